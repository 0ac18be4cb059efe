//! `kv-staging`'s controller over a provider, in virtual time: the order reserve, protect, stage, verify.

use std::collections::HashMap;

use kv_cxl::{
    Blind, Extent, FastTier, Residency, Simulated, SimulatedConfig, StageEvent, StageId,
    TierTimeToReady,
};
use kv_staging::{
    ClaimId, Controller, ControllerOptions, Effect, Object, ObjectId, Retrieval, StagingNeed,
    TimeToReady, TimeToUse, policy::Tempo,
};

const MIB: u64 = 1 << 20;
const MS: u64 = 1_000_000;
const OBJECT_BYTES: u64 = 16 * MIB;

/// Every claim is used `period_ns` after the one before.
struct Periodic {
    period_ns: u64,
}

impl TimeToUse for Periodic {
    fn time_to_use_ns(&self, claim: ClaimId, now_ns: u64) -> Option<u64> {
        Some((claim.0 * self.period_ns).saturating_sub(now_ns))
    }
}

fn extents(id: ObjectId) -> Vec<Extent> {
    let offset = u64::try_from(id.0).unwrap() * OBJECT_BYTES;
    vec![Extent { offset, bytes: OBJECT_BYTES }]
}

/// 1 GiB of flash, 128 MiB of fast memory of which 64 may be protected, 1 GiB/s: 15.6 ms an object.
fn device() -> Simulated {
    let mut config = SimulatedConfig::new(1 << 30, 128 * MIB, 1 << 30);
    config.pin_limit_bytes = 64 * MIB;
    Simulated::new(config).unwrap()
}

/// Serves 40 claims of one object each, every fourth object shared by two claims; returns the controller's report.
///
/// `is_staged` says when to call an object staged, since not every device tells.
fn serve(
    tier: &mut dyn FastTier,
    mut is_staged: impl FnMut(&mut dyn FastTier, u64, &mut HashMap<ObjectId, u64>) -> Vec<ObjectId>,
    look: impl Fn(&dyn FastTier, ObjectId),
) -> kv_staging::Report {
    let uses = Periodic { period_ns: 40 * MS };
    let mut controller = Controller::new(
        ControllerOptions::new(64 * MIB),
        Tempo { margin_percent: 25, margin_ns: 30 * MS },
    );
    let objects: Vec<Object> = (0..40_u128)
        .map(|i| Object { id: ObjectId(if i % 4 == 3 { i - 1 } else { i }), bytes: OBJECT_BYTES })
        .collect();
    let claims: Vec<ClaimId> =
        objects.iter().map(|object| controller.record(&[*object]).unwrap()).collect();
    let mut staging: HashMap<ObjectId, u64> = HashMap::new();
    for now_ns in (0..2_000).map(|ms| ms * MS) {
        let mut effects = Vec::new();
        let ready = TierTimeToReady {
            tier,
            extents_of: extents,
            fallback_bytes_per_s: 1 << 30,
            fixed_ns: 0,
        };
        controller.tick(now_ns, &uses, &ready, &mut effects);
        for id in is_staged(tier, now_ns, &mut staging) {
            controller.object_staged(id, now_ns, &mut effects).unwrap();
        }
        for (claim, object) in claims.iter().zip(&objects) {
            if controller.claim(*claim).is_some() && uses.time_to_use_ns(*claim, now_ns) == Some(0)
            {
                match controller.begin_retrieval(*claim, now_ns) {
                    Ok(Retrieval::Wait) => {}
                    Ok(Retrieval::Protected) => {
                        look(tier, object.id);
                        controller.finish_retrieval(*claim, now_ns, &mut effects).unwrap();
                    }
                    other => panic!("{other:?}: the budget has room for every claim"),
                }
            }
        }
        for effect in effects {
            match effect {
                Effect::Stage(object) => {
                    tier.protect(&extents(object.id), now_ns)
                        .expect("the budget is within the pin limit");
                    let id = StageId(u64::try_from(object.id.0).unwrap());
                    tier.submit_stage(id, &extents(object.id), now_ns).unwrap();
                    staging.insert(object.id, now_ns);
                }
                Effect::Unprotect(object) => tier.unprotect(&extents(object.id), now_ns).unwrap(),
                Effect::Failed(id) => panic!("claim {id} failed"),
                Effect::Ready(_) | Effect::Released(_) => {}
            }
        }
    }
    controller.report(2_000 * MS)
}

