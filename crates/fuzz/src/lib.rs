//! Every parser of bytes from outside, as functions of bytes that must not panic.
//!
//! [`TARGETS`] is the list. `fuzz/` gives each function to libFuzzer, where coverage finds the inputs; the test of
//! this crate gives them their seeds and some mutations of these on the stable toolchain, so that no change goes in
//! without having run them. A target calls what the product calls: where an entry is private, its crate has a hidden
//! one. Seeds are made by the product's own writers and not kept as files, so that they cannot fall behind the formats.
//!
//! What a target accepts it uses: a parsed tokenizer encodes, a parsed request is checked. Whether an answer is
//! *right* is the business of other tests; here only round trips are compared.

pub mod mutate;
mod parts;
mod targets;

pub use targets::TARGETS;

/// One parser, with inputs that it accepts.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name, also in `fuzz/`.
    pub name: &'static str,
    /// Parses any bytes; says whether they were accepted.
    pub run: fn(&[u8]) -> bool,
    /// Inputs that are accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Mutations that the stable test tries; slower parsers get fewer.
    pub n_mutations: usize,
}

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
