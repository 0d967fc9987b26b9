//! Ports that a child process can be told to listen on.
//!
//! Port 0 is better wherever a process can say which port it got. etcd cannot, and a process that is started again must
//! come back on its old port. So a port is taken from below the range from which the kernel takes the ports of
//! outgoing connections: otherwise a connection of anybody could sit on it when the process comes back.

use std::{
    collections::BTreeSet,
    fs,
    hash::{BuildHasher, RandomState},
    io,
    net::{Ipv4Addr, TcpListener},
};

/// First port that is taken, above the well-known ones.
const FIRST: u16 = 20_000;
/// So many ports are worth staying among.
const ENOUGH: u16 = 1000;
/// Where the kernel's range begins if it does not say.
const DEFAULT_END: u16 = 32_768;

/// This many different ports of the loopback address on which nobody listens now. They are not reserved: somebody else
/// may take one before it is used, so a child that cannot listen is started again with others.
pub fn free_ports(count: usize) -> io::Result<Vec<u16>> {
    let end = end_of_range(ephemeral_start());
    let span = u64::from(end - FIRST);
    let random = RandomState::new();
    // Held until all are found, so that none is found twice.
    let mut held = Vec::new();
    let mut seen = BTreeSet::new();
    for n_tried in 0..span {
        let port = FIRST + u16::try_from(random.hash_one(n_tried) % span).unwrap_or(0);
        if !seen.insert(port) {
            continue;
        }
        if let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            held.push((port, listener));
        }
        if held.len() == count {
            return Ok(held.into_iter().map(|(port, _)| port).collect());
        }
    }
    Err(io::Error::new(io::ErrorKind::AddrInUse, format!("no {count} free ports from {FIRST} to {end}")))
}

/// Where the ports that are taken end. Where the kernel's own begin so low that few or none are left below them, as on a
/// host that was tuned for many connections, a port may be lost to a connection, which is better than to have none.
fn end_of_range(ephemeral_start: Option<u16>) -> u16 {
    ephemeral_start.filter(|start| (FIRST + ENOUGH..DEFAULT_END).contains(start)).unwrap_or(DEFAULT_END)
}

fn ephemeral_start() -> Option<u16> {
    let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").ok()?;
    range.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_that_uses_all_ports_leaves_some_for_us() {
        for (start, end) in
            [(None, 32_768), (Some(25_000), 25_000), (Some(1024), 32_768), (Some(60_000), 32_768)]
        {
            assert_eq!(end_of_range(start), end, "{start:?}");
        }
    }

    #[test]
    fn ports_are_free_and_different() {
        let bound = || {
            let ports = free_ports(40).unwrap();
            let listen = |&port: &u16| TcpListener::bind((Ipv4Addr::LOCALHOST, port));
            ports.iter().map(listen).collect::<io::Result<Vec<_>>>()
        };
        // Another test may take one in between; not every time.
        let listeners = (0..5).find_map(|_| bound().ok()).unwrap();
        assert_eq!(listeners.len(), 40);
    }
}
