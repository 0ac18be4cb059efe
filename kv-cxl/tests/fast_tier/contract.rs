//! What must hold of every provider, whatever it can do: each rule looks at the declared capabilities first.

use std::thread;

use kv_cxl::{
    Extent, FastTier, FastTierError, Protection, Residency, ResidencyReport, StageEvent, StageId,
    Staging,
};

/// Runs every rule on fresh providers.
pub(crate) fn check_all(fresh: impl Fn() -> Box<dyn FastTier>) {
    declarations_agree(&*fresh());
    bad_extents_are_refused_as_a_whole(&mut *fresh());
    every_staging_ends_once(&mut *fresh());
    the_queue_is_bounded(&mut *fresh());
    protection_is_all_or_nothing_and_does_not_nest(&mut *fresh());
    protected_data_stay(&mut *fresh());
    release_is_not_eviction(&mut *fresh());
    what_is_not_declared_is_unsupported(&mut *fresh());
}

/// `count` granules from granule `first` on.
pub(crate) fn granules(tier: &dyn FastTier, first: u64, count: u64) -> [Extent; 1] {
    let granule_bytes = tier.caps().stage_granule_bytes;
    [Extent { offset: first * granule_bytes, bytes: count * granule_bytes }]
}

/// Polls until nothing is to come; returns the events and the time.
fn drain(tier: &mut dyn FastTier, mut now_ns: u64) -> (Vec<StageEvent>, u64) {
    let mut events = Vec::new();
    while let Some(wake_ns) = tier.poll(now_ns, &mut events) {
        assert!(wake_ns > now_ns, "a wake-up lies ahead");
        now_ns = wake_ns;
        // A thread of the provider's may be what is waited for.
        thread::yield_now();
    }
    (events, now_ns)
}

/// Stages `extents` to the end; returns the time.
pub(crate) fn stage(tier: &mut dyn FastTier, id: u64, extents: &[Extent], now_ns: u64) -> u64 {
    tier.submit_stage(StageId(id), extents, now_ns).unwrap();
    let (events, now_ns) = drain(tier, now_ns);
    let told = tier.caps().staging != Staging::Async { completion: false };
    assert_eq!(events, if told { vec![StageEvent::Done(StageId(id))] } else { vec![] });
    now_ns
}

/// Residency is as expected, or unknown where that is declared.
fn assert_resident(tier: &dyn FastTier, extents: &[Extent], bytes: u64) {
    let expected = match tier.caps().residency {
        ResidencyReport::Exact => Residency::Bytes(bytes),
        _ => Residency::Unknown,
    };
    assert_eq!(tier.residency(extents), Ok(expected));
}

fn declarations_agree(tier: &dyn FastTier) {
    tier.caps().validate().unwrap();
    assert!(tier.arena().bytes >= tier.caps().capacity_bytes);
}

fn bad_extents_are_refused_as_a_whole(tier: &mut dyn FastTier) {
    let caps = *tier.caps();
    let granule_bytes = caps.stage_granule_bytes;
    let outside = [
        Extent { offset: caps.capacity_bytes, bytes: granule_bytes },
        Extent { offset: 0, bytes: caps.capacity_bytes + granule_bytes },
        Extent { offset: 0, bytes: 0 },
        Extent { offset: u64::MAX - granule_bytes + 1, bytes: u64::MAX },
    ];
    let misaligned = [
        Extent { offset: 0, bytes: granule_bytes - 1 },
        Extent { offset: 1, bytes: granule_bytes },
    ];
    for bad in outside.into_iter().chain(misaligned) {
        let extents = [Extent { offset: 0, bytes: granule_bytes }, bad];
        let answers = [
            tier.residency(&extents).map(drop),
            tier.submit_stage(StageId(1), &extents, 0),
            tier.protect(&extents, 0),
            tier.unprotect(&extents, 0),
            tier.evict_hint(&extents, 0),
            tier.flush(&extents),
        ];
        for answer in answers {
            let refusal = answer.unwrap_err();
            let named = match refusal {
                FastTierError::OutOfArena { extent, .. } => outside.contains(&extent),
                FastTierError::Misaligned { extent, .. } => misaligned.contains(&extent),
                _ => false,
            };
            assert!(named, "{bad}: {refusal}");
        }
    }
    assert_eq!(drain(tier, 0), (vec![], 0), "nothing was submitted");
    assert_resident(tier, &[Extent { offset: 0, bytes: granule_bytes }], 0);
}

