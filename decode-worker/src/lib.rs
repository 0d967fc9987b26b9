//! longreach-decode
