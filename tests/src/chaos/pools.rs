//! Whether workers have given back everything: asked of the workers themselves, over their own services.

use std::{
    net::SocketAddr,
    time::{Duration, Instant},
};

use futures::future::try_join_all;
use longreach_proto::worker::{DecodeClient, PoolState, PrefillClient};
use tonic::transport::{Channel, Endpoint};

use crate::tiny::Error;

/// Looks at the workers while something is awaited.
const LOOK: Duration = Duration::from_millis(3);

/// How long one worker may take to answer.
const ASK_LIMIT: Duration = Duration::from_secs(3);

/// The workers of a cluster, to be asked how they are.
#[derive(Clone)]
pub struct Workers {
    decodes: Vec<DecodeClient>,
    prefills: Vec<PrefillClient>,
}

/// What a worker has at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Load {
    /// The worker.
    pub name: String,
    /// The life of its group; 0 for a prefill worker.
    pub epoch: u64,
    /// Sequences that wait or hold blocks.
    pub n_seqs: usize,
    /// Blocks of each of its pools.
    pub pools: Vec<PoolState>,
}

impl Load {
    /// Whether it has nothing to do and holds nothing.
    pub fn is_at_rest(&self) -> bool {
        self.n_seqs == 0 && self.pools.iter().all(|pool| pool.free + pool.cached == pool.total)
    }

    /// Blocks that are held for `reason`.
    pub fn n_held(&self, reason: &str) -> usize {
        self.pools.iter().filter_map(|pool| pool.held.get(reason)).sum()
    }
}

impl Workers {
    /// The leaders of decode groups at `decodes` and the prefill workers at `prefills`.
    pub fn new(decodes: &[SocketAddr], prefills: &[SocketAddr]) -> Result<Self, Error> {
        let channel = |addr: &SocketAddr| -> Result<Channel, Error> {
            let endpoint = Endpoint::from_shared(format!("http://{addr}"))?;
            Ok(endpoint.connect_timeout(ASK_LIMIT).tcp_nodelay(true).connect_lazy())
        };
        Ok(Self {
            decodes: decodes
                .iter()
                .map(|addr| Ok(DecodeClient::new(channel(addr)?)))
                .collect::<Result<_, Error>>()?,
            prefills: prefills
                .iter()
                .map(|addr| Ok(PrefillClient::new(channel(addr)?)))
                .collect::<Result<_, Error>>()?,
        })
    }

    /// What decode group `idx` has.
    pub async fn decode(&self, idx: usize) -> Result<Load, Error> {
        let group = tokio::time::timeout(ASK_LIMIT, self.decodes[idx].group()).await??;
        let n_seqs = group.n_waiting + group.n_running;
        Ok(Load { name: group.group_id, epoch: group.epoch.0, n_seqs, pools: group.pools })
    }

    /// What prefill worker `idx` has.
    pub async fn prefill(&self, idx: usize) -> Result<Load, Error> {
        let worker = tokio::time::timeout(ASK_LIMIT, self.prefills[idx].worker()).await??;
        let n_seqs = worker.n_waiting + worker.n_running;
        Ok(Load { name: worker.worker_id, epoch: 0, n_seqs, pools: vec![worker.pool] })
    }

    /// What all have.
    pub async fn all(&self) -> Result<Vec<Load>, Error> {
        let decodes = try_join_all((0..self.decodes.len()).map(|idx| self.decode(idx)));
        let prefills = try_join_all((0..self.prefills.len()).map(|idx| self.prefill(idx)));
        let (decodes, prefills) = tokio::try_join!(decodes, prefills)?;
        Ok([decodes, prefills].concat())
    }

    /// Waits until every worker answers; how long that took.
    pub async fn until_answering(&self, patience: Duration) -> Result<Duration, Error> {
        self.until(patience, |_| true).await
    }

    /// Waits until every worker answers and is at rest; how long that took.
    pub async fn until_at_rest(&self, patience: Duration) -> Result<Duration, Error> {
        self.until(patience, |loads| loads.iter().all(Load::is_at_rest)).await
    }

    /// Waits until every worker answers and `condition` holds of what they have; how long that took.
    pub async fn until(
        &self,
        patience: Duration,
        mut condition: impl FnMut(&[Load]) -> bool,
    ) -> Result<Duration, Error> {
        let start = Instant::now();
        loop {
            let loads = self.all().await;
            if loads.as_ref().is_ok_and(|loads| condition(loads)) {
                return Ok(start.elapsed());
            }
            if start.elapsed() > patience {
                return Err(match loads {
                    Ok(loads) => format!("workers after {patience:?}: {loads:?}").into(),
                    Err(error) => error,
                });
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
