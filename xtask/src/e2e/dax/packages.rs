//! QEMU, a kernel and the tools of the guest, from Debian packages. Only QEMU and what reads modules are installed; the
//! rest is unpacked below the target directory.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::e2e::guard::{find, succeed};

const QEMU: &str = "qemu-system-x86_64";
/// Meta package of a small kernel that has drivers of NVDIMMs.
const KERNEL: &str = "linux-image-cloud-amd64";
/// Programs of the guest and the libraries that a host may lack.
const TOOLS: &[&str] = &[
    "busybox-static",
    "ndctl",
    "daxctl",
    "libndctl6",
    "libdaxctl1",
    "libcxl1",
    "libiniparser1",
    "libtraceevent1",
    "libtracefs1",
    "libkmod2",
    "libjson-c5",
    "libuuid1",
    "libkeyutils1",
    "libudev1",
];

/// Where the parts are.
pub(super) struct Parts {
    pub(super) qemu: PathBuf,
    pub(super) kernel: PathBuf,
    /// The directory of the kernel's modules, with their dependencies listed.
    pub(super) modules: PathBuf,
    /// The root of the unpacked tools.
    pub(super) tools: PathBuf,
}

/// Gets what is absent.
pub(super) fn get(home: &Path) -> Result<Parts> {
    ensure!(find("apt-get").is_some() && find("dpkg").is_some(), "there is no apt-get");
    let (kernel_root, tools) = (home.join("kernel"), home.join("tools"));
    let unpacked = home.join("unpacked");
    let missing: Vec<&str> = [(QEMU, "qemu-system-x86"), ("depmod", "kmod"), ("xz", "xz-utils")]
        .into_iter()
        .filter(|(program, _)| find(program).is_none())
        .map(|(_, package)| package)
        .collect();
    if !missing.is_empty() || !unpacked.exists() {
        let apt = Apt::new(home)?;
        apt.update()?;
        if !missing.is_empty() {
            apt.install(&missing)?;
        }
        if !unpacked.exists() {
            apt.unpack(home, &[&apt.kernel()?], &kernel_root)?;
            apt.unpack(home, TOOLS, &tools)?;
            fs::write(&unpacked, "").context("mark the packages as unpacked")?;
        }
    }
    let modules = only_entry(&kernel_root.join("lib/modules"))?;
    let version = modules.file_name().context("modules have a version")?.display().to_string();
    succeed(Command::new("depmod").arg("-b").arg(&kernel_root).arg(&version))?;
    Ok(Parts {
        qemu: find(QEMU).context("the package brought no QEMU")?,
        kernel: kernel_root.join(format!("boot/vmlinuz-{version}")),
        modules,
        tools,
    })
}

fn only_entry(directory: &Path) -> Result<PathBuf> {
    let mut entries =
        fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))?;
    let entry = entries.next().with_context(|| format!("nothing in {}", directory.display()))?;
    Ok(entry?.path())
}

/// The system's package tool, with sources of its own where the release's QEMU or kernel is too old.
struct Apt {
    options: Vec<String>,
    /// Preferred over the release itself.
    release: Option<String>,
}

impl Apt {
    /// Debian 12's own kernel cannot register such memory with a ring, and its QEMU would replace newer tools that the
    /// system may have: there the parts come from its backports. Other releases have both.
    fn new(home: &Path) -> Result<Self> {
        let about = fs::read_to_string("/etc/os-release").unwrap_or_default();
        if !about.lines().any(|line| line == "VERSION_CODENAME=bookworm") {
            return Ok(Self { options: Vec::new(), release: None });
        }
        let format = "$(RELEASE) $(SITE)";
        let targets = output(Command::new("apt-get").args(["indextargets", "--format", format]))?;
        let site = targets.lines().find_map(|line| line.strip_prefix("bookworm "));
        let site = site.context("apt has no source of this release")?;
        let apt = home.join("apt");
        for directory in ["lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(apt.join(directory)).context("make apt's directories")?;
        }
        let key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]";
        let line = |release: &str| format!("deb {key} {site} {release} main\n");
        let sources = line("bookworm") + &line("bookworm-backports");
        fs::write(apt.join("sources.list"), sources).context("write apt's sources")?;
        let place = |name: &str, path: &str| format!("{name}={}", apt.join(path).display());
        let options = vec![
            place("Dir::Etc::SourceList", "sources.list"),
            "Dir::Etc::SourceParts=/dev/null".into(),
            place("Dir::State::Lists", "lists"),
            place("Dir::Cache", "cache"),
        ];
        Ok(Self { options, release: Some("bookworm-backports".into()) })
    }

    fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(["-q", "-o", "APT::Sandbox::User=root"]);
        command.env("DEBIAN_FRONTEND", "noninteractive");
        for option in &self.options {
            command.args(["-o", option]);
        }
        command
    }

    fn update(&self) -> Result<()> {
        succeed(self.command("apt-get").arg("update"))
    }

    fn install(&self, packages: &[&str]) -> Result<()> {
        let mut command = self.command("apt-get");
        command.args(["install", "-y", "--no-install-recommends"]);
        command.args(self.release.iter().flat_map(|release| ["-t", release]));
        succeed(command.args(packages))
    }

    /// The package that holds the kernel itself.
    fn kernel(&self) -> Result<String> {
        let release = self.release.iter().map(|release| format!("/{release}"));
        let name = format!("{KERNEL}{}", release.collect::<String>());
        let text = output(self.command("apt-cache").args(["show", &name]))?;
        let depends = text.lines().find_map(|line| line.strip_prefix("Depends: "));
        let first = depends.and_then(|list| list.split([' ', ',']).next());
        first.map(str::to_owned).with_context(|| format!("{name} names no kernel"))
    }

    /// Downloads packages and unpacks them into `root`, installing nothing.
    fn unpack(&self, home: &Path, packages: &[&str], root: &Path) -> Result<()> {
        let debs = home.join("debs");
        let _ = fs::remove_dir_all(&debs);
        let _ = fs::remove_dir_all(root);
        for directory in [&debs, &root.to_path_buf()] {
            fs::create_dir_all(directory)
                .with_context(|| format!("create {}", directory.display()))?;
        }
        let mut command = self.command("apt-get");
        command.args(self.release.iter().flat_map(|release| ["-t", release]));
        succeed(command.arg("download").args(packages).current_dir(&debs))?;
        for entry in fs::read_dir(&debs).context("list the packages")? {
            succeed(Command::new("dpkg").arg("-x").arg(entry?.path()).arg(root))?;
        }
        fs::remove_dir_all(&debs).context("remove the packages")
    }
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("run {command:?}"))?;
    ensure!(output.status.success(), "{command:?} ended with {}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
