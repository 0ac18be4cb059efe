//! One chunk file: is it whole, what does it hold, and its end if it is not.

use std::{
    fs::{self, File, Metadata, OpenOptions},
    io,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::Path,
};

use kv_chunk::{ChunkHeader, Digest, HEADER_BYTES, HeaderError, WriteId};

use crate::{Held, IoContext, TierError};

/// What stands under a chunk's name.
#[derive(Debug)]
pub(super) enum Found {
    Nothing,
    /// Header and length are right; the payload is not looked at.
    Whole {
        held: Held,
        mtime_ns: i128,
    },
    /// Not a whole chunk but so many bytes: a miss, to be removed.
    Torn(u64, HeaderError),
    /// A later version's chunk, or no file: a miss, left alone.
    LeftAlone,
}

pub(super) fn failed(
    call: &'static str,
    path: &Path,
    offset: u64,
    length: u64,
) -> impl FnOnce(io::Error) -> TierError {
    let context = IoContext { call, path: path.to_owned(), offset, length };
    move |error| TierError::io(context, error)
}

pub(super) fn mtime_ns(metadata: &Metadata) -> i128 {
    i128::from(metadata.mtime()) * 1_000_000_000 + i128::from(metadata.mtime_nsec())
}

/// Bytes that a file of this length counts with.
pub(super) fn charge(file_bytes: u64) -> u64 {
    file_bytes.next_multiple_of(4096)
}

/// Opens for reading; `None` if there is no such name.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let open = || OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(path);
    match open() {
        // The server's file is another one by now: a second look sees which.
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => open(),
        result => result,
    }
    .map(Some)
    .or_else(|error| match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENOTDIR) => Ok(None),
        _ => Err(error),
    })
}

/// What the header says, if it is the header of `digest` and of a file of this length.
pub(super) fn judge(header: &[u8], digest: Digest, file_bytes: u64) -> Result<Held, HeaderError> {
    let header = ChunkHeader::parse(header)?;
    if header.digest() != digest {
        return Err(HeaderError::Key);
    }
    let (expected, found) =
        (header.payload_bytes(), file_bytes.saturating_sub(HEADER_BYTES as u64));
    if found != expected {
        return Err(HeaderError::PayloadLength { expected, found });
    }
    Ok(Held { payload_bytes: expected, write_id: header.write_id() })
}

/// Looks at the file of `digest`.
pub(super) fn inspect(path: &Path, digest: Digest) -> Result<Found, TierError> {
    let Some(file) = open(path).map_err(failed("open", path, 0, 0))? else {
        return Ok(Found::Nothing);
    };
    let metadata = file.metadata().map_err(failed("fstat", path, 0, 0))?;
    if !metadata.is_file() {
        return Ok(Found::LeftAlone);
    }
    let mut header = [0; HEADER_BYTES];
    let read = read_full(&file, &mut header, 0);
    let read = read.map_err(failed("read", path, 0, HEADER_BYTES as u64))?;
    Ok(match judge(&header[..read], digest, metadata.len()) {
        Ok(held) => Found::Whole { held, mtime_ns: mtime_ns(&metadata) },
        Err(HeaderError::Version { .. }) => Found::LeftAlone,
        Err(why) => Found::Torn(metadata.len(), why),
    })
}

/// Reads until the buffer is full or the file ends; how much that was.
pub(super) fn read_full(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut done = 0;
    while done < buffer.len() {
        match file.read_at(&mut buffer[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// Under which condition a chunk's file is removed. It is looked at once more directly before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum If {
    /// It is not whole.
    Torn,
    /// It is that writing of it, or not whole.
    WrittenAs(WriteId),
    /// Nobody has touched it since.
    Untouched { mtime_ns: i128 },
}

/// What became of a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Discarded {
    /// It is gone, by our doing, and counted with so many bytes.
    Removed(u64),
    /// It was gone before.
    Absent,
    /// The condition did not hold.
    Kept,
}

pub(super) fn discard(path: &Path, digest: Digest, condition: If) -> Result<Discarded, TierError> {
    let file_bytes = |held: Held| HEADER_BYTES as u64 + held.payload_bytes;
    let bytes = match (inspect(path, digest)?, condition) {
        (Found::Nothing, _) => return Ok(Discarded::Absent),
        (Found::Torn(bytes, _), _) => bytes,
        (Found::Whole { held, .. }, If::WrittenAs(write_id)) if held.write_id == write_id => {
            file_bytes(held)
        }
        (Found::Whole { held, mtime_ns }, If::Untouched { mtime_ns: seen }) if mtime_ns == seen => {
            file_bytes(held)
        }
        (Found::LeftAlone | Found::Whole { .. }, _) => return Ok(Discarded::Kept),
    };
    match fs::remove_file(path) {
        Ok(()) => Ok(Discarded::Removed(charge(bytes))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Discarded::Absent),
        Err(error) => Err(failed("unlink", path, 0, 0)(error)),
    }
}
