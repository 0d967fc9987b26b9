//! longreach-prefill
