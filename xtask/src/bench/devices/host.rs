//! What the machine offers: root, tools, a cgroup that throttles.

use std::{
    env, fmt,
    fs::{self, File},
    path::{Path, PathBuf},
};

use crate::run;

const CGROUP_NAME: &str = "kvbraid-bench";
const TOOLS: [&str; 4] = ["losetup", "mkfs.ext4", "mount", "umount"];

/// What the machine does not offer: root, cgroups or loop devices. Anything else that fails is a failure.
#[derive(Debug)]
pub(in crate::bench) struct Missing(pub(in crate::bench) String);

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Missing {}

/// A machine on which devices can be made and throttled.
#[derive(Debug)]
pub(in crate::bench) struct Host {
    /// Where the cgroup is to be made.
    pub(in crate::bench) cgroup: PathBuf,
}

impl Host {
    /// Looks around; the error says what is missing.
    pub(in crate::bench) fn look() -> Result<Self, Missing> {
        let missing = |why: String| Err(Missing(why));
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        if !is_root(&read("/proc/self/status")) {
            return missing("it takes root to make loop devices and cgroups".to_owned());
        }
        if let Some(tool) = TOOLS.iter().find(|tool| find(tool).is_none()) {
            return missing(format!("{tool} is not installed"));
        }
        if let Err(error) = File::options().read(true).write(true).open("/dev/loop-control") {
            return missing(format!("no loop devices: cannot open /dev/loop-control: {error}"));
        }
        let controllers =
            |mount: &Path| fs::read_to_string(mount.join("cgroup.controllers")).unwrap_or_default();
        let Some(mount) = throttling_mount(&read("/proc/self/mounts"), controllers) else {
            let why = "no cgroup hierarchy with blkio (version 1) or io (version 2)";
            return missing(why.to_owned());
        };
        Ok(Self { cgroup: mount.join(CGROUP_NAME) })
    }
}

fn is_root(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    line.and_then(|ids| ids.split_whitespace().nth(1)) == Some("0")
}

/// Where a hierarchy is mounted that throttles: of version 1 if there is one, since only that shows what is charged
/// twice.
fn throttling_mount(mounts: &str, controllers: impl Fn(&Path) -> String) -> Option<PathBuf> {
    let fields = || mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    let one = fields().find(|it| {
        it.get(2) == Some(&"cgroup")
            && it.get(3).is_some_and(|options| options.split(',').any(|option| option == "blkio"))
    });
    let two = || {
        fields().find(|it| {
            it.get(2) == Some(&"cgroup2")
                && it.get(1).is_some_and(|mount| {
                    controllers(Path::new(mount)).split_whitespace().any(|name| name == "io")
                })
        })
    };
    Some(one.or_else(two)?.get(1)?.into())
}

/// A program in the search path or where administrators' programs are.
pub(in crate::bench) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(PathBuf::from);
    env::split_paths(&path)
        .chain(more)
        .map(|directory| directory.join(program))
        .find(|path| path.is_file())
}

/// fio, installed if need be and possible.
pub(in crate::bench) fn fio() -> Option<PathBuf> {
    if find("fio").is_none()
        && let Some(apt) = find("apt-get")
    {
        let mut command = std::process::Command::new(apt);
        // Without it one scenario is left out, and says so.
        let _ = run::logged("install fio", command.args(["install", "-y", "fio"]));
    }
    find("fio")
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
        cgroup /sys/fs/cgroup/blkio cgroup rw,nosuid,blkio 0 0\n\
        none /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
    const TWO: &str = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n";

    #[test]
    fn either_version_of_cgroups_is_found() {
        let io = |_: &Path| "cpu io memory\n".to_owned();
        let none = |_: &Path| "hugetlb\n".to_owned();
        assert_eq!(throttling_mount(ONE, io), Some("/sys/fs/cgroup/blkio".into()));
        assert_eq!(throttling_mount(TWO, io), Some("/sys/fs/cgroup".into()));
        assert_eq!(throttling_mount(TWO, none), None);
        assert_eq!(throttling_mount("", io), None);
    }

    #[test]
    fn root_is_who_acts_as_root() {
        assert!(is_root("Name:\tx\nUid:\t1000\t0\t0\t0\n"));
        assert!(!is_root("Uid:\t0\t1000\t0\t0\n"));
        assert!(!is_root(""));
    }
}
