//! Growing pauses between attempts, spread so that many clients of a store that comes back do not come at once.

use std::time::Duration;

/// Pauses that double up to a limit, each between half and the whole of its step. The spread comes from a seed (a
/// digest of the worker's name, say), not from a random source: a simulation repeats to the nanosecond.
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    max: Duration,
    step: Duration,
    state: u64,
}

impl Backoff {
    /// Pauses from `first` to `max`.
    pub fn new(first: Duration, max: Duration, seed: u64) -> Self {
        Self { first, max, step: first, state: seed }
    }

    /// The same pauses with the spread of another seed.
    pub(crate) fn seeded(self, seed: u64) -> Self {
        Self { state: self.state ^ seed, ..self }
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let step = self.step.min(self.max);
        self.step = step.saturating_mul(2);
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let frac = (mixed >> 11) as f64 / (1_u64 << 53) as f64;
        step.mul_f64(0.5 + 0.5 * frac)
    }

    /// Starts again with short pauses, after a success.
    pub fn reset(&mut self) {
        self.step = self.first;
    }
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(Duration::from_millis(100), Duration::from_secs(5), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_within_their_spread_and_start_again_after_a_reset() {
        let (first, max) = (Duration::from_millis(10), Duration::from_millis(70));
        let mut backoff = Backoff::new(first, max, 1);
        for _ in 0..2 {
            for step in [10, 20, 40, 70, 70].map(Duration::from_millis) {
                let pause = backoff.pause();
                assert!(step / 2 <= pause && pause <= step, "{pause:?} of {step:?}");
            }
            backoff.reset();
        }
    }

    #[test]
    fn two_workers_pause_differently_and_each_repeatably() {
        let pauses = |seed| {
            let mut backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1), seed);
            [(); 4].map(|()| backoff.pause())
        };
        assert_eq!(pauses(1), pauses(1));
        assert_ne!(pauses(1), pauses(2));
    }
}
