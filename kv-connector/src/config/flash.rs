//! `[tier.flash]`: memory on flash, and when it is made ready.

use kv_staging::{
    Controller, ControllerOptions, Reservation,
    policy::{ByChance, Demand, Immediate, QueueDepth, Static, Tempo, TempoQ},
};
use kv_tiers::record_bytes;
use serde::{Deserialize, Serialize};

use super::{EngineConfig, TierConfig, TierKind};
use crate::{ByteSize, EngineError, clock::ns_from_ms};

const HOUR_MS: u64 = 3_600_000;
/// Of the memory that there is, so much may be protected: locking more than a cgroup allows ends the process.
const SHARE_PERCENT: u64 = 80;

/// `[tier.flash]`: how much fast memory claims may hold on a tier of kind flash, and when. See
/// [`Engine::claim`](crate::Engine::claim).
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct FlashSection {
    /// Most bytes protected at once; by default 1 GiB or a quarter of the tier, whichever is less. **Below the limit of the
    /// memory cgroup**: locking over that limit ends the process.
    pub protected_bytes: Option<ByteSize>,
    /// When a claim is staged.
    pub policy: FlashPolicy,
    /// Whether a claim counts as protected from its commitment, or from its first staged byte.
    pub reservation: FlashReservation,
    /// Added to the time until ready, in per cent of it; by default 25 for `tempo_q` where it goes by a quantile, else 0. Of
    /// policies `tempo` and `tempo_q`.
    pub margin_percent: Option<u32>,
    /// Added to the time until ready; by default 100 for `tempo_q`, else 0. Of policies `tempo`, `tempo_q` and `static`.
    pub margin_ms: Option<u64>,
    /// Which quantile of the projected times until use is believed, where callers give none; by default 30 for `tempo_q`,
    /// else 50.
    pub quantile_percent: Option<u32>,
    /// Of policy `tempo_q` with a schedule: to protect so many per cent of a usual claim's bytes for a second is as bad as
    /// one request that is late by a second. The more, the sooner claims are staged.
    pub late_price_percent: u32,
    /// Rate of staging: believed until it is measured, and by policy `static` always.
    pub staging_bytes_per_s: ByteSize,
    /// No further claim begins to be staged while so much is on its way.
    pub in_flight_bytes: ByteSize,
    /// Chunks read from the tier at once, each by a thread of its own; 0: one after the other by the tier's thread.
    pub read_threads: usize,
    /// Most claims alive; more are refused.
    pub claims_max: usize,
    /// A claim that nobody revises or reads for so long is cancelled.
    pub claim_deadline_ms: u64,
}

impl Default for FlashSection {
    fn default() -> Self {
        Self {
            protected_bytes: None,
            policy: FlashPolicy::default(),
            reservation: FlashReservation::default(),
            margin_percent: None,
            margin_ms: None,
            quantile_percent: None,
            // 35 GiB for claims of 5 GiB: chosen in simulation, where lateness and protection are both seen.
            late_price_percent: 700,
            staging_bytes_per_s: ByteSize::gib(1),
            in_flight_bytes: ByteSize::mib(64),
            read_threads: 8,
            claims_max: 16_384,
            claim_deadline_ms: 600_000,
        }
    }
}

/// When a claim is staged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FlashPolicy {
    /// Never: every retrieval reads through the flash.
    Demand,
    /// As soon as it is recorded.
    Immediate,
    /// While it is the oldest that is not read yet.
    Queue1,
    /// While it is one of the four oldest.
    Queue4,
    /// When the time until use falls to bytes over the configured rate.
    Static,
    /// When the time until use falls to the time until ready.
    Tempo,
    /// When the chance that it is used before it could be ready outweighs its bytes; where only a time is known, as `tempo`
    /// with a low quantile of it and a margin.
    #[default]
    TempoQ,
}

/// From when a claim counts as protected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FlashReservation {
    /// From its commitment.
    Eager,
    /// From its first staged byte, and then the whole claim.
    #[default]
    Lazy,
}

impl FlashSection {
    pub(crate) fn protected_bytes(&self, capacity: ByteSize) -> u64 {
        self.protected_bytes.map_or((capacity.0 / 4).min(1 << 30), |bytes| bytes.0)
    }

    pub(crate) fn quantile_percent(&self) -> u32 {
        let default = if self.policy == FlashPolicy::TempoQ { 30 } else { 50 };
        self.quantile_percent.unwrap_or(default)
    }

