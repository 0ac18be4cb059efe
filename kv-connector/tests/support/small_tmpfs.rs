//! A real file system that is soon full.

use std::{
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};

/// A tmpfs of 8 MiB, gone at the end.
pub(crate) struct SmallTmpfs(PathBuf);

impl SmallTmpfs {
    /// Mounts it; where that is not allowed it says so, and there is none.
    pub(crate) fn mount(directory: &Path) -> Option<Self> {
        let output = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=8m,mode=700", "kvbraid-test"])
            .arg(directory)
            .output();
        if output.is_ok_and(|output| output.status.success()) {
            return Some(Self(directory.to_owned()));
        }
        println!("SKIP small tmpfs: it cannot be mounted (needs root)");
        None
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Somebody else takes the rest.
    pub(crate) fn fill(&self) {
        let mut file = File::create(self.path("ballast")).unwrap();
        while file.write_all(&[1; 65_536]).is_ok() {}
        // To the last page.
        while file.write_all(&[1; 4_096]).is_ok() {}
    }

    /// And gives it back.
    pub(crate) fn empty(&self) {
        fs::remove_file(self.path("ballast")).unwrap();
    }
}

impl Drop for SmallTmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}
