//! A conversation as clients send it.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::TextError;

/// Who speaks. A closed set: templates build control tokens from the role's name, so a name of the client's
/// making could become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Sets the scene.
    System,
    /// The newer name of [`Role::System`]; rendered as such unless the template knows it.
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a tool call.
    Tool,
    /// The older name of [`Role::Tool`].
    Function,
}

impl Role {
    /// The name that templates and clients use.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
            Self::Function => "function",
        }
    }
}

impl std::str::FromStr for Role {
    type Err = TextError;

    fn from_str(name: &str) -> Result<Self, TextError> {
        let all = [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool, Self::Function];
        all.into_iter().find(|role| role.name() == name).ok_or_else(|| {
            let names = all.map(Self::name).join(", ");
            TextError::request("role", format!("{name:?} is not one of {names}"))
        })
    }
}

/// What is said: a string, or a list of parts.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Plain text.
    Text(String),
    /// Parts, of which only text is understood.
    Parts(Vec<ContentPart>),
}

/// One part of a [`Content`].
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct ContentPart {
    /// `text`, or a kind that is refused.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text of a text part.
    #[serde(default)]
    pub text: Option<String>,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// What is said; absent when the assistant only calls tools.
    #[serde(default)]
    pub content: Option<Content>,
    /// Name of the speaker or of the tool.
    #[serde(default)]
    pub name: Option<String>,
    /// Calls that the assistant made, as clients send them.
    #[serde(default)]
    pub tool_calls: Option<Value>,
    /// Which call a tool message answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// What the assistant thought, for templates that render it.
    #[serde(default)]
    pub reasoning_content: Option<String>,
}

impl ChatMessage {
    /// A message of plain text.
    pub fn text(role: Role, text: impl Into<String>) -> Self {
        Self { content: Some(Content::Text(text.into())), ..Self::empty(role) }
    }

    /// A message without anything.
    pub fn empty(role: Role) -> Self {
        Self {
            role,
            content: None,
            name: None,
            tool_calls: None,
            tool_call_id: None,
            reasoning_content: None,
        }
    }
}

/// What a template can cope with, found out by trying it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capabilities {
    /// System messages appear in the prompt.
    pub(super) system: bool,
    /// The template knows the role `developer`.
    pub(super) developer: bool,
    /// Content may be a list of parts.
    pub(super) parts: bool,
    /// Content may be null.
    pub(super) null_content: bool,
}

/// Brings a conversation into the form that the template can cope with.
///
/// Parts become one string, joined by line ends, where the template wants strings; null becomes an empty
/// string where it cannot be printed. Where the template has no system role, leading system messages go
/// before the first user message, and empty ones are dropped.
pub(super) fn to_values(messages: &[ChatMessage], can: Capabilities) -> Result<Vec<Value>, TextError> {
    let n_leading = messages.iter().take_while(|message| is_system(message.role)).count();
    let n_merged = if can.system { 0 } else { n_leading };
    let mut merged = Vec::new();
    for (idx, message) in messages[..n_merged].iter().enumerate() {
        if let Some(content) = &message.content {
            merged.push(joined(content, idx)?);
        }
    }
    merged.retain(|text| !text.is_empty());
    let mut values = Vec::with_capacity(messages.len());
    for (idx, message) in messages.iter().enumerate().skip(n_merged) {
        let mut value = to_value(message, idx, can)?;
        if message.role == Role::User && !merged.is_empty() {
            prepend(&mut value, std::mem::take(&mut merged));
        }
        values.push(value);
    }
    if merged.is_empty() {
        return Ok(values);
    }
    let reason =
        "the model has no system role, and there is no user message that could carry the system message";
    Err(TextError::request("messages", reason))
}

fn is_system(role: Role) -> bool {
    matches!(role, Role::System | Role::Developer)
}

fn to_value(message: &ChatMessage, idx: usize, can: Capabilities) -> Result<Value, TextError> {
    let role = match message.role {
        Role::Developer if !can.developer => Role::System,
        role => role,
    };
    let content = match &message.content {
        None if can.null_content => Value::Null,
        None => json!(""),
        Some(Content::Parts(parts)) if can.parts => {
            let texts = parts.iter().map(|part| part_text(part, idx));
            texts.map(|text| Ok(json!({"type": "text", "text": text?}))).collect::<Result<_, TextError>>()?
        }
        Some(content) => json!(joined(content, idx)?),
    };
    let mut value = Map::new();
    value.insert("role".to_owned(), json!(role.name()));
    value.insert("content".to_owned(), content);
    let optional = [
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
        ("reasoning_content", &message.reasoning_content),
    ];
    for (key, text) in optional {
        if let Some(text) = text {
            value.insert(key.to_owned(), json!(text));
        }
    }
    if let Some(calls) = message.tool_calls.as_ref().filter(|calls| !calls.is_null()) {
        value.insert("tool_calls".to_owned(), with_parsed_arguments(calls.clone()));
    }
    Ok(Value::Object(value))
}

/// Clients send the arguments of a call as a string of JSON; templates want what it says.
fn with_parsed_arguments(mut calls: Value) -> Value {
    for call in calls.as_array_mut().into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let parsed = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
        if let Some(parsed) = parsed.filter(Value::is_object) {
            *arguments = parsed;
        }
    }
    calls
}

fn joined(content: &Content, idx: usize) -> Result<String, TextError> {
    match content {
        Content::Text(text) => Ok(text.clone()),
        Content::Parts(parts) => {
            let texts: Result<Vec<&str>, TextError> = parts.iter().map(|part| part_text(part, idx)).collect();
            Ok(texts?.join("\n"))
        }
    }
}

fn part_text(part: &ContentPart, idx: usize) -> Result<&str, TextError> {
    match &part.text {
        Some(text) if matches!(part.kind.as_str(), "text" | "input_text" | "output_text") => Ok(text),
        _ => {
            let reason =
                format!("it has a part of type {:?}; only text parts with a text are supported", part.kind);
            Err(TextError::request(format!("messages[{idx}].content"), reason))
        }
    }
}

/// Puts merged system texts before the content of a user message.
fn prepend(value: &mut Value, merged: Vec<String>) {
    let system = merged.join("\n\n");
    match &mut value["content"] {
        Value::String(text) => *text = format!("{system}\n\n{text}"),
        Value::Array(parts) => parts.insert(0, json!({"type": "text", "text": format!("{system}\n\n")})),
        content => *content = json!(system),
    }
}
