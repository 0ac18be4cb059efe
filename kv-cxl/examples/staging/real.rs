//! On a throttled file in a memory cgroup: all policies, and LMCache's own adapter for Device-DAX.

use std::{
    error::Error,
    fs::{self, File},
    io::Write as _,
    path::Path,
};

use kv_staging::Reservation;
use serde_json::{Value, json};

use crate::{
    child::{Place, Seen},
    flash::word,
    lmcache::Lmcache,
    option,
    policies::{ALL, Kind},
    rows::{Compared, Row, compare},
    table,
    workload::{GIB, Setting, Workload},
};

const MIB: u64 = 1 << 20;
const OBJECT_MIB: u64 = 16;
const OBJECTS: usize = 48;
const BUDGET_MIB: u64 = 256;
pub(crate) const BUDGET_BYTES: u64 = BUDGET_MIB * MIB;
/// The row that is not a policy of ours.
const PEER: &str = "lmcache_dax";
/// Above the rate at which the modelled accelerator can serve: a queue builds up.
const UTILISATION: f64 = 1.2;
/// Requests that are there from the beginning.
const QUEUED: usize = 10;
const FIRST_SEED: u64 = 3000;

pub(crate) fn setting(rate_mib_s: f64) -> Setting {
    let object_gib = OBJECT_MIB as f64 / 1024.0;
    Setting {
        budget_gib: BUDGET_MIB as f64 / 1024.0,
        staging_gib_s: rate_mib_s / 1024.0,
        staging_sigma: 0.0,
        // From memory, checked on the way.
        retrieval_gib_s: 2.0,
        slots: 4,
        objects: OBJECTS,
        object_gib,
        object_sigma: 0.0,
        prefill_s: 0.01,
        iteration_s: 0.004,
        iteration_s_per_request: 0.001,
        output_tokens: 110.0,
        output_sigma: 0.25,
        requests: 40,
    }
}

pub(crate) fn workload(setting: &Setting, seed: u64) -> Workload {
    let per_s = UTILISATION * crate::model::capacity_per_s(setting);
    let mut workload = Workload::draw(setting, per_s, seed);
    // Objects are whole granules, and the queue does not begin empty.
    workload.object_bytes.fill(OBJECT_MIB * MIB);
    let shift_ns = workload.requests[QUEUED].arrival_ns;
    for request in &mut workload.requests {
        request.arrival_ns = request.arrival_ns.saturating_sub(shift_ns);
    }
    workload
}

