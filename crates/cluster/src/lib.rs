//! longreach-cluster
