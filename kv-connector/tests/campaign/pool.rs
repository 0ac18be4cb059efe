//! Runs seeds on some threads, and watches over them.

use std::{
    collections::BTreeMap,
    env,
    panic::{self, AssertUnwindSafe},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use crate::life::{self, Tally};

/// Runs at one time. They mostly wait.
const THREADS: usize = 4;
/// Many times what a run takes on a busy machine.
const HANGS_AFTER: Duration = Duration::from_secs(120);
/// The command that repeats a run.
const COMMAND: &str = "cargo test -p kv-connector --test campaign";

fn number(variable: &str) -> Option<u64> {
    env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

/// Panics of any thread: an engine catches those of its tiers' threads and goes on.
fn note_panics() -> Arc<Mutex<Vec<String>>> {
    let panics = Arc::new(Mutex::new(Vec::new()));
    let (noted, words) = (Arc::clone(&panics), panic::take_hook());
    panic::set_hook(Box::new(move |info| {
        noted.lock().unwrap().push(info.to_string());
        words(info);
    }));
    panics
}

pub(crate) fn run() {
    let seeds: Vec<u64> = match number("KVBRAID_SEED") {
        Some(seed) => vec![seed; usize::try_from(number("KVBRAID_REPEAT").unwrap_or(1)).unwrap()],
        None => (1..=number("KVBRAID_RUNS").unwrap_or(200)).collect(),
    };
    let panics = note_panics();
    let (next, tallies) = (AtomicU64::new(0), Mutex::new(Vec::new()));
    let failed: Mutex<BTreeMap<u64, String>> = Mutex::default();
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let index = usize::try_from(next.fetch_add(1, Ordering::Relaxed)).unwrap();
                    let Some(&seed) = seeds.get(index) else { break };
                    match watched(seed) {
                        Ok(tally) => tallies.lock().unwrap().push(tally),
                        Err(why) => drop(failed.lock().unwrap().insert(seed, why)),
                    }
                }
            });
        }
    });
    let mut sum = Tally::default();
    tallies.into_inner().unwrap().iter().for_each(|tally| sum.add(tally));
    println!("{} runs in {:.1} s: {sum}", seeds.len(), began.elapsed().as_secs_f64());
    let failed = failed.into_inner().unwrap();
    for (seed, why) in &failed {
        println!("FAILED, repeat with: KVBRAID_SEED={seed} {COMMAND}\n  {why}");
    }
    assert!(failed.is_empty(), "{} of {} runs failed", failed.len(), seeds.len());
    let panics = panics.lock().unwrap();
    assert!(panics.is_empty(), "a thread panicked: {panics:?}");
    assert!(seeds.len() < 50 || sum.is_worth_something(), "nothing happened: {sum}");
}

/// A run that does not end ends the process: its threads cannot be ended.
fn watched(seed: u64) -> Result<Tally, String> {
    let (ended, end) = mpsc::channel();
    let named = thread::Builder::new().name(format!("seed {seed}"));
    let run = named.spawn(move || {
        let result = panic::catch_unwind(AssertUnwindSafe(|| life::live(seed)));
        let _ = ended.send(result.map_err(|cause| {
            let text = cause.downcast_ref::<String>().cloned();
            text.or_else(|| cause.downcast_ref::<&str>().map(|it| (*it).to_owned()))
                .unwrap_or_default()
        }));
    });
    let run = run.expect("a thread starts");
    match end.recv_timeout(HANGS_AFTER) {
        Ok(result) => {
            run.join().expect("it has ended");
            result
        }
        Err(_) => {
            println!("HANGS, repeat with: KVBRAID_SEED={seed} {COMMAND}");
            std::process::exit(101);
        }
    }
}