/// A row to be: its name, its reservation, and a run for each repetition.
type Job = (&'static str, Reservation, Vec<Seen>);

/// The whole comparison: policies take turns, so that what else the machine does strikes all alike.
pub(crate) fn parent(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let needed = |name| {
        option(arguments, name)?.ok_or_else(|| Box::<dyn Error>::from(format!("{name} is missing")))
    };
    let reps: u64 = option(arguments, "--reps")?.map_or(Ok(3), str::parse)?;
    let lmcache = match option(arguments, "--lmcache")? {
        None => None,
        Some(python) => Some(Lmcache {
            python: python.into(),
            script: needed("--script")?.into(),
            log: needed("--log")?.into(),
        }),
    };
    let place = Place {
        file: needed("--file")?.into(),
        memory: needed("--memory-cgroup")?.into(),
        io: needed("--io-cgroup")?.into(),
        rate_mib_s: needed("--rate-mib-s")?.to_owned(),
        lmcache,
    };
    fill(&place.file)?;
    let mut jobs = jobs(&place);
    for rep in 0..reps {
        for (name, reservation, seen) in &mut jobs {
            let one = match &place.lmcache {
                Some(lmcache) if *name == PEER => place.run_peer(lmcache, FIRST_SEED + rep)?,
                _ => place.run(name, *reservation, FIRST_SEED + rep)?,
            };
            println!(
                "run {rep} {name} {reservation:?}: p95 wait {:.3} s, C {:.4} GiB.s",
                one.run.p95_wait_s, one.run.c_gib_s
            );
            seen.push(one);
        }
    }
    let skipped = option(arguments, "--skipped")?;
    report(&place, &jobs, skipped, option(arguments, "--json")?)
}

fn jobs(place: &Place) -> Vec<Job> {
    let mut jobs: Vec<Job> = Vec::new();
    for reservation in crate::model::RESERVATIONS {
        // Who never protects does not reserve.
        let policies = ALL
            .iter()
            .filter(|(_, kind)| reservation == Reservation::Eager || *kind != Kind::Demand);
        jobs.extend(policies.map(|(name, _)| (*name, reservation, Vec::new())));
        if place.lmcache.is_some() && reservation == Reservation::Eager {
            jobs.push((PEER, reservation, Vec::new()));
        }
    }
    jobs
}

/// Runs of who reserves nothing stand for either reservation.
fn reserves(policy: &str) -> bool {
    !["demand", PEER].contains(&policy)
}

fn report(
    place: &Place,
    jobs: &[Job],
    skipped: Option<&str>,
    json: Option<&str>,
) -> Result<(), Box<dyn Error>> {
    let rate: f64 = place.rate_mib_s.parse()?;
    let offered_per_s = UTILISATION * crate::model::capacity_per_s(&setting(rate));
    let row = |(policy, reservation, seen): &Job| Row {
        scenario: "throttled_page_cache",
        varied: None,
        utilisation: UTILISATION,
        offered_per_s,
        policy,
        reservation: *reservation,
        runs: seen.iter().map(|seen| seen.run.clone()).collect(),
    };
    let mut rows: Vec<Row> = jobs.iter().map(row).collect();
    let again: Vec<Row> = rows.iter().filter(|row| !reserves(row.policy)).cloned().collect();
    rows.extend(again.into_iter().map(|row| Row { reservation: Reservation::Lazy, ..row }));
    let compared = compare(&rows);
    let mut values = Vec::new();
    for it in &compared {
        let job = jobs.iter().find(|job| {
            job.0 == it.row.policy && (job.1 == it.row.reservation || !reserves(job.0))
        });
        let seen = &job.ok_or("a row without its runs")?.2;
        values.push(value(it, seen));
    }
    print!("{}{}", table::draw(&compared), verdict(&compared, &values));
    let value = json!({
        "simulated": false,
        "parameters": {
            "rate_mib_s": rate, "object_mib": OBJECT_MIB, "objects": OBJECTS, "first_seed": FIRST_SEED,
            "modelled": "accelerator; storage, page cache, locks and reads are real",
        },
        "skipped": skipped.map_or_else(Vec::new, |why| vec![json!({"policy": PEER, "why": why})]),
        "results": values,
    });
    if let Some(path) = json {
        fs::write(path, serde_json::to_string_pretty(&value)? + "\n")?;
    }
    Ok(())
}

/// A row, and what was seen of its runs.
fn value(it: &Compared<'_>, seen: &[Seen]) -> Value {
    let most = |of: fn(&Seen) -> u64| json!(seen.iter().map(of).max());
    let mut value = it.json();
    value["budget_bytes"] = json!(BUDGET_BYTES);
    value["protected_bytes_max"] = most(|seen| seen.protected_bytes_max);
    value["oom_kills"] = json!(seen.iter().filter(|seen| seen.was_killed).count());
    value["mlocked_bytes_end"] = most(|seen| seen.locked_bytes_end);
    let read: u64 = seen.iter().map(|seen| seen.device_read_bytes).sum();
    value["device_read_bytes"] = json!(read / (seen.len().max(1) as u64));
    value
}

fn verdict(compared: &[Compared<'_>], values: &[Value]) -> String {
    let mut out = String::from("\naims\n");
    let mut say = |met: bool, what: String| {
        out += &format!("{:<6} {what}\n", if met { "met" } else { "MISSED" });
    };
    for it in compared.iter().filter(|it| it.row.policy == "tempo_q") {
        let name = it.row.reservation_name();
        let (wait, c) = (it.p95_wait_cut, it.c_cut);
        say(
            wait.mean >= 0.2,
            format!(
                "{name}: tempo_q's p95 retrieval wait {:.1} +- {:.1} % below demand's (at least 20)",
                wait.mean * 100.0,
                wait.se * 100.0
            ),
        );
        say(
            c.mean >= 0.6,
            format!(
                "{name}: tempo_q's C {:.1} +- {:.1} % below immediate's (at least 60)",
                c.mean * 100.0,
                c.se * 100.0
            ),
        );
    }
    let most = |key: &str| values.iter().filter_map(|value| value[key].as_u64()).max().unwrap_or(0);
    let protected = most("protected_bytes_max");
    say(
        protected <= BUDGET_MIB * MIB,
        format!("protected bytes at most {} MiB of {BUDGET_MIB}", protected / MIB),
    );
    say(most("oom_kills") == 0, format!("{} runs killed for memory", most("oom_kills")));
    say(
        most("mlocked_bytes_end") == 0,
        format!("{} bytes locked at the end", most("mlocked_bytes_end")),
    );
    out
}

/// The file, so that what is read can be checked.
fn fill(path: &Path) -> Result<(), Box<dyn Error>> {
    let mut file = File::create(path)?;
    for offset in (0..OBJECTS as u64 * OBJECT_MIB * MIB).step_by(1 << 20) {
        let words = (offset..offset + MIB).step_by(8).flat_map(|at| word(at).to_le_bytes());
        file.write_all(&words.collect::<Vec<u8>>())?;
    }
    file.sync_all()?;
    println!(
        "{:.2} GiB of objects of {OBJECT_MIB} MiB",
        (OBJECTS as u64 * OBJECT_MIB * MIB) as f64 / GIB
    );
    Ok(())
}
