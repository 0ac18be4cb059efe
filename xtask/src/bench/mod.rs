//! `cargo xtask bench`: every bench that exists, briefly; JSON first, then one table drawn from it.

mod criterion;
mod devices;
mod lmcache;
mod machine;
mod retrieval;
mod staging;
mod vllm;
mod worker;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::{metadata, run};

/// Arguments of `cargo xtask bench`.
#[derive(clap::Args)]
pub(crate) struct Bench {
    /// Only benches of this name or crate; `demo` is the whole engine on a real trace, `lmcache` a real LMCache over ours
    /// and over its own back ends, `hicache` the same of SGLang's HiCache, `vllm` a whole vLLM over all of them.
    name: Option<String>,
    /// For `retrieval` and `staging`: over modelled devices, in virtual time.
    #[arg(long, requires = "name")]
    model: bool,
    /// For `retrieval`: over two throttled block devices that are made for it; takes root.
    #[arg(long, requires = "name", conflicts_with = "model")]
    devices: bool,
    #[command(flatten)]
    options: devices::Options,
    #[command(flatten)]
    staging: staging::Options,
}

/// One line of the summary.
struct Line {
    bench: String,
    what: String,
    figure: String,
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        if self.devices {
            ensure!(self.name.as_deref() == Some("retrieval"), "--devices: only of retrieval");
            return devices::bench(&self.options);
        }
        let json = self.options.json.as_deref();
        if self.name.as_deref() == Some("staging") {
            ensure!(self.model || self.staging.real, "staging: say which one, --model or --real");
            return match self.model {
                true => staging::model(&self.staging, json),
                false => staging::real(&self.options),
            };
        }
        ensure!(!self.staging.real, "--real: only of staging");
        if self.name.as_deref() == Some("vllm") {
            ensure!(!self.model, "--model: only of retrieval");
            return vllm::bench(&self.options);
        }
        let subject = match self.name.as_deref() {
            Some("lmcache") => Some(lmcache::Subject::Lmcache),
            Some("hicache") => Some(lmcache::Subject::Hicache),
            _ => None,
        };
        if let Some(subject) = subject {
            ensure!(!self.model, "--model: only of retrieval");
            return lmcache::bench(subject, &self.options);
        }
        let wants = |names: [&str; 2]| {
            self.name.as_ref().is_none_or(|wanted| names.contains(&wanted.as_str()))
        };
        let mut lines = Vec::new();
        for package in metadata::packages()? {
            for bench in &package.benches {
                if wants([bench, &package.name]) {
                    println!("== {} {bench}", package.name);
                    let results = criterion::run(&package.name, bench)?;
                    lines.extend(results.iter().map(|result| criterion_line(bench, result)));
                    write(bench, json!({"crate": package.name, "results": results}))?;
                }
            }
        }
        if wants(["demo", "kv-connector"]) {
            println!("== demo");
            lines.extend(demo()?);
        }
        if self.name.as_deref() == Some("retrieval") {
            ensure!(self.model, "retrieval: say which one, --model or --devices");
            println!("== retrieval --model");
            lines.extend(retrieval::model()?);
        }
        ensure!(!lines.is_empty(), "no bench has that name");
        println!("\n{:<16} {:<52} {:>24}", "bench", "what", "figure");
        for line in &lines {
            println!("{:<16} {:<52} {:>24}", line.bench, line.what, line.figure);
        }
        println!("\nEvery repetition is in {}", directory().display());
        Ok(())
    }
}

fn directory() -> PathBuf {
    run::root().join("target/bench")
}

/// Writes `target/bench/<name>.json`: the results, and what they were measured on.
fn write(name: &str, mut value: Value) -> Result<()> {
    value["bench"] = json!(name);
    value["machine"] = machine::describe();
    value["commit"] = json!(machine::commit());
    if value["parameters"].is_null() {
        value["parameters"] = criterion::parameters();
    }
    let path = directory().join(format!("{name}.json"));
    fs::create_dir_all(directory()).with_context(|| format!("create {}", directory().display()))?;
    fs::write(&path, serde_json::to_string_pretty(&value)? + "\n")
        .with_context(|| format!("write {}", path.display()))
}

/// [`write()`], and a copy of it if asked.
fn save(name: &str, value: Value, copy: Option<&Path>) -> Result<()> {
    write(name, value)?;
    if let Some(copy) = copy {
        let from = directory().join(format!("{name}.json"));
        fs::copy(&from, copy).with_context(|| format!("write {}", copy.display()))?;
    }
    Ok(())
}

/// Says why nothing was measured, also where results go: what an earlier run measured must not be read as this one's.
fn save_skip(name: &str, why: &str, copy: Option<&Path>) -> Result<()> {
    println!("SKIP bench {name}: {why}");
    save(name, json!({"results": [], "device_mbps": [], "skipped": why, "parameters": {}}), copy)
}

fn criterion_line(bench: &str, result: &Value) -> Line {
    let number = |key: &str| result[key].as_f64().unwrap_or(f64::NAN);
    Line {
        bench: bench.to_owned(),
        what: result["id"].as_str().unwrap_or_default().to_owned(),
        figure: format!("{} +- {}", nanoseconds(number("ns_mean")), nanoseconds(number("ns_se"))),
    }
}

fn nanoseconds(ns: f64) -> String {
    match ns {
        _ if ns < 1e3 => format!("{ns:.1} ns"),
        _ if ns < 1e6 => format!("{:.2} us", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}

/// The demo as an end-to-end bench; it writes its own JSON.
fn demo() -> Result<Vec<Line>> {
    let path = directory().join("demo.json");
    fs::create_dir_all(directory()).with_context(|| format!("create {}", directory().display()))?;
    crate::demo::Demo::with(vec!["--json".to_owned(), path.display().to_string()]).run()?;
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    let rows = value["rows"].as_array().context("demo.json has no rows")?;
    Ok(rows
        .iter()
        .map(|row| Line {
            bench: "demo".to_owned(),
            what: format!("retrieval, {}", row["policy"].as_str().unwrap_or("?")),
            figure: format!("{:.2} s", row["retrieval_s"].as_f64().unwrap_or(f64::NAN)),
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::nanoseconds;

    #[test]
    fn times_are_printed_in_the_unit_that_fits() {
        assert_eq!([12.34, 1234.0, 12.34e6].map(nanoseconds), ["12.3 ns", "1.23 us", "12.34 ms"]);
    }
}
