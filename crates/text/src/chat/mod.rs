//! Chat templates: from messages to the text of a prompt.
//!
//! Templates are written for Python's Jinja and carry a good part of a model's behaviour, so they are run as
//! they are, by `minijinja` with Python's methods and the globals of Hugging Face. A template that cannot
//! work fails at load. What templates differ in (a system role, content as parts, null content) is found out
//! at load by trying, and the messages are brought into the form that fits.

mod environment;
mod json;
mod marks;
mod message;
mod time;

use std::time::{SystemTime, UNIX_EPOCH};

use indexmap::IndexMap;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

use crate::{TextError, Tokenizer};
use environment::{NOW, Raised};
use marks::{MarkPolicy, Marker};
use message::{Capabilities, to_values};

pub(crate) use marks::Rendered;
pub use message::{ChatMessage, Content, ContentPart, Role};

const DEFAULT: &str = "default";
/// Some models ship a second template for conversations with tools.
const TOOL_USE: &str = "tool_use";
/// What a trial rendering looks for.
const TRIAL: &str = "trial-text";

/// Errors in the rendering of a plain question that no request can mend.
const BROKEN: [ErrorKind; 5] = [
    ErrorKind::UnknownFilter,
    ErrorKind::UnknownFunction,
    ErrorKind::UnknownTest,
    ErrorKind::UnknownMethod,
    ErrorKind::OutOfFuel,
];
/// The same for a conversation with tool calls, whose form differs between templates: a method that a value
/// does not have may be a matter of form.
const INCOMPLETE: [ErrorKind; 3] =
    [ErrorKind::UnknownFilter, ErrorKind::UnknownFunction, ErrorKind::UnknownTest];

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    origin: String,
    /// All sources, to choose a mark that none of them has.
    sources: String,
    has_tool_use: bool,
    /// `bos_token` and the like.
    globals: Map<String, Value>,
    can: Capabilities,
}

/// How a conversation is rendered.
#[derive(Clone, Debug)]
pub struct ChatOptions {
    /// Open the assistant's turn, so that the model answers.
    pub add_generation_prompt: bool,
    /// Schemas of the tools that the model may call, as clients send them.
    pub tools: Option<Value>,
    /// Documents for models that cite.
    pub documents: Option<Value>,
    /// Further variables, such as `enable_thinking`.
    pub variables: Map<String, Value>,
    /// The time that the template sees.
    pub now: SystemTime,
}

impl Default for ChatOptions {
    #[allow(clippy::disallowed_methods, reason = "a date, which nothing is measured by")]
    fn default() -> Self {
        Self {
            add_generation_prompt: true,
            tools: None,
            documents: None,
            variables: Map::new(),
            now: SystemTime::now(),
        }
    }
}

/// One conversation, ready to render.
struct Job<'a> {
    template: &'a str,
    messages: Value,
    /// Everything else that the client chose.
    options: Value,
    now: u64,
}

impl ChatTemplate {
    /// Compiles a template. `chat_template` is its source, or a list of `{name, template}` objects; `origin`
    /// says where it was found; `globals` are the special tokens' spellings under the names that templates
    /// use.
    pub fn new(chat_template: &Value, origin: &str, globals: Map<String, Value>) -> Result<Self, TextError> {
        let templates = named_templates(chat_template).ok_or_else(|| TextError::Template {
            origin: origin.to_owned(),
            reason: "it is neither a string nor a list of named strings with one named default".to_owned(),
        })?;
        let all = Capabilities { system: true, developer: true, parts: true, null_content: true };
        let mut template = Self {
            env: environment::build(origin, &templates)?,
            origin: origin.to_owned(),
            sources: templates.iter().map(|(_, source)| source.as_str()).collect(),
            has_tool_use: templates.iter().any(|(name, _)| name == TOOL_USE),
            globals,
            can: all,
        };
        template.can = template.try_out()?;
        Ok(template)
    }

