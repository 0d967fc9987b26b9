//! longreach-tests
