//! longreach-sched
