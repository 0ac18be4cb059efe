//! What stands in the directory, for tools: every file is looked at, and nothing is written.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::Duration,
};

use kv_chunk::{Digest, HeaderError};

use super::{
    SharedTier,
    config::OpenAs,
    index::Entry,
    inspect::{self, Discarded, Found, If, charge},
    jobs::{Done, Job, hung, names},
    lease::Figures,
    media::{Bad, Lease, Marker, VERSION},
    ops::Running,
    paths::{self, Fan, Named},
    pool::{LaneId, Message},
    publish::Place,
    space::Space,
};
use crate::{Finding, FindingKind, Held, TierError};

/// What was found in the root, or in one fan-out directory.
#[derive(Debug, Default)]
pub(super) struct Survey {
    pub(super) fans: Vec<Fan>,
    pub(super) chunks: Vec<(Digest, Held)>,
    /// What the files under chunks' names count with.
    pub(super) used_bytes: u64,
    /// Chunks of a later version.
    pub(super) newer: u64,
    /// Files that were removed since they were no whole chunks.
    pub(super) removed: u64,
    pub(super) findings: Vec<Finding>,
}

impl Survey {
    fn note(&mut self, kind: FindingKind, path: PathBuf, why: impl Into<String>) {
        self.findings.push(Finding { path, kind, why: why.into() });
    }

    fn add(&mut self, other: Self) {
        self.chunks.extend(other.chunks);
        self.used_bytes += other.used_bytes;
        self.newer += other.newer;
        self.removed += other.removed;
        self.findings.extend(other.findings);
    }
}

/// Looks at the root: whose it is, and what stands there besides the fan-out directories.
pub(super) fn survey_root(place: &Place, open_as: OpenAs) -> Result<Survey, TierError> {
    let (root, mut found) = (&place.root, Survey::default());
    let mut marked = false;
    for name in names(root)? {
        place.looked_at.fetch_add(1, Ordering::Relaxed);
        let path = root.join(&name);
        if let Some(fan) = Fan::from_file_name(&name).filter(|_| path.is_dir()) {
            found.fans.push(fan);
            continue;
        }
        match name.to_str() {
            Some(paths::MARKER) => {
                marked = true;
                judge_marker(path, &mut found);
            }
            Some(paths::LEASE) => judge_lease(path, open_as, &mut found),
            Some(name) if paths::is_temporary(name) => {
                found.note(
                    FindingKind::Leftover,
                    path,
                    "being written, or left by a process that died",
                );
            }
            _ => found.note(FindingKind::LeftAlone, path, "not ours"),
        }
    }
    let is_newer =
        |it: &Finding| it.kind == FindingKind::LeftAlone && it.path.ends_with(paths::MARKER);
    if found.findings.iter().any(is_newer) {
        // A later version may use any name in its own way.
        found.fans.clear();
    }
    if !marked && !found.fans.is_empty() {
        let why = "missing: the next opening by an engine makes it";
        found.note(FindingKind::Leftover, root.join(paths::MARKER), why);
    }
    Ok(found)
}

fn judge_marker(path: PathBuf, found: &mut Survey) {
    match fs::read(&path).map(|bytes| Marker::parse(&bytes)) {
        Ok(Ok(_)) => {}
        Ok(Err(Bad::Newer(version))) => {
            let why = format!("version {version}, known is {VERSION}: nothing here is looked at");
            found.note(FindingKind::LeftAlone, path, why);
        }
        Ok(Err(Bad::Damaged)) => {
            let why = "damaged: no engine opens this; remove it if the directory is KVBraid's";
            found.note(FindingKind::Damaged, path, why);
        }
        Err(error) => found.note(FindingKind::Damaged, path, format!("not readable: {error}")),
    }
}

fn judge_lease(path: PathBuf, open_as: OpenAs, found: &mut Survey) {
    let is_damaged =
        || matches!(fs::read(&path).map(|it| Lease::parse(&it)), Ok(Err(Bad::Damaged)));
    match fs::read(&path).map(|bytes| Lease::parse(&bytes)) {
        Ok(Err(Bad::Newer(version))) => {
            found.note(FindingKind::LeftAlone, path, format!("of version {version}"));
        }
        Ok(Err(Bad::Damaged)) => {
            // Leaders replace it whole: what is damaged twice stays so.
            let removed =
                open_as == OpenAs::Mender && is_damaged() && fs::remove_file(&path).is_ok();
            if removed {
                found.removed += 1;
            } else {
                found.note(FindingKind::Damaged, path, "damaged: the next leader replaces it");
            }
        }
        _ => {}
    }
}

/// Looks at every file of one fan-out directory.
pub(super) fn survey_fan(place: &Place, fan: Fan, open_as: OpenAs) -> Result<Survey, TierError> {
    let (directory, mut found) = (fan.path(&place.root), Survey::default());
    for name in names(&directory)? {
        place.looked_at.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(&name);
        match name.to_str().map(|name| paths::named(fan, name)) {
            Some(Named::Chunk(digest)) => survey_chunk(path, digest, open_as, &mut found),
            Some(Named::Temporary) => {
                let why = "being written, or left by a writer that died: the leader removes it";
                found.note(FindingKind::Leftover, path, why);
            }
            _ => found.note(FindingKind::LeftAlone, path, "not ours"),
        }
    }
    Ok(found)
}

