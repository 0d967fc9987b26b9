//! longreach-router
