//! Signals that ask a process to end: the first drains, the second ends it at once.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::error::CliError;

/// A token that SIGINT or SIGTERM cancels. A second signal exits with code 130, as a shell would.
pub(crate) fn shutdown() -> Result<CancellationToken, CliError> {
    let listen = |kind| signal(kind).map_err(|error| CliError::Start(format!("signals: {error}")));
    let (mut interrupt, mut terminate) = (listen(SignalKind::interrupt())?, listen(SignalKind::terminate())?);
    let token = CancellationToken::new();
    let cancel = token.clone();
    // Lives as long as the process; a tracker would make the drain wait for a signal that may never come.
    std::thread::Builder::new()
        .name("signals".to_owned())
        .spawn({
            let runtime = tokio::runtime::Handle::current();
            move || {
                runtime.block_on(async {
                    for is_first in [true, false] {
                        // Both arms are cancel-safe: a signal that came is kept until it is asked for.
                        tokio::select! {
                            _ = interrupt.recv() => {}
                            _ = terminate.recv() => {}
                        }
                        if is_first {
                            eprintln!("draining; once more ends it at once");
                            cancel.cancel();
                        }
                    }
                });
                std::process::exit(130);
            }
        })
        .map_err(|error| CliError::Start(format!("signals: {error}")))?;
    Ok(token)
}
