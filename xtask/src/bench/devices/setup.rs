//! Two loop devices with file systems and a cgroup, for as long as the value lives.

use std::{
    env,
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::Duration,
};

use anyhow::{Context, Error, Result, bail, ensure};

use super::host::{Host, Missing, find};

const NAMES: [&str; 2] = ["fast", "slow"];
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
/// For fio's buffers: 2 MiB each.
const HUGE_PAGES_MORE: u64 = 64;

/// A mounted loop device.
#[derive(Debug)]
pub(in crate::bench) struct Device {
    pub(in crate::bench) name: &'static str,
    pub(in crate::bench) mount: PathBuf,
    /// As cgroups name it.
    pub(in crate::bench) number: String,
}

/// What was set up. Dropping it takes everything down; what a killed run left is taken down at the next begin.
#[derive(Debug)]
pub(in crate::bench) struct Setup {
    devices: Vec<Device>,
    places: Places,
    _lock: File,
}

/// Where everything is: known beforehand, so that it is found again after a run that was killed.
#[derive(Debug)]
struct Places {
    home: PathBuf,
    cgroup: PathBuf,
}

impl Setup {
    /// Makes devices of these sizes, the fast one first.
    ///
    /// # Errors
    /// [`Missing`] for what the machine does not offer, else what went wrong; everything that was made until then is
    /// taken down.
    pub(in crate::bench) fn new(home: &Path, host: &Host, sizes: [u64; 2]) -> Result<Self> {
        fs::create_dir_all(home).with_context(|| format!("create {}", home.display()))?;
        let home = home.canonicalize()?;
        // One for the machine: the cgroup and the huge pages are the machine's, and two runs would measure each other.
        let lock = env::temp_dir().join("kvbraid-bench.lock");
        let lock = File::create(&lock).with_context(|| format!("create {}", lock.display()))?;
        ensure!(lock.try_lock().is_ok(), "another run is in progress on this machine");
        let places = Places { home, cgroup: host.cgroup.clone() };
        places.take_down();
        let mut setup = Self { devices: Vec::new(), places, _lock: lock };
        // From here on dropping it takes down what there is.
        setup.check_space(sizes.iter().sum())?;
        setup.make_cgroup()?;
        for (name, bytes) in NAMES.into_iter().zip(sizes) {
            let device = setup.places.make_device(name, bytes)?;
            setup.devices.push(device);
        }
        setup.places.more_huge_pages();
        Ok(setup)
    }

    pub(in crate::bench) fn devices(&self) -> &[Device] {
        &self.devices
    }

    pub(in crate::bench) fn cgroup(&self) -> &Path {
        &self.places.cgroup
    }

    fn check_space(&self, need: u64) -> Result<()> {
        let home = self.places.home.display().to_string();
        let free = output("df", &["--output=avail", "-B1", &home])?;
        let free: u64 = free.lines().nth(1).and_then(|line| line.trim().parse().ok()).unwrap_or(0);
        ensure!(free >= need, "{home} has {free} bytes free, {need} are needed; see --seconds");
        Ok(())
    }

    fn make_cgroup(&self) -> Result<()> {
        let cgroup = &self.places.cgroup;
        if let Some(parent) = cgroup.parent()
            && parent.join("cgroup.controllers").exists()
        {
            let file = parent.join("cgroup.subtree_control");
            fs::write(&file, "+io").map_err(|it| denied(it, "write", &file))?;
        }
        fs::create_dir(cgroup).map_err(|it| denied(it, "make the cgroup", cgroup))
    }
}

impl Drop for Setup {
    fn drop(&mut self) {
        self.places.take_down();
    }
}

impl Places {
    fn image(&self, name: &str) -> PathBuf {
        self.home.join(format!("{name}.img"))
    }

    fn mount(&self, name: &str) -> PathBuf {
        self.home.join(format!("mnt-{name}"))
    }

    fn huge_pages(&self) -> PathBuf {
        self.home.join("nr_hugepages.before")
    }

