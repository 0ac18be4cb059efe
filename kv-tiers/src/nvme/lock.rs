//! One process at a time in a directory.

use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io::{self, Read, Seek, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::Path,
    process,
};

use crate::{IoContext, TierError};

pub(super) const LOCK_NAME: &str = "LOCK";

/// Holds the directory until dropped by the process that took it.
///
/// The kernel releases the lock when the last descriptor of it closes, also after a crash. A forked child inherits the
/// descriptor, so the owner unlocks explicitly and a child never does.
#[derive(Debug)]
pub(super) struct DirectoryLock {
    file: File,
    owner_pid: u32,
}

impl DirectoryLock {
    /// Makes `directory` if absent (mode 0700) and takes it, or says who has it. Never waits.
    pub(super) fn take(directory: &Path) -> Result<Self, TierError> {
        let failed = |call, path: &Path, source| {
            let context = IoContext { call, path: path.to_owned(), offset: 0, length: 0 };
            TierError::io(context, source)
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(|error| failed("mkdir", directory, error))?;
        let path = directory.join(LOCK_NAME);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(&path)
            .map_err(|error| failed("open", &path, error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let pid = holder(&mut file).unwrap_or(0);
                return Err(TierError::Locked { path: directory.to_owned(), pid });
            }
            Err(TryLockError::Error(error)) => return Err(failed("flock", &path, error)),
        }
        // The number is for people who look; a full disk must not keep us from serving what is there.
        let _ = name_holder(&mut file);
        Ok(Self { file, owner_pid: process::id() })
    }
}

impl Drop for DirectoryLock {
    fn drop(&mut self) {
        if process::id() == self.owner_pid {
            let _ = self.file.unlock();
        }
    }
}

fn holder(file: &mut File) -> Option<u32> {
    let mut text = String::new();
    file.take(32).read_to_string(&mut text).ok()?;
    text.trim().parse().ok()
}

fn name_holder(file: &mut File) -> io::Result<()> {
    file.set_len(0)?;
    file.rewind()?;
    writeln!(file, "{}", process::id())
}
