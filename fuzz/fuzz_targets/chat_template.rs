//! libFuzzer over `longreach_fuzz`'s target of this name.
#![no_main]

longreach_fuzz_targets::fuzz!(chat_template);
