//! longreach-service
