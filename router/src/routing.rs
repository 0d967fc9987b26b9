//! The routing policy: which of the workers gets a request.
//!
//! Pure: it sees numbers and answers with an index, so that it runs unchanged in a simulation and a test needs no
//! worker. Cost is work in tokens, not in requests, because one long prompt outweighs a hundred short ones. Among
//! workers of nearly equal cost the lesser loaded of two random ones wins: always taking the minimum would send
//! every router's traffic to the same worker until the next snapshot shows it.
//!
//! What a worker did lately is folded in as a [`Tier`]; see [`health`](crate::health).

/// How much a worker is to be trusted with this request; better ones first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Tier {
    /// Nothing speaks against it.
    Good,
    /// It refused work for want of room a moment ago.
    Busy,
    /// It failed lately, or failed this very request. Still better than one that is not there.
    Suspect,
    /// It does not answer now. Still better than nobody.
    Lost,
}

/// One worker, as the policy sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Candidate {
    /// Tokens of work it would have with this request. The unit is the role's: positions held for each rank of a
    /// decode group, prompt tokens to compute for a prefill worker.
    pub(crate) cost: u64,
    /// How far it is to be trusted.
    pub(crate) tier: Tier,
    /// How strongly the request's session is drawn to it: the highest wins among near equals. 0 for no session.
    pub(crate) affinity: u64,
}

/// The index of the worker to take, or `None` if there is none. Costs at most `slack_percent` above the least are
/// near equals. `draws` are two random numbers.
pub(crate) fn choose(candidates: &[Candidate], slack_percent: u64, draws: [u64; 2]) -> Option<usize> {
    let tier = candidates.iter().map(|candidate| candidate.tier).min()?;
    let in_tier = |candidate: &Candidate| candidate.tier == tier;
    let least = candidates.iter().filter(|c| in_tier(c)).map(|c| c.cost).min()?;
    let bound = least.saturating_add(least.saturating_mul(slack_percent) / 100);
    let near = |candidate: &Candidate| in_tier(candidate) && candidate.cost <= bound;
    let nears = || candidates.iter().enumerate().filter(|(_, candidate)| near(candidate));
    let n_near = nears().count() as u64;
    if let Some((home, _)) = nears().filter(|(_, c)| c.affinity > 0).max_by_key(|(_, c)| c.affinity) {
        return Some(home);
    }
    let first = draws[0] % n_near;
    // Distinct from the first: one of the n - 1 others, in circular order.
    let second = if n_near > 1 { (first + 1 + draws[1] % (n_near - 1)) % n_near } else { first };
    let nth = |n: u64| nears().nth(n as usize);
    let (one, other) = (nth(first)?, nth(second)?);
    Some(if other.1.cost < one.1.cost { other.0 } else { one.0 })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn good(cost: u64) -> Candidate {
        Candidate { cost, tier: Tier::Good, affinity: 0 }
    }

    proptest! {
        #[test]
        fn the_choice_is_of_the_best_tier_and_near_the_least_cost(
            workers in prop::collection::vec((0_u64..1000, 0_u8..4, 0_u64..3), 0..20),
            slack in 0_u64..100,
            draws in any::<[u64; 2]>(),
        ) {
            let tiers = [Tier::Good, Tier::Busy, Tier::Suspect, Tier::Lost];
            let candidates: Vec<Candidate> = workers
                .iter()
                .map(|&(cost, tier, affinity)| Candidate { cost, tier: tiers[tier as usize], affinity })
                .collect();
            match choose(&candidates, slack, draws) {
                None => prop_assert!(candidates.is_empty()),
                Some(chosen) => {
                    let chosen = candidates[chosen];
                    let rivals = candidates.iter().filter(|c| c.tier <= chosen.tier);
                    for rival in rivals {
                        prop_assert_eq!(rival.tier, chosen.tier);
                        prop_assert!(chosen.cost <= rival.cost + rival.cost * slack / 100);
                    }
                }
            }
        }
    }

    #[test]
    fn the_less_loaded_of_two_wins() {
        let candidates = [good(10), good(14), good(12)];
        let wins = |first, second| choose(&candidates, 50, [first, second]);
        assert_eq!(wins(1, 0), Some(2), "14 against 12");
        assert_eq!(wins(1, 1), Some(0), "14 against 10");
        assert_eq!(wins(0, 0), Some(0), "10 against 14");
    }

    #[test]
    fn a_session_goes_home_unless_home_is_much_busier() {
        let home = |cost| Candidate { affinity: 7, ..good(cost) };
        assert_eq!(choose(&[good(10), home(30), good(11)], 200, [0, 0]), Some(1));
        assert_eq!(choose(&[good(10), home(31), good(100)], 200, [0, 0]), Some(0));
    }
}
