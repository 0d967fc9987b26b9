//! What a worker's last outcomes say about sending it more: a circuit breaker with a probe, as a pure state machine.
//!
//! Outcomes are of three kinds, because a refusal for want of room is neither success nor fault, and a client's
//! mistake says nothing about the worker. Time is an argument. The state only *ranks* workers; it never forbids
//! one, so that a fleet of suspects is still tried rather than refused.

use std::time::Duration;

use crate::routing::Tier;

/// Faults in a row that open the breaker.
const FAULTS_TO_OPEN: u32 = 2;

/// How long the breaker stays open at first; doubled each time a probe fails.
const FIRST_PAUSE: Duration = Duration::from_millis(500);

/// The longest pause between probes.
const MAX_PAUSE: Duration = Duration::from_secs(15);

/// How long a worker that refused for want of room is passed over.
const BUSY_PAUSE: Duration = Duration::from_millis(200);

/// What became of work that was sent to a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It was done.
    Success,
    /// It ended for a reason of the client's: nothing is learned.
    Neutral,
    /// It was refused for want of room.
    Backpressure,
    /// The worker failed or was lost.
    Fault,
}

/// A worker's standing. Times are since an arbitrary start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Health {
    n_faults: u32,
    suspect_until: Duration,
    busy_until: Duration,
}

impl Health {
    /// Takes note of `outcome`.
    pub(crate) fn record(&mut self, outcome: Outcome, now: Duration) {
        match outcome {
            Outcome::Success => *self = Self::default(),
            Outcome::Neutral => {}
            Outcome::Backpressure => {
                self.n_faults = 0;
                self.busy_until = now + BUSY_PAUSE;
            }
            Outcome::Fault => {
                self.n_faults = self.n_faults.saturating_add(1);
                if let Some(n_doublings) = self.n_faults.checked_sub(FAULTS_TO_OPEN) {
                    let pause = FIRST_PAUSE.saturating_mul(1 << n_doublings.min(10)).min(MAX_PAUSE);
                    self.suspect_until = now + pause;
                }
            }
        }
    }

    /// How far the worker is to be trusted now.
    pub(crate) fn tier(&self, now: Duration) -> Tier {
        if now < self.suspect_until {
            Tier::Suspect
        } else if now < self.busy_until {
            Tier::Busy
        } else {
            Tier::Good
        }
    }

    /// Called when the worker was chosen. If its pause is over but it has not proved itself, this request is the
    /// probe, and others keep away until its outcome is known or another pause has passed.
    pub(crate) fn claim(&mut self, now: Duration) {
        if self.n_faults >= FAULTS_TO_OPEN && now >= self.suspect_until {
            self.suspect_until = now + FIRST_PAUSE;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn two_faults_open_and_one_probe_at_a_time_closes() {
        let mut health = Health::default();
        health.record(Outcome::Fault, Duration::ZERO);
        assert_eq!(health.tier(Duration::ZERO), Tier::Good, "one fault may be chance");
        health.record(Outcome::Fault, Duration::ZERO);
        assert_eq!(health.tier(499 * MS), Tier::Suspect);
        assert_eq!(health.tier(500 * MS), Tier::Good, "half open");
        health.claim(500 * MS);
        assert_eq!(health.tier(501 * MS), Tier::Suspect, "a probe is on its way");
        health.record(Outcome::Success, 600 * MS);
        assert_eq!(health.tier(600 * MS), Tier::Good);
    }

    #[test]
    fn pauses_double_up_to_a_bound() {
        let mut health = Health::default();
        for _ in 0..50 {
            health.record(Outcome::Fault, Duration::ZERO);
        }
        assert_eq!(health.tier(MAX_PAUSE - MS), Tier::Suspect);
        assert_eq!(health.tier(MAX_PAUSE), Tier::Good);
    }

    #[test]
    fn backpressure_is_no_fault_and_a_clients_mistake_is_nothing() {
        let mut health = Health::default();
        for _ in 0..10 {
            health.record(Outcome::Neutral, Duration::ZERO);
            health.record(Outcome::Backpressure, Duration::ZERO);
        }
        assert_eq!(health.tier(199 * MS), Tier::Busy);
        assert_eq!(health.tier(200 * MS), Tier::Good);
    }
}
