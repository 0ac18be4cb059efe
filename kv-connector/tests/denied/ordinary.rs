//! A child of this program that is nobody, and what it must do.

use std::{
    env,
    fs::{self, File},
    io,
    os::unix::{fs::chown, process::CommandExt},
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use kv_connector::{
    ByteSize, Config, Engine, Stored, TierConfig, Want,
    replay::{fill, wrong_bytes},
};
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
    unistd::geteuid,
};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

use crate::testing::key;

/// Set in a child: where it works.
const CHILD: &str = "KVBRAID_DENIED_CHILD";
const NOBODY: u32 = 65_534;
const MEMLOCK_BYTES: u64 = 64 << 10;
/// What a tier says, once, whose ring got fewer entries: how many the limit leaves depends on the user's other rings.
const SMALLER_RING: &str = "ring entries not used but";
const SOON: Duration = Duration::from_secs(30);
/// The same number on every architecture.
const IO_URING_SETUP: i64 = 425;
const PAYLOAD_BYTES: usize = 50_000;

/// What is taken away.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Denied {
    pub(crate) ring: Option<Errno>,
    pub(crate) memlock: bool,
}

impl Denied {
    /// In the child, before anything else: holds for all threads that come.
    fn apply(self) {
        if self.memlock {
            setrlimit(Resource::RLIMIT_MEMLOCK, MEMLOCK_BYTES, MEMLOCK_BYTES).unwrap();
        }
        let Some(errno) = self.ring else { return };
        let arch = TargetArch::try_from(env::consts::ARCH).unwrap();
        let number = u32::try_from(errno as i32).unwrap();
        let filter = SeccompFilter::new(
            [(IO_URING_SETUP, Vec::new())].into(),
            SeccompAction::Allow,
            SeccompAction::Errno(number),
            arch,
        );
        let program: BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&program).unwrap();
    }

    /// Of which every tier must say one, once.
    fn fallbacks(self) -> &'static [&'static str] {
        match self {
            Self { ring: Some(_), .. } => &["io_uring not used"],
            // The rings of the user's other processes, and for a while those of ended ones, take of the same limit.
            Self { memlock: true, .. } => &[
                "registered buffers not used",
                "io_uring not used: io_uring_setup: Cannot allocate",
            ],
            _ => &[],
        }
    }
}

/// Runs this program's test `name` as nobody, if this is root, in a directory of its own.
pub(crate) fn as_ordinary_user(name: &str, denied: Denied) {
    if let Some(root) = env::var_os(CHILD) {
        denied.apply();
        return child(root.as_ref(), denied);
    }
    // What two rings register; the user's other processes count as well.
    let enough = getrlimit(Resource::RLIMIT_MEMLOCK).unwrap().0 >= 8 << 20;
    if !enough && denied.fallbacks().is_empty() {
        println!("SKIP {name}: this user's RLIMIT_MEMLOCK is small");
        return;
    }
    // What the user's other rings have locked counts as well, and is given back some time after they ended.
    for attempt in 1..=5 {
        let text = match run_child(name) {
            Ok((true, _)) => return,
            Ok((false, text)) => text,
            Err(error) => return println!("SKIP {name}: {error}"),
        };
        let is_short = !denied.memlock && text.contains("Cannot allocate memory");
        assert!(is_short && attempt < 5, "{text}");
        thread::sleep(Duration::from_secs(1));
    }
}

/// Whether the test passed, and all that it said.
fn run_child(name: &str) -> io::Result<(bool, String)> {
    let root = tempfile::tempdir()?;
    let mut command = Command::new(env::current_exe()?);
    command.args(["--exact", name, "--nocapture"]).env(CHILD, root.path()).stdin(Stdio::null());
    if geteuid().is_root() {
        chown(root.path(), Some(NOBODY), Some(NOBODY))?;
        command.uid(NOBODY).gid(NOBODY);
    }
    let output = command.output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    Ok((output.status.success() && text.contains("1 passed"), text))
}

