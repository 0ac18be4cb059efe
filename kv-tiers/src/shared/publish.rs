//! From a record in memory to a published chunk: a temporary, all bytes, then one atomic step that the first wins.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use kv_chunk::{Digest, HEADER_BYTES};
use nix::fcntl::{AT_FDCWD, RenameFlags, renameat2};

use super::{
    config::{Modes, PublishBy},
    inspect::{self, Found, If, failed, inspect},
    paths,
};
use crate::{Held, Record, TierError};

/// Bytes of one write call; between two of them a write can be paused.
const PART_BYTES: usize = 1 << 20;

/// What every job needs to know of the store.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) root: PathBuf,
    pub(super) modes: Modes,
    pub(super) node: u64,
    pub(super) publish: PublishBy,
    /// The process' umask takes bits away that the modes have: they are set once more.
    pub(super) chmod: bool,
    /// Written by the tier's thread, read by its pool between two parts of a write. Relaxed: it guards no data, and one
    /// part more or less does not matter.
    pub(super) hold: AtomicBool,
    /// Makes names unique. Relaxed: only that each number is given once counts.
    pub(super) attempts: AtomicU64,
    /// Files looked at for a tool. Written by the pool, read by the tier's thread to see that it goes on. Relaxed: it
    /// guards no data.
    pub(super) looked_at: AtomicU64,
}

/// A chunk that is half written.
#[derive(Debug)]
pub(super) struct Temporary {
    file: File,
    path: PathBuf,
    written: usize,
}

/// How a write ended.
#[derive(Debug)]
pub(super) enum Stored {
    Published,
    /// Somebody's chunk was there: at the start, or when ours was complete.
    Held(Held),
    /// Something that must not be touched is in its place.
    Occupied,
    /// Writes are held.
    Paused(Temporary),
}

/// What a write did besides.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spent {
    pub(super) written_bytes: u64,
    pub(super) calls: u64,
    pub(super) torn_removed: u64,
}

impl Place {
    pub(super) fn make_file(&self, path: &Path) -> io::Result<File> {
        let mode = self.modes.for_file();
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .custom_flags(libc::O_NOFOLLOW)
            .open(path)?;
        if self.chmod {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        Ok(file)
    }

    pub(super) fn make_directory(&self, path: &Path) -> io::Result<()> {
        let mode = self.modes.for_directory();
        match DirBuilder::new().mode(mode).create(path) {
            Ok(()) if self.chmod => fs::set_permissions(path, Permissions::from_mode(mode)),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        }
    }

    fn make_temporary(&self, digest: Digest) -> Result<Temporary, TierError> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let path = paths::temporary_path(&self.root, digest, self.node, attempt);
        let made = match self.make_file(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let fan = paths::Fan::of(digest).path(&self.root);
                self.make_directory(&fan).map_err(failed("mkdir", &fan, 0, 0))?;
                self.make_file(&path)
            }
            made => made,
        };
        let file = made.map_err(failed("open", &path, 0, 0))?;
        Ok(Temporary { file, path, written: 0 })
    }

    /// Writes `record` unless its chunk is there. On failure and on a lost race nothing stays behind.
    pub(super) fn store(
        &self,
        record: &Arc<Record>,
        begun: Option<Temporary>,
        spent: &mut Spent,
    ) -> Result<Stored, TierError> {
        let digest = record.digest();
        let path = paths::chunk_path(&self.root, digest);
        let mut temporary = match begun {
            Some(temporary) => temporary,
            None => {
                match inspect(&path, digest)? {
                    Found::Whole { held, .. } => return Ok(Stored::Held(held)),
                    Found::LeftAlone => return Ok(Stored::Occupied),
                    Found::Torn(..) => {
                        inspect::discard(&path, digest, If::Torn)?;
                        spent.torn_removed += 1;
                    }
                    Found::Nothing => {}
                }
                self.make_temporary(digest)?
            }
        };
        let name = temporary.path.clone();
        let stored = match self.fill(record, &mut temporary, spent) {
            Ok(true) => self.finish(temporary, &path, record),
            Ok(false) => return Ok(Stored::Paused(temporary)),
            Err(error) => Err(error),
        };
        // After a link it is the second name of the chunk, after a lost race or a failure rubbish.
        if !matches!(
            (&stored, self.publish),
            (Ok(Stored::Published), PublishBy::RenameNoReplace | PublishBy::Rename)
        ) {
            let _ = fs::remove_file(&name);
        }
        stored
    }

    /// False: writes are held.
    fn fill(
        &self,
        record: &Record,
        temporary: &mut Temporary,
        spent: &mut Spent,
    ) -> Result<bool, TierError> {
        let bytes = &record.stored_bytes()[..HEADER_BYTES + record.payload().len()];
        while temporary.written < bytes.len() {
            if self.hold.load(Ordering::Relaxed) {
                return Ok(false);
            }
            let at = temporary.written;
            let part = &bytes[at..bytes.len().min(at + PART_BYTES)];
            let context = failed("write", &temporary.path, at as u64, part.len() as u64);
            match temporary.file.write_at(part, at as u64) {
                Ok(0) => return Err(context(io::ErrorKind::WriteZero.into())),
                Ok(written) => {
                    temporary.written += written;
                    spent.written_bytes += written as u64;
                    spent.calls += 1;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(context(error)),
            }
        }
        Ok(true)
    }

    /// All bytes are at the server before the name appears: another node must not see a name without them.
    fn finish(
        &self,
        temporary: Temporary,
        path: &Path,
        record: &Record,
    ) -> Result<Stored, TierError> {
        let Temporary { file, path: name, written } = temporary;
        file.sync_data().map_err(failed("fdatasync", &name, 0, written as u64))?;
        nix::unistd::close(file)
            .map_err(|errno| failed("close", &name, 0, written as u64)(errno.into()))?;
        let published = publish(self.publish, &name, path);
        let Err(error) = published else { return Ok(Stored::Published) };
        // A reply that was lost and asked for again says "exists" of our own work.
        match inspect(path, record.digest())? {
            Found::Whole { held, .. } if held.write_id == record.header().write_id() => {
                Ok(Stored::Published)
            }
            Found::Whole { held, .. } => Ok(Stored::Held(held)),
            Found::LeftAlone => Ok(Stored::Occupied),
            Found::Torn(..) | Found::Nothing => {
                Err(failed("publish", path, 0, written as u64)(error))
            }
        }
    }
}

