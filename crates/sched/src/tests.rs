//! The scheduler against a toy engine that has a real arena: see [`world`].

mod cases;
mod properties;
mod world;
