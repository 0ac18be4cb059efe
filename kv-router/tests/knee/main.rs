//! The window learner over devices in virtual time.

mod model;

use kv_router::{Knee, KneeConfig, KneeProbe};
use model::*;
use proptest::prelude::*;

const STARTS: [u32; 3] = [1, 8, 64];

/// Ordinary reads: they vary by 30 %, the device by 10 %.
fn varying(places: f64) -> Profile {
    Profile { places, jitter: 0.3, drift: 0.1, ..CALM }
}

/// Over so many seeds.
fn mean(seeds: u32, rate: impl FnMut(u64) -> f64) -> f64 {
    (0..u64::from(seeds)).map(rate).sum::<f64>() / f64::from(seeds)
}

#[test]
fn a_calm_device_is_met_exactly_from_anywhere() {
    for places in [1, 2, 3, 5, 8, 12, 20, 31, 40] {
        for start in STARTS {
            let mut tier = Tier::learning(Profile { places: f64::from(places), ..CALM }, 1, start);
            tier.run(80.0);
            let base = tier.knee().base();
            assert!(
                (places..=places + places / 8).contains(&base),
                "{start} to {base} of {places}"
            );
            assert!(tier.knee().is_settled());
            let moves = tier.moves;
            tier.run(60.0);
            assert_eq!(tier.moves, moves, "a settled window of {base} moved");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn a_varying_device_is_met_within_a_step_or_a_little_above(
        places in 2_u32..=32,
        jitter in 0.0..0.35,
        drift in 0.0..0.12,
        start in prop::sample::select(&STARTS[..]),
        seed: u64,
    ) {
        let profile = Profile { places: f64::from(places), jitter, drift, ..CALM };
        let mut tier = Tier::learning(profile, seed, start);
        tier.run(200.0);
        tier.at_limit.fill(0);
        let rate = tier.run(60.0);
        let mut at_knee = Tier::fixed(profile, seed, places);
        at_knee.run(200.0);
        let at_knee = at_knee.run(60.0);
        prop_assert!(rate >= 0.95 * at_knee, "{:.3} of the rate at {places}", rate / at_knee);
        // Most reads met a window of this range.
        let reads = |windows: std::ops::Range<u32>| -> u64 { tier.at_limit[windows.start as usize..windows.end as usize].iter().sum() };
        let step = 1 + places / 8;
        let inside = reads(places - step..places + places / 2 + 2 * step + 1);
        prop_assert!(4 * inside >= 3 * reads(0..200), "{places}: {:?}", tier.at_limit);
    }
}

#[test]
fn learning_costs_less_than_three_percent() {
    for profile in [Profile { places: 12.0, ..CALM }, varying(12.0), varying(4.0)] {
        let fixed = mean(8, |seed| Tier::fixed(profile, seed, 12).run(60.0));
        let learning = mean(8, |seed| Tier::learning(profile, seed, 8).run(60.0));
        assert!(learning >= 0.97 * fixed, "{:.3} of the rate: {profile:?}", learning / fixed);
    }
}

#[test]
fn a_settled_window_seldom_moves() {
    let mut moves = 0;
    for seed in 0..8 {
        let mut tier = Tier::learning(varying(12.0), seed, 8);
        tier.run(60.0);
        let before = tier.moves;
        tier.run(120.0);
        moves += tier.moves - before;
    }
    assert!(moves <= 8 * 8, "{moves} moves in 8 times 120 s");
}

#[test]
fn reads_that_stall_do_not_make_windows_too_small() {
    for (places, stalls) in [(12.0, 0.03), (4.0, 0.03), (6.0, 0.01)] {
        let profile = Profile { stalls, ..varying(places) };
        // A third of the places and more wait for reads that stall: the knee is far above the calm device's.
        let best = mean(4, |seed| Tier::fixed(profile, seed, 24).run(120.0));
        let rate = mean(4, |seed| {
            let mut tier = Tier::learning(profile, seed, 8);
            tier.run(30.0);
            tier.run(120.0)
        });
        assert!(rate >= 0.92 * best, "{:.3} of the rate: {profile:?}", rate / best);
    }
}

#[test]
fn a_device_that_changes_is_followed() {
    for varies in [CALM, varying(1.0)] {
        let mut tier = Tier::learning(Profile { places: 12.0, ..varies }, 3, 8);
        for (places, least, most) in [(12, 11, 16), (28, 24, 40), (4, 4, 7), (12, 11, 18)] {
            tier.device.profile.places = f64::from(places);
            tier.run(200.0);
            let base = tier.knee().base();
            assert!((least..=most).contains(&base), "{base} for {places}: {varies:?}");
        }
    }
}

/// A tail looks like a slow device with too small a window.
#[test]
fn ends_of_steps_are_not_taken_for_the_device() {
    for (steps, places) in [(64, 12), (40, 6), (24, 12), (24, 3), (150, 20)] {
        let profile = Profile { places: f64::from(places), ..CALM };
        for start in [8, 20] {
            let mut tier = Tier::learning(profile, 5, start).in_steps_of(steps);
            tier.run(100.0);
            let base = tier.knee().base();
            let fits = places..=places + 1 + places / 8;
            // What cannot be told from such steps is left alone.
            assert!(fits.contains(&base) || base == start, "{base}: steps of {steps}, {places}");
        }
    }
    let mut tier = Tier::learning(varying(12.0), 5, 8).in_steps_of(64);
    tier.run(150.0);
    assert!((11..=20).contains(&tier.knee().base()), "{}", tier.knee().base());
}

#[test]
fn latency_alone_asks_for_places_as_well() {
    // 10 ms of latency beside 2.1 ms of transfer.
    let profile = Profile { latency_s: 10e-3, jitter: 0.1, ..CALM };
    let mut tier = Tier::learning(profile, 1, 1);
    tier.run(60.0);
    let rate = tier.run(60.0);
    assert!(rate >= 0.97 * Tier::fixed(profile, 1, 24).run(60.0));
}

#[test]
fn the_limit_stays_within_its_bounds() {
    for (min, max, start) in [(0, 0, 0), (3, 5, 9), (7, 2, 1), (4, 4, 4)] {
        let mut knee = Knee::new(KneeConfig { min, max, start });
        let low = min.max(1);
        for n in 0..100_000_u64 {
            knee.refilled(knee.limit(), true);
            knee.completed(1 << 20, n * n % 977 * 1_000_000 + n * 2_000_000);
            assert!((low..=max.max(low)).contains(&knee.limit()), "{}", knee.limit());
        }
    }
}

#[test]
fn a_learner_owns_no_memory() {
    assert!(!std::mem::needs_drop::<Knee>() && !std::mem::needs_drop::<KneeProbe>());
    assert!(size_of::<Knee>() < 1024);
}

#[test]
fn a_probe_starts_at_the_knee_or_a_little_above() {
    for places in [1_u32, 2, 3, 5, 8, 12, 20, 40] {
        let (window, reads) = probe(Profile { places: f64::from(places), ..CALM }, 1, 1000);
        let window = window.unwrap();
        assert!((places..=places + 1 + places / 3).contains(&window), "{window} for {places}");
        assert!(reads <= u64::from(10 * places + 60), "{reads} reads for {places}");
    }
    for seed in 0..20 {
        let (window, _) = probe(varying(12.0), seed, 1000);
        assert!((8..=32).contains(&window.unwrap()), "{window:?}");
    }
}

#[test]
fn a_probe_that_is_stopped_says_what_it_saw() {
    let profile = Profile { places: 12.0, ..CALM };
    assert_eq!(probe(profile, 1, 8).0, None);
    // Windows of 1 and 2, none of them enough.
    assert_eq!(probe(profile, 1, 25).0, Some(2));
}

#[test]
fn learning_goes_on_from_where_a_probe_ended() {
    let mut tier = Tier::learning(varying(12.0), 1, 8);
    tier.knee.as_mut().unwrap().start_at(14);
    tier.run(30.0);
    assert!((11..=18).contains(&tier.knee().base()), "{}", tier.knee().base());
}
