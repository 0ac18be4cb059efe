//! The file in which the child notes what it may be held to. One `write` a note: a kill loses none and halves none.

use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions},
    io::Write,
    path::Path,
};

use kv_chunk::Digest;

const NOTE_BYTES: usize = 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Note {
    /// The engine said so.
    Published,
    /// The tier is about to be given leave to drop it.
    GivenUp,
    /// The engine said so: never of something that was published.
    Lost,
    /// A load delivered wrong bytes.
    WrongBytes,
    /// A thread panicked.
    Panicked,
}

const NOTES: [(u8, Note); 5] = [
    (b'p', Note::Published),
    (b'g', Note::GivenUp),
    (b'l', Note::Lost),
    (b'w', Note::WrongBytes),
    (b'!', Note::Panicked),
];

#[derive(Debug)]
pub(crate) struct Ledger(File);

impl Ledger {
    pub(crate) fn open(path: &Path) -> Self {
        Self(OpenOptions::new().append(true).create(true).open(path).unwrap())
    }

    pub(crate) fn note(&self, note: Note, tier: u8, digest: Digest) {
        let (letter, _) = NOTES.iter().find(|(_, known)| *known == note).unwrap();
        let mut line = [0; NOTE_BYTES];
        (line[0], line[1]) = (*letter, tier);
        line[2..].copy_from_slice(&digest.to_bytes());
        (&self.0).write_all(&line).unwrap();
    }
}

pub(crate) fn notes(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |it| it.len()) / NOTE_BYTES as u64
}

/// What must be there, after all that was noted: fails on notes that must not be.
pub(crate) fn required(path: &Path) -> BTreeSet<(u8, Digest)> {
    let bytes = fs::read(path).unwrap_or_default();
    let mut required = BTreeSet::new();
    for line in bytes.chunks_exact(NOTE_BYTES) {
        let (_, note) = NOTES.iter().find(|(letter, _)| *letter == line[0]).unwrap();
        let tier = line[1];
        let digest = Digest::from_bytes(*line[2..].first_chunk().unwrap());
        match note {
            Note::Published => {
                required.insert((tier, digest));
            }
            Note::GivenUp => {
                required.remove(&(tier, digest));
            }
            Note::Lost => {
                let held = required.contains(&(tier, digest));
                assert!(!held, "tier {tier} lost {digest} that it had published");
            }
            Note::WrongBytes => panic!("the child was given wrong bytes for {digest}"),
            Note::Panicked => panic!("a thread of the child panicked (its words are above)"),
        }
    }
    required
}
