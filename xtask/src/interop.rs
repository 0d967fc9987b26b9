//! A whole cluster on this machine, answered by clients that other people wrote.
//!
//! Rust tests share our generated code and so would share its mistakes; here the stubs come from the .proto files by
//! another compiler and the HTTP face is read by the official client. The cluster is stopped by the signal of
//! Ctrl-C and must drain and exit well; it is killed when anything here fails.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::process::{self, Background};
use crate::python::Python;
use crate::workspace::Workspace;

/// Time for the first start: the model may have to be fetched and is loaded by a lightly optimised build.
const READY_LIMIT: Duration = Duration::from_secs(300);
const POLL: Duration = Duration::from_millis(200);
const HTTP_LIMIT: Duration = Duration::from_secs(5);
/// Lines of the cluster's log that are shown when something fails.
const TAIL_LINES: usize = 40;

/// Starts the cluster, runs the clients, stops the cluster.
pub(crate) fn run(workspace: &Workspace) -> Result<(), Failure> {
    let log = workspace.target.join("interop.log");
    let outcome = run_logged(workspace, &log);
    if outcome.is_err() {
        show_tail(&log);
    }
    outcome
}

fn run_logged(workspace: &Workspace, log: &Path) -> Result<(), Failure> {
    let [http, grpc] =
        free_addresses().map_err(|source| Failure::File { path: "127.0.0.1".into(), source })?;
    let started = Instant::now();
    let mut cluster = Background::start(&mut up(workspace, log, http, grpc)?)?;
    wait_until_ready(&mut cluster, http, log)?;
    println!("cluster is ready after {:.1} s, log in {}", started.elapsed().as_secs_f64(), log.display());
    let python = Python::of(&workspace.root);
    let client = |script: &str| {
        let mut command = python.program("python");
        command.current_dir(&workspace.root).arg(format!("tests/python/{script}"));
        command
    };
    process::run(client("interop_grpc.py").arg("--grpc").arg(grpc.to_string()).args(["--proto", "proto"]))?;
    process::run(client("interop_openai.py").arg("--http").arg(http.to_string()))?;
    cluster.stop()?;
    println!("cluster drained and exited well");
    expect_quiet(log)
}

fn up(workspace: &Workspace, log: &Path, http: SocketAddr, grpc: SocketAddr) -> Result<Command, Failure> {
    let file_failure = |source| Failure::File { path: log.to_owned(), source };
    let output = File::create(log).map_err(file_failure)?;
    let errors = output.try_clone().map_err(file_failure)?;
    let mut command = Command::new(workspace.target.join("debug/longreach"));
    command.current_dir(&workspace.root).args(["up", "--http"]).arg(http.to_string());
    command.arg("--grpc").arg(grpc.to_string()).env("NO_COLOR", "1");
    command.stdin(Stdio::null()).stdout(output).stderr(errors);
    Ok(command)
}

/// Two loopback addresses that are free now. Both are held until both are known, so that they differ.
fn free_addresses() -> io::Result<[SocketAddr; 2]> {
    let listen = || TcpListener::bind((Ipv4Addr::LOCALHOST, 0));
    let (first, second) = (listen()?, listen()?);
    Ok([first.local_addr()?, second.local_addr()?])
}

fn wait_until_ready(cluster: &mut Background, http: SocketAddr, log: &Path) -> Result<(), Failure> {
    let started = Instant::now();
    while started.elapsed() < READY_LIMIT {
        if let Some(status) = cluster.wait(POLL)? {
            let command = format!("longreach up (log: {})", log.display());
            return Err(Failure::Exit { command, status });
        }
        if is_ready(http).unwrap_or(false) {
            return Ok(());
        }
    }
    Err(Failure::TimedOut { what: "the start of `longreach up`".to_owned(), limit: READY_LIMIT })
}

fn is_ready(http: SocketAddr) -> io::Result<bool> {
    let mut stream = TcpStream::connect_timeout(&http, HTTP_LIMIT)?;
    stream.set_read_timeout(Some(HTTP_LIMIT))?;
    stream
        .write_all(format!("GET /readyz HTTP/1.1\r\nHost: {http}\r\nConnection: close\r\n\r\n").as_bytes())?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    Ok(answer.starts_with(b"HTTP/1.1 200"))
}

/// Clients that behave and clients that err are both everyday life: neither may raise a warning.
fn expect_quiet(log: &Path) -> Result<(), Failure> {
    let text = read_log(log)?;
    let lines: Vec<String> = text.lines().filter(|line| is_alarm(line)).map(str::to_owned).collect();
    if lines.is_empty() {
        return Ok(());
    }
    Err(Failure::Broken { rules: "lines of the log that warn", lines })
}

fn is_alarm(line: &str) -> bool {
    line.split_whitespace().any(|word| matches!(word, "WARN" | "ERROR")) || line.contains("panicked at")
}

fn show_tail(log: &Path) {
    if let Ok(text) = read_log(log) {
        let lines: Vec<&str> = text.lines().collect();
        eprintln!("last lines of {}:", log.display());
        lines.iter().skip(lines.len().saturating_sub(TAIL_LINES)).for_each(|line| eprintln!("  {line}"));
    }
}

fn read_log(log: &Path) -> Result<String, Failure> {
    let bytes = fs::read(log).map_err(|source| Failure::File { path: PathBuf::from(log), source })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_is_http_200_and_nothing_else() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let server = std::thread::spawn(move || {
            for answer in ["HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 503 Service Unavailable\r\n\r\n", ""] {
                let (mut stream, _) = listener.accept().unwrap();
                let mut request = [0; 1024];
                let read = stream.read(&mut request).unwrap();
                assert!(request[..read].starts_with(b"GET /readyz HTTP/1.1\r\n"));
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        assert_eq!([(); 3].map(|()| is_ready(address).unwrap()), [true, false, false]);
        server.join().unwrap();
        assert!(is_ready(address).is_err(), "nobody listens any more");
    }

    #[test]
    fn an_alarm_is_a_level_or_a_panic_not_a_mention() {
        assert!(is_alarm("2026-01-01T00:00:00Z  WARN longreach_router: queue is long"));
        assert!(is_alarm("thread 'engine' panicked at src/lib.rs:1"));
        assert!(!is_alarm("2026-01-01T00:00:00Z  INFO longreach_router: no WARNINGS, no ERRORs"));
    }
}
