//! The model against what can be known without it.

use std::collections::BTreeSet;

use kv_router::{ChunkSpec, PoolConfig, Tail, TierMask};

use super::{
    CHUNK_BLOCKS, CHUNK_BYTES, Case, Policy, Profile, Schedule, Stall, Study, StudyOptions,
    TierProfile, fluid_s, machine::Machine,
};

const POLICIES: [Policy; 6] = [
    Policy::Kvbraid,
    Policy::Window,
    Policy::Static(1.0),
    Policy::Ewma,
    Policy::FastOnly,
    Policy::Serial,
];

fn case(chunks: usize, ranks: u16, steps: usize) -> Case {
    Case { chunks, ranks, schedule: Schedule { warm_up: 1, steps } }
}

/// Rates and windows of a tier that never varies, whose places are independent of each other.
fn steady(tiers: &[(f64, u16)]) -> Profile {
    let tier = |&(bytes_per_s, window): &(f64, u16)| TierProfile {
        bytes_per_s,
        window,
        jitter: 0.0,
        drift: 0.0,
        drift_s: 1.0,
        share_max: 1.0 / f64::from(window),
        latency_s: 0.0,
        stall: Stall { probability: 0.0, mean_s: 0.0, sigma: 0.0 },
    };
    Profile { name: "steady", about: "", tiers: tiers.iter().map(tier).collect() }
}

fn chunks(n: usize, tiers: u8) -> Vec<ChunkSpec> {
    let tiers = TierMask::all(tiers);
    vec![ChunkSpec { tiers, blocks: CHUNK_BLOCKS, bytes: CHUNK_BYTES, rank: 0 }; n]
}

#[test]
fn every_chunk_is_delivered_once_and_every_byte_is_accounted_for() {
    for profile in Profile::all(3) {
        let mut config = PoolConfig::new(3);
        for (window, tier) in config.windows.iter_mut().zip(&profile.tiers) {
            *window = tier.window;
        }
        for tail in [Tail::Whole, Tail::Duplicate, Tail::SplitAndDuplicate] {
            config.tail = tail;
            let mut machine = Machine::new(&profile, 3);
            let (mut payload, mut duplicates) = (0, 0);
            for n in [64, 1, 7, 0, 16, 64] {
                let report = machine.run(&chunks(n, 3), &config);
                assert_eq!((report.delivered, report.all_missed()), (n as u64, 0));
                assert_eq!(report.delivered_bytes, n as u64 * CHUNK_BYTES);
                let first: u64 = report.tiers.iter().map(|tier| tier.bytes).sum();
                assert_eq!(first, report.delivered_bytes, "each byte counts once");
                payload += report.delivered_bytes;
                duplicates += report.duplicate_bytes();
            }
            machine.wait(60.0);
            assert_eq!(machine.in_flight(), 0);
            let (started, ended) = machine.moved();
            assert_eq!((started, ended), (payload + duplicates, payload + duplicates));
            assert_eq!(duplicates == 0, tail == Tail::Whole);
        }
    }
}

#[test]
fn losers_take_the_next_steps_places() {
    // Two places, one chunk: both read it, the loser is still there when the next step begins.
    let profile = steady(&[(1e9, 1), (0.25e9, 1)]);
    let mut config = PoolConfig::new(2);
    config.windows = [1; 8];
    config.tail = Tail::Duplicate;
    let mut machine = Machine::new(&profile, 1);
    let one = CHUNK_BYTES as f64 / 1e9;
    let _ = machine.run(&chunks(1, 2), &config);
    assert_eq!(machine.in_flight(), 1);
    let from_s = machine.now_s;
    assert!((from_s - one).abs() < 1e-12);
    let report = machine.run(&chunks(3, 2), &config);
    assert_eq!(report.tiers[0].chunks, 3, "the slow tier's place is taken");
    assert!((machine.now_s - from_s - 3.0 * one).abs() < 1e-12);
}

#[test]
fn no_policy_beats_the_bound_of_steady_devices() {
    let profile = steady(&[(2e9, 12), (0.625e9, 4), (1.2e9, 8)]);
    let rates = profile.calibrate();
    for (rate, tier) in rates.iter().zip(&profile.tiers) {
        assert!((rate / tier.bytes_per_s - 1.0).abs() < 1e-3, "calibrated {rate}");
    }
    let nominal: Vec<f64> = profile.tiers.iter().map(|tier| tier.bytes_per_s).collect();
    for policy in POLICIES {
        for n in [1, 5, 16, 64, 230] {
            let outcome = case(n, 1, 5).run(&profile, &nominal, policy, 1);
            assert!(outcome.gap() > -1e-9, "{policy:?} {n}: {}", outcome.gap());
            assert!((outcome.gap() - outcome.over_nominal()).abs() < 1e-9);
        }
    }
}

