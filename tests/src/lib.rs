//! What the integration tests share: models small enough to try every case, a whole cluster in one process, a cluster
//! whose parts come and go, and one of real processes that is attacked.

pub mod chaos;
pub mod cluster;
pub mod parts;
pub mod pulling;
pub mod tiny;
