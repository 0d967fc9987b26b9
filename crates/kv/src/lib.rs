//! longreach-kv
