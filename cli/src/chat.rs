//! `longreach chat`: a conversation with a running cluster, over its gRPC face.

use std::io::{BufRead, Write};

use futures::StreamExt;
use longreach_proto::inference::{
    ChatMessage, ChatPrompt, ChatStreamRequest, GenerateOptions, ListModelsRequest,
    chat_stream_response::Event, inference_service_client::InferenceServiceClient,
    model_service_client::ModelServiceClient,
};
use tonic::transport::{Channel, Endpoint};

use crate::{args::ChatArgs, error::CliError};

/// Runs the command.
pub(crate) async fn run(args: ChatArgs) -> Result<(), CliError> {
    let channel = connect(&args.grpc).await?;
    let models = ModelServiceClient::new(channel.clone()).list_models(ListModelsRequest::default()).await;
    let models = models.map_err(|status| failed(&status))?.into_inner().models;
    let model = models.into_iter().next().map(|model| model.name);
    let model =
        model.ok_or_else(|| CliError::Start(format!("the cluster at {} serves no model", args.grpc)))?;
    let mut chat = Chat { client: InferenceServiceClient::new(channel), model, args, messages: Vec::new() };
    if let Some(system) = chat.args.system.clone() {
        chat.messages.push(message("system", system));
    }
    if let Some(prompt) = chat.args.prompt.clone() {
        return chat.turn(prompt).await;
    }
    while let Some(line) = read_line().await? {
        chat.turn(line).await?;
    }
    Ok(())
}

struct Chat {
    client: InferenceServiceClient<Channel>,
    model: String,
    args: ChatArgs,
    messages: Vec<ChatMessage>,
}

impl Chat {
    /// One question, and its answer as it comes.
    async fn turn(&mut self, text: String) -> Result<(), CliError> {
        self.messages.push(message("user", text));
        let options = GenerateOptions {
            max_tokens: Some(self.args.max_tokens),
            temperature: self.args.temperature,
            seed: self.args.seed,
            ..GenerateOptions::default()
        };
        let request = ChatStreamRequest {
            model: self.model.clone(),
            chat: Some(ChatPrompt { messages: self.messages.clone(), ..ChatPrompt::default() }),
            options: Some(options),
            ..ChatStreamRequest::default()
        };
        let response = self.client.chat_stream(request).await;
        let mut events = response.map_err(|status| failed(&status))?.into_inner();
        let mut answer = String::new();
        while let Some(event) = events.next().await {
            if let Some(Event::Delta(delta)) = event.map_err(|status| failed(&status))?.event {
                print!("{}", delta.text);
                flush()?;
                answer += &delta.text;
            }
        }
        println!();
        self.messages.push(message("assistant", answer));
        Ok(())
    }
}

async fn connect(addr: &str) -> Result<Channel, CliError> {
    let endpoint = Endpoint::from_shared(format!("http://{addr}"))
        .map_err(|error| CliError::Usage(format!("--grpc {addr}: {error}")))?;
    endpoint.tcp_nodelay(true).connect().await.map_err(|_| {
        CliError::Start(format!(
            "no cluster answers at {addr}; start one with `longreach up`, or give --grpc"
        ))
    })
}

fn message(role: &str, content: String) -> ChatMessage {
    ChatMessage { role: role.to_owned(), content }
}

fn failed(status: &tonic::Status) -> CliError {
    CliError::Start(format!("the cluster answered {:?}: {}", status.code(), status.message()))
}

fn flush() -> Result<(), CliError> {
    std::io::stdout().flush().map_err(|error| CliError::start(&error))
}

/// The next line that is not empty; `None` at an empty one or at the end of the input.
async fn read_line() -> Result<Option<String>, CliError> {
    print!("> ");
    flush()?;
    let read = || {
        let mut line = String::new();
        std::io::stdin().lock().read_line(&mut line).map(|_| line.trim_end().to_owned())
    };
    let line = tokio::task::spawn_blocking(read).await.map_err(|error| CliError::start(&error))?;
    let line = line.map_err(|error| CliError::start(&error))?;
    Ok((!line.is_empty()).then_some(line))
}