/// Gives a complete file its name unless something has it.
pub(super) fn publish(by: PublishBy, temporary: &Path, path: &Path) -> io::Result<()> {
    match by {
        PublishBy::Link => fs::hard_link(temporary, path),
        PublishBy::RenameNoReplace => {
            renameat2(AT_FDCWD, temporary, AT_FDCWD, path, RenameFlags::RENAME_NOREPLACE)
                .map_err(io::Error::from)
        }
        PublishBy::Rename => match fs::symlink_metadata(path) {
            Ok(_) => Err(io::ErrorKind::AlreadyExists.into()),
            Err(_) => fs::rename(temporary, path),
        },
    }
}

/// The first way that works here and really refuses to replace, and what the others said.
pub(super) fn choose(place: &Place) -> Result<(PublishBy, Vec<String>), TierError> {
    let mut refused = Vec::new();
    for by in [PublishBy::Link, PublishBy::RenameNoReplace] {
        match refuses_to_replace(place, by) {
            Ok(()) => return Ok((by, refused)),
            // No way works there, and none is to be blamed.
            Err(error) if is_full(&error) => {
                return Err(failed("publish", &place.root, 0, 0)(error));
            }
            Err(error) => {
                refused.push(format!("publishing by {by:?} does not work here ({error})"));
            }
        }
    }
    refuses_to_replace(place, PublishBy::Rename).map_err(failed("rename", &place.root, 0, 0))?;
    refused
        .push("chunks are published by Rename: of writers within one moment the last wins".into());
    Ok((PublishBy::Rename, refused))
}

fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

fn refuses_to_replace(place: &Place, by: PublishBy) -> io::Result<()> {
    let name = |what: &str| paths::root_temporary(&place.root, what, place.node);
    let (first, second, target) = (name("probe-1"), name("probe-2"), name("probe-3"));
    let tried = try_it(place, by, [&first, &second, &target]);
    for path in [first, second, target] {
        let _ = fs::remove_file(path);
    }
    tried
}

fn try_it(place: &Place, by: PublishBy, [first, second, target]: [&Path; 3]) -> io::Result<()> {
    for (path, byte) in [(first, 1), (second, 2)] {
        place.make_file(path)?.write_all_at(&[byte], 0)?;
    }
    publish(by, first, target)?;
    match publish(by, second, target) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
        Ok(()) => return Err(io::Error::other("it replaces what is there")),
    }
    if fs::read(target)? != [1] {
        return Err(io::Error::other("it replaces what is there"));
    }
    Ok(())
}
