//! Staging policies compared: `model` in virtual time over modelled devices, `real` on a throttled file.
//!
//! One queue and one modelled accelerator, with `kv-staging`'s controller, policies and estimators between them and the
//! device. `cargo xtask bench staging` runs it.

#![expect(clippy::print_stdout, reason = "a command-line tool speaks on standard output")]

mod child;
mod device;
mod flash;
mod gpu;
mod lmcache;
mod model;
mod policies;
mod real;
mod rows;
mod serve;
mod statistics;
mod table;
mod workload;

use std::{env, error::Error, fs};

use serde_json::{Value, json};

const USAGE: &str = "usage: staging model [--seeds N] [--json PATH]\n       \
    staging real --file PATH --memory-cgroup DIR --io-cgroup DIR --rate-mib-s N [--reps N] [--json PATH]\n       \
    \x20       [--lmcache PYTHON --script PATH --log PATH | --skipped WHY]";

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    match arguments.first().map(String::as_str) {
        Some("model") => model(&arguments[1..]),
        Some("real") => real::parent(&arguments[1..]),
        Some("one") => child::one(&arguments[1..]),
        Some("peer") => child::peer(&arguments[1..]),
        _ => Err(USAGE.into()),
    }
}

/// The value behind `name`.
fn option<'a>(arguments: &'a [String], name: &str) -> Result<Option<&'a str>, Box<dyn Error>> {
    let Some(at) = arguments.iter().position(|argument| argument == name) else { return Ok(None) };
    Ok(Some(arguments.get(at + 1).ok_or_else(|| format!("{name} lacks its value; {USAGE}"))?))
}

fn model(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let seeds = option(arguments, "--seeds")?.map_or(Ok(10), str::parse)?;
    if seeds == 0 {
        return Err("--seeds: give at least 1".into());
    }
    let rows = model::study(seeds);
    let compared = rows::compare(&rows);
    println!("SIMULATED: modelled accelerator and devices, in virtual time");
    print!("{}{}{}", table::draw(&compared), table::fronts(&compared), table::aims(&compared));
    let margins = rows::margins(&rows);
    print!("{}", table::margins(&margins));
    let value = json!({
        "simulated": true,
        "parameters": {"first_seed": model::FIRST_SEED, "chosen_on_seeds": [1000, 1029]},
        "results": compared.iter().map(rows::Compared::json).collect::<Vec<Value>>(),
        "margins": margins,
    });
    if let Some(path) = option(arguments, "--json")? {
        fs::write(path, serde_json::to_string_pretty(&value)? + "\n")
            .map_err(|error| format!("write {path}: {error}"))?;
    }
    Ok(())
}
