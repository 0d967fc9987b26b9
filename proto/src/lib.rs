//! longreach-proto
