//! longreach-engine