    fn make_device(&self, name: &'static str, bytes: u64) -> Result<Device> {
        let (image, mount) = (self.image(name), self.mount(name));
        let file = File::create(&image).with_context(|| format!("create {}", image.display()))?;
        file.set_len(bytes).with_context(|| format!("size {}", image.display()))?;
        let image = image.display().to_string();
        let node = output("losetup", &["--find", "--show", "--direct-io=on", &image])?;
        let node = node.trim();
        let about = |file: &str| {
            let name = node.trim_start_matches("/dev/");
            let path = format!("/sys/block/{name}/{file}");
            let text = fs::read_to_string(&path).with_context(|| format!("read {path}"))?;
            Ok::<_, anyhow::Error>(text.trim().to_owned())
        };
        ensure!(about("loop/dio")? == "1", "the file system under {image} takes no direct I/O");
        let lazy = "lazy_itable_init=0,lazy_journal_init=0";
        // Nothing is written behind our back: no journal, no tables to be filled in later.
        output("mkfs.ext4", &["-q", "-F", "-m", "0", "-O", "^has_journal", "-E", lazy, node])?;
        fs::create_dir_all(&mount).with_context(|| format!("create {}", mount.display()))?;
        output("mount", &["-t", "ext4", "-o", "noatime", node, &mount.display().to_string()])?;
        Ok(Device { name, mount, number: about("dev")? })
    }

    /// Without them fio says so, and one scenario is left out.
    fn more_huge_pages(&self) {
        let before = fs::read_to_string(HUGE_PAGES).unwrap_or_default();
        if let Ok(pages) = before.trim().parse::<u64>()
            && fs::write(self.huge_pages(), &before).is_ok()
        {
            let _ = fs::write(HUGE_PAGES, (pages + HUGE_PAGES_MORE).to_string());
        }
    }

    /// Removes what there is of a setup; what does not go is said and left.
    fn take_down(&self) {
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for name in NAMES {
            if is_mounted(&mounts, &self.mount(name)) {
                report(self.unmount(name));
            }
            let image = self.image(name);
            if image.exists() {
                let listed = output("losetup", &["-j", &image.display().to_string()]);
                for node in nodes(&listed.unwrap_or_default()) {
                    report(output("losetup", &["-d", node]));
                }
                report(gone(fs::remove_file(&image)));
            }
            report(gone(fs::remove_dir(self.mount(name))));
        }
        report(self.remove_cgroup());
        if let Ok(before) = fs::read_to_string(self.huge_pages()) {
            report(fs::write(HUGE_PAGES, before).map_err(anyhow::Error::from));
            report(gone(fs::remove_file(self.huge_pages())));
        }
    }

    /// A process that was killed leaves its files a moment later.
    fn unmount(&self, name: &str) -> Result<()> {
        let mount = self.mount(name).display().to_string();
        let mut outcome = Ok(String::new());
        for _ in 0..50 {
            outcome = output("umount", &[&mount]);
            if outcome.is_ok() {
                break;
            }
            thread::sleep(Duration::from_millis(100));
        }
        outcome.map(drop)
    }

    /// And its cgroup.
    fn remove_cgroup(&self) -> Result<()> {
        for _ in 0..50 {
            match fs::remove_dir(&self.cgroup) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    thread::sleep(Duration::from_millis(100));
                }
                other => return gone(other),
            }
        }
        bail!("{} is still in use", self.cgroup.display())
    }
}

/// What is not there need not be removed.
fn gone(outcome: std::io::Result<()>) -> Result<()> {
    match outcome {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error.into()),
        _ => Ok(()),
    }
}

/// Where it is not allowed, the machine has no cgroups for us.
fn denied(error: std::io::Error, did: &str, path: &Path) -> Error {
    let about = format!("{did} {}", path.display());
    match error.kind() {
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => {
            Missing(format!("{about}: {error}")).into()
        }
        _ => Error::new(error).context(about),
    }
}

/// Whether a tool failed since it may not do what it is for, rather than at doing it.
fn lacks_loop_devices(said: &str) -> bool {
    ["not permitted", "ermission denied", "superuser", "unused loop device"]
        .iter()
        .any(|part| said.contains(part))
}

fn report<T>(outcome: Result<T>) {
    if let Err(error) = outcome {
        println!("taking down: {error:#}");
    }
}

fn is_mounted(mounts: &str, path: &Path) -> bool {
    // Blanks in a path are written so.
    let path = path.display().to_string().replace(' ', "\\040");
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(&path))
}

