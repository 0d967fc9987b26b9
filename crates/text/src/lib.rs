//! longreach-text
