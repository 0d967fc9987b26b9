//! The beat of a link: a thread that says at intervals that this process is alive.
//!
//! Not the engine thread, which is busy for as long as a step takes, and not the reader, which sleeps in a receive.

use std::{io, thread};

use crossbeam_channel as channel;

use super::half::Sender;

/// A running beat; it ends when this is dropped or the link has ended.
pub(super) struct Beat {
    stop: Option<channel::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Beat {
    /// Starts beating on the link of `sender`, where the link is one between processes.
    pub(super) fn start(sender: &Sender) -> io::Result<Option<Self>> {
        let Some(interval) = sender.beat_interval() else { return Ok(None) };
        let sender = sender.clone();
        let (stop, stopped) = channel::bounded::<()>(0);
        let name = format!("beat-{}", sender.peer());
        let thread = thread::Builder::new().name(name).spawn(move || {
            // A disconnection is the stop; a link that takes no beat has ended, and its reader says why.
            while stopped.recv_timeout(interval) == Err(channel::RecvTimeoutError::Timeout) {
                if sender.beat().is_err() {
                    return;
                }
            }
        })?;
        Ok(Some(Self { stop: Some(stop), thread: Some(thread) }))
    }
}

impl Drop for Beat {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It waits for nothing longer than one bounded write.
            let _ended = thread.join();
        }
    }
}
