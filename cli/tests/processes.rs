//! `longreach up --processes` as a person runs it: it answers, survives the loss of a rank, and leaves nothing behind.
#![allow(clippy::unwrap_used, reason = "a test that cannot build its fixture has failed")]

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, ChildStdout, Command, Stdio},
    time::Duration,
};

/// The command; killed if a test ends early, and with it its children, by the kernel.
struct Up {
    child: Child,
    output: BufReader<ChildStdout>,
    log: PathBuf,
    _folder: tempfile::TempDir,
}

/// A process in the summary.
struct Row {
    name: String,
    pid: u32,
}

impl Up {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut child = Command::new(env!("CARGO_BIN_EXE_longreach"))
            .args(["up", "--processes", "--kv-mib", "32", "--decode-ranks", "2"])
            .args(["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self { child, output, log, _folder: folder }
    }

    /// Reads the summary; it comes when the router is ready.
    fn summary(&mut self) -> (Vec<Row>, SocketAddr) {
        let (mut rows, mut http) = (Vec::new(), None);
        let mut line = String::new();
        while self.output.read_line(&mut line).unwrap() > 0 && !line.contains("kill -9") {
            let words: Vec<_> = line.split_whitespace().collect();
            if let [name, "pid", pid, rest @ ..] = &words[..] {
                rows.push(Row { name: (*name).to_owned(), pid: pid.parse().unwrap() });
                if *name == "router" {
                    http = rest.last().and_then(|url| url.strip_prefix("http://")?.parse().ok());
                }
            }
            line.clear();
        }
        assert!(http.is_some(), "no summary: {}", self.log());
        (rows, http.unwrap())
    }

    fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ended = self.child.kill();
        let _ended = self.child.wait();
    }
}

fn send(signal: &str, pid: u32) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

/// Whether there is a process of that number that is not only waiting to be reaped.
fn runs(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

/// The streamed answer to a greedy prompt. `begun` is called when it has begun.
fn complete(http: SocketAddr, begun: impl FnOnce()) -> String {
    let body = r#"{"model":"SmolLM2-135M-Instruct","prompt":"Once upon a time","max_tokens":200,"temperature":0,
        "stream":true}"#;
    let mut stream = TcpStream::connect(http).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: {http}\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
    let (mut begun, mut text, mut all) = (Some(begun), String::new(), String::new());
    for line in BufReader::new(stream).lines() {
        let line = line.unwrap();
        all += &line;
        let Some(data) = line.strip_prefix("data: ") else { continue };
        if data == "[DONE]" {
            break;
        }
        let event: serde_json::Value = serde_json::from_str(data).unwrap();
        text += event["choices"][0]["text"].as_str().unwrap_or_default();
        if let Some(begun) = begun.take_if(|_| !text.is_empty()) {
            begun();
        }
    }
    assert!(all.ends_with("[DONE]"), "the answer has no end: {all}");
    text
}

#[test]
fn a_killed_rank_costs_a_pause_and_no_token_and_nothing_is_left_at_the_end() {
    let mut up = Up::start();
    let (rows, http) = up.summary();
    let names: Vec<_> = rows.iter().map(|row| row.name.as_str()).collect();
    assert_eq!(names, ["router", "prefill-0", "decode-0-0", "decode-0-1"], "{}", up.log());
    let undisturbed = complete(http, || {});
    assert!(undisturbed.len() > 100, "{undisturbed:?}");
    let victim = rows[3].pid;
    assert_eq!(complete(http, || send("-KILL", victim)), undisturbed, "{}", up.log());
    let log = up.log();
    assert!(log.contains("longreach: decode-0-1 ended (signal: 9"), "{log}");
    assert!(log.contains("longreach: decode-0-1 is started again, pid "), "{log}");

    send("-INT", up.child.id());
    let status = up.child.wait().unwrap();
    assert!(status.success(), "{status}: {}", up.log());
    assert!(rows.iter().all(|row| !runs(row.pid)));
    // Drained, not killed: the rank that was started again too.
    let log = up.log();
    for name in names {
        assert!(log.contains(&format!("{name} ended (exit status: 0)")), "{name}: {log}");
    }
}

#[test]
fn children_do_not_outlive_a_killed_parent() {
    let mut up = Up::start();
    let (rows, _) = up.summary();
    send("-STOP", rows[3].pid);
    up.child.kill().unwrap();
    up.child.wait().unwrap();
    // The children held the other end of the log's pipe in the parent; what is left to wait for is the kernel.
    let mut rest = String::new();
    up.output.read_to_string(&mut rest).unwrap();
    let is_gone = |row: &Row| !runs(row.pid);
    let deadline = std::time::Instant::now() + Duration::from_secs(5);
    while !rows.iter().all(is_gone) && std::time::Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert!(
        rows.iter().all(is_gone),
        "{}",
        rows.iter().map(|row| format!("{} ", row.name)).collect::<String>()
    );
}
