//! Keeps the index files up: the journal within the poll, a new snapshot on a thread of its own.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{Receiver, SyncSender, TrySendError, channel, sync_channel},
    },
    thread::{self, JoinHandle},
};

use nix::sys::eventfd::EventFd;

use crate::nvme::{
    index::Index,
    journal::{self, Identity, Journal, RECORD_BYTES},
    segment::BLOCK,
    snapshot::{self, Cursor, Writer},
    warm::{Loaded, journal_path, snapshot_path, temporary_path},
};

/// A journal of fewer bytes is not worth a snapshot, and one of more would cost time at open.
const JOURNAL_BYTES: std::ops::RangeInclusive<u64> = 64 << 10..=16 << 20;
/// A journal grows to so many times its bound while its successor's snapshot is written.
const OVERRUN: u64 = 3;
/// After the index files were given up: changes until they are tried again.
const RETRY_CHANGES: u64 = 1024;
/// Parts of a snapshot that wait for the disk.
const PARTS_MAX: usize = 2;

/// Bytes at which a journal is followed by the next.
fn journal_bytes_max(slots: u64, segments: u64) -> u64 {
    snapshot::bytes_max(slots, segments).clamp(*JOURNAL_BYTES.start(), *JOURNAL_BYTES.end())
}

/// Most bytes that the index files of so many slots take, two generations of them.
pub(super) fn reserved_bytes(slots: u64, segments: u64) -> u64 {
    let files = 2 * snapshot::bytes_max(slots, segments)
        + (1 + OVERRUN) * journal_bytes_max(slots, segments);
    files.next_multiple_of(BLOCK) + 4 * BLOCK
}

/// The index files of a store.
#[derive(Debug)]
pub(super) struct Persist {
    directory: PathBuf,
    store_uuid: [u8; 16],
    /// Of the journal in use.
    generation: u64,
    journal: Option<Journal>,
    /// Nothing is written before something changes; then the files go, and come back at the close.
    is_frozen: bool,
    is_touched: bool,
    run: Option<Run>,
    /// All our index files.
    files: Vec<PathBuf>,
    /// Changes since the files were given up.
    unwritten: u64,
    /// The index's tick when all of it was in a snapshot, and nothing has changed since but uses.
    saved: Option<u64>,
    told: bool,
}

/// A snapshot being written.
#[derive(Debug)]
struct Run {
    cursor: Cursor,
    /// `None` once all is sent.
    parts: Option<SyncSender<Option<Vec<u8>>>>,
    /// What is to be sent next, if it could not be sent.
    part: Option<Option<Vec<u8>>>,
    /// All is encoded.
    ended: bool,
    done: Receiver<io::Result<()>>,
    thread: JoinHandle<()>,
}

impl Persist {
    /// Goes on with what was found.
    pub(super) fn new(
        directory: &Path,
        store_uuid: [u8; 16],
        loaded: Loaded,
        index: &Index,
    ) -> Self {
        for path in &loaded.temporaries {
            let _ = fs::remove_file(path);
        }
        let resume = |read: &journal::Read| {
            let path = journal_path(directory, read.identity.generation);
            Journal::resume(&path, read).ok()
        };
        let journal = loaded.journal.as_ref().and_then(resume);
        Self { journal, is_frozen: false, ..Self::frozen(directory, store_uuid, loaded, index) }
    }

    /// Leaves all as it is until something changes.
    pub(super) fn frozen(
        directory: &Path,
        store_uuid: [u8; 16],
        loaded: Loaded,
        index: &Index,
    ) -> Self {
        let is_saved = loaded.journal.as_ref().is_some_and(|read| read.changes.is_empty());
        Self {
            directory: directory.to_owned(),
            store_uuid,
            generation: loaded.generation,
            journal: None,
            is_frozen: true,
            is_touched: false,
            run: None,
            files: loaded.files,
            unwritten: 0,
            saved: is_saved.then(|| index.tick()),
            told: false,
        }
    }

    /// Whether changes are being written down.
    pub(super) fn is_writing(&self) -> bool {
        self.journal.is_some()
    }

    fn identity(&self) -> Identity {
        Identity { store_uuid: self.store_uuid, generation: self.generation }
    }

    /// Hands what changed to the system: a killed process loses nothing of it.
    pub(super) fn flush(&mut self, index: &mut Index, wake: &Arc<EventFd>) {
        if index.changes.is_empty() {
            return;
        }
        if self.is_frozen {
            // A kill from here on finds none.
            (self.saved, self.is_touched) = (None, true);
            index.changes.clear();
            return self.remove_files();
        }
        let count = index.changes.len() as u64;
        self.saved = None;
        let Some(journal) = &mut self.journal else {
            index.changes.clear();
            self.unwritten += count;
            if self.unwritten >= RETRY_CHANGES {
                self.unwritten = 0;
                self.begin(index, wake);
            }
            return;
        };
        let segments = index.segment_count() as u64;
        let bytes_max = journal_bytes_max(index.slots(), segments);
        if journal.bytes() + count * RECORD_BYTES > OVERRUN * bytes_max {
            index.changes.clear();
            return self.give_up("write", &io::Error::from_raw_os_error(libc::EFBIG));
        }
        let appended = journal.append(&mut index.changes);
        let is_due = journal.bytes() > bytes_max;
        match appended {
            Err(error) => self.give_up("write", &error),
            Ok(()) if is_due && self.run.is_none() => self.begin(index, wake),
            Ok(()) => {}
        }
    }