#[test]
fn the_controller_stages_a_device_that_tells() {
    let told = |tier: &mut dyn FastTier, now_ns, staging: &mut HashMap<ObjectId, u64>| {
        let mut events = Vec::new();
        tier.poll(now_ns, &mut events);
        let done = |event| match event {
            StageEvent::Done(id) => ObjectId(id.0.into()),
            StageEvent::Failed(id, error) => panic!("staging {id}: {error}"),
        };
        let ended: Vec<ObjectId> = events.into_iter().map(done).collect();
        for id in &ended {
            assert_eq!(
                tier.residency(&extents(*id)),
                Ok(Residency::Bytes(OBJECT_BYTES)),
                "verified"
            );
            staging.remove(id);
        }
        ended
    };
    let is_there = |tier: &dyn FastTier, id| {
        assert_eq!(tier.residency(&extents(id)), Ok(Residency::Bytes(OBJECT_BYTES)));
    };
    let report = serve(&mut device(), told, is_there);
    assert_eq!((report.released, report.ready, report.blocked, report.demand), (40, 40, 0, 0));
    assert!(report.late <= 1, "only the first claim, used at once, cannot be in time: {report:?}");
    assert!(report.peak_bytes <= 64 * MIB);
    // Just in time: far less than 40 claims' worth of the whole run.
    assert!(report.c_per_claim_gib_s() < 0.002, "{report:?}");
}

#[test]
fn the_controller_stages_a_device_that_tells_nothing() {
    // Readiness by time: twice what the object takes at the assumed rate, behind what was submitted before.
    let by_time = |tier: &mut dyn FastTier, now_ns, staging: &mut HashMap<ObjectId, u64>| {
        let mut events = Vec::new();
        tier.poll(now_ns, &mut events);
        assert_eq!(events, []);
        let ended: Vec<ObjectId> = staging
            .iter()
            .filter(|(_, since_ns)| now_ns - **since_ns >= 32 * MS)
            .map(|(id, _)| *id)
            .collect();
        staging.retain(|id, _| !ended.contains(id));
        ended
    };
    let mut blind = Blind::new(device());
    let report = serve(&mut blind, by_time, |_, _| ());
    assert_eq!((report.released, report.ready, report.demand), (40, 40, 0));
}

#[test]
fn resident_bytes_are_not_missing_and_unknown_ones_are() {
    let mut tier = device();
    let object = Object { id: ObjectId(3), bytes: OBJECT_BYTES };
    let ask = |tier: &dyn FastTier, cold: &[Object], in_flight_bytes| {
        let ready = TierTimeToReady {
            tier,
            extents_of: extents,
            fallback_bytes_per_s: 1 << 29,
            fixed_ns: 5,
        };
        ready.time_to_ready_ns(&StagingNeed { cold, in_flight_bytes }, 0)
    };
    let object_ns = (OBJECT_BYTES * 1_000_000_000) >> 30;
    assert_eq!(ask(&tier, &[object], 0), object_ns + 5);
    tier.submit_stage(StageId(1), &extents(ObjectId(9)), 0).unwrap();
    assert_eq!(ask(&tier, &[object], 0), 2 * object_ns + 5);
    tier.poll(object_ns, &mut Vec::new());
    tier.submit_stage(StageId(2), &extents(object.id), object_ns).unwrap();
    tier.poll(2 * object_ns, &mut Vec::new());
    assert_eq!(ask(&tier, &[object], 0), 5, "it is there");
    assert_eq!(ask(&tier, &[], 0), 0);
    assert_eq!(ask(&Blind::new(tier), &[object], 0), 2 * object_ns + 5, "at the assumed half rate");
}
