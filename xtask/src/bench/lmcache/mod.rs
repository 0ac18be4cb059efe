//! `cargo xtask bench lmcache`: ours and LMCache's own back ends through a real LMCache, side by side in one run.
//!
//! Two devices of known speed are made and throttled; every back end gets a process of its own with LMCache's own
//! storage manager in it (`data/lmcache/`), and they take turns. Every byte that comes back is compared with what its
//! key says, and the devices' counters say whether it came from a device.

pub(super) mod alone;
mod backends;
pub(super) mod rows;
mod study;
mod table;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, anyhow, ensure};
use serde_json::{Value, json};

use self::{
    backends::{CHUNK_BYTES, MOONCAKE},
    study::{Found, Study, step_chunks},
};
use super::{
    devices::{
        LIMITS_MBPS, Options,
        host::{Host, Missing},
        setup::Setup,
        signals::Signals,
        throttle::Throttle,
    },
    directory, save, save_skip,
    worker::Place,
};
use crate::{
    engines::{self, Absent},
    run,
    wheel::quiet,
};

/// What LMCache's raw block store needs, and does not bring.
const RAW_BLOCK: &str = "lmcache_rust_raw_block_io==0.5.7rc2";
pub(super) const SCENARIOS: [&str; 2] = ["throttled", "unthrottled"];
/// The bare disk is a second scenario, not the judged one.
const BARE_REPS_MAX: u32 = 2;

/// Whose storage back ends are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Subject {
    Lmcache,
    Hicache,
}

impl Subject {
    fn name(self) -> &'static str {
        match self {
            Self::Lmcache => "lmcache",
            Self::Hicache => "hicache",
        }
    }

    fn backends(self) -> &'static [&'static str] {
        match self {
            Self::Lmcache => &backends::LMCACHE,
            Self::Hicache => &backends::HICACHE,
        }
    }
}

/// Measures, writes `lmcache.json` or `hicache.json`, prints tables and aims; where the machine cannot, says why and
/// does nothing.
pub(super) fn bench(subject: Subject, options: &Options) -> Result<()> {
    let mut wanted = options.chosen_backends(subject.backends())?;
    for name in &options.scenarios {
        ensure!(SCENARIOS.contains(&name.as_str()), "--scenario {name}: there are {SCENARIOS:?}");
    }
    let skip = |why: &str| save_skip(subject.name(), why, options.json.as_deref());
    let host = match Host::look() {
        Ok(host) => host,
        Err(Missing(why)) => return skip(&why),
    };
    let venv = match engines::with_wheel()? {
        Ok(venv) => venv,
        Err(Absent(why)) => return skip(&why),
    };
    let home = directory().join("lmcache");
    let (mut places, mut skipped) = (Vec::new(), Vec::new());
    if subject == Subject::Hicache {
        match engines::sglang() {
            Ok(place) => places.push(place),
            Err(Absent(why)) => return skip(&why),
        }
    }
    wanted.retain(|name| match packages(name, &venv, &home) {
        Ok(found) => {
            places.extend(found);
            true
        }
        Err(error) => {
            skipped.push(json!({"backend": name, "why": format!("{error:#}")}));
            false
        }
    });
    // Before any thread or child exists: they inherit which signals are blocked.
    let signals = Signals::listen()?;
    let seconds = options.seconds();
    let setup = match Setup::new(&home, &host, device_bytes(seconds, &wanted)) {
        Ok(setup) => setup,
        Err(error) if error.is::<Missing>() => return skip(&format!("{error:#}")),
        Err(error) => return Err(error),
    };
    let logs = run::root().join("target/xtask");
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    let study = Study {
        place: Place {
            bench: "lmcache",
            variables: &[],
            python: venv.join("bin/python"),
            script: run::root().join("xtask/data/lmcache/worker.py"),
            packages: env::join_paths(places)?,
            bytecode: &home.join("bytecode"),
            logs: &logs,
            cgroup: setup.cgroup(),
            signals: &signals,
        },
        throttle: Throttle::new(setup.cgroup()),
        devices: setup.devices(),
        limits_mbps: LIMITS_MBPS,
        subject,
        backends: wanted,
        seconds,
    };
    let measured = measure(&study, options)?;
    ensure!(!signals.arrived(), "stopped by a signal");
    show(subject, options, &measured, &skipped)
}

/// Everything that was measured, and what could not be.
struct Measured {
    throttled: Found,
    bare: Found,
    overhead: Option<Value>,
    failed: Vec<Value>,
}