    /// Where the template was found.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The text of a conversation, as the reference renders it.
    pub fn render(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<String, TextError> {
        let job = self.job(messages, options)?;
        self.run(&job, None)
    }

    /// The text of a conversation for a tokenizer, with the users' part in it marked.
    pub(crate) fn render_for(
        &self,
        tokenizer: &Tokenizer,
        messages: &[ChatMessage],
        options: &ChatOptions,
    ) -> Result<Rendered, TextError> {
        let job = self.job(messages, options)?;
        let plain = self.run(&job, None)?;
        let marker = Marker::new(tokenizer.control_spellings());
        let values = [&job.messages, &job.options];
        if !marker.is_needed(&values) {
            return Ok(Rendered::plain(plain));
        }
        let no_mark = || TextError::request("messages", "they use every private-use character of plane 15");
        let mark = Marker::choose_mark(&values, &self.sources).ok_or_else(no_mark)?;
        let run = |policy: &MarkPolicy| {
            let marked = self.run(&job, Some((&marker, policy)))?;
            Ok::<_, TextError>(Rendered::from_marked(&marked, mark))
        };
        let safe = run(&marker.at_starts(mark))?;
        if safe.text() == plain {
            return Ok(safe);
        }
        if let Some(policy) = marker.in_spellings(mark) {
            let close = run(&policy)?;
            let same_controls = tokenizer.controls_in(&close) == tokenizer.controls_in(&safe);
            if close.text() == plain && same_controls {
                return Ok(close);
            }
        }
        Ok(safe)
    }

    fn job(&self, messages: &[ChatMessage], options: &ChatOptions) -> Result<Job<'_>, TextError> {
        if messages.is_empty() {
            return Err(TextError::request("messages", "it is empty; at least one message is needed"));
        }
        let messages = Value::Array(to_values(messages, self.can)?);
        Ok(self.job_of(messages, options))
    }

    fn job_of(&self, messages: Value, options: &ChatOptions) -> Job<'_> {
        let given = |value: &Option<Value>| {
            let some =
                value.clone().filter(|value| !matches!(value, Value::Array(items) if items.is_empty()));
            some.unwrap_or(Value::Null)
        };
        let mut variables = options.variables.clone();
        let tools = given(&options.tools);
        let template = if self.has_tool_use && !tools.is_null() { TOOL_USE } else { DEFAULT };
        variables.insert("tools".to_owned(), tools);
        variables.insert("documents".to_owned(), given(&options.documents));
        variables.insert("add_generation_prompt".to_owned(), json!(options.add_generation_prompt));
        let now = options.now.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        Job { template, messages, options: Value::Object(variables), now }
    }

    fn run(&self, job: &Job<'_>, marks: Option<(&Marker<'_>, &MarkPolicy)>) -> Result<String, TextError> {
        self.evaluate(job, marks).map_err(|error| {
            use std::error::Error as _;
            let raised = error.source().and_then(|source| source.downcast_ref::<Raised>());
            match raised {
                Some(Raised(message)) => TextError::Refused(message.clone()),
                None => TextError::Render(format!("{error:#}")),
            }
        })
    }

    fn evaluate(
        &self,
        job: &Job<'_>,
        marks: Option<(&Marker<'_>, &MarkPolicy)>,
    ) -> Result<String, minijinja::Error> {
        let Value::Object(options) = &job.options else { return Ok(String::new()) };
        let trusted = self.globals.iter().map(|(name, value)| (name.clone(), to_jinja(value, None)));
        let given = options.iter().map(|(name, value)| (name.clone(), to_jinja(value, marks)));
        let fixed = [
            ("messages".to_owned(), messages_to_jinja(&job.messages, marks)),
            (NOW.to_owned(), minijinja::Value::from(job.now)),
        ];
        // Later entries win: a client's variables cannot stand in for the messages or a special token.
        let context: minijinja::Value = given.chain(trusted).chain(fixed).collect::<Pairs>().into();
        self.env.get_template(job.template)?.render(context)
    }

    /// Renders small conversations to see whether the template works at all and what it can do.
    fn try_out(&self) -> Result<Capabilities, TextError> {
        let user = json!([{"role": "user", "content": TRIAL}]);
        self.first_trial(user.clone(), None, &BROKEN)?;
        self.first_trial(user, Some(trial_tools()), &BROKEN)?;
        self.first_trial(trial_call(), Some(trial_tools()), &INCOMPLETE)?;
        let system = |role: &str| json!([{"role": role, "content": TRIAL}, {"role": "user", "content": "x"}]);
        let parts = json!([{"role": "user", "content": [{"type": "text", "text": TRIAL}]}]);
        let silent = json!({"role": "assistant", "content": null, "tool_calls": []});
        let null = json!([{"role": "user", "content": "x"}, silent, {"role": "user", "content": TRIAL}]);
        let shows = |messages: Value, never: &str| {
            let text = self.trial(messages, None);
            text.is_ok_and(|text| text.contains(TRIAL) && !text.contains(never))
        };
        Ok(Capabilities {
            system: shows(system("system"), "\0"),
            developer: self.sources.contains("developer") && shows(system("developer"), "\0"),
            parts: shows(parts, "type"),
            null_content: shows(null, "None"),
        })
    }

    /// A template may refuse a trial in its own words, or need a variable. To call what does not exist is its
    /// fault and fails the load.
    fn first_trial(
        &self,
        messages: Value,
        tools: Option<Value>,
        fatal: &[ErrorKind],
    ) -> Result<(), TextError> {
        match self.trial(messages, tools) {
            Err(error) if fatal.contains(&error.kind()) => {
                Err(TextError::Template { origin: self.origin.clone(), reason: format!("{error:#}") })
            }
            _ => Ok(()),
        }
    }

    fn trial(&self, messages: Value, tools: Option<Value>) -> Result<String, minijinja::Error> {
        let options = ChatOptions { tools, now: UNIX_EPOCH, ..ChatOptions::default() };
        self.evaluate(&self.job_of(messages, &options), None)
    }
}

