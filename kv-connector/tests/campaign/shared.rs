//! What happens to a directory that many nodes share, behind their backs.

use std::{
    fs::{self, File, FileTimes},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use kv_chunk::{HEADER_BYTES, block_crc};

use crate::rig::rot;

/// Files below whose names end in `end`; what vanishes meanwhile is not there.
pub(crate) fn files(directory: &Path, end: &str) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut found = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        match path.is_dir() {
            true => found.extend(files(&path, end)),
            false if path.to_string_lossy().ends_with(end) => found.push(path),
            false => {}
        }
    }
    found.sort();
    found
}

/// What the chunks take on the medium, as `du` counts.
pub(crate) fn chunk_bytes(directory: &Path) -> u64 {
    let chunks = files(directory, ".kvc").into_iter();
    chunks.filter_map(|path| fs::metadata(path).ok()).map(|it| it.blocks() * 512).sum()
}

/// One thing that goes wrong. False: there was nothing for it to go wrong with. Files may go while this looks at them.
pub(crate) fn damage(directory: &Path, random: &mut fastrand::Rng) -> bool {
    let chunks = files(directory, ".kvc");
    if chunks.is_empty() {
        return false;
    }
    let mut any = || chunks[random.usize(0..chunks.len())].clone();
    let (path, other) = (any(), any());
    let lease = directory.join("KVBLEASE");
    match random.u8(0..12) {
        0 => fs::remove_file(path).is_ok(),
        1 => path.parent().is_some_and(|fan| fs::remove_dir_all(fan).is_ok()),
        2 => edit(&path, |file, length| file.set_len(random.u64(0..=length)).is_ok()),
        3..6 => edit(&path, |file, length| {
            rot(file, length, random);
            true
        }),
        // Another chunk under its name.
        6 => fs::copy(other, path).is_ok(),
        // A later version's.
        7 => random.u8(0..4) == 0 && make_later(&path),
        8 => {
            let half = fs::read(&path).unwrap_or_default();
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            let name = format!(".{name}.{:016x}-{:x}.tmp", random.u64(..), random.u8(..));
            fs::write(path.with_file_name(name), &half[..half.len() / 2]).is_ok()
        }
        // Its clock is another one.
        9 => {
            let by = Duration::from_secs(random.u64(0..1 << 31));
            let now = SystemTime::now();
            let then = if random.bool() { now + by } else { now - by };
            edit(&path, |file, _| file.set_times(FileTimes::new().set_modified(then)).is_ok())
        }
        10 => fs::remove_file(lease).is_ok(),
        _ => edit(&lease, |file, length| {
            rot(file, length, random);
            true
        }),
    }
}

fn make_later(path: &Path) -> bool {
    let Ok(mut bytes) = fs::read(path) else { return false };
    if bytes.len() < HEADER_BYTES {
        return false;
    }
    bytes[8] = 2;
    bytes[12..16].fill(0);
    let crc = block_crc(&bytes[..HEADER_BYTES]);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
    edit(path, |file, _| file.write_all_at(&bytes[..HEADER_BYTES], 0).is_ok())
}

fn edit(path: &Path, edit: impl FnOnce(&File, u64) -> bool) -> bool {
    let Ok(file) = File::options().read(true).write(true).open(path) else { return false };
    let Ok(metadata) = file.metadata() else { return false };
    edit(&file, metadata.len())
}
