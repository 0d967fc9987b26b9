//! What the libFuzzer targets share.
//!
//! The targets themselves are functions of `longreach_fuzz`, which the stable toolchain builds and tests too.

pub use libfuzzer_sys;

/// Defines the entry points of a target.
#[macro_export]
macro_rules! fuzz {
    ($name:ident) => {
        $crate::libfuzzer_sys::fuzz_target!(
            init: $crate::init(),
            |data: &[u8]| -> $crate::libfuzzer_sys::Corpus { $crate::run(stringify!($name), data) }
        );
    };
}

/// Takes libFuzzer's hook away, which ends the process at every panic. The product contains the panics of one library
/// on purpose; one that reaches libFuzzer still ends the process.
pub fn init() {
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
}

/// Runs the target. Every input is worth keeping: those that are refused late are the best.
pub fn run(name: &str, data: &[u8]) -> libfuzzer_sys::Corpus {
    let target = longreach_fuzz::target(name).expect("the binary is named after a target");
    (target.run)(data);
    libfuzzer_sys::Corpus::Keep
}
