//! `kvbraid fsck` and `kvbraid purge` on a tier of kind flash, without an engine and beside one that holds claims.

use std::{fs, path::PathBuf, process::Command, time::Duration};

use kv_chunk::{ChunkHeader, ChunkKey, HEADER_BYTES};
use kv_connector::{
    Config, Engine,
    inspect::{PurgeRequest, Selector},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    claims::{claims, until},
    common::{CHUNK_BYTES, directory, fill, load},
    testing::namespace,
};

const NOW: Option<Duration> = Some(Duration::ZERO);

/// A configuration of one tier, and the command.
struct Place {
    root: TempDir,
    text: String,
}

impl Place {
    fn new() -> Self {
        let root = directory();
        let (flash, socket) = (root.path().join("flash"), root.path().join("engine.sock"));
        let text = format!(
            "[engine]\nchunk_bytes_max = \"1 MiB\"\nhost_cache = 0\ncache_stores = false\n\
             staging = \"16 MiB\"\nsocket = {socket:?}\n[[tier]]\nname = \"f\"\n\
             kind = \"flash\"\npath = {flash:?}\ncapacity = \"64 MiB\"\n"
        );
        fs::write(root.path().join("kvbraid.toml"), &text).unwrap();
        Self { root, text }
    }

    fn engine(&self) -> Engine {
        Engine::open(Config::from_toml(&self.text).unwrap()).unwrap()
    }

    fn flash(&self) -> PathBuf {
        self.root.path().join("flash")
    }

    /// Exit code and first tier of what `kvbraid ARGUMENTS --json` prints.
    #[track_caller]
    fn tier(&self, arguments: &[&str]) -> (i32, Value) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvbraid"));
        let file = self.root.path().join("kvbraid.toml");
        let output = command.args(arguments).args(["--json", "--config"]).arg(file).output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|_| panic!("{text}\n{}", String::from_utf8_lossy(&output.stderr)));
        (output.status.code().unwrap(), value["tiers"][0].clone())
    }

    /// Flips a bit so far behind the beginning of a chunk's record.
    fn flip(&self, key: &ChunkKey, offset: usize) {
        let mut bytes = fs::read(self.flash()).unwrap();
        let is_it = |at: &usize| {
            let header = ChunkHeader::parse(&bytes[*at..at + HEADER_BYTES]);
            header.is_ok_and(|header| header.verify_key(key).is_ok())
        };
        let at = (0..bytes.len()).step_by(4096).find(is_it).expect("the chunk is there");
        bytes[at + offset] ^= 4;
        fs::write(self.flash(), bytes).unwrap();
    }
}

fn keys(model: &str, count: u64) -> Vec<ChunkKey> {
    let namespace = namespace(model);
    let key = |n: u64| ChunkKey::new(&namespace, 0, 0, &n.to_le_bytes(), b"").unwrap();
    (0..count).map(key).collect()
}

#[test]
fn fsck_verifies_every_chunk_and_repair_removes_the_damaged_for_good() {
    let place = Place::new();
    let known = keys("m", 10);
    let engine = place.engine();
    fill(&engine, &known);
    drop(engine);
    let before = fs::read(place.flash()).unwrap();
    let (code, tier) = place.tier(&["fsck"]);
    assert_eq!((code, &tier["whole_chunks"]), (0, &10.into()), "{tier}");
    assert_eq!(tier["whole_bytes"], 10 * CHUNK_BYTES);
    assert!(fs::read(place.flash()).unwrap() == before, "a byte changed");

    place.flip(&known[3], HEADER_BYTES + 500_000);
    place.flip(&known[7], 0);
    let damaged = fs::read(place.flash()).unwrap();
    let (code, tier) = place.tier(&["fsck"]);
    assert_eq!((code, &tier["damaged"]["checksum"]), (1, &1.into()), "{tier}");
    assert_eq!((&tier["torn_slots"], &tier["whole_chunks"]), (&1.into(), &8.into()), "{tier}");
    assert!(fs::read(place.flash()).unwrap() == damaged, "without --repair a byte changed");
    let (code, tier) = place.tier(&["fsck", "--repair"]);
    let removed = (&tier["removed_chunks"], &tier["removed_others"]);
    assert_eq!((code, removed), (1, (&1.into(), &1.into())), "{tier}");
    let (code, tier) = place.tier(&["fsck"]);
    assert_eq!((code, &tier["whole_chunks"]), (0, &8.into()), "{tier}");
    let engine = place.engine();
    let (report, outcomes) = load(&engine, &known);
    assert_eq!(report.hits(), 8);
    assert!(!outcomes[3].is_hit() && !outcomes[7].is_hit());
}

