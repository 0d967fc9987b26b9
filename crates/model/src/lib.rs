//! longreach-model
