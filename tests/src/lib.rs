//! What the integration tests share: models small enough to try every case, a whole cluster in one process, and a
//! cluster whose parts come and go.

pub mod cluster;
pub mod parts;
pub mod pulling;
pub mod tiny;
