//! Telling the template's text from the users' in a rendered prompt.
//!
//! A control token in a prompt must come from the template. A template mixes its own strings with the users'
//! in expressions, so the rendered text alone does not say which is which, and splitting at placeholders
//! would break every template that looks at its content (trims it, tests what it begins with, cuts thoughts
//! away). So the users' strings are rendered once more with *marks* in them: a character that neither they
//! nor the template contain, put behind every character that could begin a control token. In that rendering
//! no control token can come from a user, whatever the template does with the strings short of picking them
//! apart character by character. If it differs from the plain rendering in the marks only, the marks say
//! which characters of the plain rendering are the users'.
//!
//! If it differs in more, the template has looked at a marked string: a `<` in a thought, for example. Then
//! marks are set only inside spellings of control tokens, in any case of letters. If that rendering equals the
//! plain one, and shows the template's control tokens in the same order as the fully marked one, it is as
//! good. If not, the fully marked rendering is used without its marks: safe, and different from the reference
//! only where a user wrote something that looks like a control token and the template looks for such.
//!
//! Text without any character that could begin a control token needs none of this.

use aho_corasick::AhoCorasick;
use serde_json::Value;

/// Private-use characters from which the mark is chosen.
const MARKS: std::ops::RangeInclusive<char> = '\u{f0000}'..='\u{ffffd}';

/// A rendered conversation and the places in it that are known to be a user's.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Rendered {
    text: String,
    /// Ascending byte offsets of `text`: right behind a character that a user wrote.
    marks: Vec<usize>,
}

impl Rendered {
    /// A text in which every control token is the template's.
    pub(crate) fn plain(text: String) -> Self {
        Self { text, marks: Vec::new() }
    }

    /// Takes the marks out of a text and keeps their places.
    pub(crate) fn from_marked(marked: &str, mark: char) -> Self {
        let mut rendered = Self::default();
        for (idx, stretch) in marked.split(mark).enumerate() {
            if idx > 0 {
                rendered.marks.push(rendered.text.len());
            }
            rendered.text.push_str(stretch);
        }
        rendered
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn has_marks(&self) -> bool {
        !self.marks.is_empty()
    }

    /// Whether a control token spelled at these bytes has a user's character in it. The mark behind the
    /// character that precedes the spelling does not count.
    pub(crate) fn is_forged(&self, start: usize, end: usize) -> bool {
        let next = self.marks.partition_point(|&mark| mark <= start);
        self.marks.get(next).is_some_and(|&mark| mark <= end)
    }
}

/// Sets marks into the strings of a conversation.
pub(super) struct Marker<'a> {
    /// Every character with which a control token can begin, in both cases.
    starts: Vec<char>,
    spellings: Vec<&'a str>,
}

/// Where marks are set.
pub(super) enum MarkPolicy {
    /// Behind every character that could begin a control token.
    Starts(char),
    /// Behind the first character of every spelling of a control token.
    Spellings(char, AhoCorasick),
}

impl<'a> Marker<'a> {
    pub(super) fn new(spellings: impl Iterator<Item = &'a str>) -> Self {
        let spellings: Vec<&str> = spellings.collect();
        let mut starts: Vec<char> = spellings
            .iter()
            .filter_map(|spelling| spelling.chars().next())
            .flat_map(|c| c.to_lowercase().chain(c.to_uppercase()).chain([c]))
            .collect();
        starts.sort_unstable();
        starts.dedup();
        Self { starts, spellings }
    }

    /// Whether any string holds a character that could begin a control token.
    pub(super) fn is_needed(&self, values: &[&Value]) -> bool {
        let has_start = |text: &str| text.contains(self.starts.as_slice());
        values.iter().any(|value| any_string(value, &has_start))
    }

    /// A mark that occurs in none of the values and not in the template.
    pub(super) fn choose_mark(values: &[&Value], template: &str) -> Option<char> {
        let mut used: Vec<char> = Vec::new();
        let mut collect = |text: &str| used.extend(text.chars().filter(|c| MARKS.contains(c)));
        collect(template);
        for value in values {
            each_string(value, &mut collect);
        }
        used.sort_unstable();
        MARKS.into_iter().find(|mark| used.binary_search(mark).is_err())
    }

