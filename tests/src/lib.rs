//! What the integration tests share: models small enough to try every case, and a whole cluster in one process.

pub mod cluster;
pub mod tiny;
