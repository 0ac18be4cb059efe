//! Stores that were never written, for benchmarks and tests of size: sparse segments and a snapshot that fills them.

use std::{fs::OpenOptions, io, os::unix::fs::FileExt, path::Path};

use kv_chunk::{Digest, WriteId};

use crate::{
    Held, Purpose, Unguarded,
    nvme::{
        class_of,
        evict::{self, Dropped},
        files,
        index::{Index, Place},
        journal::{Identity, Journal},
        segment::Geometry,
        slots::{Queue, Slot},
        snapshot::{self, Cursor, Writer},
        warm,
    },
};

const STORE_UUID: [u8; 16] = *b"a synthetic one!";

/// The digest of the chunk with this number in a synthetic store.
pub fn digest(number: u64) -> Digest {
    Digest::of(&number.to_le_bytes())
}

/// Makes a store of `chunks` chunks of `payload_bytes` zeros in `segments` sparse files, as an orderly close leaves it.
/// Its index is whole; what is read from it fails verification.
pub fn store(directory: &Path, chunks: u64, payload_bytes: u64, segments: u64) -> io::Result<()> {
    std::fs::create_dir_all(directory)?;
    let mut index = Index::default();
    let slots = u32::try_from(chunks.div_ceil(segments)).map_err(io::Error::other)?;
    let mut number = 0;
    for segment_id in 1..=segments {
        let record_bytes = class_of(payload_bytes);
        let geometry = Geometry { segment_id, store_uuid: STORE_UUID, record_bytes, slots };
        let path = directory.join(files::name_of(segment_id));
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        file.set_len(geometry.file_bytes())?;
        file.write_all_at(&geometry.encode().0, 0)?;
        let file = files::open(&path, false).map_err(io::Error::other)?;
        let row = index.recover_segment(file, geometry);
        for slot in 0..slots.min(u32::try_from(chunks - number).unwrap_or(u32::MAX)) {
            let held = Held { payload_bytes, write_id: WriteId::new(u128::from(number)) };
            let queue = if number % 4 == 0 { Queue::Small } else { Queue::Main };
            // In a store that lives, neighbours are of any age.
            let age = 1 + number.wrapping_mul(0x9e37_79b1) % chunks;
            let chunk = Slot::live(digest(number), held, age);
            index.recover(Place { row, slot }, Slot { queue, ..chunk });
            number += 1;
        }
    }
    index.settle_recovery();
    let identity = Identity { store_uuid: STORE_UUID, generation: 1 };
    Journal::create(&warm::journal_path(directory, 1), identity, 0)?;
    let path = warm::snapshot_path(directory, 1);
    let mut writer = Writer::create(&path, &warm::temporary_path(directory, 1))?;
    let mut part = Vec::new();
    snapshot::encode_header(identity, index.next_segment_id(), &mut part);
    let mut cursor = Cursor::default();
    while snapshot::encode_section(&index, &mut cursor, &mut part) {
        writer.write(&part)?;
        part.clear();
    }
    writer.write(&part)?;
    writer.finish()
}

/// The index of a store of one record size whose device does everything at once: what eviction costs, and what it keeps.
#[derive(Debug)]
pub struct Cache(Index);

impl Cache {
    /// Room for `chunks`, in segments of 4096.
    pub fn new(chunks: u64) -> io::Result<Self> {
        let mut index = Index::default();
        let mut left = u32::try_from(chunks).map_err(io::Error::other)?;
        while left > 0 {
            let slots = left.min(4096);
            let segment_id = index.next_segment_id();
            let geometry =
                Geometry { segment_id, store_uuid: STORE_UUID, record_bytes: 8192, slots };
            let file = files::open(Path::new("/dev/null"), false).map_err(io::Error::other)?;
            index.add_segment(file, geometry);
            left -= slots;
        }
        Ok(Self(index))
    }

    /// Whether this chunk is held, which does not count as a use.
    pub fn contains(&self, digest: Digest) -> bool {
        self.0.get(digest).is_some()
    }

    /// Whether this chunk is held, which counts as a use.
    pub fn read(&mut self, number: u64) -> bool {
        let entry = self.0.begin_read(digest(number), Purpose::Use);
        entry.is_some_and(|entry| {
            self.0.end_read(entry.place);
            true
        })
    }

    /// Writes a chunk that is not held, in the place of another if there is no room.
    pub fn write(&mut self, number: u64) {
        let mut dropped = Dropped::default();
        let place = self.0.take_free(8192).or_else(|| {
            evict::drop_coldest_chunk(&mut self.0, 8192, &Unguarded, &mut dropped);
            dropped.wipes.drain(..).for_each(|place| self.0.end_wipe(place, true));
            self.0.take_free(8192)
        });
        let held = Held { payload_bytes: 4096, write_id: WriteId::new(u128::from(number)) };
        if let Some(place) = place {
            self.0.publish(place, digest(number), held);
        }
        self.0.changes.clear();
    }
}