/// The devices in what `losetup -j` says: `/dev/loop0: [65024]:1234 (/path/fast.img)`.
fn nodes(listed: &str) -> impl Iterator<Item = &str> {
    listed.lines().filter_map(|line| line.split_once(':')).map(|(node, _)| node)
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let path = find(program).with_context(|| format!("{program} is not installed"))?;
    let mut command = Command::new(path);
    command.args(arguments).env("LC_ALL", "C");
    let output = command.output().with_context(|| format!("run {program}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        let why = format!("{program} {}: {}", arguments.join(" "), said.trim());
        let missing = ["losetup", "mount"].contains(&program) && lacks_loop_devices(&said);
        return Err(if missing { Missing(why).into() } else { Error::msg(why) });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use std::{panic, process};

    use super::*;

    fn places(name: &str) -> Places {
        let home = env::temp_dir().join(format!("kvbraid-setup-{}-{name}", process::id()));
        fs::create_dir_all(&home).unwrap();
        Places { cgroup: home.join("cgroup"), home }
    }

    /// As a run leaves it, but for what takes root.
    fn make(places: &Places) {
        fs::create_dir(&places.cgroup).unwrap();
        for name in NAMES {
            fs::write(places.image(name), "image").unwrap();
            fs::create_dir(places.mount(name)).unwrap();
        }
    }

    fn is_clean(home: &Path) -> bool {
        fs::read_dir(home).unwrap().flatten().all(|entry| entry.file_name() == "lock")
    }

    #[test]
    fn what_was_set_up_is_taken_down_when_dropped_even_by_a_panic() {
        let places = places("panic");
        let home = places.home.clone();
        let outcome = panic::catch_unwind(move || {
            make(&places);
            let lock = File::create(places.home.join("lock")).unwrap();
            let _setup = Setup { devices: Vec::new(), places, _lock: lock };
            panic::resume_unwind(Box::new("in the middle of a run"));
        });
        assert!(outcome.is_err() && is_clean(&home));
        fs::remove_dir_all(home).unwrap();
    }

    #[test]
    fn what_a_killed_run_left_is_taken_down_and_nothing_else() {
        let places = places("left");
        make(&places);
        fs::write(places.home.join("kept"), "").unwrap();
        places.take_down();
        assert!(places.home.join("kept").exists() && !places.image("fast").exists());
        fs::remove_file(places.home.join("kept")).unwrap();
        assert!(is_clean(&places.home));
        // Again, with nothing left.
        places.take_down();
        fs::remove_dir_all(&places.home).unwrap();
    }

    #[test]
    fn only_what_the_machine_denies_is_missing() {
        let path = Path::new("/sys/fs/cgroup/kvbraid-bench");
        let is_missing = |kind: ErrorKind| denied(kind.into(), "make", path).is::<Missing>();
        assert!(is_missing(ErrorKind::PermissionDenied));
        assert!(is_missing(ErrorKind::ReadOnlyFilesystem));
        assert!(!is_missing(ErrorKind::AlreadyExists) && !is_missing(ErrorKind::StorageFull));
        assert!(lacks_loop_devices("losetup: cannot find an unused loop device\n"));
        assert!(lacks_loop_devices("mount: /x: permission denied.\n"));
        assert!(!lacks_loop_devices("losetup: /x.img: failed to set up: No space left\n"));
    }

    #[test]
    fn mounts_and_loop_devices_are_found_by_their_paths() {
        let mounts =
            "/dev/loop0 /a/mnt-fast ext4 rw 0 0\n/dev/loop1 /a\\040b/mnt-fast ext4 rw 0 0\n";
        assert!(is_mounted(mounts, Path::new("/a/mnt-fast")));
        assert!(is_mounted(mounts, Path::new("/a b/mnt-fast")));
        assert!(!is_mounted(mounts, Path::new("/a/mnt")));
        let listed = "/dev/loop3: [65024]:99 (/a/fast.img)\n/dev/loop4: []: (/a/fast.img)\n";
        assert_eq!(nodes(listed).collect::<Vec<_>>(), ["/dev/loop3", "/dev/loop4"]);
        assert_eq!(nodes("").count(), 0);
    }
}
