//! An HTTP client that hides nothing: bytes out, bytes in, one connection for each request.

use std::{collections::HashMap, io, net::SocketAddr};

use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
};

use crate::tiny::Error;

/// Sends requests to one address.
#[derive(Clone, Copy, Debug)]
pub struct HttpClient {
    addr: SocketAddr,
}

/// An answer whose body is still to be read. Dropping it closes the connection.
pub struct Answer {
    /// The status code.
    pub status: u16,
    /// The headers, by their names in lower case.
    pub headers: HashMap<String, String>,
    reader: BufReader<TcpStream>,
    /// Bytes of the body that were read and not given out.
    buffer: Vec<u8>,
    has_ended: bool,
}

impl HttpClient {
    /// A client of the server at `addr`.
    pub fn new(addr: SocketAddr) -> Self {
        Self { addr }
    }

    /// Sends a request; the answer is left to be read.
    pub async fn post(&self, path: &str, body: &Value) -> Result<Answer, Error> {
        let body = body.to_string();
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        self.send(&head, &body).await
    }

    /// Gets a page.
    pub async fn get(&self, path: &str) -> Result<Answer, Error> {
        self.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"), "").await
    }

    async fn send(&self, head: &str, body: &str) -> Result<Answer, Error> {
        let mut stream = TcpStream::connect(self.addr).await?;
        stream.set_nodelay(true)?;
        stream.write_all(head.as_bytes()).await?;
        stream.write_all(body.as_bytes()).await?;
        Answer::open(stream).await
    }
}

impl Answer {
    async fn open(stream: TcpStream) -> Result<Self, Error> {
        let mut reader = BufReader::new(stream);
        let line = read_line(&mut reader).await?;
        let status = line.split(' ').nth(1).ok_or("no status line")?.parse()?;
        let mut headers = HashMap::new();
        loop {
            let line = read_line(&mut reader).await?;
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.insert(name.to_ascii_lowercase(), value.to_owned());
        }
        Ok(Self { status, headers, reader, buffer: Vec::new(), has_ended: false })
    }

    /// The next bytes of the body, however it is framed.
    async fn piece(&mut self) -> Result<Option<Vec<u8>>, Error> {
        if self.has_ended {
            return Ok(None);
        }
        if self.headers.get("transfer-encoding").is_some_and(|encoding| encoding == "chunked") {
            let len = usize::from_str_radix(&read_line(&mut self.reader).await?, 16)?;
            let mut piece = vec![0; len + 2];
            self.reader.read_exact(&mut piece).await?;
            piece.truncate(len);
            self.has_ended = len == 0;
            return Ok((len > 0).then_some(piece));
        }
        self.has_ended = true;
        let mut body = Vec::new();
        self.reader.read_to_end(&mut body).await?;
        Ok(Some(body))
    }

    async fn body(mut self) -> Result<Vec<u8>, Error> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await? {
            body.extend(piece);
        }
        Ok(body)
    }

    /// The body as JSON.
    pub async fn json(self) -> Result<Value, Error> {
        Ok(serde_json::from_slice(&self.body().await?)?)
    }

    /// The body as text.
    pub async fn text(self) -> Result<String, Error> {
        Ok(String::from_utf8(self.body().await?)?)
    }

    /// The data of the next event, or a comment with its colon; `None` at the end.
    pub async fn event(&mut self) -> Result<Option<String>, Error> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.buffer.drain(..end + 2).collect();
                let event = String::from_utf8(event[..end].to_vec())?;
                return Ok(Some(event.strip_prefix("data: ").map_or(event.clone(), str::to_owned)));
            }
            match self.piece().await? {
                Some(piece) => self.buffer.extend(piece),
                None => return Ok(None),
            }
        }
    }

    /// Everything that the events of a stream say, in order.
    pub async fn events(mut self) -> Result<Vec<String>, Error> {
        let mut events = Vec::new();
        while let Some(event) = self.event().await? {
            events.push(event);
        }
        Ok(events)
    }
}

async fn read_line(reader: &mut BufReader<TcpStream>) -> io::Result<String> {
    let mut line = String::new();
    if reader.read_line(&mut line).await? == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(line.trim_end().to_owned())
}
