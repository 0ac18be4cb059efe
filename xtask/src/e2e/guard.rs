//! What a suite has started or mounted, taken down when the value is dropped; and programs, found or installed.

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

/// How often something that is waited for is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a server may take to end when asked to.
const END_WAIT: Duration = Duration::from_secs(10);

/// A server: ended, by force if need be, when dropped.
#[derive(Debug)]
pub(super) struct Server {
    child: Child,
    log: PathBuf,
}

impl Server {
    /// Starts it with its output in `log`.
    pub(super) fn start(command: &mut Command, log: &Path) -> Result<Self> {
        let out = File::create(log).with_context(|| format!("create {}", log.display()))?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        let child = command.spawn().with_context(|| format!("start {command:?}"))?;
        Ok(Self { child, log: log.to_owned() })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `ready`, while it lives.
    pub(super) fn wait_until(
        &mut self,
        what: &str,
        limit: Duration,
        mut ready: impl FnMut() -> bool,
    ) -> Result<()> {
        let end = Instant::now() + limit;
        while !ready() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{what}: it ended with {status}\n{}", self.last_words());
            }
            if Instant::now() > end {
                bail!("{what}: not within {limit:?}\n{}", self.last_words());
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    fn last_words(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let pid = self.child.id().to_string();
        // A test that was killed can have left it stopped: stopped, it does not hear.
        for signal in ["-CONT", "-TERM"] {
            let _ = Command::new("kill").args([signal, &pid]).stderr(Stdio::null()).status();
        }
        let end = Instant::now() + END_WAIT;
        while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < end {
            thread::sleep(LOOK_EVERY);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A mount: gone when dropped, lazily if something still uses it.
#[derive(Debug)]
pub(super) struct Mount(PathBuf);

impl Mount {
    /// Takes care of what is, or will be, mounted at `path`; what a killed run left there is gone before.
    pub(super) fn at(path: &Path) -> Result<Self> {
        let mount = Self(path.to_owned());
        mount.take_down();
        fs::create_dir_all(path).with_context(|| format!("create {}", path.display()))?;
        Ok(mount)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn is_mounted(&self) -> bool {
        let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
        let path = self.0.to_str().unwrap_or_default();
        mounts.lines().any(|line| line.split(' ').nth(1) == Some(path))
    }

    fn take_down(&self) {
        for arguments in [&[][..], &["-l"]] {
            if self.is_mounted() {
                let _ = Command::new("umount")
                    .args(arguments)
                    .arg(&self.0)
                    .stderr(Stdio::null())
                    .status();
            }
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.take_down();
    }
}

/// Runs a short command to its end.
pub(super) fn succeed(command: &mut Command) -> Result<()> {
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("run {command:?}"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} ended with {}: {}", output.status, said.trim());
    }
    Ok(())
}

/// Where a program is.
pub(super) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH")?;
    let places = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    places.map(|place| place.join(program)).find(|path| path.is_file())
}

/// The program, installed from its Debian package if it is absent; `Err` says why there is none.
pub(super) fn find_or_install(program: &str, package: &str) -> Result<PathBuf, String> {
    if let Some(path) = find(program) {
        return Ok(path);
    }
    if find("apt-get").is_none() {
        return Err(format!("there is no {program}, and no apt-get to install {package} with"));
    }
    let mut install = Command::new("apt-get");
    install
        .args(["install", "-y", "--no-install-recommends", package])
        .env("DEBIAN_FRONTEND", "noninteractive");
    if succeed(&mut install).is_err() {
        // The lists of a fresh machine are empty.
        let _ = succeed(Command::new("apt-get").arg("update"));
        succeed(&mut install)
            .map_err(|error| format!("{package} cannot be installed: {error:#}"))?;
    }
    find(program).ok_or_else(|| format!("{package} brought no {program}"))
}

pub(super) fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    line.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}
