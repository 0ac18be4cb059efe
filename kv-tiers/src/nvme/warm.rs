//! The index read from its snapshot and journals at open, if they are whole and belong together.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::nvme::{
    index::{Index, Place},
    journal::{self, Change, Identity, Kind, Unusable},
    snapshot,
};

const PREFIX: &str = "index-";
const SNAPSHOT: &str = ".snap";
const JOURNAL: &str = ".log";
const TEMPORARY: &str = ".snap.tmp";

pub(super) fn snapshot_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("{PREFIX}{generation:016x}{SNAPSHOT}"))
}

pub(super) fn journal_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("{PREFIX}{generation:016x}{JOURNAL}"))
}

pub(super) fn temporary_path(directory: &Path, generation: u64) -> PathBuf {
    directory.join(format!("{PREFIX}{generation:016x}{TEMPORARY}"))
}

/// Whether a file has the name of an index file.
pub(super) fn is_index_name(name: &str) -> bool {
    [SNAPSHOT, JOURNAL, TEMPORARY].iter().any(|suffix| generation_in(name, suffix).is_some())
}

fn generation_in(name: &str, suffix: &str) -> Option<u64> {
    let digits = name.strip_prefix(PREFIX)?.strip_suffix(suffix)?;
    u64::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 16)
}

/// What the index files brought.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    /// The journal to go on with; `None`: the index is not known from files.
    pub(super) journal: Option<journal::Read>,
    /// Why not all of it is known, for the log; `None` where there was nothing, or all is well.
    pub(super) trouble: Option<String>,
    /// The highest number of any index file.
    pub(super) generation: u64,
    /// Files of ours.
    pub(super) files: Vec<PathBuf>,
    /// Snapshots that were not finished.
    pub(super) temporaries: Vec<PathBuf>,
    pub(super) damaged: Vec<(PathBuf, &'static str)>,
    /// Files of a later version.
    pub(super) left_alone: Vec<(PathBuf, u32)>,
    /// Rows of segments that were given up, and whose file is still there.
    pub(super) given_up: Vec<u32>,
}

#[derive(Debug, Default)]
struct Listed {
    snapshots: Vec<u64>,
    journals: Vec<u64>,
    temporaries: Vec<PathBuf>,
}

fn list(directory: &Path) -> io::Result<Listed> {
    let mut listed = Listed::default();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        listed.snapshots.extend(generation_in(name, SNAPSHOT));
        listed.journals.extend(generation_in(name, JOURNAL));
        if generation_in(name, TEMPORARY).is_some() {
            listed.temporaries.push(entry.path());
        }
    }
    listed.snapshots.sort_unstable();
    listed.journals.sort_unstable();
    Ok(listed)
}

/// Reads what there is into `index`, which knows the segment files and nothing of their slots.
///
/// `store_uuid` is that of the segments; with none it is what the snapshot says.
pub(super) fn load(
    directory: &Path,
    store_uuid: &mut Option<[u8; 16]>,
    index: &mut Index,
) -> Loaded {
    let mut loaded = Loaded::default();
    let listed = match list(directory) {
        Ok(listed) => listed,
        Err(error) => {
            loaded.trouble = Some(format!("readdir: {error}"));
            return loaded;
        }
    };
    loaded.temporaries.clone_from(&listed.temporaries);
    let highest = listed.snapshots.last().max(listed.journals.last());
    loaded.generation = highest.copied().unwrap_or(0);
    let outcome = read_all(directory, store_uuid, &listed, &mut loaded);
    let (snapshot, mut journals) = match outcome {
        Ok(Some(read)) => read,
        Ok(None) => return loaded,
        Err(trouble) => {
            loaded.trouble = Some(trouble);
            return loaded;
        }
    };
    let is_whole = snapshot.apply(index);
    if !is_whole {
        loaded.trouble = Some("a part of the snapshot is damaged".to_owned());
    }
    for change in journals.iter().flat_map(|journal| &journal.changes) {
        replay(index, change, &mut loaded.given_up);
    }
    // A second journal means that its snapshot is missing: a new one is due.
    let is_alone = journals.len() == 1;
    let Some(last) = journals.pop() else { return loaded };
    if last.torn_bytes > 0 {
        loaded.trouble = Some(format!("the journal's last {} bytes are torn", last.torn_bytes));
    }
    loaded.journal = (is_whole && is_alone).then_some(last);
    loaded
}

