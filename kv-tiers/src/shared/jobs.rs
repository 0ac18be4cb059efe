//! What the pool's threads do: one blocking job each, with everything it needs inside.

use std::{
    ffi::OsString,
    fs, io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use kv_chunk::{Digest, HEADER_BYTES, HeaderError};
use nix::sys::{stat::futimens, time::TimeSpec};

use super::{
    config::OpenAs,
    inspect::{self, Discarded, Found, If, charge, failed, inspect, judge, mtime_ns, read_full},
    paths::{self, Fan, Named},
    publish::{Place, Spent, Stored, Temporary},
    survey::{Survey, survey_fan, survey_root},
};
use crate::{Held, IoContext, ReadDone, Record, Slot, TierError, piece_range};

/// Work for a thread.
#[derive(Debug)]
pub(super) enum Job {
    Read { digest: Digest, blocks: Range<u32>, slot: Slot, touch: bool },
    Write { record: Arc<Record>, begun: Option<Temporary> },
    Look(Vec<Digest>),
    Discard { digest: Digest, condition: If },
    ListFans,
    Scan(Fan),
    RemoveTemporary(PathBuf),
    SurveyRoot(OpenAs),
    SurveyFan(Fan, OpenAs),
}

/// Its outcome.
#[derive(Debug)]
pub(super) enum Done {
    Read { slot: Slot, result: Result<Bytes, TierError> },
    Write { result: Result<Stored, TierError>, spent: Spent },
    Looked(Vec<(Digest, Result<Option<Held>, TierError>)>),
    Discarded(Result<Discarded, TierError>),
    Fans(Result<Vec<Fan>, TierError>),
    Scanned(Result<Scan, TierError>),
    TemporaryRemoved(bool),
    Surveyed(Result<Survey, TierError>),
}

/// What a read found.
#[derive(Debug)]
pub(super) enum Bytes {
    Here(ReadDone, Held),
    Nothing,
    /// Something is there, and it is no whole chunk.
    Torn,
    /// Something is there that is left alone, or does not fit the slot.
    Unusable,
}

/// One fan-out directory.
#[derive(Debug, Default)]
pub(super) struct Scan {
    pub(super) files: Vec<Seen>,
    pub(super) temporaries: Vec<OsString>,
}

/// One chunk's file, by its metadata.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Seen {
    pub(super) mtime_ns: i128,
    pub(super) digest: Digest,
    pub(super) bytes: u64,
}

pub(super) fn perform(job: Job, place: &Place) -> Done {
    match job {
        Job::Read { digest, blocks, mut slot, touch } => {
            let result = read(place, digest, &blocks, &mut slot, touch);
            Done::Read { slot, result }
        }
        Job::Write { record, begun } => {
            let mut spent = Spent::default();
            let result = place.store(&record, begun, &mut spent);
            Done::Write { result, spent }
        }
        Job::Look(digests) => {
            let look = |digest| (digest, look(&place.root, digest));
            Done::Looked(digests.into_iter().map(look).collect())
        }
        Job::Discard { digest, condition } => {
            let path = paths::chunk_path(&place.root, digest);
            Done::Discarded(inspect::discard(&path, digest, condition))
        }
        Job::ListFans => Done::Fans(list_fans(&place.root)),
        Job::Scan(fan) => Done::Scanned(scan(&place.root, fan)),
        Job::SurveyRoot(open_as) => Done::Surveyed(survey_root(place, open_as)),
        Job::SurveyFan(fan, open_as) => Done::Surveyed(survey_fan(place, fan, open_as)),
        Job::RemoveTemporary(path) => Done::TemporaryRemoved(fs::remove_file(path).is_ok()),
    }
}

fn look(root: &Path, digest: Digest) -> Result<Option<Held>, TierError> {
    Ok(match inspect(&paths::chunk_path(root, digest), digest)? {
        Found::Whole { held, .. } => Some(held),
        _ => None,
    })
}

fn read(
    place: &Place,
    digest: Digest,
    blocks: &Range<u32>,
    slot: &mut [u8],
    touch: bool,
) -> Result<Bytes, TierError> {
    let path = paths::chunk_path(&place.root, digest);
    let at = |offset: u64, length: usize| failed("read", &path, offset, length as u64);
    let Some(file) = inspect::open(&path).map_err(failed("open", &path, 0, 0))? else {
        return Ok(Bytes::Nothing);
    };
    let metadata = file.metadata().map_err(failed("fstat", &path, 0, 0))?;
    if !metadata.is_file() {
        return Ok(Bytes::Unusable);
    }
    let Some(payload_bytes) = metadata.len().checked_sub(HEADER_BYTES as u64) else {
        return Ok(Bytes::Torn);
    };
    let range = piece_range(payload_bytes, blocks);
    let wanted = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
    let Some(landing) = slot.get_mut(..HEADER_BYTES.saturating_add(wanted)) else {
        return Ok(Bytes::Unusable);
    };
    let read = if range.start == 0 {
        let length = landing.len();
        read_full(&file, landing, 0).map_err(at(0, length))?
    } else {
        let (header, piece) = landing.split_at_mut(HEADER_BYTES);
        let read = read_full(&file, header, 0).map_err(at(0, HEADER_BYTES))?;
        let offset = HEADER_BYTES as u64 + range.start;
        let length = piece.len();
        read + read_full(&file, piece, offset).map_err(at(offset, length))?
    };
    match judge(landing.get(..read.min(HEADER_BYTES)).unwrap_or_default(), digest, metadata.len()) {
        Ok(held) if read == landing.len() => {
            if touch {
                // Without permission it looks older than it is: it may be dropped too soon.
                let _ = futimens(&file, &TimeSpec::UTIME_OMIT, &TimeSpec::UTIME_NOW);
            }
            Ok(Bytes::Here(ReadDone { first_block: blocks.start, payload_bytes: wanted }, held))
        }
        // It was cut while we read.
        Ok(_) => Ok(Bytes::Torn),
        Err(HeaderError::Version { .. }) => Ok(Bytes::Unusable),
        Err(_) => Ok(Bytes::Torn),
    }
}

pub(super) fn names(directory: &Path) -> Result<Vec<OsString>, TierError> {
    let names = || -> io::Result<Vec<OsString>> {
        fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name())).collect()
    };
    match names() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        names => names.map_err(failed("readdir", directory, 0, 0)),
    }
}

fn list_fans(root: &Path) -> Result<Vec<Fan>, TierError> {
    Ok(names(root)?.iter().filter_map(|name| Fan::from_file_name(name)).collect())
}

fn scan(root: &Path, fan: Fan) -> Result<Scan, TierError> {
    let directory = fan.path(root);
    let mut scan = Scan::default();
    for name in names(&directory)? {
        let Some(text) = name.to_str() else { continue };
        match paths::named(fan, text) {
            Named::Chunk(digest) => {
                // One that went meanwhile, or cannot be asked, is counted next time.
                let Ok(metadata) = fs::symlink_metadata(directory.join(text)) else { continue };
                if metadata.is_file() {
                    let (mtime_ns, bytes) = (mtime_ns(&metadata), charge(metadata.len()));
                    scan.files.push(Seen { mtime_ns, digest, bytes });
                }
            }
            Named::Temporary => scan.temporaries.push(name),
            Named::Other => {}
        }
    }
    Ok(scan)
}

/// The error of an op that waited for threads that hang.
pub(super) fn hung(call: &'static str, root: &Path, length: u64) -> TierError {
    let context = IoContext { call, path: root.to_owned(), offset: 0, length };
    TierError::io(context, io::Error::from_raw_os_error(libc::ETIMEDOUT))
}
