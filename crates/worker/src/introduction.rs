//! When a worker is ready: not when it could serve, but when somebody who sends work knows it.
//!
//! Routers hear of a worker from the store and ask it to describe itself; before that nobody sends it anything. A rolling
//! update waits for one worker to be ready and then takes the next one away, and must not find the first unknown.

use std::time::Duration;

use longreach_types::Epoch;
use tokio::{sync::watch, time::timeout};

/// How long a worker waits for a router to ask. Routers that run do so in milliseconds; where none does, a worker is
/// ready without.
const PATIENCE: Duration = Duration::from_secs(3);

/// Whether a router has asked who the worker is, in its present life. Clones share it.
#[derive(Clone, Debug, Default)]
pub struct Introduction(watch::Sender<Option<Epoch>>);

impl Introduction {
    /// A router has asked in the life `epoch`.
    pub fn asked(&self, epoch: Epoch) {
        self.0.send_replace(Some(epoch));
    }

    /// Resolves when a router has asked in the life `epoch`, or none has for some time.
    pub async fn made(&self, epoch: Epoch) {
        let mut asked = self.0.subscribe();
        let _or_nobody_asks = timeout(PATIENCE, asked.wait_for(|asked| *asked == Some(epoch))).await;
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_worker_is_introduced_once_in_each_life_and_does_not_wait_for_ever() {
        let (introduction, start) = (Introduction::default(), Instant::now());
        introduction.asked(Epoch(1));
        introduction.made(Epoch(1)).await;
        assert_eq!(start.elapsed(), Duration::ZERO);
        let later = introduction.clone();
        let asking = async move {
            tokio::time::sleep(PATIENCE / 2).await;
            later.asked(Epoch(2));
        };
        tokio::join!(introduction.made(Epoch(2)), asking);
        assert_eq!(start.elapsed(), PATIENCE / 2);
        introduction.made(Epoch(3)).await;
        assert_eq!(start.elapsed(), PATIENCE / 2 + PATIENCE);
    }
}
