//! longreach-collective
