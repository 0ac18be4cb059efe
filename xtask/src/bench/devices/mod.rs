//! `cargo xtask bench retrieval --devices`: the engine on two real block devices of known speed.
//!
//! Here is what takes root: files, loop devices, file systems, a cgroup that throttles. The steps are read, checked and
//! timed by `kvbraid bench retrieval`.

pub(super) mod host;
pub(super) mod setup;
pub(super) mod signals;
mod table;
pub(super) mod throttle;
mod verdict;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, ExitStatus},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use self::{
    host::{Host, Missing},
    setup::Setup,
    signals::Signals,
};
use super::{directory, write};
use crate::run;

pub(super) const LIMITS_MBPS: [u32; 2] = [300, 100];
const SCENARIOS: [&str; 6] =
    ["two_tiers", "colocated", "changing_limit", "writes_queued", "four_ranks", "one_device"];
/// How often the measuring process and the signals are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Steps' bytes that lie on a device: two stores, what is written beside, and some.
const STEPS_ON_A_DEVICE: f64 = 6.0;
const BYTES_PER_S: f64 = 400e6;

/// Options of benches on devices.
#[derive(clap::Args)]
pub(super) struct Options {
    /// With --devices: only this scenario (two_tiers, colocated, changing_limit, writes_queued, four_ranks, one_device);
    /// of lmcache: throttled or unthrottled; give it once for each.
    #[arg(long = "scenario", value_name = "NAME", requires = "name")]
    pub(super) scenarios: Vec<String>,
    /// On devices: short steps and few repetitions, to see that all works.
    #[arg(long, requires = "name")]
    pub(super) quick: bool,
    /// With --devices: reads in flight on each device.
    #[arg(long, value_name = "N", requires = "devices", value_parser = clap::value_parser!(u32).range(1..=1024))]
    window: Option<u32>,
    /// On devices: repetitions of everything that is compared.
    #[arg(long, value_name = "N", requires = "name", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) reps: Option<u32>,
    /// On devices: how long a step takes at the limits, about.
    #[arg(long, value_name = "S", requires = "name", value_parser = seconds)]
    seconds: Option<f64>,
    /// Of lmcache, hicache and vllm: only this back end; give it once for each.
    #[arg(long = "backend", value_name = "NAME", requires = "name")]
    pub(super) backends: Vec<String>,
    /// Of lmcache, hicache, vllm and staging: where else the results go.
    #[arg(long, value_name = "FILE", requires = "name")]
    pub(super) json: Option<PathBuf>,
}

/// Devices are made for steps of that length.
fn seconds(text: &str) -> Result<f64, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.2..=60.0).contains(seconds));
    seconds.ok_or_else(|| "give 0.2 to 60".to_owned())
}

impl Options {
    /// Those of `all` that are asked for, in their order; all if none is named.
    ///
    /// # Errors
    /// A name that is none of them.
    pub(super) fn chosen_backends(&self, all: &[&'static str]) -> Result<Vec<&'static str>> {
        for name in &self.backends {
            ensure!(all.contains(&name.as_str()), "--backend {name}: there are {all:?}");
        }
        let is_chosen =
            |name: &&str| self.backends.is_empty() || self.backends.iter().any(|it| it == name);
        Ok(all.iter().copied().filter(is_chosen).collect())
    }

    fn reps(&self) -> u32 {
        self.reps.unwrap_or(if self.quick { 2 } else { 5 })
    }

    pub(super) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 1.5 } else { 5.0 })
    }

    pub(super) fn wants(&self, scenario: &str) -> bool {
        self.scenarios.is_empty() || self.scenarios.iter().any(|wanted| wanted == scenario)
    }
}

