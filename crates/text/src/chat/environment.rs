//! The template engine, set up as Hugging Face's `apply_chat_template` sets up Jinja.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::json::tojson;
use super::time::strftime;
use crate::TextError;

/// Work that one rendering may do: instructions, plus a unit for every 64 bytes that it produces. A
/// conversation of a million characters needs a few hundred thousand; a loop without end is stopped in under
/// a second.
const FUEL: u64 = 8_000_000;
/// The longest template. The longest that models ship have some 20 KiB.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Variable in which the time of the request travels to `strftime_now`.
pub(super) const NOW: &str = "__now";

/// The message of a `raise_exception` in a template.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub(super) struct Raised(pub(super) String);

/// Compiles templates under their names.
pub(super) fn build(origin: &str, templates: &[(String, String)]) -> Result<Environment<'static>, TextError> {
    let broken = |reason: String| TextError::Template { origin: origin.to_owned(), reason };
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.map_err(|error| broken(error.to_string()))?);
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    // Debug mode would quote the conversation in error messages.
    env.set_debug(false);
    env.set_fuel(Some(FUEL));
    env.add_filter("tojson", tojson);
    env.add_test("iterable", is_iterable);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    for (name, source) in templates {
        if source.len() > MAX_TEMPLATE_BYTES {
            let n_bytes = source.len();
            return Err(broken(format!("it has {n_bytes} bytes; at most {MAX_TEMPLATE_BYTES} are allowed")));
        }
        env.add_template_owned(name.clone(), without_generation_tags(source))
            .map_err(|error| broken(format!("{error:#}")))?;
    }
    Ok(env)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

/// Nothing is not iterable in Python: templates ask so whether tools are given.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn strftime_now(state: &State<'_, '_>, format: String) -> String {
    let seconds = state.lookup(NOW).and_then(|value| u64::try_from(value).ok()).unwrap_or(0);
    let time = UNIX_EPOCH.checked_add(std::time::Duration::from_secs(seconds));
    strftime(&format, time.unwrap_or(SystemTime::UNIX_EPOCH))
}

/// `{% generation %}` marks the assistant's text for training. It means nothing here, but it must parse, and
/// trim white space as a block does: so it becomes a block that is always taken.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        // Behind the opening: in `{%}` the two share a character.
        let Some(len) = rest[open + 2..].find("%}").map(|at| at + 2) else { break };
        let (before, inner) = (&rest[..open], &rest[open + 2..open + len]);
        out.push_str(before);
        let keyword = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        let replacement = match keyword.trim() {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        match replacement {
            Some(replacement) => {
                out.push_str(&format!("{{%{}%}}", inner.replacen(keyword.trim(), replacement, 1)))
            }
            None => out.push_str(&rest[open..open + len + 2]),
        }
        rest = &rest[open + len + 2..];
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_blocks_and_keep_their_dashes() {
        let source = "a{%- generation -%}b{%endgeneration%}{% if generation %}{{ '%}' }}{% endif %} {%";
        let expected = "a{%- if true -%}b{%endif%}{% if generation %}{{ '%}' }}{% endif %} {%";
        assert_eq!(without_generation_tags(source), expected);
        assert_eq!(without_generation_tags("{%}{%}"), "{%}{%}");
    }
}
