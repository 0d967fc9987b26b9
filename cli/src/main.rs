//! One command for people.
fn main() {}