    pub(super) fn at_starts(&self, mark: char) -> MarkPolicy {
        MarkPolicy::Starts(mark)
    }

    pub(super) fn in_spellings(&self, mark: char) -> Option<MarkPolicy> {
        let finder = AhoCorasick::builder().ascii_case_insensitive(true).build(&self.spellings).ok()?;
        Some(MarkPolicy::Spellings(mark, finder))
    }

    /// One string with marks.
    pub(super) fn mark(&self, text: &str, policy: &MarkPolicy) -> String {
        match policy {
            MarkPolicy::Starts(mark) => {
                let is_start = |c: char| self.starts.binary_search(&c).is_ok();
                with_marks(text, *mark, text.char_indices().filter(|(_, c)| is_start(*c)).map(|(at, _)| at))
            }
            MarkPolicy::Spellings(mark, finder) => {
                let mut starts: Vec<usize> =
                    finder.find_overlapping_iter(text).map(|hit| hit.start()).collect();
                starts.sort_unstable();
                starts.dedup();
                with_marks(text, *mark, starts.into_iter())
            }
        }
    }
}

/// Puts a mark behind the characters at the given ascending offsets.
fn with_marks(text: &str, mark: char, starts: impl Iterator<Item = usize>) -> String {
    let mut marked = String::with_capacity(text.len());
    let mut from = 0;
    for start in starts {
        let end = start + text[start..].chars().next().map_or(0, char::len_utf8);
        marked.push_str(&text[from..end]);
        marked.push(mark);
        from = end;
    }
    marked.push_str(&text[from..]);
    marked
}

fn any_string(value: &Value, test: &impl Fn(&str) -> bool) -> bool {
    match value {
        Value::String(text) => test(text),
        Value::Array(items) => items.iter().any(|item| any_string(item, test)),
        Value::Object(map) => map.iter().any(|(key, item)| test(key) || any_string(item, test)),
        _ => false,
    }
}

fn each_string(value: &Value, visit: &mut impl FnMut(&str)) {
    match value {
        Value::String(text) => visit(text),
        Value::Array(items) => items.iter().for_each(|item| each_string(item, visit)),
        Value::Object(map) => map.iter().for_each(|(key, item)| {
            visit(key);
            each_string(item, visit);
        }),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    proptest! {
        #[test]
        fn marks_come_out_as_they_went_in(text in "[a<\\[é]{0,20}") {
            let marker = Marker::new(["<|a|>", "[X]"].into_iter());
            let marked = marker.mark(&text, &marker.at_starts('\u{f0000}'));
            let rendered = Rendered::from_marked(&marked, '\u{f0000}');
            prop_assert_eq!(rendered.text(), &text);
            let starts = text.char_indices().filter(|(_, c)| "<[".contains(*c)).map(|(at, _)| at + 1);
            prop_assert_eq!(rendered.marks, starts.collect::<Vec<_>>());
        }
    }

    #[test]
    fn spellings_are_marked_in_any_case_and_when_they_overlap() {
        let marker = Marker::new(["<|a|>", "|>b"].into_iter());
        let policy = marker.in_spellings('M').unwrap();
        assert_eq!(marker.mark("x<|A|>B <|", &policy), "x<M|A|M>B <|");
    }

    #[test]
    fn the_mark_is_a_character_that_nobody_uses() {
        let values = json!({"\u{f0000}": ["\u{f0002}"]});
        assert_eq!(Marker::choose_mark(&[&values], "\u{f0001}"), Some('\u{f0003}'));
    }

    #[test]
    fn a_spelling_is_forged_if_any_of_it_is_a_users() {
        // The user wrote the bytes 2 and 7; a template's control token stands at 3..6.
        let rendered = Rendered { text: "ab<cde<f".to_owned(), marks: vec![3, 7] };
        assert!(!rendered.is_forged(3, 6));
        assert!(rendered.is_forged(2, 6));
        assert!(rendered.is_forged(3, 7));
        assert!(rendered.is_forged(6, 7));
    }
}
