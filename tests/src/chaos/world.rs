//! Where the processes of a cluster under attack live: hosts of their own behind a bridge, or addresses of loopback.
//!
//! A host is a network namespace with one address, joined to a bridge by a virtual cable; cutting it off is taking the
//! cable out of the bridge, so that packets vanish as they do behind a dead switch: no reset, no refusal. Everything is
//! made inside namespaces that [`enter`] made first, of network, mounts and processes, so that the machine's own network
//! is not touched and nothing at all is left when the program ends, however it ends. Where a machine does not allow
//! that, hosts are addresses `127.x.y.z` of loopback; the rows that cut cables then say that they cannot run.

use std::{
    ffi::OsString,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
};

use crate::tiny::Error;

/// Set for the program inside the namespaces.
const INSIDE: &str = "LONGREACH_CHAOS_INSIDE";

/// Where `ip netns` keeps names.
const NETNS_DIR: &str = "/run/netns";

const BRIDGE: &str = "bridge";

/// How processes are kept apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Addresses of loopback.
    Loopback,
    /// Network namespaces.
    Namespaces,
}

/// The place for a cluster's processes.
#[derive(Debug)]
pub struct World {
    kind: Kind,
    /// Distinguishes worlds on loopback.
    subnet: [u8; 2],
    /// Hosts that have been made.
    hosts: Vec<Host>,
    /// How many of them are given out.
    n_given: usize,
}

/// One host.
#[derive(Clone, Debug)]
pub struct Host {
    ip: Ipv4Addr,
    /// Name of its namespace, which is also that of its cable's end in the bridge.
    netns: Option<String>,
}

/// What became of the wish to be inside.
pub enum Entered {
    /// This is the program inside.
    Inside,
    /// The program ran inside, and ended so.
    Ran(ExitStatus),
    /// The machine does not allow it.
    Impossible,
}

/// Runs this program again inside namespaces of its own, if it is not there yet and the machine allows it. They, and
/// every process in them, end with it.
pub fn enter() -> Result<Entered, Error> {
    if std::env::var_os(INSIDE).is_some() {
        return Ok(Entered::Inside);
    }
    const PLAIN: &[&str] = &["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"];
    const AS_ROOT: &[&str] = &["--user", "--map-root-user"];
    let attempts = [PLAIN.to_vec(), [AS_ROOT, PLAIN].concat()];
    for flags in attempts {
        let is_allowed = |command: &mut Command| {
            command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
        };
        // What will be needed inside: links, and a folder for the names of namespaces.
        let probe = "ip link add probe type bridge && mkdir -p /run/netns && mount -t tmpfs none /run/netns \
            && ip netns add probe";
        if is_allowed(Command::new("unshare").args(&flags).args(["sh", "-c", probe])) {
            let program = std::env::current_exe()?;
            // However this process ends, the kernel then ends the other, and that takes all inside along.
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "--", "unshare"]);
            command.args(&flags).arg(program).args(std::env::args_os().skip(1)).env(INSIDE, "1");
            return Ok(Entered::Ran(command.status()?));
        }
    }
    Ok(Entered::Impossible)
}

impl World {
    /// Hosts are addresses of loopback. `nonce` keeps several worlds apart.
    pub fn loopback(nonce: u32) -> Self {
        let subnet = [64 + (nonce >> 8) as u8 % 64, nonce as u8];
        Self { kind: Kind::Loopback, subnet, hosts: Vec::new(), n_given: 0 }
    }

    /// Hosts are namespaces. Only for a program that [`enter`] has put inside.
    pub fn namespaces() -> Result<Self, Error> {
        std::fs::create_dir_all(NETNS_DIR)?;
        run(Command::new("mount").args(["-t", "tmpfs", "none", NETNS_DIR]))?;
        ip(&["link", "set", "lo", "up"])?;
        ip(&["link", "add", BRIDGE, "type", "bridge"])?;
        ip(&["addr", "add", "10.77.0.1/16", "dev", BRIDGE])?;
        ip(&["link", "set", BRIDGE, "up"])?;
        Ok(Self { kind: Kind::Namespaces, subnet: [0, 0], hosts: Vec::new(), n_given: 0 })
    }

    /// How processes are kept apart.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Takes all hosts back, for another cluster.
    pub fn rewind(&mut self) {
        self.n_given = 0;
    }

    /// Another host.
    pub fn host(&mut self) -> Result<Host, Error> {
        if self.n_given == self.hosts.len() {
            let n = u8::try_from(self.hosts.len() + 1).map_err(|_| "a world has at most 255 hosts")?;
            let [a, b] = self.subnet;
            let host = match self.kind {
                Kind::Loopback => Host { ip: Ipv4Addr::new(127, a, b, n), netns: None },
                Kind::Namespaces => Host { ip: Ipv4Addr::new(10, 77, 1, n), netns: Some(format!("host{n}")) },
            };
            host.wire()?;
            self.hosts.push(host);
        }
        let host = self.hosts[self.n_given].clone();
        self.n_given += 1;
        host.heal().map(|()| host)
    }
}

impl Host {
    /// Its address.
    pub fn ip(&self) -> Ipv4Addr {
        self.ip
    }

    /// What to start so that `program` runs there, and the arguments that go before its own. It becomes the program in the
    /// same process.
    pub fn program(&self, program: &Path) -> (PathBuf, Vec<OsString>) {
        match &self.netns {
            None => (program.to_owned(), Vec::new()),
            Some(netns) => {
                let first = ["netns".into(), "exec".into(), netns.into(), program.as_os_str().to_owned()];
                ("ip".into(), first.into())
            }
        }
    }

    /// Takes the cable out. Whether the host has one.
    pub fn cut(&self) -> Result<bool, Error> {
        let Some(netns) = &self.netns else { return Ok(false) };
        ip(&["link", "set", netns, "nomaster"]).map(|()| true)
    }

    /// Puts the cable back.
    pub fn heal(&self) -> Result<(), Error> {
        let Some(netns) = &self.netns else { return Ok(()) };
        ip(&["link", "set", netns, "master", BRIDGE])
    }

    fn wire(&self) -> Result<(), Error> {
        let Some(netns) = &self.netns else { return Ok(()) };
        let addr = format!("{}/16", self.ip);
        ip(&["netns", "add", netns])?;
        ip(&["link", "add", netns, "type", "veth", "peer", "name", "eth0", "netns", netns])?;
        ip(&["link", "set", netns, "master", BRIDGE, "up"])?;
        ip(&["-n", netns, "addr", "add", &addr, "dev", "eth0"])?;
        ip(&["-n", netns, "link", "set", "eth0", "up"])?;
        ip(&["-n", netns, "link", "set", "lo", "up"])
    }
}

fn ip(args: &[&str]) -> Result<(), Error> {
    run(Command::new("ip").args(args))
}

fn run(command: &mut Command) -> Result<(), Error> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim()).into())
}