type Found = (snapshot::Read, Vec<journal::Read>);

/// The youngest usable snapshot, and all journals since. `None`: there are no index files.
fn read_all(
    directory: &Path,
    store_uuid: &mut Option<[u8; 16]>,
    listed: &Listed,
    loaded: &mut Loaded,
) -> Result<Option<Found>, String> {
    let mut trouble = None;
    let mut chosen = None;
    for &generation in listed.snapshots.iter().rev() {
        let path = snapshot_path(directory, generation);
        let read = snapshot::read(&path).and_then(|read| {
            let store_uuid = *store_uuid.get_or_insert(read.identity.store_uuid);
            let belongs = read.identity == Identity { store_uuid, generation };
            belongs.then_some(read).ok_or(Unusable::Damaged("it is of another store or name"))
        });
        match read {
            Err(Unusable::Newer(version)) => {
                trouble.get_or_insert_with(|| newer(&path, version));
                loaded.left_alone.push((path, version));
                continue;
            }
            Err(Unusable::Damaged(what)) => {
                trouble.get_or_insert_with(|| format!("{}: {what}", path.display()));
                loaded.damaged.push((path.clone(), what));
            }
            Ok(read) if chosen.is_none() => chosen = Some(read),
            Ok(_) => {}
        }
        loaded.files.push(path);
    }
    let from = chosen.as_ref().map_or(u64::MAX, |read| read.identity.generation);
    let uuid = store_uuid.unwrap_or_default();
    let mut journals: Vec<journal::Read> = Vec::new();
    for &generation in &listed.journals {
        let path = journal_path(directory, generation);
        let read = journal::read(&path);
        if let Err(Unusable::Newer(version)) = read {
            if generation >= from {
                trouble.get_or_insert_with(|| newer(&path, version));
            }
            loaded.left_alone.push((path, version));
            continue;
        }
        if generation >= from {
            match read.ok().filter(|read| follows(&journals, read, uuid, generation, from)) {
                Some(read) => journals.push(read),
                None => {
                    let what = "its journal is damaged, or does not follow";
                    trouble.get_or_insert_with(|| format!("{}: {what}", path.display()));
                    loaded.damaged.push((path.clone(), what));
                }
            }
        }
        loaded.files.push(path);
    }
    let newer_since = loaded.left_alone.iter().any(|(path, _)| generation_of(path) >= from);
    let Some(snapshot) = chosen else { return trouble.map_or(Ok(None), Err) };
    let last = journals.last().map(|journal| journal.identity.generation);
    if newer_since || last.is_none() || last != listed.journals.last().copied() {
        return Err(trouble.unwrap_or_else(|| "a journal is missing".to_owned()));
    }
    Ok(Some((snapshot, journals)))
}

fn generation_of(path: &Path) -> u64 {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    generation_in(name, SNAPSHOT).or_else(|| generation_in(name, JOURNAL)).unwrap_or(0)
}

fn newer(path: &Path, version: u32) -> String {
    format!("{}: index format version {version}, this reader knows 1", path.display())
}

/// Whether a journal goes on where those before it end.
fn follows(
    before: &[journal::Read],
    read: &journal::Read,
    store_uuid: [u8; 16],
    generation: u64,
    from: u64,
) -> bool {
    let identity = Identity { store_uuid, generation };
    read.identity == identity
        && match before.last() {
            None => generation == from,
            Some(last) => {
                last.identity.generation + 1 == generation
                    && last.torn_bytes == 0
                    && last.chain == read.previous_chain
            }
        }
}

fn replay(index: &mut Index, change: &Change, given_up: &mut Vec<u32>) {
    let id = change.segment_id();
    let row = index.row_of(id);
    let geometry = row.and_then(|row| index.segment(row)).map(|segment| segment.geometry);
    match change.kind() {
        Some(Kind::SegmentAdded) => {
            index.reserve_ids_to(id);
            if let (Some(row), Some(geometry)) = (row, geometry)
                && change.is_of(&geometry)
            {
                index.recover_unknown(row);
                index.recover_told(row, geometry.slots);
            }
        }
        Some(Kind::SegmentRemoved) => {
            index.reserve_ids_to(id);
            if let Some(row) = row {
                index.recover_unknown(row);
                given_up.push(row);
            }
        }
        Some(_) => {
            if let Some(row) = row {
                let place = Place { row, slot: change.slot_number() };
                index.recover(place, change.slot());
            }
        }
        None => {}
    }
}
