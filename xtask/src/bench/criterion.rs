//! Running a criterion bench briefly, and reading back the files that it leaves.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::run;

const WARM_UP_SECONDS: &str = "0.5";
const MEASURE_SECONDS: &str = "2";

/// How long each bench warms up and measures.
pub(crate) fn parameters() -> Value {
    json!({"warm_up_s": WARM_UP_SECONDS, "measurement_s": MEASURE_SECONDS})
}

/// Runs one bench target and gives one object for each benchmark in it: its id, mean, standard error and median in
/// nanoseconds, and every sample.
///
/// # Errors
/// If the bench fails or leaves nothing.
pub(crate) fn run(package: &str, bench: &str) -> Result<Vec<Value>> {
    let home = run::root().join("target/bench/criterion").join(bench);
    if home.exists() {
        // What an earlier version of the bench measured must not be read as this one's.
        fs::remove_dir_all(&home).with_context(|| format!("remove {}", home.display()))?;
    }
    let finished = run::logged(
        &format!("bench {bench}"),
        run::cargo()
            .args(["bench", "--locked", "--package", package, "--bench", bench, "--", "--noplot"])
            .args(["--warm-up-time", WARM_UP_SECONDS, "--measurement-time", MEASURE_SECONDS])
            .env("CRITERION_HOME", &home),
    )?;
    ensure!(finished.success, "bench {bench} of {package} failed");
    let results = read(&home)?;
    ensure!(!results.is_empty(), "bench {bench} of {package} left no result in {}", home.display());
    Ok(results)
}

fn read(home: &Path) -> Result<Vec<Value>> {
    let mut directories = Vec::new();
    find(home, &mut directories)?;
    directories.sort();
    directories.iter().map(|directory| one(directory)).collect()
}

/// Collects the directories named `new`, each the latest run of one benchmark.
fn find(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory).with_context(|| format!("list {}", directory.display()))? {
        let path = entry?.path();
        if path.is_dir() && path.join("estimates.json").exists() && path.ends_with("new") {
            found.push(path);
        } else if path.is_dir() {
            find(&path, found)?;
        }
    }
    Ok(())
}

fn one(directory: &Path) -> Result<Value> {
    let load = |name: &str| -> Result<Value> {
        let path = directory.join(name);
        let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))
    };
    let (about, estimates, sample) =
        (load("benchmark.json")?, load("estimates.json")?, load("sample.json")?);
    let numbers = |key: &str| -> Vec<f64> {
        sample[key]
            .as_array()
            .map(|values| values.iter().filter_map(Value::as_f64).collect())
            .unwrap_or_default()
    };
    let samples: Vec<f64> =
        numbers("times").iter().zip(numbers("iters")).map(|(time, runs)| time / runs).collect();
    Ok(json!({
        "id": about["full_id"],
        "throughput": about["throughput"],
        "ns_mean": estimates["mean"]["point_estimate"],
        "ns_se": estimates["mean"]["standard_error"],
        "ns_median": estimates["median"]["point_estimate"],
        "ns_samples": samples,
    }))
}