fn survey_chunk(path: PathBuf, digest: Digest, open_as: OpenAs, found: &mut Survey) {
    match inspect::inspect(&path, digest) {
        // It went between list and look.
        Ok(Found::Nothing) => {}
        Ok(Found::Whole { held, .. }) => {
            found.used_bytes += charge(kv_chunk::HEADER_BYTES as u64 + held.payload_bytes);
            found.chunks.push((digest, held));
        }
        Ok(Found::LeftAlone) => match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_file() => {
                found.used_bytes += charge(metadata.len());
                found.newer += 1;
            }
            _ => found.note(FindingKind::LeftAlone, path, "no file"),
        },
        Ok(Found::Torn(bytes, why)) => survey_torn(path, digest, (bytes, why), open_as, found),
        Err(error) => found.note(FindingKind::Damaged, path, format!("not readable: {error}")),
    }
}

fn survey_torn(
    path: PathBuf,
    digest: Digest,
    (bytes, why): (u64, HeaderError),
    open_as: OpenAs,
    found: &mut Survey,
) {
    let mut why = format!("no whole chunk: {why}");
    if open_as == OpenAs::Mender {
        // Looked at once more directly before: what somebody has written since stays.
        match inspect::discard(&path, digest, If::Torn) {
            Ok(Discarded::Removed(_)) => {
                found.removed += 1;
                return;
            }
            Ok(Discarded::Absent) => return,
            Ok(Discarded::Kept) => return survey_chunk(path, digest, OpenAs::Looker, found),
            Err(error) => why = format!("{why}; it was not removed: {error}"),
        }
    }
    found.used_bytes += charge(bytes);
    found.note(FindingKind::Damaged, path, why);
}

impl SharedTier {
    /// Fills the index with what is there. Every directory is listed and every header read: on the tier's threads, as
    /// many as it has, and as long as that takes, but for a mount that does not answer.
    pub(super) fn survey(&mut self) -> Result<(), TierError> {
        let open_as = self.config.open_as;
        let mut sum = self.run_survey(Job::SurveyRoot(open_as))?;
        let fans = std::mem::take(&mut sum.fans);
        let mut left = fans.iter();
        loop {
            while let Some(fan) = left.as_slice().first()
                && self.send_survey(Job::SurveyFan(*fan, open_as))
            {
                left.next();
            }
            if self.running.is_empty() {
                break;
            }
            sum.add(self.next_survey()?);
        }
        let figures =
            Figures { round: 0, used_bytes: sum.used_bytes, chunks: sum.chunks.len() as u64 };
        self.space = Space::new(self.config.capacity_bytes, figures);
        for (digest, held) in sum.chunks {
            let entry = Entry { held, found: true, touched_ns: None, touched_round: 0 };
            self.index.insert(digest, entry);
        }
        sum.findings.sort_by(|one, other| one.path.cmp(&other.path));
        self.findings = sum.findings;
        (self.detail.newer_chunks, self.detail.torn_removed) = (sum.newer, sum.removed);
        Ok(())
    }

    fn run_survey(&mut self, job: Job) -> Result<Survey, TierError> {
        self.send_survey(job);
        self.next_survey()
    }

    /// False: all threads work.
    fn send_survey(&mut self, job: Job) -> bool {
        let key = self.next_key();
        let Some((data, small)) = &mut self.lanes else { return false };
        let lane = if data.has_room() { data } else { small };
        if !lane.has_room() {
            return false;
        }
        lane.send(key, job, 0);
        self.running.insert(key, Running::Survey);
        true
    }

    fn next_survey(&mut self) -> Result<Survey, TierError> {
        let patience = Duration::from_nanos(self.config.op_timeout_ns);
        loop {
            let before = self.place.looked_at.load(Ordering::Relaxed);
            match self.messages.recv_timeout(patience) {
                Ok(Message::Done { lane, key, done }) => {
                    self.running.remove(&key);
                    if let Some((data, small)) = &mut self.lanes {
                        match lane {
                            LaneId::Data => data.ended(key),
                            LaneId::Small => small.ended(key),
                        }
                    }
                    if let Done::Surveyed(found) = done {
                        return found;
                    }
                }
                Ok(Message::Beat(_)) => {}
                // A directory of many files takes long: only one in which nothing moves is given up.
                Err(_) if self.place.looked_at.load(Ordering::Relaxed) != before => {}
                Err(_) => return Err(hung("survey", &self.config.directory, 0)),
            }
        }
    }
}

/// A directory that tools look at must be there.
pub(super) fn check_root(root: &Path) -> Result<(), TierError> {
    let found = fs::metadata(root).and_then(|it| match it.is_dir() {
        true => Ok(()),
        false => Err(io::ErrorKind::NotADirectory.into()),
    });
    found.map_err(inspect::failed("open", root, 0, 0))
}
