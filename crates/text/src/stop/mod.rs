//! Stop strings in a stream of text.
//!
//! The matcher holds back the longest tail of the text that could still grow into a stop string, and nothing
//! more: unrelated text passes at once, however long the stops are, and no part of a stop string that matches
//! is ever emitted. Which text matches depends on the whole text only, not on how it was cut into pieces: the
//! match with the leftmost start wins, and among those the stop that comes first in the request's list.
//!
//! Each stop has a Knuth-Morris-Pratt automaton, so the work is linear in the text for each stop. The
//! `aho-corasick` crate would walk all stops at once, but it does not say how much of the text is still open,
//! which is the number that a stream needs.
//!
//! It does not know tokens: a stop that is the text of a control token, which never appears in the text, is
//! matched by id in [`crate::TextStream`].

use crate::TextError;

/// The most stop strings of one request.
pub const MAX_STOPS: usize = 16;
/// The longest stop string, in bytes.
pub const MAX_STOP_BYTES: usize = 1024;

/// Finds stop strings in text that arrives in pieces.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Stop>,
    include_stop: bool,
    /// Text that is not emitted yet. It begins at byte `held_start` of the whole text.
    held: String,
    held_start: usize,
    /// Bytes seen.
    pos: usize,
    /// The best complete match so far; another with an earlier start may still be open.
    best: Option<Found>,
    done: bool,
}

/// What came out of a piece of text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStep {
    /// Text to emit now.
    pub text: String,
    /// The stop string that ended the text, as an index into the request's list.
    pub matched: Option<usize>,
}

#[derive(Clone, Debug)]
struct Stop {
    bytes: Box<[u8]>,
    /// `failure[k]`: length of the longest proper border of the first `k` bytes.
    failure: Box<[u16]>,
    /// How many bytes of the stop the text ends with now.
    matched_len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Found {
    start: usize,
    stop_idx: usize,
}

impl StopMatcher {
    /// Checks the stop strings. An empty list means that nothing stops the text.
    pub fn new(stops: &[String], include_stop: bool) -> Result<Self, TextError> {
        if stops.len() > MAX_STOPS {
            let reason = format!("{} stop strings are given; at most {MAX_STOPS} are allowed", stops.len());
            return Err(TextError::request("stop", reason));
        }
        for (idx, stop) in stops.iter().enumerate() {
            if !(1..=MAX_STOP_BYTES).contains(&stop.len()) {
                let reason =
                    format!("it has {} bytes; a stop string has from 1 to {MAX_STOP_BYTES}", stop.len());
                return Err(TextError::request(format!("stop[{idx}]"), reason));
            }
        }
        Ok(Self {
            stops: stops.iter().map(|stop| Stop::new(stop.as_bytes())).collect(),
            include_stop,
            held: String::new(),
            held_start: 0,
            pos: 0,
            best: None,
            done: false,
        })
    }

    /// Takes the next piece of text. After a match every further piece is dropped.
    pub fn push(&mut self, text: &str) -> StopStep {
        if self.done {
            return StopStep::default();
        }
        if self.stops.is_empty() {
            return StopStep { text: text.to_owned(), matched: None };
        }
        self.held.push_str(text);
        for &byte in text.as_bytes() {
            self.step(byte);
            if let Some(found) = self.best.filter(|found| self.is_final(*found)) {
                return self.emit_match(found);
            }
        }
        StopStep { text: self.emit_until(self.first_open()), matched: None }
    }

    /// Ends the text: an open match is decided, everything still held is released.
    pub fn finish(&mut self) -> StopStep {
        if self.done {
            return StopStep::default();
        }
        if let Some(found) = self.best {
            return self.emit_match(found);
        }
        self.done = true;
        StopStep { text: std::mem::take(&mut self.held), matched: None }
    }

    /// Bytes held back at present.
    pub fn held_bytes(&self) -> usize {
        self.held.len()
    }

    fn step(&mut self, byte: u8) {
        self.pos += 1;
        for (stop_idx, stop) in self.stops.iter_mut().enumerate() {
            if !stop.step(byte) {
                continue;
            }
            let start = self.pos - stop.bytes.len();
            let better = |best: Found| (start, stop_idx) < (best.start, best.stop_idx);
            if self.best.is_none_or(better) {
                self.best = Some(Found { start, stop_idx });
            }
        }
    }

    /// Whether no stop that is still open can beat `found`. The open prefix of a stop that starts first is
    /// the longest one, so one comparison for each stop decides.
    fn is_final(&self, found: Found) -> bool {
        self.stops.iter().enumerate().all(|(stop_idx, stop)| {
            let open_len = stop.open_len();
            open_len == 0 || (self.pos - open_len, stop_idx) > (found.start, found.stop_idx)
        })
    }

    /// Where the text that could still belong to a stop begins.
    fn first_open(&self) -> usize {
        let open = self.stops.iter().map(|stop| self.pos - stop.open_len());
        open.chain(self.best.map(|found| found.start)).min().unwrap_or(self.pos)
    }

    fn emit_match(&mut self, found: Found) -> StopStep {
        self.done = true;
        let stop_len = self.stops[found.stop_idx].bytes.len();
        let end = if self.include_stop { found.start + stop_len } else { found.start };
        let text = self.emit_until(end);
        self.held = String::new();
        StopStep { text, matched: Some(found.stop_idx) }
    }

    /// Takes the held text up to byte `end` of the whole text. Both the text and the stops are whole
    /// characters, so an open prefix begins at a character.
    fn emit_until(&mut self, end: usize) -> String {
        let rest = self.held.split_off(end - self.held_start);
        self.held_start = end;
        std::mem::replace(&mut self.held, rest)
    }
}

impl Stop {
    fn new(bytes: &[u8]) -> Self {
        let mut failure = vec![0_u16; bytes.len() + 1];
        let mut border = 0;
        for len in 2..=bytes.len() {
            while border > 0 && bytes[border] != bytes[len - 1] {
                border = usize::from(failure[border]);
            }
            border += usize::from(bytes[border] == bytes[len - 1]);
            failure[len] = border as u16;
        }
        Self { bytes: bytes.into(), failure: failure.into(), matched_len: 0 }
    }

    /// Takes one byte; says whether the stop is complete.
    fn step(&mut self, byte: u8) -> bool {
        let mut len = self.open_len();
        while len > 0 && self.bytes[len] != byte {
            len = usize::from(self.failure[len]);
        }
        self.matched_len = len + usize::from(self.bytes[len] == byte);
        self.matched_len == self.bytes.len()
    }

    /// Length of the longest proper prefix of the stop with which the text ends.
    fn open_len(&self) -> usize {
        match self.matched_len {
            len if len == self.bytes.len() => usize::from(self.failure[len]),
            len => len,
        }
    }
}

#[cfg(test)]
mod tests;