    /// Begins the next journal, and a snapshot to go with it.
    fn begin(&mut self, index: &Index, wake: &Arc<EventFd>) {
        if let Err(error) = self.try_begin(index, wake) {
            self.give_up("open", &error);
        }
    }

    fn try_begin(&mut self, index: &Index, wake: &Arc<EventFd>) -> io::Result<()> {
        let writer = self.next_generation()?;
        let (parts, received) = sync_channel(PARTS_MAX);
        let (result, done) = channel();
        let wake = Arc::clone(wake);
        let write = move || {
            let written = write_parts(writer, &received, &wake);
            let _ = result.send(written);
            let _ = wake.write(1);
        };
        let thread = thread::Builder::new().name("kvb-snapshot".to_owned()).spawn(write)?;
        let mut header = Vec::new();
        snapshot::encode_header(self.identity(), index.next_segment_id(), &mut header);
        let cursor = Cursor::default();
        let (parts, part) = (Some(parts), Some(Some(header)));
        self.run = Some(Run { cursor, parts, part, ended: false, done, thread });
        Ok(())
    }

    /// Makes the next generation's journal, in use from now on, and its snapshot's writer.
    fn next_generation(&mut self) -> io::Result<Writer> {
        self.generation += 1;
        let path = journal_path(&self.directory, self.generation);
        let chain = self.journal.as_ref().map_or(0, Journal::chain);
        self.files.push(path.clone());
        self.journal = Some(Journal::create(&path, self.identity(), chain)?);
        let path = snapshot_path(&self.directory, self.generation);
        let writer = Writer::create(&path, &temporary_path(&self.directory, self.generation))?;
        self.files.push(path);
        Ok(writer)
    }

    /// Goes on with a snapshot. True: there is more to do at once.
    pub(super) fn step(&mut self, index: &Index) -> bool {
        let Some(run) = &mut self.run else { return false };
        match run.done.try_recv() {
            Ok(result) => {
                if let Some(run) = self.run.take() {
                    let _ = run.thread.join();
                }
                match result {
                    Ok(()) => self.settle(),
                    Err(error) => self.give_up("write", &error),
                }
                return false;
            }
            Err(_) if run.parts.is_none() => return false,
            Err(_) => {}
        }
        let Some(parts) = &run.parts else { return false };
        let part = run.part.take().unwrap_or_else(|| {
            (!run.ended).then(|| {
                let mut part = Vec::new();
                run.ended = !snapshot::encode_section(index, &mut run.cursor, &mut part);
                part
            })
        });
        let is_end = part.is_none();
        match parts.try_send(part) {
            Ok(()) if is_end => {
                run.parts = None;
                false
            }
            Ok(()) => true,
            // Its thread wakes us.
            Err(TrySendError::Full(part)) => {
                run.part = Some(part);
                false
            }
            Err(TrySendError::Disconnected(_)) => false,
        }
    }

    /// A generation is whole: those before it are not needed any more.
    fn settle(&mut self) {
        let keep = [
            snapshot_path(&self.directory, self.generation),
            journal_path(&self.directory, self.generation),
        ];
        for path in self.files.iter().filter(|path| !keep.contains(path)) {
            let _ = fs::remove_file(path);
        }
        self.files = keep.to_vec();
        self.told = false;
    }

    /// Index files that cannot be kept up are worse than none: the next open reads all headers.
    fn give_up(&mut self, call: &str, error: &io::Error) {
        if !self.told {
            let path = self.journal.as_ref().map_or(self.directory.as_path(), Journal::path);
            tracing::warn!(call, %error, path = %path.display(), "the index files are given up for now");
        }
        self.told = true;
        self.run = None;
        self.journal = None;
        self.unwritten = 0;
        self.remove_files();
    }

    fn remove_files(&mut self) {
        for path in self.files.drain(..) {
            let _ = fs::remove_file(path);
        }
    }

    /// Writes a snapshot and an empty journal, and waits for it.
    pub(super) fn save(&mut self, index: &mut Index) {
        index.changes.clear();
        if let Err(error) = self.try_save(index) {
            self.give_up("write", &error);
        }
    }

    fn try_save(&mut self, index: &Index) -> io::Result<()> {
        let mut writer = self.next_generation()?;
        let mut part = Vec::new();
        snapshot::encode_header(self.identity(), index.next_segment_id(), &mut part);
        let mut cursor = Cursor::default();
        while snapshot::encode_section(index, &mut cursor, &mut part) {
            writer.write(&part)?;
            part.clear();
        }
        writer.write(&part)?;
        writer.finish()?;
        self.settle();
        self.saved = Some(index.tick());
        Ok(())
    }

    /// The last words of a store.
    pub(super) fn close(&mut self, index: &mut Index) {
        if let Some(run) = self.run.take() {
            drop(run.parts);
            let _ = run.thread.join();
        }
        let is_untouched = self.is_frozen && !self.is_touched && index.changes.is_empty();
        if !is_untouched && (!index.changes.is_empty() || self.saved != Some(index.tick())) {
            self.save(index);
        }
    }
}

/// Writes what comes until all is there, or nobody sends any more.
fn write_parts(
    mut writer: Writer,
    parts: &Receiver<Option<Vec<u8>>>,
    wake: &EventFd,
) -> io::Result<()> {
    loop {
        match parts.recv() {
            Ok(Some(part)) => writer.write(&part)?,
            Ok(None) => return writer.finish(),
            Err(_) => return Err(io::Error::other("it was not finished")),
        }
        let _ = wake.write(1);
    }
}
