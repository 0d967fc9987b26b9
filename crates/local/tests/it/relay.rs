//! A relay between a client and etcd that can be cut in the ways in which networks are cut.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

/// What the relay does with what it is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Line {
    /// It is passed on.
    Open,
    /// Questions are passed on and answers are not; nobody is told.
    NoAnswers,
    /// Nothing is passed on, and nobody is told: the link is half-open.
    Silent,
}

/// A running relay. Connections end with it.
pub(crate) struct Relay {
    addr: SocketAddr,
    line: watch::Sender<Line>,
    n_connections: Arc<AtomicUsize>,
    _accepting: AbortOnDropHandle<()>,
}

impl Relay {
    /// A relay to `endpoint`, a plain one on loopback.
    pub(crate) async fn start(endpoint: &str, line: Line) -> Self {
        let target: SocketAddr = endpoint.strip_prefix("http://").unwrap().parse().unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (line, _) = watch::channel(line);
        let n_connections = Arc::new(AtomicUsize::new(0));
        let accept = accept(listener, target, line.clone(), Arc::clone(&n_connections));
        let accepting = AbortOnDropHandle::new(TaskTracker::new().spawn(accept));
        Self { addr, line, n_connections, _accepting: accepting }
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("http://{}", self.addr)
    }

    /// Changes the line for all connections that come. Those that are there are cut in silence for ever if it is
    /// not open: a network that is repaired brings no old packets.
    pub(crate) fn set(&self, line: Line) {
        self.line.send_replace(line);
    }

    /// Connections so far.
    pub(crate) fn n_connections(&self) -> usize {
        self.n_connections.load(Ordering::Relaxed)
    }
}

async fn accept(
    listener: TcpListener,
    target: SocketAddr,
    line: watch::Sender<Line>,
    count: Arc<AtomicUsize>,
) {
    // Aborted with this task.
    let mut connections = tokio::task::JoinSet::new();
    while let Ok((client, _)) = listener.accept().await {
        count.fetch_add(1, Ordering::Relaxed);
        let line = line.subscribe();
        connections.spawn(async move {
            let Ok(server) = TcpStream::connect(target).await else { return };
            let (client, server) = (client.into_split(), server.into_split());
            let questions = pump(client.0, server.1, line.clone(), |line| line != Line::Silent);
            let answers = pump(server.0, client.1, line, |line| line == Line::Open);
            tokio::join!(questions, answers);
        });
    }
}

/// Copies one direction while it is open. After a cut it keeps the connection and reads on, as a network without an end
/// would.
async fn pump(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    mut line: watch::Receiver<Line>,
    passes: fn(Line) -> bool,
) {
    let mut bytes = vec![0; 16 << 10];
    let mut is_cut = !passes(*line.borrow_and_update());
    loop {
        // Both arms are cancel-safe: bytes are read or they are not.
        tokio::select! {
            biased;
            Ok(()) = line.changed() => is_cut |= !passes(*line.borrow_and_update()),
            n = from.read(&mut bytes) => match n {
                Ok(n) if n > 0 && is_cut => {}
                Ok(n) if n > 0 && to.write_all(&bytes[..n]).await.is_ok() => {}
                _ => break,
            },
        }
    }
    if is_cut {
        // The other side hears nothing of this side's end either.
        std::future::pending::<()>().await;
    }
}
