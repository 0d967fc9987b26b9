//! What a request cost, in tokens and in time.

use std::time::Duration;

use longreach_types::Usage;
use tokio::time::Instant;

use super::UsageReport;
use crate::{error::Stage, request::GenerateSpec};

/// Where the time of a request went. Of several outputs the slowest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timings {
    /// Until a decode group had reserved blocks.
    pub(crate) queue: Duration,
    /// From then until the first token.
    pub(crate) prefill: Duration,
    /// From then until the last token.
    pub(crate) decode: Duration,
}

/// Counts while the outputs of a request are made.
pub(super) struct Account {
    started: Instant,
    prompt_tokens: usize,
    /// Outputs of each prompt.
    n: usize,
    choices: Vec<ChoiceAccount>,
    n_unfinished: usize,
}

#[derive(Clone, Default)]
struct ChoiceAccount {
    cached_len: usize,
    output_len: usize,
    accepted: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
    is_finished: bool,
}

impl Account {
    /// Nothing has happened yet to the outputs of `spec`.
    pub(super) fn new(spec: &GenerateSpec) -> Self {
        let n_choices = spec.prompts.len() * spec.n;
        Self {
            started: Instant::now(),
            prompt_tokens: spec.prompt_tokens(),
            n: spec.n,
            choices: vec![ChoiceAccount::default(); n_choices],
            n_unfinished: n_choices,
        }
    }

    pub(super) fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    pub(super) fn n_choices(&self) -> usize {
        self.choices.len()
    }

    /// A group took the output. A later one, after a loss, changes nothing.
    pub(super) fn accepted(&mut self, index: usize, cached_len: usize, now: Instant) {
        let choice = &mut self.choices[index];
        if choice.accepted.is_none() {
            choice.accepted = Some(now);
            choice.cached_len = cached_len;
        }
    }

    /// A token came. What the prefill worker had cached counts if it is the first.
    pub(super) fn token(&mut self, index: usize, cached_len: usize, now: Instant) {
        let choice = &mut self.choices[index];
        if choice.output_len == 0 {
            choice.first_token = Some(now);
            choice.cached_len = choice.cached_len.max(cached_len);
        }
        choice.output_len += 1;
        choice.last_token = Some(now);
    }

    /// An output is complete. Says whether it was the last.
    pub(super) fn finished(&mut self, index: usize) -> bool {
        if !std::mem::replace(&mut self.choices[index].is_finished, true) {
            self.n_unfinished -= 1;
        }
        self.n_unfinished == 0
    }

    /// Where the request is: as far as its last output.
    pub(super) fn stage(&self) -> Stage {
        let mut open = self.choices.iter().filter(|choice| !choice.is_finished);
        if open.clone().any(|choice| choice.accepted.is_none()) {
            Stage::Queue
        } else if open.any(|choice| choice.first_token.is_none()) {
            Stage::Prefill
        } else {
            Stage::Decode
        }
    }

    /// The account, closed.
    pub(super) fn report(&self) -> UsageReport {
        let slowest = |span: fn(&ChoiceAccount, Instant) -> Option<Duration>| {
            self.choices.iter().filter_map(|choice| span(choice, self.started)).max().unwrap_or_default()
        };
        UsageReport {
            tokens: Usage {
                prompt_tokens: self.prompt_tokens,
                completion_tokens: self.choices.iter().map(|choice| choice.output_len).sum(),
                // All outputs of a prompt compute it, so the one that found least says what was saved for sure.
                cached_tokens: self.choices.chunks(self.n).map(least_cached).sum(),
            },
            timings: Timings {
                queue: slowest(|choice, started| Some(choice.accepted? - started)),
                prefill: slowest(|choice, _| Some(choice.first_token? - choice.accepted?)),
                decode: slowest(|choice, _| Some(choice.last_token? - choice.first_token?)),
            },
        }
    }
}

fn least_cached(choices: &[ChoiceAccount]) -> usize {
    choices.iter().map(|choice| choice.cached_len).min().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use longreach_types::TokenId;

    use super::*;
    use crate::request::{ModelLimits, Options, RequestLimits};

    #[test]
    fn the_account_sums_tokens_and_takes_the_slowest_times() {
        let model = ModelLimits { max_context_len: 100, vocab_size: 10 };
        let options = Options { n: Some(2), ..Default::default() };
        let prompts = vec![vec![TokenId(1); 10]];
        let spec = GenerateSpec::check(prompts, options, model, &RequestLimits::default()).unwrap();
        let mut account = Account::new(&spec);
        let times = [5, 7, 20, 30, 50, 90].map(|ms| account.started + Duration::from_millis(ms));
        account.accepted(0, 4, times[0]);
        account.accepted(1, 8, times[1]);
        account.token(0, 6, times[2]);
        assert_eq!(account.stage(), Stage::Prefill);
        account.token(1, 0, times[3]);
        account.token(0, 0, times[4]);
        account.accepted(0, 10, times[5]);
        assert!(!account.finished(0) && !account.finished(0) && account.finished(1));
        let UsageReport { tokens, timings } = account.report();
        assert_eq!(tokens, Usage { prompt_tokens: 10, completion_tokens: 3, cached_tokens: 6 });
        assert_eq!(timings.queue.as_millis(), 7);
        assert_eq!(timings.prefill.as_millis(), 23);
        assert_eq!(timings.decode.as_millis(), 30);
    }
}
