//! The conformance of each driver with files on several file systems, in each way of doing I/O.

use std::{collections::BTreeMap, fs::File, path::Path, process::Command};

use anyhow::{Context, Result};

use super::{
    Report,
    guard::{Mount, find_or_install, is_root, succeed},
    home,
};
use crate::tally::Tally;

const IMAGE_BYTES: u64 = 1 << 30;

/// One file system: its name, the program that makes it, and that program's package.
const KINDS: &[(&str, Option<(&str, &str)>)] = &[
    ("tmpfs", None),
    ("ext4", Some(("mkfs.ext4", "e2fsprogs"))),
    ("xfs", Some(("mkfs.xfs", "xfsprogs"))),
];

pub(super) fn run(report: &mut Report) -> Result<()> {
    let home = home("filesystems")?;
    let mut matrix = Matrix::default();
    for &(kind, maker) in KINDS {
        match mount(&home, kind, maker) {
            Ok(mount) => {
                let variables = [("KVBRAID_TEST_DIR", mount.path().display().to_string())];
                let name = format!("filesystems {kind}");
                let tally = report.tests(&name, ("kv-tiers", "filesystems"), &[], &variables)?;
                matrix.add(kind, &tally);
            }
            Err(why) => {
                matrix.add_skipped(kind, &why);
                report.skip(&format!("filesystems on {kind}"), &why);
            }
        }
    }
    matrix.print();
    Ok(())
}

/// A new file system of this kind; `Err` says why there is none.
fn mount(home: &Path, kind: &str, maker: Option<(&str, &str)>) -> Result<Mount, String> {
    if !is_root() {
        return Err("mounting needs root".into());
    }
    let maker = maker.map(|(program, package)| find_or_install(program, package)).transpose()?;
    make(home, kind, maker.as_deref()).map_err(|error| format!("{error:#}"))
}

fn make(home: &Path, kind: &str, maker: Option<&Path>) -> Result<Mount> {
    let mount = Mount::at(&home.join(kind))?;
    let mut command = Command::new("mount");
    match maker {
        None => {
            command.args(["-t", kind, "-o", "size=1g,mode=0700", "tmpfs"]);
        }
        Some(maker) => {
            let image = home.join(format!("{kind}.img"));
            let _ = std::fs::remove_file(&image);
            let file =
                File::create(&image).with_context(|| format!("create {}", image.display()))?;
            file.set_len(IMAGE_BYTES).with_context(|| format!("size {}", image.display()))?;
            let force = if kind == "ext4" { "-F" } else { "-f" };
            succeed(Command::new(maker).args([force, "-q"]).arg(&image))?;
            command.args(["-t", kind, "-o", "loop,noatime"]).arg(&image);
        }
    }
    succeed(command.arg(mount.path()))?;
    Ok(mount)
}

/// Driver and way of doing I/O by file system.
#[derive(Default)]
struct Matrix {
    kinds: Vec<String>,
    /// By test, then by file system.
    cells: BTreeMap<String, BTreeMap<String, String>>,
    whole: Vec<String>,
}

impl Matrix {
    fn add(&mut self, kind: &str, tally: &Tally) {
        self.kinds.push(kind.to_owned());
        let mut put = |test: &str, cell: &str| {
            let name = test.rsplit(' ').next().unwrap_or(test).to_owned();
            self.cells.entry(name).or_default().insert(kind.to_owned(), cell.to_owned());
        };
        tally.names.iter().for_each(|name| put(name, "passed"));
        tally.failures.iter().for_each(|name| put(name, "FAILED"));
        for skip in &tally.skips {
            // `<what>: <why> (<program> <test>)`
            let Some((why, test)) = skip.trim_end_matches(')').rsplit_once(" (") else { continue };
            put(test, "skipped");
            self.whole.push(format!("skipped on {kind}: {why}"));
        }
    }

    fn add_skipped(&mut self, kind: &str, why: &str) {
        self.whole.push(format!("skipped on {kind}, all: {why}"));
    }

    fn print(&self) {
        print!("\n{:<40}", "driver and way of I/O");
        self.kinds.iter().for_each(|kind| print!("{kind:>10}"));
        println!();
        for (name, cells) in &self.cells {
            print!("{name:<40}");
            for kind in &self.kinds {
                print!("{:>10}", cells.get(kind).map_or("-", String::as_str));
            }
            println!();
        }
        self.whole.iter().for_each(|line| println!("{line}"));
        println!();
    }
}