/// Measures, writes `retrieval-devices.json`, prints the table; where the machine cannot, says why and does nothing.
pub(super) fn bench(options: &Options) -> Result<()> {
    for name in &options.scenarios {
        ensure!(SCENARIOS.contains(&name.as_str()), "--scenario {name}: there are {SCENARIOS:?}");
    }
    let home = directory().join("devices");
    let host = match Host::look() {
        Ok(host) => host,
        Err(Missing(why)) => return skip(&why),
    };
    let program = build()?;
    let fio = if options.wants("one_device") { host::fio() } else { None };
    // Before any thread or child exists: they inherit which signals are blocked.
    let signals = Signals::listen()?;
    let setup = match Setup::new(&home, &host, [device_bytes(options.seconds()); 2]) {
        Ok(setup) => setup,
        Err(error) if error.is::<Missing>() => return skip(&format!("{error:#}")),
        Err(error) => return Err(error),
    };
    let json = home.join("raw.json");
    let mut command = Command::new(program);
    command.args(arguments(options, &setup, fio.as_deref(), &json));
    // What an earlier run left is not this one's.
    let _ = fs::remove_file(&json);
    let status = wait(&mut command, &signals)?;
    let text = fs::read_to_string(&json);
    drop(setup);
    ensure!(!signals.arrived(), "stopped by a signal");
    // Where one scenario failed, the others' figures stand.
    ensure!(text.is_ok() || !status.success(), "kvbraid bench retrieval wrote nothing");
    if let Ok(text) = text {
        show(&serde_json::from_str(&text).with_context(|| format!("parse {}", json.display()))?)?;
    }
    ensure!(status.success(), "kvbraid bench retrieval ended with {status}");
    Ok(())
}

fn device_bytes(seconds: f64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "not negative, and far below 2^53")]
    let bytes = (seconds * BYTES_PER_S * STEPS_ON_A_DEVICE).max(0.0) as u64;
    bytes + (1 << 30)
}

fn show(value: &Value) -> Result<()> {
    write("retrieval-devices", value.clone())?;
    print!("{}", table::draw(value));
    print!("{}", verdict::draw(value));
    println!("\nEvery repetition is in {}", directory().join("retrieval-devices.json").display());
    Ok(())
}

fn skip(why: &str) -> Result<()> {
    println!("SKIP retrieval --devices: {why}");
    // What an earlier run measured must not be read as this one's; who may not write there has none.
    let skipped = json!([{"scenario": "all", "why": why}]);
    let _ =
        write("retrieval-devices", json!({"results": [], "skipped": skipped, "parameters": {}}));
    Ok(())
}

fn build() -> Result<PathBuf> {
    let mut command = run::cargo();
    command.args([
        "build",
        "--release",
        "--locked",
        "--package",
        "kv-connector",
        "--bin",
        "kvbraid",
    ]);
    let finished = run::logged("build kvbraid", &mut command)?;
    ensure!(finished.success, "kvbraid does not build");
    let target =
        env::var_os("CARGO_TARGET_DIR").map_or_else(|| PathBuf::from("target"), PathBuf::from);
    Ok(run::root().join(target).join("release/kvbraid"))
}

fn arguments(options: &Options, setup: &Setup, fio: Option<&Path>, json: &Path) -> Vec<String> {
    let mut arguments: Vec<String> = vec!["bench".to_owned(), "retrieval".to_owned()];
    let mut push = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    push("--cgroup", setup.cgroup().display().to_string());
    for (device, mbps) in setup.devices().iter().zip(LIMITS_MBPS) {
        let (name, path, number) = (&device.name, device.mount.display(), &device.number);
        push("--device", format!("{name}={path},{number},{mbps}"));
    }
    for scenario in &options.scenarios {
        push("--scenario", scenario.clone());
    }
    push("--reps", options.reps().to_string());
    push("--seconds", options.seconds().to_string());
    if let Some(window) = options.window {
        push("--window", window.to_string());
    }
    if let Some(fio) = fio {
        push("--fio", fio.display().to_string());
    }
    push("--json", json.display().to_string());
    arguments.push("--with-parent".to_owned());
    arguments
}

/// Waits for the command; a signal ends it, gently at first.
pub(super) fn wait(command: &mut Command, signals: &Signals) -> Result<ExitStatus> {
    let mut child = command.spawn().with_context(|| format!("run {command:?}"))?;
    let mut told = false;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if signals.arrived() && !told {
            signals::terminate(child.id());
            told = true;
        }
        if signals.arrived_again() {
            child.kill()?;
        }
        thread::sleep(LOOK);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_step_that_no_device_could_be_made_for_is_refused_before_any_is() {
        for text in ["nan", "inf", "-1", "0", "61", "1e300", "five", ""] {
            assert!(super::seconds(text).is_err(), "{text}");
        }
        assert_eq!(super::seconds("1.5"), Ok(1.5));
    }
}
