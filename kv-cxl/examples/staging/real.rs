//! On a throttled file in a memory cgroup: a child process for each run, watched from outside.

use std::{
    env,
    error::Error,
    fs::{self, File},
    io::{Read as _, Write as _},
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use kv_staging::Reservation;
use serde_json::{Value, json};

use crate::{
    flash::{Flash, Real, word},
    option,
    policies::{ALL, Kind},
    rows::{Compared, Row, Run, compare},
    serve::Server,
    table,
    workload::{GIB, Setting, Workload},
};

const MIB: u64 = 1 << 20;
const OBJECT_MIB: u64 = 16;
const OBJECTS: usize = 48;
const BUDGET_MIB: u64 = 256;
/// How often a child's locked bytes are looked at.
const SAMPLE: Duration = Duration::from_millis(5);
/// A run takes some seconds.
const RUN_MAX: Duration = Duration::from_secs(60);
/// Above the rate at which the modelled accelerator can serve: a queue builds up.
const UTILISATION: f64 = 1.2;
/// Requests that are there from the beginning.
const QUEUED: usize = 10;
const FIRST_SEED: u64 = 3000;

fn setting(rate_mib_s: f64) -> Setting {
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

fn workload(setting: &Setting, seed: u64) -> Workload {
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

/// What one child did, and what was seen of it.
struct Seen {
    run: Run,
    protected_bytes_max: u64,
    locked_bytes_end: u64,
    was_killed: bool,
}

struct Parent {
    file: PathBuf,
    memory: PathBuf,
    io: PathBuf,
    rate_mib_s: String,
}

/// The whole comparison: policies take turns, so that what else the machine does strikes all alike.
pub(crate) fn parent(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let needed = |name| {
        option(arguments, name)?.ok_or_else(|| Box::<dyn Error>::from(format!("{name} is missing")))
    };
    let reps: u64 = option(arguments, "--reps")?.map_or(Ok(3), str::parse)?;
    let parent = Parent {
        file: needed("--file")?.into(),
        memory: needed("--memory-cgroup")?.into(),
        io: needed("--io-cgroup")?.into(),
        rate_mib_s: needed("--rate-mib-s")?.to_owned(),
    };
    fill(&parent.file)?;
    let mut jobs = Vec::new();
    for reservation in crate::model::RESERVATIONS {
        // Who never protects does not reserve.
        let policies = ALL
            .iter()
            .filter(|(_, kind)| reservation == Reservation::Eager || *kind != Kind::Demand);
        jobs.extend(policies.map(|(name, _)| (*name, reservation, Vec::<Seen>::new())));
    }
    for rep in 0..reps {
        for (name, reservation, seen) in &mut jobs {
            let one = parent.run(name, *reservation, FIRST_SEED + rep)?;
            println!(
                "run {rep} {name} {reservation:?}: p95 wait {:.3} s, C {:.4} GiB.s",
                one.run.p95_wait_s, one.run.c_gib_s
            );
            seen.push(one);
        }
    }
    report(&parent, &jobs, option(arguments, "--json")?)
}

fn report(
    parent: &Parent,
    jobs: &[(&'static str, Reservation, Vec<Seen>)],
    json: Option<&str>,
) -> Result<(), Box<dyn Error>> {
    let rate: f64 = parent.rate_mib_s.parse()?;
    let offered_per_s = UTILISATION * crate::model::capacity_per_s(&setting(rate));
    let row = |(policy, reservation, seen): &(&'static str, Reservation, Vec<Seen>)| Row {
        scenario: "throttled_page_cache",
        varied: None,
        utilisation: UTILISATION,
        offered_per_s,
        policy,
        reservation: *reservation,
        runs: seen.iter().map(|seen| seen.run.clone()).collect(),
    };
    let mut rows: Vec<Row> = jobs.iter().map(row).collect();
    // The same runs stand for either reservation.
    rows.push(Row { reservation: Reservation::Lazy, ..rows[0].clone() });
    let compared = compare(&rows);
    let mut values = Vec::new();
    for it in &compared {
        let mut value = it.json();
        let job = jobs.iter().find(|job| {
            job.0 == it.row.policy && (job.1 == it.row.reservation || job.0 == "demand")
        });
        let seen = &job.ok_or("a row without its runs")?.2;
        value["budget_bytes"] = json!(BUDGET_MIB * MIB);
        value["protected_bytes_max"] =
            json!(seen.iter().map(|seen| seen.protected_bytes_max).max());
        value["oom_kills"] = json!(seen.iter().filter(|seen| seen.was_killed).count());
        value["mlocked_bytes_end"] = json!(seen.iter().map(|seen| seen.locked_bytes_end).max());
        values.push(value);
    }
    print!("{}{}", table::draw(&compared), verdict(&compared, &values));
    let value = json!({
        "simulated": false,
        "parameters": {
            "rate_mib_s": rate, "object_mib": OBJECT_MIB, "objects": OBJECTS, "first_seed": FIRST_SEED,
            "modelled": "accelerator; storage, page cache, locks and reads are real",
        },
        "results": values,
    });
    if let Some(path) = json {
        fs::write(path, serde_json::to_string_pretty(&value)? + "\n")?;
    }
    Ok(())
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

impl Parent {
    fn run(
        &self,
        policy: &str,
        reservation: Reservation,
        seed: u64,
    ) -> Result<Seen, Box<dyn Error>> {
        let kills_before = oom_kills(&self.memory);
        // It joins the cgroups before it runs: memory is charged to who first uses it.
        let mut child = Command::new("sh")
            .args(["-c", "for c in \"$0\" \"$1\"; do echo $$ > \"$c/cgroup.procs\" || exit 9; done; shift; exec \"$@\""])
            .args([&self.memory, &self.io])
            .arg(env::current_exe()?)
            .args(["one", policy, if reservation == Reservation::Lazy { "lazy" } else { "eager" }])
            .args([&seed.to_string(), &self.rate_mib_s])
            .arg(&self.file)
            .stdout(Stdio::piped())
            .spawn()?;
        let begun = Instant::now();
        let mut protected_bytes_max = 0;
        let status = loop {
            protected_bytes_max = protected_bytes_max.max(locked_bytes(&child.id().to_string()));
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if begun.elapsed() > RUN_MAX {
                child.kill()?;
                return Err(format!("{policy}: still running after {RUN_MAX:?}").into());
            }
            thread::sleep(SAMPLE);
        };
        let was_killed = status.signal() == Some(9) || oom_kills(&self.memory) > kills_before;
        let mut text = String::new();
        child.stdout.take().ok_or("no output")?.read_to_string(&mut text)?;
        if was_killed {
            return Ok(Seen {
                run: Run::default(),
                protected_bytes_max,
                locked_bytes_end: 0,
                was_killed,
            });
        }
        if !status.success() {
            return Err(format!("{policy}: {status}").into());
        }
        let value: Value = serde_json::from_str(&text)?;
        let locked_bytes_end = value["locked_bytes_end"].as_u64().ok_or("no locked_bytes_end")?;
        Ok(Seen { run: Run::from_json(&value), protected_bytes_max, locked_bytes_end, was_killed })
    }
}

/// One run, in the cgroups.
pub(crate) fn one(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [policy, reservation, seed, rate, file] = arguments else {
        return Err("one: five arguments".into());
    };
    let kind = ALL.iter().find(|(name, _)| name == policy).ok_or("no such policy")?.1;
    let reservation = if reservation == "lazy" { Reservation::Lazy } else { Reservation::Eager };
    let setting = setting(rate.parse()?);
    let workload = workload(&setting, seed.parse()?);
    let device =
        Flash::open(Path::new(file), &workload.object_bytes, BUDGET_MIB * MIB, setting.slots)?;
    let server = Server::new(&setting, &workload, &kind, reservation, device);
    let (outcome, device) = server.run(&mut Real(Instant::now()));
    let locked_bytes_end = locked_bytes("self");
    drop(device);
    let mut value = Run::of(&outcome).to_json();
    value["locked_bytes_end"] = json!(locked_bytes_end);
    println!("{value}");
    Ok(())
}

/// Locked by a process; 0 if it is gone.
fn locked_bytes(process: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmLck:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Of either version of cgroups.
fn oom_kills(cgroup: &Path) -> u64 {
    let read = |name: &str| fs::read_to_string(cgroup.join(name));
    let text = read("memory.events").or_else(|_| read("memory.oom_control")).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    line.and_then(|count| count.trim().parse().ok()).unwrap_or(0)
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
