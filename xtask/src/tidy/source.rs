//! Rust text with its comments and literals blanked out, so that what is left can be searched and counted.

/// `text` with every comment, string and character literal replaced by spaces; lines stay where they are.
pub(super) fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        let skipped = if in_word(&code) { None } else { raw_string(rest) };
        match skipped.or_else(|| comment(rest)).or_else(|| string(rest)).or_else(|| character(rest)) {
            Some(len) => {
                let (literal, after) = rest.split_at(len);
                code.extend(literal.chars().map(|c| if c == '\n' { '\n' } else { ' ' }));
                rest = after;
            }
            None => {
                code.push(next);
                rest = &rest[next.len_utf8()..];
            }
        }
    }
    code
}

/// Whether what comes next continues a word (`for` before `"` is no raw string).
fn in_word(code: &str) -> bool {
    code.ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// Length of the comment that starts `rest`.
fn comment(rest: &str) -> Option<usize> {
    if rest.starts_with("//") {
        return Some(rest.find('\n').unwrap_or(rest.len()));
    }
    if !rest.starts_with("/*") {
        return None;
    }
    let mut depth = 0_usize;
    for (at, pair) in rest.as_bytes().windows(2).enumerate() {
        match pair {
            b"/*" => depth += 1,
            b"*/" if depth == 1 => return Some(at + 2),
            b"*/" => depth -= 1,
            _ => {}
        }
    }
    Some(rest.len())
}

/// Length of the string that starts `rest`; a prefix like `b` counts as code.
fn string(rest: &str) -> Option<usize> {
    let body = rest.strip_prefix('"')?;
    Some(1 + end_of_quoted(body, '"'))
}

/// Length of the raw string that starts `rest`, its prefix included.
fn raw_string(rest: &str) -> Option<usize> {
    let after_prefix = ["r", "br", "cr"]
        .iter()
        .find_map(|prefix| rest.strip_prefix(prefix).filter(|after| after.starts_with(['"', '#'])))?;
    let body = after_prefix.trim_start_matches('#');
    let n_hashes = after_prefix.len() - body.len();
    let body = body.strip_prefix('"')?;
    let close = format!("\"{}", "#".repeat(n_hashes));
    let end = body.find(&close).map_or(body.len(), |at| at + close.len());
    Some(rest.len() - body.len() + end)
}

/// Length of the character literal that starts `rest`; `None` for a lifetime.
fn character(rest: &str) -> Option<usize> {
    let body = rest.strip_prefix('\'')?;
    let mut chars = body.chars();
    let (first, second) = (chars.next()?, chars.next()?);
    (first == '\\' || second == '\'').then(|| 1 + end_of_quoted(body, '\''))
}

/// Length up to and including the closing `quote`, escapes passed over.
fn end_of_quoted(body: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in body.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    body.len()
}

/// A function: the line it starts on (from 1), its name and its length in lines.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Function<'a> {
    pub(super) line_number: usize,
    pub(super) name: &'a str,
    pub(super) n_lines: usize,
}

/// Every function with a body in `code`, which has its literals blanked.
pub(super) fn functions(code: &str) -> Vec<Function<'_>> {
    let mut found = Vec::new();
    let mut start = 0;
    for (line_idx, line) in code.split_inclusive('\n').enumerate() {
        if let Some((at, name)) = function_name(line) {
            let n_lines = body_end(&code[start + at..]).map(|body| body.lines().count());
            found.extend(n_lines.map(|n_lines| Function { line_number: line_idx + 1, name, n_lines }));
        }
        start += line.len();
    }
    found
}

/// Where on the line a function's definition starts, and its name. A pointer type (`fn(u8)`) has none.
fn function_name(line: &str) -> Option<(usize, &str)> {
    let (at, _) = line.match_indices("fn ").find(|(at, _)| !in_word(&line[..*at]))?;
    let after = line[at + 3..].trim_start();
    let end = after.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(after.len());
    (end > 0).then(|| (at, &after[..end]))
}

/// The text from the start of a function to its closing brace; `None` for a declaration without a body.
fn body_end(code: &str) -> Option<&str> {
    let (mut braces, mut brackets) = (0_usize, 0_usize);
    for (at, c) in code.char_indices() {
        match c {
            '(' | '[' => brackets += 1,
            ')' | ']' => brackets = brackets.saturating_sub(1),
            ';' if braces == 0 && brackets == 0 => return None,
            '{' => braces += 1,
            '}' if braces <= 1 => return Some(&code[..=at]),
            '}' => braces -= 1,
            _ => {}
        }
    }
    None
}

/// Line numbers (from 1) on which `word` stands as a whole word.
pub(super) fn lines_with_word(code: &str, word: &str) -> Vec<usize> {
    let continues = |c: char| c.is_alphanumeric() || c == '_';
    let has_word = |line: &str| {
        line.match_indices(word).any(|(at, _)| {
            !line[..at].ends_with(continues) && !line[at + word.len()..].starts_with(continues)
        })
    };
    code.lines().enumerate().filter(|(_, line)| has_word(line)).map(|(idx, _)| idx + 1).collect()
}
