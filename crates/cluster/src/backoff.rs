//! Growing pauses between attempts, spread so that many clients of a store that comes back do not come at once.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

/// Pauses that double up to a limit, each between half and the whole of its step. The spread comes from a seed, not from
/// a random source: a simulation repeats to the nanosecond.
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

    /// Pauses of 100 ms to 5 s, spread by the name of who pauses: those who lost the same store at the same moment do
    /// not all come back to it at the same moment.
    pub fn of(who: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        who.hash(&mut hasher);
        Self::new(Duration::from_millis(100), Duration::from_secs(5), hasher.finish())
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
        let pauses = |who| {
            let mut backoff = Backoff::of(who);
            [(); 4].map(|()| backoff.pause())
        };
        assert_eq!(pauses("decode-0"), pauses("decode-0"));
        assert_ne!(pauses("decode-0"), pauses("decode-1"));
    }
}
