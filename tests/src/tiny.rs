//! Models small enough to try every case.
