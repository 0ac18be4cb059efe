//! The simulated device: its bandwidth, its capacity, and its faults.

use std::collections::BTreeMap;

use kv_cxl::{
    Extent, FastTier, FastTierError, Residency, Simulated, SimulatedConfig, StageEvent, StageId,
};
use proptest::{collection::vec, prelude::*};

const GRANULE: u64 = 4096;

/// 32 granules, 8 of them in fast memory, one every microsecond.
fn device(change: impl FnOnce(&mut SimulatedConfig)) -> Simulated {
    let mut config = SimulatedConfig::new(32 * GRANULE, 8 * GRANULE, GRANULE * 1_000_000);
    config.granule_bytes = GRANULE;
    change(&mut config);
    Simulated::new(config).unwrap()
}

fn granules(first: u64, count: u64) -> [Extent; 1] {
    [Extent { offset: first * GRANULE, bytes: count * GRANULE }]
}

fn resident(device: &Simulated, first: u64, count: u64) -> u64 {
    match device.residency(&granules(first, count)).unwrap() {
        Residency::Bytes(bytes) => bytes / GRANULE,
        Residency::Unknown => panic!("it is exact"),
    }
}

#[test]
fn bytes_move_at_the_rate_one_staging_after_the_other() {
    let mut device = device(|config| config.latency_ns = 500);
    device.submit_stage(StageId(1), &granules(0, 3), 0).unwrap();
    device.submit_stage(StageId(2), &granules(3, 2), 100).unwrap();
    assert_eq!(device.load().queued_bytes, Some(5 * GRANULE));
    let mut events = Vec::new();
    assert_eq!(device.poll(1_499, &mut events), Some(1_500));
    assert_eq!(resident(&device, 0, 5), 0);
    assert_eq!(device.poll(1_500, &mut events), Some(2_500));
    assert_eq!((resident(&device, 0, 5), device.load().queued_bytes), (1, Some(4 * GRANULE)));
    assert_eq!(device.poll(3_500, &mut events), Some(4_500));
    assert_eq!(events, [StageEvent::Done(StageId(1))]);
    assert_eq!(device.poll(5_500, &mut events), None);
    assert_eq!(events, [1, 2].map(|id| StageEvent::Done(StageId(id))));
}

#[test]
fn an_awkward_rate_is_kept_over_many_granules() {
    let mut device = device(|config| config.bytes_per_s = GRANULE * 300_000_007);
    let mut now_ns = 0;
    for round in 0..1_000 {
        device.submit_stage(StageId(round), &granules(round % 4 * 8, 8), now_ns).unwrap();
        while let Some(wake_ns) = device.poll(now_ns, &mut Vec::new()) {
            now_ns = wake_ns;
        }
    }
    // 8000 granules at 300,000,007 a second are 26,666.6 ns.
    assert!((26_666..=26_667).contains(&now_ns), "{now_ns}");
}

#[test]
fn what_was_asked_for_longest_ago_leaves_first() {
    let mut device = device(|_| ());
    device.submit_stage(StageId(1), &granules(0, 8), 0).unwrap();
    device.submit_stage(StageId(2), &granules(0, 2), 8_000).unwrap(); // asked for again
    device.submit_stage(StageId(3), &granules(8, 3), 8_000).unwrap();
    device.poll(20_000, &mut Vec::new());
    assert_eq!(
        (resident(&device, 0, 2), resident(&device, 2, 3), resident(&device, 5, 6)),
        (2, 0, 6)
    );
}

#[test]
fn done_is_not_the_same_as_there() {
    let mut device = device(|_| ());
    device.protect(&granules(0, 8), 0).unwrap();
    device.submit_stage(StageId(1), &granules(0, 8), 0).unwrap();
    device.submit_stage(StageId(2), &granules(8, 2), 0).unwrap();
    let mut events = Vec::new();
    device.poll(20_000, &mut events);
    assert_eq!(events, [1, 2].map(|id| StageEvent::Done(StageId(id))));
    assert_eq!((resident(&device, 0, 8), resident(&device, 8, 2)), (8, 0));
}

#[test]
fn a_bad_extent_fails_what_reaches_into_it() {
    let bad = granules(2, 1)[0];
    let mut device = device(|config| config.bad_extents.push(bad));
    device.submit_stage(StageId(1), &granules(0, 4), 0).unwrap();
    device.submit_stage(StageId(2), &granules(4, 1), 0).unwrap();
    let mut events = Vec::new();
    assert_eq!(device.poll(20_000, &mut events), None);
    let failed = StageEvent::Failed(StageId(1), FastTierError::Device { errno: 5, extent: bad });
    assert_eq!(events, [failed, StageEvent::Done(StageId(2))]);
    assert_eq!(
        (resident(&device, 0, 2), resident(&device, 2, 2), resident(&device, 4, 1)),
        (2, 0, 1)
    );
}

#[derive(Clone, Debug)]
enum Call {
    Stage(u64, u64),
    Protect(u64, u64),
    Unprotect(u64, u64),
    Evict(u64, u64),
    Poll,
}