/// A map of the template engine that keeps the order of its keys.
#[derive(Default)]
struct Pairs(IndexMap<minijinja::Value, minijinja::Value>);

impl FromIterator<(String, minijinja::Value)> for Pairs {
    fn from_iter<I: IntoIterator<Item = (String, minijinja::Value)>>(pairs: I) -> Self {
        Self(pairs.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }
}

impl From<Pairs> for minijinja::Value {
    fn from(pairs: Pairs) -> Self {
        minijinja::Value::from_object(pairs.0)
    }
}

fn named_templates(chat_template: &Value) -> Option<Vec<(String, String)>> {
    if let Value::String(source) = chat_template {
        return Some(vec![(DEFAULT.to_owned(), source.clone())]);
    }
    let mut templates = Vec::new();
    for entry in chat_template.as_array()? {
        let text = |key: &str| entry.get(key).and_then(Value::as_str).map(str::to_owned);
        templates.push((text("name")?, text("template")?));
    }
    templates.retain(|(name, _)| name == DEFAULT || name == TOOL_USE);
    templates.iter().any(|(name, _)| name == DEFAULT).then_some(templates)
}

/// Messages with marks in everything that is free text; roles and the kinds of parts are from closed sets.
fn messages_to_jinja(messages: &Value, marks: Option<(&Marker<'_>, &MarkPolicy)>) -> minijinja::Value {
    let message = |message: &Value| {
        let fields = message.as_object().into_iter().flatten();
        let pairs = fields.map(|(key, value)| {
            let value = match (key.as_str(), value) {
                ("role", role) => to_jinja(role, None),
                ("content", Value::Array(parts)) => {
                    parts.iter().map(|part| part_to_jinja(part, marks)).collect()
                }
                (_, value) => to_jinja(value, marks),
            };
            (key.clone(), value)
        });
        minijinja::Value::from(pairs.collect::<Pairs>())
    };
    messages.as_array().into_iter().flatten().map(message).collect()
}

fn part_to_jinja(part: &Value, marks: Option<(&Marker<'_>, &MarkPolicy)>) -> minijinja::Value {
    let fields = part.as_object().into_iter().flatten();
    let pairs = fields.map(|(key, value)| (key.clone(), to_jinja(value, marks.filter(|_| key != "type"))));
    pairs.collect::<Pairs>().into()
}

fn to_jinja(value: &Value, marks: Option<(&Marker<'_>, &MarkPolicy)>) -> minijinja::Value {
    let text = |text: &str| match marks {
        None => text.to_owned(),
        Some((marker, policy)) => marker.mark(text, policy),
    };
    match value {
        Value::Null => minijinja::Value::from(()),
        Value::Bool(flag) => (*flag).into(),
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => number.as_f64().unwrap_or(f64::NAN).into(),
        },
        Value::String(string) => text(string).into(),
        Value::Array(items) => items.iter().map(|item| to_jinja(item, marks)).collect(),
        Value::Object(map) => {
            let pairs = map.iter().map(|(key, item)| (key_text(key, &text), to_jinja(item, marks)));
            pairs.collect::<Pairs>().into()
        }
    }
}

/// Templates look up keys by name, so a key that is a name has no marks.
fn key_text(key: &str, text: &impl Fn(&str) -> String) -> String {
    let is_name = key.chars().all(|c| c.is_ascii_alphanumeric() || "_-.$".contains(c));
    if is_name { key.to_owned() } else { text(key) }
}

fn trial_call() -> Value {
    let call =
        json!({"id": "a12345678", "type": "function", "function": {"name": "f", "arguments": {"x": "1"}}});
    json!([
        {"role": "user", "content": TRIAL},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "f", "tool_call_id": "a12345678", "content": "2"},
        {"role": "assistant", "content": "3"},
        {"role": "user", "content": TRIAL},
    ])
}

fn trial_tools() -> Value {
    let parameters = json!({"type": "object", "properties": {"x": {"type": "string", "description": "y"}}});
    json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}])
}

#[cfg(test)]
mod tests;