    /// What decides when claims on a tier of `capacity` are staged.
    pub(crate) fn controller(&self, capacity: ByteSize) -> Controller {
        let mut options = ControllerOptions::new(self.protected_bytes(capacity));
        options.reservation = match self.reservation {
            FlashReservation::Eager => Reservation::Eager,
            FlashReservation::Lazy => Reservation::Lazy,
        };
        options.in_flight_bytes_max = self.in_flight_bytes.0;
        options.claims_max = self.claims_max;
        let is_q = self.policy == FlashPolicy::TempoQ;
        let margin_percent = self.margin_percent.unwrap_or(if is_q { 25 } else { 0 });
        let margin_ns = ns_from_ms(self.margin_ms.unwrap_or(if is_q { 100 } else { 0 }));
        match self.policy {
            FlashPolicy::Demand => Controller::new(options, Demand),
            FlashPolicy::Immediate => Controller::new(options, Immediate),
            FlashPolicy::Queue1 => Controller::new(options, QueueDepth { claims: 1 }),
            FlashPolicy::Queue4 => Controller::new(options, QueueDepth { claims: 4 }),
            FlashPolicy::Static => {
                let bytes_per_s = self.staging_bytes_per_s.0;
                Controller::new(options, Static { bytes_per_s, lead_ns: margin_ns })
            }
            FlashPolicy::Tempo => Controller::new(options, Tempo { margin_percent, margin_ns }),
            FlashPolicy::TempoQ => {
                let by_chance = TempoQ {
                    margin_percent: self.margin_percent.unwrap_or(0),
                    margin_ns,
                    ..TempoQ::default()
                };
                let by_quantile = Tempo { margin_percent, margin_ns };
                let policy = ByChance::new(by_chance, by_quantile, self.late_price_percent);
                Controller::new(options, policy)
            }
        }
    }
}

/// `memory` is what the process may use, if that is known.
pub(super) fn check(
    tier: &TierConfig,
    engine: &EngineConfig,
    memory: Option<u64>,
    at: &impl Fn(&str) -> String,
) -> Result<(), EngineError> {
    let fail = |field: &str, problem: String, fix: String| {
        Err(EngineError::config(at(field), problem, fix))
    };
    if tier.kind != TierKind::Flash {
        let kind = format!("the tier is of kind {}, not flash", tier.kind.name());
        return if tier.flash.is_some() { fail("flash", kind, "remove it".into()) } else { Ok(()) };
    }
    if tier.path.as_ref().is_none_or(|path| path.as_os_str().is_empty()) {
        let fix = "write a file on local flash, or a device such as \"/dev/dax0.0\"".into();
        return fail("path", "a tier of kind flash needs one".into(), fix);
    }
    let section = tier.flash.clone().unwrap_or_default();
    let capacity = tier.capacity.unwrap_or_default();
    let protected = ByteSize(section.protected_bytes(capacity));
    let chunk = ByteSize(record_bytes(engine.chunk_bytes_max.0));
    if section.protected_bytes.is_some_and(|bytes| bytes < chunk)
        && section.policy != FlashPolicy::Demand
    {
        let problem = format!("{protected} hold no chunk of {}", engine.chunk_bytes_max);
        let fix = format!("write at least {chunk}, or policy = \"demand\"");
        return fail("flash.protected_bytes", problem, fix);
    }
    if protected > capacity {
        let problem = format!("{protected} are more than the tier of kind flash has");
        return fail("flash.protected_bytes", problem, format!("write {capacity} or less"));
    }
    if let Some(most) = memory.map(|bytes| ByteSize(bytes / 100 * SHARE_PERCENT))
        && protected > most
    {
        let problem = format!("{protected} of locked memory could end the process");
        return fail("flash.protected_bytes", problem, format!("write {most} or less"));
    }
    check_numbers(&section, fail)
}

fn check_numbers(
    section: &FlashSection,
    fail: impl Fn(&str, String, String) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    for (field, value, least, most) in [
        ("margin_percent", section.margin_percent.map(u64::from), 0, 10_000),
        ("margin_ms", section.margin_ms, 0, HOUR_MS),
        ("quantile_percent", section.quantile_percent.map(u64::from), 1, 100),
        ("late_price_percent", Some(u64::from(section.late_price_percent)), 1, 1_000_000),
        ("read_threads", u64::try_from(section.read_threads).ok(), 0, 64),
        ("claims_max", u64::try_from(section.claims_max).ok(), 1, 1 << 20),
        ("claim_deadline_ms", Some(section.claim_deadline_ms), 1_000, 24 * HOUR_MS),
    ] {
        if let Some(value) = value.filter(|value| !(least..=most).contains(value)) {
            let fix = format!("write {least} to {most}");
            return fail(&format!("flash.{field}"), format!("{value} is out of range"), fix);
        }
    }
    for (field, value) in [
        ("staging_bytes_per_s", section.staging_bytes_per_s),
        ("in_flight_bytes", section.in_flight_bytes),
    ] {
        if value.0 == 0 {
            let fix = "write a size, such as \"64 MiB\"".into();
            return fail(&format!("flash.{field}"), "is 0: nothing would be staged".into(), fix);
        }
    }
    Ok(())
}
