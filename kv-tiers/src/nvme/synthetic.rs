//! Stores that were never written, for benchmarks and tests of size: sparse segments and a snapshot that fills them.

use std::{fs::OpenOptions, io, os::unix::fs::FileExt, path::Path};

use kv_chunk::{Digest, WriteId};

use crate::{
    Held,
    nvme::{
        class_of, files,
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
#[doc(hidden)]
pub fn synthetic_digest(number: u64) -> Digest {
    Digest::of(&number.to_le_bytes())
}

/// Makes a store of `chunks` chunks of `payload_bytes` zeros in `segments` sparse files, as an orderly close leaves it.
/// Its index is whole; what is read from it fails verification.
#[doc(hidden)]
pub fn synthetic_store(
    directory: &Path,
    chunks: u64,
    payload_bytes: u64,
    segments: u64,
) -> io::Result<()> {
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
            let chunk = Slot::live(synthetic_digest(number), held, age);
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
