//! Every provider keeps the contract.

use kv_cxl::{
    ArenaView, Blind, Caps, DeviceDax, DeviceDaxConfig, Extent, FastTier, FastTierError, Load,
    PageCacheConfig, PageCacheFlash, Pinning, Protection, Residency, Simulated, SimulatedConfig,
    StageEvent, StageId,
};

use crate::contract::{check_all, granules, stage};

const MIB: u64 = 1 << 20;

/// 64 granules, of which 16 fit fast memory and 12 can be protected.
fn config() -> SimulatedConfig {
    let mut config = SimulatedConfig::new(128 * MIB, 32 * MIB, 1 << 30);
    config.pin_limit_bytes = 24 * MIB;
    config.latency_ns = 50_000;
    config.queue_ops_max = 4;
    config
}

fn simulated() -> Simulated {
    Simulated::new(config()).unwrap()
}

#[test]
fn simulated_keeps_the_contract() {
    check_all(|| Box::new(simulated()));
}

#[test]
fn blind_keeps_the_contract() {
    check_all(|| Box::new(Blind::new(simulated())));
}

#[test]
fn a_device_that_can_only_be_touched_is_legal() {
    check_all(|| Box::new(Touched(Caps::new(128 * MIB, 2 * MIB))));
    check_all(|| Box::new(Blind::new(Touched(Caps::new(128 * MIB, 2 * MIB)))));
}

/// Plain memory with flash somewhere behind it: nothing can be asked of it, nothing is known.
#[derive(Debug)]
struct Touched(Caps);

impl Touched {
    fn refuse(&self, extents: &[Extent], call: &'static str) -> Result<(), FastTierError> {
        self.ignore(extents)?;
        Err(FastTierError::Unsupported { call })
    }

    fn ignore(&self, extents: &[Extent]) -> Result<(), FastTierError> {
        extents.iter().try_for_each(|extent| extent.check(&self.0))
    }
}

impl FastTier for Touched {
    fn caps(&self) -> &Caps {
        &self.0
    }

    fn arena(&self) -> ArenaView {
        ArenaView { bytes: self.0.capacity_bytes, base_address: None }
    }

    fn residency(&self, extents: &[Extent]) -> Result<Residency, FastTierError> {
        self.ignore(extents).map(|()| Residency::Unknown)
    }

    fn submit_stage(
        &mut self,
        _id: StageId,
        extents: &[Extent],
        _now_ns: u64,
    ) -> Result<(), FastTierError> {
        self.refuse(extents, "stage")
    }

    fn poll(&mut self, _now_ns: u64, _events: &mut Vec<StageEvent>) -> Option<u64> {
        None
    }

    fn protect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.refuse(extents, "protect")
    }

    fn unprotect(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.ignore(extents)
    }

    fn evict_hint(&mut self, extents: &[Extent], _now_ns: u64) -> Result<(), FastTierError> {
        self.ignore(extents)
    }

    fn flush(&mut self, extents: &[Extent]) -> Result<(), FastTierError> {
        self.ignore(extents)
    }

    fn load(&self) -> Load {
        Load { queued_bytes: None, bytes_per_s: None }
    }
}

#[test]
fn blind_tells_nothing_and_the_device_behind_it_works_on() {
    let mut blind = Blind::new(simulated());
    let extents = granules(&blind, 0, 4);
    blind.protect(&extents, 0).unwrap();
    stage(&mut blind, 1, &extents, 0);
    assert_eq!(blind.residency(&extents), Ok(Residency::Unknown));
    assert_eq!((blind.load().queued_bytes, blind.load().bytes_per_s), (None, None));
    assert_eq!(blind.inner().residency(&extents), Ok(Residency::Bytes(8 * MIB)));
}

#[test]
fn declarations_that_contradict_themselves_are_refused_by_name() {
    type Change = fn(&mut SimulatedConfig);
    let changes: [(&str, Change); 7] = [
        ("stage_granule_bytes", |config| config.granule_bytes = 3 << 20),
        ("capacity_bytes", |config| config.capacity_bytes += 1),
        ("pin_limit_bytes", |config| config.pin_limit_bytes = 33 * MIB),
        ("queue_ops_max", |config| config.queue_ops_max = 0),
        ("fast_bytes", |config| (config.fast_bytes, config.pin_limit_bytes) = (1, 0)),
        ("fast_bytes", |config| config.fast_bytes += 1),
        ("bytes_per_s", |config| config.bytes_per_s = 0),
    ];
    for (name, change) in changes {
        let mut config = config();
        change(&mut config);
        let refused = Simulated::new(config).unwrap_err();
        assert!(matches!(refused, FastTierError::Caps { field, .. } if field == name), "{refused}");
    }
}

/// A file for each provider, gone with the directory.
struct Files(tempfile::TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
    }

    fn fresh(&self) -> std::path::PathBuf {
        let file = tempfile::NamedTempFile::new_in(self.0.path()).unwrap();
        file.into_temp_path().keep().unwrap()
    }
}

#[test]
fn device_dax_on_a_file_keeps_the_contract() {
    let files = Files::new();
    check_all(|| {
        let path = files.fresh();
        std::fs::File::options().write(true).open(&path).unwrap().set_len(2 * MIB).unwrap();
        Box::new(DeviceDax::open(&DeviceDaxConfig::new(path)).unwrap())
    });
}

fn page_cache(files: &Files, pinning: Pinning) -> PageCacheFlash {
    let mut config = PageCacheConfig::new(files.fresh(), 24 * MIB);
    config.bytes = Some(128 * MIB);
    config.queue_ops_max = 4;
    config.pinning = pinning;
    PageCacheFlash::open(config).unwrap()
}

#[test]
fn page_cache_flash_keeps_the_contract() {
    let files = Files::new();
    let probe = page_cache(&files, Pinning::IfAllowed);
    if probe.residency(&granules(&probe, 0, 64)) == Ok(Residency::Bytes(128 * MIB)) {
        println!("SKIP a page cache as fast memory: this file system lives in memory");
        return;
    }
    if probe.caps().protection == Protection::Hard {
        check_all(|| Box::new(page_cache(&files, Pinning::IfAllowed)));
    } else {
        println!("SKIP hard protection: there is no CAP_IPC_LOCK");
    }
    check_all(|| Box::new(page_cache(&files, Pinning::Advisory)));
    check_all(|| Box::new(Blind::new(page_cache(&files, Pinning::IfAllowed))));
}
