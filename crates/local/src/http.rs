//! One question to a server on loopback: the little of HTTP that asks a child how it is.
//!
//! A client library was the alternative; all that is needed is a body, within a bound, from a server that we started.

use std::{io, net::Ipv4Addr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time,
};

/// Longest wait for the whole answer.
const LIMIT: Duration = Duration::from_secs(2);
/// Longest answer.
const MAX_ANSWER_BYTES: u64 = 4 << 20;

/// The answer to `GET path` of a server on this machine, its head included.
pub(crate) async fn get(port: u16, path: &str) -> io::Result<String> {
    time::timeout(LIMIT, ask(port, path)).await?
}

async fn ask(port: u16, path: &str) -> io::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
    let question = format!("GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n");
    stream.write_all(question.as_bytes()).await?;
    let mut answer = String::new();
    stream.take(MAX_ANSWER_BYTES).read_to_string(&mut answer).await?;
    Ok(answer)
}
