//! Unpredictable numbers for request ids, seeds and tie-breaking.
//!
//! The standard library's hasher is keyed from the operating system; hashing a counter with it gives numbers that
//! nobody outside can foresee, without a dependency. It is not meant for secrets.

use std::{
    hash::{BuildHasher, RandomState},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicU64, Ordering},
    },
};

static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// The next number.
pub(crate) fn next_u64() -> u64 {
    KEY.hash_one(COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// A source of numbers: unpredictable ones, or those of a seed, with which a simulated router repeats its choices.
/// Clones share the source.
#[derive(Clone, Debug, Default)]
pub(crate) struct Random(Option<Arc<AtomicU64>>);

impl Random {
    /// The numbers of `seed`.
    #[cfg(any(test, feature = "simulation"))]
    pub(crate) fn seeded(seed: u64) -> Self {
        Self(Some(Arc::new(AtomicU64::new(seed))))
    }

    /// The next number.
    pub(crate) fn next_u64(&self) -> u64 {
        match &self.0 {
            None => next_u64(),
            Some(state) => mix(state.fetch_add(GOLDEN, Ordering::Relaxed)),
        }
    }
}

/// The seed of choice `choice_idx` of a request with seed `seed`: the seed itself for the first, so that a request
/// for one output is repeated by asking for it alone; well-mixed neighbours for the others.
pub(crate) fn choice_seed(seed: u64, choice_idx: usize) -> u64 {
    if choice_idx == 0 {
        return seed;
    }
    mix(seed.wrapping_add((choice_idx as u64).wrapping_mul(GOLDEN)))
}

/// The step and the finaliser of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(mut mixed: u64) -> u64 {
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_and_seeds_do_not_repeat() {
        let numbers: HashSet<u64> = (0..10_000).map(|_| next_u64()).collect();
        assert_eq!(numbers.len(), 10_000);
        let seeds: HashSet<u64> =
            (0..100).flat_map(|seed| (0..100).map(move |idx| choice_seed(seed, idx))).collect();
        assert_eq!(seeds.len(), 10_000);
    }

    #[test]
    fn a_seed_repeats_its_numbers_and_no_other_seed_does() {
        let numbers = |seed| {
            let random = Random::seeded(seed);
            [(); 8].map(|()| random.next_u64())
        };
        assert_eq!(numbers(1), numbers(1));
        assert_ne!(numbers(1), numbers(2));
        assert_ne!(Random::default().next_u64(), Random::default().next_u64());
    }
}