fn child(root: &Path, denied: Denied) {
    assert!(!geteuid().is_root(), "not as an ordinary user");
    let log = root.join("log");
    tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::WARN)
        .with_ansi(false)
        .with_writer(Arc::new(File::create(&log).unwrap()))
        .init();
    let names = ["one", "two"];
    let mut tiers = names.map(|name| TierConfig::nvme(name, root.join(name), ByteSize::mib(32)));
    tiers.iter_mut().for_each(|tier| tier.window = Some(2));
    let mut config = Config::new(tiers.into());
    config.engine.chunk_bytes_max = ByteSize::kib(64);
    config.engine.read_buffer = Some(ByteSize::kib(10 * 68));
    config.engine.host_cache = ByteSize(0);
    config.engine.staging = ByteSize::kib(500);
    config.engine.lock_memory = denied.memlock;
    for round in 0..2 {
        File::create(&log).unwrap();
        let engine = Engine::open(config.clone()).unwrap();
        serve(&engine, round == 0);
        let stats = engine.stats();
        for tier in &stats.tiers {
            let ring = tier.io_mode.contains("io_uring");
            let refused = tier.fallbacks.iter().any(|line| line.starts_with("io_uring not used"));
            assert_eq!(ring, !refused && denied.ring.is_none(), "{tier:?}");
            let registered = tier.io_mode.contains("registered_buffers");
            assert_eq!(registered, denied.fallbacks().is_empty(), "{tier:?}");
            let is_smaller = |line: &&String| denied.memlock && line.contains(SMALLER_RING);
            let smaller = tier.fallbacks.iter().filter(is_smaller).count();
            assert!(smaller <= 1, "{tier:?}");
            assert_eq!(tier.fallbacks.len() - smaller, usize::from(!registered), "{tier:?}");
        }
        assert!(!stats.read_memory.locked, "{stats:?}");
        assert!(engine.close(SOON).drained);
        check_log(&fs::read_to_string(&log).unwrap(), &names, denied);
    }
}

/// One warning for each tier and each thing, and no other.
fn check_log(log: &str, tiers: &[&str], denied: Denied) {
    let mut lines: Vec<&str> = log.lines().collect();
    let mut take = |about: &str, words: &[&str]| {
        let before = lines.len();
        lines.retain(|line| {
            let said = words.iter().any(|word| line.contains(word));
            !(said && line.contains("WARN") && line.contains(about))
        });
        assert_eq!(before - lines.len(), 1, "{words:?} not said once in\n{log}");
    };
    if !denied.fallbacks().is_empty() {
        tiers.iter().for_each(|tier| take(&format!("tier=\"{tier}\""), denied.fallbacks()));
    }
    if denied.memlock {
        take("", &["memory is not locked"]);
        for tier in tiers {
            let is_smaller = |line: &str| line.contains(SMALLER_RING) && line.contains(tier);
            let smaller = lines.iter().position(|line| is_smaller(line));
            smaller.map(|at| lines.remove(at));
        }
    }
    assert!(lines.is_empty(), "said besides: {lines:#?}");
}

fn serve(engine: &Engine, store: bool) {
    let keys: Vec<_> = (0..12).map(key).collect();
    for key in keys.iter().filter(|_| store) {
        let mut payload = vec![0; PAYLOAD_BYTES];
        fill(key.digest(), &mut payload);
        assert_eq!(engine.store(key, &payload), Stored::Staged);
        assert!(engine.flush(SOON).drained);
    }
    let lease = engine.lookup(&keys);
    assert_eq!(lease.prefix_hits(), keys.len());
    let mut buffers = vec![vec![0; PAYLOAD_BYTES]; keys.len()];
    let mut wants: Vec<_> =
        keys.iter().zip(&mut buffers).map(|(key, dest)| Want::new(key, dest)).collect();
    let report = engine.load(&lease, &mut wants);
    assert_eq!(report.hits(), keys.len() as u64, "{report:?}");
    assert!(wants.iter().all(|want| wrong_bytes(want.key.digest(), want.dest) == 0));
}