fn every_staging_ends_once(tier: &mut dyn FastTier) {
    if tier.caps().staging == Staging::TouchOnly {
        return;
    }
    let (one, two) = (granules(tier, 0, 3), granules(tier, 2, 3));
    tier.submit_stage(StageId(1), &one, 0).unwrap();
    let duplicate = tier.submit_stage(StageId(1), &two, 0);
    assert_eq!(duplicate, Err(FastTierError::DuplicateId { id: StageId(1) }));
    tier.submit_stage(StageId(2), &two, 0).unwrap();
    let (events, now_ns) = drain(tier, 0);
    let told = tier.caps().staging != Staging::Async { completion: false };
    let expected = [1, 2].map(|id| StageEvent::Done(StageId(id)));
    assert_eq!(events, if told { expected.to_vec() } else { vec![] });
    assert_eq!(drain(tier, now_ns + 1).0, vec![]);
    assert_resident(tier, &granules(tier, 0, 5), 5 * tier.caps().stage_granule_bytes);
    // What is there need not be moved again, and ends all the same.
    stage(tier, 1, &one, now_ns);
}

fn the_queue_is_bounded(tier: &mut dyn FastTier) {
    if tier.caps().staging == Staging::TouchOnly {
        return;
    }
    let queue_ops_max = tier.caps().queue_ops_max;
    let extents = granules(tier, 0, 1);
    for id in 0..queue_ops_max as u64 {
        tier.submit_stage(StageId(id), &extents, 0).unwrap();
    }
    let over = tier.submit_stage(StageId(1_000), &extents, 0);
    assert_eq!(over, Err(FastTierError::QueueFull { queue_ops_max }));
    let (_, now_ns) = drain(tier, 0);
    tier.submit_stage(StageId(1_000), &extents, now_ns).unwrap();
}

fn protection_is_all_or_nothing_and_does_not_nest(tier: &mut dyn FastTier) {
    let caps = *tier.caps();
    let Some(limit) = caps.pin_limit_bytes.filter(|_| caps.protection != Protection::None) else {
        return;
    };
    let count = limit / caps.stage_granule_bytes;
    let over = tier.protect(&granules(tier, 0, count + 1), 0).unwrap_err();
    let asked_bytes = (count + 1) * caps.stage_granule_bytes;
    assert_eq!(over, FastTierError::NoCapacity { asked_bytes, free_bytes: limit });
    let all = granules(tier, 0, count);
    tier.protect(&all, 0).unwrap();
    tier.protect(&all, 0).unwrap();
    let other = granules(tier, count, 1);
    assert!(matches!(
        tier.protect(&other, 0),
        Err(FastTierError::NoCapacity { free_bytes: 0, .. })
    ));
    tier.unprotect(&all, 0).unwrap();
    tier.unprotect(&all, 0).unwrap();
    tier.protect(&granules(tier, count, count), 0).unwrap();
}

fn protected_data_stay(tier: &mut dyn FastTier) {
    if tier.caps().protection != Protection::Hard || tier.caps().staging == Staging::TouchOnly {
        return;
    }
    let (kept, granule_bytes) = (granules(tier, 0, 4), tier.caps().stage_granule_bytes);
    tier.protect(&kept, 0).unwrap();
    let mut now_ns = stage(tier, 0, &kept, 0);
    assert_resident(tier, &kept, 4 * granule_bytes);
    // Everything else streams through, twice what fast memory holds.
    let others = tier.caps().capacity_bytes / granule_bytes - 4;
    for first in (4..others).step_by(4) {
        let other = granules(tier, first, 4);
        now_ns = stage(tier, first, &other, now_ns);
    }
    tier.evict_hint(&kept, now_ns).unwrap();
    assert_resident(tier, &kept, 4 * granule_bytes);
    // What has no known bound need not have evicted anything.
    if tier.caps().fast_bytes.is_some() {
        assert_resident(tier, &granules(tier, 4, 4), 0);
    }
}

fn release_is_not_eviction(tier: &mut dyn FastTier) {
    if tier.caps().protection == Protection::None || tier.caps().staging == Staging::TouchOnly {
        return;
    }
    let (extents, granule_bytes) = (granules(tier, 7, 2), tier.caps().stage_granule_bytes);
    tier.protect(&extents, 0).unwrap();
    let now_ns = stage(tier, 1, &extents, 0);
    tier.unprotect(&extents, now_ns).unwrap();
    assert_resident(tier, &extents, 2 * granule_bytes);
    tier.evict_hint(&extents, now_ns).unwrap();
    assert_resident(tier, &extents, if tier.caps().evict { 0 } else { 2 * granule_bytes });
}

fn what_is_not_declared_is_unsupported(tier: &mut dyn FastTier) {
    let extents = granules(tier, 0, 1);
    if tier.caps().staging == Staging::TouchOnly {
        assert!(matches!(
            tier.submit_stage(StageId(1), &extents, 0),
            Err(FastTierError::Unsupported { .. })
        ));
    }
    if tier.caps().protection == Protection::None {
        assert!(matches!(tier.protect(&extents, 0), Err(FastTierError::Unsupported { .. })));
    }
}
