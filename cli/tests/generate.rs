//! `longreach generate` as scripts use it: tiny models against the reference, ranks as threads and as processes,
//! exit codes.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{path::PathBuf, process::Command};

use serde_json::Value;

fn golden_dir(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/tiny").join(name)
}

/// Runs the command on a tiny model's golden prompt; its JSON and the reference's greedy tokens.
fn generate(name: &str, args: &[&str]) -> (Value, Value) {
    let dir = golden_dir(name);
    let golden: Value = serde_json::from_slice(&std::fs::read(dir.join("golden.json")).unwrap()).unwrap();
    let ids =
        golden["input_ids"].as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>().join(",");
    let output = Command::new(env!("CARGO_BIN_EXE_longreach"))
        .args(["generate", "--model", dir.to_str().unwrap(), "--prompt-ids", &ids, "--max-tokens", "16"])
        .args(["--ignore-eos", "--json", "--kv-dtype", "f32", "--kv-mib", "8", "--local-prefill-max", "0"])
        .args(args)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {}: {errors}", output.status);
    (serde_json::from_slice(&output.stdout).unwrap(), golden["greedy16"].clone())
}

#[test]
fn ranks_as_threads_and_as_processes_give_the_reference_tokens() {
    let shapes: [&[&str]; 5] = [
        &[],
        &["--decode-ranks", "4", "--dcp", "2"],
        &["--decode-ranks", "2", "--rank-processes"],
        &["--decode-ranks", "4", "--dcp", "2", "--rank-processes", "--merge", "ag_rs", "--query", "gather"],
        &["--decode-ranks", "3", "--rank-processes"],
    ];
    for args in shapes {
        let (report, golden) = generate("qwen2", args);
        assert_eq!(report["token_ids"], golden, "{args:?}");
        assert_eq!(report["finish_reason"], "length");
        assert_eq!(report["usage"]["completion_tokens"], 16);
    }
}

#[test]
fn a_cut_output_is_resumed_with_the_same_tokens() {
    let (whole, _) = generate("llama", &["--temperature", "0.9", "--seed", "7"]);
    let ids = |value: &Value| value.as_array().unwrap().iter().map(Value::to_string).collect::<Vec<_>>();
    let (prompt, output) = (ids(&whole["prompt_ids"]), ids(&whole["token_ids"]));
    for cut in [1, 7, 15] {
        let resumed_prompt = [prompt.as_slice(), &output[..cut]].concat().join(",");
        let output_rest = Command::new(env!("CARGO_BIN_EXE_longreach"))
            .args(["generate", "--model", golden_dir("llama").to_str().unwrap()])
            .args(["--prompt-ids", &resumed_prompt, "--resumed", &cut.to_string(), "--max-tokens", "16"])
            .args(["--ignore-eos", "--json", "--kv-dtype", "f32", "--kv-mib", "8", "--decode-ranks", "2"])
            .args(["--temperature", "0.9", "--seed", "7"])
            .output()
            .unwrap();
        let report: Value = serde_json::from_slice(&output_rest.stdout).unwrap();
        assert_eq!(ids(&report["token_ids"]), output[cut..], "cut at {cut}");
    }
}

#[test]
fn bad_usage_exits_64_and_a_failed_start_exits_1_with_a_sentence() {
    let cases: [(&[&str], i32, &str); 5] = [
        (&["generate"], 64, "--prompt"),
        (&["generate", "--prompt", "x", "--decode-ranks", "9"], 64, "1 to 8 ranks"),
        (&["generate", "--prompt", "x", "--decode-ranks", "4", "--dcp", "3"], 64, "does not divide"),
        (&["generate", "--prompt", "x", "--kv-dtype", "f8"], 64, "choose f16, bf16 or f32"),
        (&["generate", "--prompt", "x", "--model", "/nowhere/at/all"], 1, "/nowhere/at/all"),
    ];
    for (args, code, says) in cases {
        let output = Command::new(env!("CARGO_BIN_EXE_longreach")).args(args).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(says), "{args:?}: {errors}");
    }
}