fn measure<'a>(study: &'a Study<'a>, options: &Options) -> Result<Measured> {
    let mut failed = Vec::new();
    let reps = options.reps.unwrap_or(if options.quick { 2 } else { 7 });
    let (mut throttled, mut bare) = (Found::default(), Found::default());
    study.limit(true)?;
    let mut runners = study.open(&mut failed)?;
    if options.wants(SCENARIOS[0]) {
        throttled = study.throttled(&mut runners, reps)?;
    }
    study.limit(false)?;
    if options.wants(SCENARIOS[1]) {
        bare = study.bare(&mut runners, reps.min(BARE_REPS_MAX))?;
    }
    let overhead = study.overhead(&mut runners);
    let overhead = overhead.unwrap_or_else(|error| {
        failed.push(
            json!({"backend": "kvbraid", "scenario": "overhead", "why": format!("{error:#}")}),
        );
        None
    });
    for (found, scenario) in [(&mut throttled, SCENARIOS[0]), (&mut bare, SCENARIOS[1])] {
        for mut it in found.failed.drain(..) {
            it["scenario"] = json!(scenario);
            failed.push(it);
        }
    }
    Ok(Measured { throttled, bare, overhead, failed })
}

fn show(subject: Subject, options: &Options, measured: &Measured, skipped: &[Value]) -> Result<()> {
    let Measured { throttled, bare, overhead, failed } = measured;
    let rows = |found: &Found| found.rows.iter().map(rows::Row::to_json).collect::<Vec<_>>();
    let verdicts = table::verdicts(&throttled.rows, &throttled.device_mbps);
    let aims: Vec<Value> =
        verdicts.iter().map(|(met, what)| json!({"met": met, "what": what})).collect();
    let document = json!({
        "results": rows(throttled),
        "device_mbps": throttled.device_mbps,
        "unthrottled": rows(bare),
        "overhead": overhead,
        "failed": failed,
        "skipped": skipped,
        "aims": aims,
        "parameters": {
            "chunk_bytes": CHUNK_BYTES, "requests": backends::REQUESTS, "seconds": options.seconds(),
            "limits_mbps": LIMITS_MBPS,
        },
    });
    save(subject.name(), document, options.json.as_deref())?;
    let [fast, slow] = LIMITS_MBPS;
    let title = format!("devices limited to {fast} and {slow} MB/s");
    print!("{}", table::draw(&title, &throttled.rows));
    print!("{}", table::draw("the bare disk under both devices", &bare.rows));
    let rates: Vec<_> = throttled.device_mbps.iter().map(|it| format!("{it:.1} MB/s")).collect();
    println!("\nalone, the devices gave {}", rates.join(" and "));
    print!("{}", overhead.as_ref().map(table::overhead).unwrap_or_default());
    for (what, list) in [("FAILED", &failed[..]), ("SKIP", skipped)] {
        for it in list {
            let text = |key: &str| it[key].as_str().unwrap_or_default();
            println!("{what} {} {}: {}", text("backend"), text("scenario"), text("why"));
        }
    }
    println!("{} failed, {} skipped", failed.len(), skipped.len());
    for (met, what) in verdicts {
        println!("{:<6} {what}", if met { "met" } else { "MISSED" });
    }
    println!(
        "\nEvery repetition is in {}",
        directory().join(subject.name()).with_extension("json").display()
    );
    Ok(())
}

/// Where packages are that a back end needs and the environment of the engines lacks.
///
/// # Errors
/// If this machine cannot have them, or not what they need: then the back end is skipped.
fn packages(name: &str, venv: &Path, home: &Path) -> Result<Option<PathBuf>> {
    match name {
        "raw_block" => raw_block(venv, &home.join("packages")).context(RAW_BLOCK).map(Some),
        MOONCAKE => mooncake(venv).map(Some),
        _ => Ok(None),
    }
}

fn raw_block(venv: &Path, packages: &Path) -> Result<PathBuf> {
    if !packages.join("lmcache_rust_raw_block_io").exists() {
        let mut pip = Command::new(venv.join("bin/pip"));
        pip.args(["install", "--quiet", "--no-deps", "--target"]).arg(packages).arg(RAW_BLOCK);
        quiet(&mut pip)?;
    }
    Ok(packages.to_owned())
}

fn mooncake(venv: &Path) -> Result<PathBuf> {
    let place = engines::mooncake().map_err(|Absent(why)| anyhow!(why))?;
    // Run as a program it says what it lacks.
    let mut python = Command::new(venv.join("bin/python"));
    python.arg(run::root().join("xtask/data/lmcache/mooncake_master.py"));
    quiet(python.env("PYTHONPATH", &place))?;
    Ok(place)
}

/// Ours on both; on the fast one what the others store and what is read alone; and some room.
fn device_bytes(seconds: f64, wanted: &[&str]) -> [u64; 2] {
    let bytes = |mbps: u32| step_chunks(mbps, seconds) * CHUNK_BYTES;
    let [fast, slow] = LIMITS_MBPS;
    let ours = bytes(fast + slow) * 6 / 5;
    [
        ours + (backends::stores(wanted) + 1) * bytes(fast) + bytes(fast) / 5 + (1 << 30),
        ours + bytes(fast) + 2 * bytes(slow) + (1 << 29),
    ]
}