#[test]
fn the_bound_holds_for_every_policy_on_calm_devices() {
    for name in ["G", "H"] {
        let profile = Profile::named(name, 2).expect("known");
        let rates = profile.calibrate();
        for policy in POLICIES {
            let outcome = case(230, 1, 30).run(&profile, &rates, policy, 2);
            assert!(outcome.gap() > 0.0, "{name} {policy:?}: {}", outcome.gap());
        }
    }
}

#[test]
fn a_seed_gives_one_result_and_another_seed_another() {
    let profile = Profile::named("E", 2).expect("known");
    let rates = [1.8e9, 0.56e9];
    for policy in POLICIES {
        let run = |seed| case(64, 4, 5).run(&profile, &rates, policy, seed);
        assert_eq!(run(7), run(7));
        assert_ne!(run(7).seconds, run(8).seconds);
    }
}

#[test]
fn the_document_has_a_row_for_each_combination_and_no_nulls() {
    let mut options = StudyOptions::default();
    (options.seeds, options.chunks, options.devices) = (2, 230, vec!["B".into(), "G".into()]);
    let document = Study::run(options).to_json();
    let rows = document["results"].as_array().expect("a list");
    let (mut seen, mut policies) = (BTreeSet::new(), BTreeSet::new());
    for row in rows {
        for key in ["chunks", "ranks", "tiers", "seeds"] {
            assert!(row[key].is_u64(), "{key}: {row}");
        }
        let figures = [
            "gap_mean",
            "gap_se",
            "seconds_mean",
            "seconds_se",
            "over_nominal_mean",
            "duplicate_bytes_fraction",
        ];
        for key in figures {
            assert!(row[key].is_f64(), "{key}: {row}");
        }
        let reps = row["reps"].as_array().expect("a list");
        assert_eq!(reps.len() as u64, row["seeds"].as_u64().expect("checked"));
        for rep in reps {
            let bytes = rep["bytes"].as_u64().expect("whole bytes");
            assert_eq!(
                bytes,
                row["chunks"].as_u64().expect("checked")
                    * row["steps_per_seed"].as_u64().expect("whole steps")
                    * CHUNK_BYTES
            );
            assert!(rep["seconds"].as_f64().expect("a number") > 0.0);
        }
        let text = |key: &str| row[key].as_str().expect("text").to_owned();
        policies.insert(text("policy"));
        let case = ["tiers", "chunks", "ranks"].map(|key| row[key].as_u64());
        assert!(seen.insert((text("device"), text("policy"), case)), "twice: {row}");
    }
    assert_eq!(policies, BTreeSet::from(Study::POLICIES.map(str::to_owned)));
    assert_eq!(rows.len() % (2 * policies.len()), 0);
    assert!(!document.to_string().contains("null"), "{document}");
}

#[test]
fn drift_is_the_same_for_every_policy() {
    let profile = Profile::named("D", 2).expect("known");
    let mut machines = [1, 1].map(|seed| Machine::new(&profile, seed));
    let _ = machines[0].run(&chunks(64, 2), &PoolConfig::new(2));
    let bounds = machines.each_mut().map(|machine| machine.bound_s(&[2e9, 1e9], 0.0, 1e10));
    assert_eq!(bounds[0], bounds[1]);
}

#[test]
fn refilled_windows_meet_their_closed_form() {
    // Four places read a chunk in one tick each, two in two ticks. Powers of two keep ticks exact.
    let rate = f64::from(1 << 30);
    let profile = steady(&[(rate, 4), (rate / 4.0, 2)]);
    let tick_s = 4.0 * CHUNK_BYTES as f64 / rate;
    for n in 1..200 {
        let claimed_by = |tick: usize| 4 * (tick + 1) + 2 * (tick / 2 + 1);
        let last = (0..).find(|&tick| claimed_by(tick) >= n).expect("some tick");
        let left = n - if last > 0 { claimed_by(last - 1) } else { 0 };
        // In the tick that takes the last chunks the fast places come first.
        let ticks = if left > 4 { last + 2 } else { last + 1 };
        let outcome = case(n, 1, 3).run(&profile, &[rate, rate / 4.0], Policy::Window, 1);
        let took = outcome.step_s() / tick_s;
        assert!((took - ticks as f64).abs() < 1e-9, "{n} chunks: {took} ticks, not {ticks}");
    }
    assert!((fluid_s(&[rate, rate / 4.0], 1.25 * rate) - 1.0).abs() < 1e-12);
}