fn any_call() -> impl Strategy<Value = (u64, Call)> {
    let range = || (0..32_u64, 1..6_u64).prop_map(|(first, count)| (first, count.min(32 - first)));
    let call = prop_oneof![
        3 => range().prop_map(|(first, count)| Call::Stage(first, count)),
        2 => range().prop_map(|(first, count)| Call::Protect(first, count)),
        1 => range().prop_map(|(first, count)| Call::Unprotect(first, count)),
        1 => range().prop_map(|(first, count)| Call::Evict(first, count)),
        2 => Just(Call::Poll),
    ];
    (0..6_000_u64, call)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// After every call: no more in fast memory than fits, no more protected than allowed, every staging ended once and
    /// in order, no faster than the rate, and what was protected throughout is there.
    #[test]
    fn capacity_rate_and_protection_hold(calls in vec(any_call(), 0..80)) {
        let mut device = device(|config| config.pin_limit_bytes = 6 * GRANULE);
        let mut now_ns = 0;
        let mut in_flight: BTreeMap<StageId, (u64, u64)> = BTreeMap::new();
        let mut protected = [false; 32];
        let mut there = [false; 32];
        let index = |granule: u64| usize::try_from(granule).unwrap();
        let range = |first: u64, count: u64| index(first)..index(first + count);
        for (id, (wait_ns, call)) in calls.into_iter().enumerate() {
            now_ns += wait_ns;
            let mut events = Vec::new();
            match call {
                Call::Stage(first, count) => {
                    let id = StageId(id as u64);
                    if device.submit_stage(id, &granules(first, count), now_ns).is_ok() {
                        in_flight.insert(id, (first, count));
                    }
                }
                Call::Protect(first, count) => {
                    let fresh = protected[range(first, count)].iter().filter(|is| !**is).count();
                    let fits = protected.iter().filter(|is| **is).count() + fresh <= 6;
                    prop_assert_eq!(device.protect(&granules(first, count), now_ns).is_ok(), fits);
                    if fits {
                        protected[range(first, count)].fill(true);
                    }
                }
                Call::Unprotect(first, count) => {
                    device.unprotect(&granules(first, count), now_ns).unwrap();
                    protected[range(first, count)].fill(false);
                    there[range(first, count)].fill(false);
                }
                Call::Evict(first, count) => device.evict_hint(&granules(first, count), now_ns).unwrap(),
                Call::Poll => {
                    device.poll(now_ns, &mut events);
                }
            }
            for event in events {
                let StageEvent::Done(id) = event else { panic!("no extent is bad") };
                let (oldest, (first, count)) = in_flight.pop_first().unwrap();
                prop_assert_eq!(oldest, id);
                // A granule protected later than it came in may have left in between: look now, and then hold it to it.
                for granule in range(first, count) {
                    there[granule] |= protected[granule] && resident(&device, granule as u64, 1) == 1;
                }
            }
            prop_assert!(resident(&device, 0, 32) <= 8);
            for (granule, &promised) in there.iter().enumerate() {
                let kept = !promised || resident(&device, granule as u64, 1) == 1;
                prop_assert!(kept, "protected granule {} left", granule);
            }
        }
    }

    /// What is protected before it is staged is there when its staging is done, whatever else streams by.
    #[test]
    fn reserve_protect_stage_ends_ready(
        claims in vec((0..32_u64, 1..4_u64), 1..10),
        noise in vec((0..32_u64, 1..6_u64), 0..20),
    ) {
        let mut device = device(|_| ());
        let clip = |(first, count): (u64, u64)| granules(first, count.min(32 - first));
        let mut taken = Vec::new();
        for (id, claim) in claims.into_iter().enumerate() {
            if device.protect(&clip(claim), 0).is_ok() {
                device.submit_stage(StageId(id as u64), &clip(claim), 0).unwrap();
                taken.push(clip(claim));
            }
        }
        for (id, extents) in noise.into_iter().enumerate() {
            device.submit_stage(StageId(1_000 + id as u64), &clip(extents), 0).unwrap();
        }
        device.poll(1_000_000, &mut Vec::new());
        for extents in taken {
            prop_assert_eq!(device.residency(&extents), Ok(Residency::Bytes(extents[0].bytes)));
        }
    }

    /// When a thing happens does not depend on how often anyone looks.
    #[test]
    fn polling_more_often_changes_nothing(
        stages in vec((0..3_000_u64, 0..28_u64, 1..5_u64), 1..12),
        extra in vec(0..30_000_u64, 0..20),
    ) {
        let run = |extra: &[u64]| {
            let mut device = device(|_| ());
            let (mut events, mut now_ns) = (Vec::new(), 0);
            for (id, &(wait_ns, first, count)) in stages.iter().enumerate() {
                let next_ns = now_ns + wait_ns;
                let mut between: Vec<u64> = extra.iter().copied().filter(|at| (now_ns..next_ns).contains(at)).collect();
                between.sort_unstable();
                for at_ns in between {
                    device.poll(at_ns, &mut events);
                }
                now_ns = next_ns;
                device.submit_stage(StageId(id as u64), &granules(first, count), now_ns).unwrap();
            }
            let mut end_ns = now_ns;
            while let Some(wake_ns) = device.poll(end_ns, &mut events) {
                end_ns = wake_ns;
            }
            let left: Vec<u64> = (0..32).map(|granule| resident(&device, granule, 1)).collect();
            (events, end_ns, left)
        };
        prop_assert_eq!(run(&[]), run(&extra));
    }
}