#[test]
fn a_purge_without_an_engine_removes_a_model_for_good_and_nothing_else() {
    let place = Place::new();
    let (mine, other) = (keys("m", 6), keys("n", 6));
    let engine = place.engine();
    fill(&engine, &[mine.clone(), other.clone()].concat());
    drop(engine);
    let before = fs::read(place.flash()).unwrap();
    let (code, tier) = place.tier(&["purge", "--model", "m", "--dry-run"]);
    assert_eq!((code, &tier["matched_chunks"]), (1, &6.into()), "{tier}");
    assert!(fs::read(place.flash()).unwrap() == before, "a dry run changed a byte");
    let (code, tier) = place.tier(&["purge", "--model", "m"]);
    let counts = (&tier["removed_chunks"], &tier["left_chunks"]);
    assert_eq!((code, counts), (0, (&6.into(), &0.into())), "{tier}");
    let engine = place.engine();
    assert_eq!(engine.stats().tiers[0].recovered_chunks, 6);
    assert_eq!((load(&engine, &mine).0.hits(), load(&engine, &other).0.hits()), (0, 6));
}

#[test]
fn a_purge_of_a_running_engine_gives_up_the_claims_on_what_it_removes() {
    let place = Place::new();
    let engine = place.engine();
    let (mine, other) = (keys("m", 6), keys("n", 6));
    fill(&engine, &[mine.clone(), other.clone()].concat());
    engine.claim("ready", &mine[..4], NOW);
    engine.claim("mixed", &[mine[5].clone(), other[5].clone()], NOW);
    engine.claim("waits", &mine[4..], Some(Duration::from_secs(3600)));
    engine.claim("other", &other[..4], NOW);
    until(&engine, |status| status.states["ready"] == 3);
    let (code, tier) = place.tier(&["purge", "--model", "m"]);
    let counts = (&tier["removed_chunks"], &tier["leased_chunks"], &tier["complete"]);
    assert_eq!((code, counts), (0, (&6.into(), &0.into(), &true.into())), "{tier}");
    assert!(!engine.revise("ready", NOW) && engine.revise("other", NOW));
    assert_eq!((load(&engine, &mine).0.hits(), load(&engine, &other).0.hits()), (0, 6));
    engine.cancel("waits");
    let status = until(&engine, |status| status.protected_bytes == 0 && status.released == 4);
    assert_eq!((status.protected_chunks, status.reserved_bytes), (4, 0));
    assert_eq!(engine.stats().chunks_leased, 0);
    // A restart brings nothing of it back.
    drop(engine);
    assert_eq!(load(&place.engine(), &mine).0.hits(), 0);
}

#[test]
fn a_purge_waits_for_readers_not_for_claims() {
    let place = Place::new();
    let engine = place.engine();
    let mine = keys("m", 4);
    fill(&engine, &mine);
    engine.claim("r", &mine, NOW);
    until(&engine, |status| status.states["ready"] == 1);
    let lease = engine.lookup(&mine[..1]);
    let mut request = PurgeRequest::new(Selector::model("m"));
    request.wait_ms = 300;
    let report = engine.purge(&request).unwrap();
    let counts = (report.tiers[0].removed_chunks, report.tiers[0].leased_chunks);
    assert_eq!((counts, report.complete), ((3, 1), false), "{report:?}");
    assert_eq!(claims(&engine).cancelled, 1);
    drop(lease);
    assert!(engine.purge(&request).unwrap().complete);
}
