//! An HTTP client that hides nothing: bytes out, bytes in.

use std::{collections::HashMap, net::SocketAddr};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

/// Sends requests to one address, each on its own connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HttpClient {
    pub(crate) addr: SocketAddr,
}

/// A whole answer.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    pub(crate) body: Vec<u8>,
}

/// An answer that is read event by event. Dropping it closes the connection.
pub(crate) struct SseReader {
    pub(crate) status: u16,
    pub(crate) headers: HashMap<String, String>,
    reader: BufReader<TcpStream>,
    /// Bytes of the body that were read and not given out.
    buffer: Vec<u8>,
    has_ended: bool,
}

impl Answer {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    /// What the events of a stream say.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':'));
        events.map(|event| event.strip_prefix("data: ").unwrap().to_owned()).collect()
    }
}

impl HttpClient {
    pub(crate) fn new(addr: SocketAddr) -> Self {
        Self { addr }
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"), b"").await
    }

    pub(crate) async fn post(&self, path: &str, body: impl AsRef<[u8]>) -> Answer {
        self.send(&post_head(path, body.as_ref().len()), body.as_ref()).await
    }

    pub(crate) async fn post_json(&self, path: &str, body: &Value) -> Answer {
        self.post(path, body.to_string()).await
    }

    /// Sends a request and leaves the answer to be read.
    pub(crate) async fn open(&self, path: &str, body: &Value) -> SseReader {
        let body = body.to_string();
        SseReader::open(self.write(&post_head(path, body.len()), body.as_bytes()).await).await
    }

    /// Sends a request and gives its connection, unread.
    pub(crate) async fn write(&self, head: &str, body: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(body).await.unwrap();
        stream
    }

    async fn send(&self, head: &str, body: &[u8]) -> Answer {
        let mut reader = SseReader::open(self.write(head, body).await).await;
        let mut body = Vec::new();
        while let Some(piece) = reader.next_piece().await {
            body.extend(piece);
        }
        Answer { status: reader.status, headers: reader.headers, body }
    }
}

pub(crate) fn post_head(path: &str, len: usize) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {len}\r\n\r\n"
    )
}

impl SseReader {
    async fn open(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let status = read_line(&mut reader).await.split(' ').nth(1).unwrap().parse().unwrap();
        let mut headers = HashMap::new();
        loop {
            let line = read_line(&mut reader).await;
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        Self { status, headers, reader, buffer: Vec::new(), has_ended: false }
    }

    /// The next bytes of the body, however it is framed.
    async fn next_piece(&mut self) -> Option<Vec<u8>> {
        if self.has_ended {
            return None;
        }
        if self.headers.get("transfer-encoding").is_none_or(|encoding| encoding != "chunked") {
            self.has_ended = true;
            let mut body = Vec::new();
            match self.headers.get("content-length") {
                Some(len) => {
                    body.resize(len.parse().unwrap(), 0);
                    self.reader.read_exact(&mut body).await.unwrap();
                }
                None => {
                    self.reader.read_to_end(&mut body).await.unwrap();
                }
            }
            return Some(body);
        }
        let len = usize::from_str_radix(&read_line(&mut self.reader).await, 16).unwrap();
        let mut piece = vec![0; len + 2];
        self.reader.read_exact(&mut piece).await.unwrap();
        piece.truncate(len);
        self.has_ended = len == 0;
        (len > 0).then_some(piece)
    }

    /// The next event's data, or a comment with its colon; `None` at the end.
    pub(crate) async fn next_event(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event[..end].to_vec()).unwrap();
                return Some(event.strip_prefix("data: ").map_or(event.clone(), str::to_owned));
            }
            let piece = self.next_piece().await?;
            self.buffer.extend(piece);
        }
    }
}

async fn read_line(reader: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).await.unwrap();
    line.trim_end().to_owned()
}
