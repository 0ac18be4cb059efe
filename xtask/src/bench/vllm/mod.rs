//! `cargo xtask bench vllm`: requests through a whole vLLM on the processor, over ours and over what others have.
//!
//! Two devices of known speed are made and throttled. Every back end gets a vLLM of its own (`data/vllm/`), all are asked
//! the same at the same pace, and they take turns. Requests arrive whether or not earlier ones are done; time to first
//! token counts from then.

mod backends;
mod rows;
mod study;
mod table;

use std::{env, fs};

use anyhow::{Context, Result, ensure};
use serde_json::json;

use self::{
    backends::{ALL, CHUNK_BYTES, Load, TOKEN_BYTES},
    study::{Found, Study},
};
use super::{
    devices::{
        Options,
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
};

/// So slow, since the processor that stands in for an accelerator is: reading a prefix takes longer than computing what
/// follows it, and less than computing it again.
const LIMITS_MBPS: [u32; 2] = [120, 40];
/// One thread computes, as an accelerator would beside the processor; the other core is for what storage costs.
const VARIABLES: [(&str, &str); 3] = [
    ("OMP_NUM_THREADS", "1"),
    ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
    ("VLLM_LOGGING_LEVEL", "WARNING"),
];
/// Parts of the rate at which recomputing is busy all the time.
const RATES: [f64; 3] = [0.5, 0.8, 1.0];
/// Coefficients of variation of the pauses between requests.
const CVS: [f64; 2] = [1.0, 4.0];
/// Chunks that a request leaves at most, on average.
const NEW_CHUNKS: u64 = 7;
/// Chunks that are stored before, for each request; later ones have less that is new.
const OLD_CHUNKS: u64 = 6;
/// With five engines and two servers.
const MEMORY_GIB: f64 = 9.0;

/// What is measured.
struct Plan {
    load: Load,
    rates: &'static [f64],
    cvs: &'static [f64],
    reps: u32,
}

impl Plan {
    fn new(options: &Options) -> Self {
        let (before, requests) = if options.quick { (60, 16) } else { (200, 60) };
        let (rates, cvs) =
            if options.quick { (&RATES[1..2], &CVS[..1]) } else { (&RATES[..], &CVS[..]) };
        let reps = options.reps.unwrap_or(1);
        // Two more: all at once, and one by one.
        let cells = u64::from(reps) * (rates.len() * cvs.len()) as u64 + 2;
        let chunks = u64::from(before) * OLD_CHUNKS + u64::from(requests) * NEW_CHUNKS * cells;
        let capacity = chunks * (CHUNK_BYTES + 8192) * 5 / 4 + (256 << 20);
        Self { load: Load { before, requests, capacity }, rates, cvs, reps }
    }

    /// Two of ours on each, two of the others on the fast one: they lose after each cell what was new in it.
    fn device_bytes(&self) -> [u64; 2] {
        let ours = 2 * self.load.capacity + (512 << 20);
        let others =
            u64::from(self.load.before) * OLD_CHUNKS + u64::from(self.load.requests) * NEW_CHUNKS;
        [ours + 3 * others * CHUNK_BYTES, ours]
    }
}

/// Measures, writes `vllm.json`, prints the table; where the machine cannot, says why and does nothing.
pub(super) fn bench(options: &Options) -> Result<()> {
    let backends = options.chosen_backends(&ALL)?;
    ensure!(options.scenarios.is_empty(), "--scenario: vllm has none");
    let host = match Host::look() {
        Ok(host) => host,
        Err(Missing(why)) => return skip(options, &why),
    };
    if let Some(why) = lacks_memory(&fs::read_to_string("/proc/meminfo").unwrap_or_default()) {
        return skip(options, &why);
    }
    let venv = match engines::with_wheel()? {
        Ok(venv) => venv,
        Err(Absent(why)) => return skip(options, &why),
    };
    let plan = Plan::new(options);
    let home = directory().join("vllm");
    // Before any thread or child exists: they inherit which signals are blocked.
    let signals = Signals::listen()?;
    let setup = match Setup::new(&home, &host, plan.device_bytes()) {
        Ok(setup) => setup,
        Err(error) if error.is::<Missing>() => return skip(options, &format!("{error:#}")),
        Err(error) => return Err(error),
    };
    let (root, logs) = (run::root(), run::root().join("target/xtask"));
    fs::create_dir_all(&logs).with_context(|| format!("create {}", logs.display()))?;
    let modules = [root.join("xtask/data/lmcache"), root.join("kv-connector/python/tests")];
    let study = Study {
        place: Place {
            bench: "vllm",
            variables: &VARIABLES,
            python: venv.join("bin/python"),
            script: root.join("xtask/data/vllm/worker.py"),
            packages: env::join_paths(modules)?,
            bytecode: &home.join("bytecode"),
            logs: &logs,
            cgroup: setup.cgroup(),
            signals: &signals,
        },
        throttle: Throttle::new(setup.cgroup()),
        devices: setup.devices(),
        limits_mbps: LIMITS_MBPS,
        home: &home,
        trace: &root.join("xtask/data/mooncake_conversation_slice.jsonl.gz"),
        backends,
        plan: &plan,
    };
    let found = study.run()?;
    show(options, &plan, &found)
}

fn show(options: &Options, plan: &Plan, found: &Found) -> Result<()> {
    let aims = table::aims(&found.rows);
    let document = json!({
        "results": found.rows.iter().map(rows::Row::to_json).collect::<Vec<_>>(),
        "device_mbps": found.device_mbps,
        "retrieval_share": found.shares.get("fs"),
        "retrieval_shares": found.shares,
        "alone": found.alone,
        "recompute_requests_per_s": found.capacity_per_s,
        "failed": found.failed,
        "not_ahead": aims.iter().filter(|(met, _)| !met).map(|(_, what)| what).collect::<Vec<_>>(),
        "parameters": {
            "limits_mbps": LIMITS_MBPS, "rates": plan.rates, "cvs": plan.cvs,
            "requests": plan.load.requests, "requests_before": plan.load.before,
            "token_bytes": TOKEN_BYTES, "chunk_bytes": CHUNK_BYTES,
            "load": machine_load(),
        },
    });
    save("vllm", document, options.json.as_deref())?;
    print!("{}", table::draw(found));
    for it in &found.failed {
        let text = |key: &str| it[key].as_str().unwrap_or_default();
        println!("FAILED {} {}: {}", text("backend"), text("cell"), text("why"));
    }
    for (met, what) in aims {
        println!("{:<9} {what}", if met { "ahead" } else { "NOT AHEAD" });
    }
    println!("\nEvery repetition is in {}", directory().join("vllm.json").display());
    Ok(())
}

fn machine_load() -> String {
    fs::read_to_string("/proc/loadavg").unwrap_or_default().trim().to_owned()
}

fn skip(options: &Options, why: &str) -> Result<()> {
    save_skip("vllm", why, options.json.as_deref())
}

/// Why there is too little of it.
fn lacks_memory(meminfo: &str) -> Option<String> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    let gib = kib / f64::from(1 << 20);
    (gib < MEMORY_GIB)
        .then(|| format!("{gib:.1} GiB of memory are free, {MEMORY_GIB} GiB are needed"))
}

#[cfg(test)]
mod tests {
    use super::lacks_memory;

    #[test]
    fn a_small_machine_is_told_what_is_needed() {
        let why = lacks_memory("MemTotal: 9 kB\nMemAvailable:    4194304 kB\n").unwrap_or_default();
        assert!(why.contains("4.0 GiB of memory are free"), "{why}");
        assert_eq!(lacks_memory("MemAvailable:   33554432 kB\n"), None);
        assert_eq!(lacks_memory(""), None);
    }
}
