//! Serving under signals, for roles whose `serve` drains by itself when a token is cancelled.

use std::future::Future;

use tokio_util::sync::CancellationToken;

use crate::signals::{Signal, Signals};

/// Runs `serving`; the first signal is told to `on_signal` and cancels `shutdown`, which asks it to drain. `None` if a
/// second signal came before it had: then it was dropped where it was.
pub async fn serve_until_signal<F: Future>(
    signals: &mut Signals,
    shutdown: &CancellationToken,
    on_signal: impl FnOnce(Signal),
    serving: F,
) -> Option<F::Output> {
    tokio::pin!(serving);
    // Waiting for a signal is cancel-safe; `serving` is polled on until it ends or is given up for good.
    tokio::select! {
        outcome = &mut serving => return Some(outcome),
        signal = signals.next() => on_signal(signal),
    }
    shutdown.cancel();
    tokio::select! {
        outcome = &mut serving => Some(outcome),
        _ = signals.next() => None,
    }
}
