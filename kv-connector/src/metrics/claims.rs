//! Claims on tiers of kind flash.

use super::Text;
use crate::{ClaimStatus, EngineStats};

type Value = fn(&ClaimStatus) -> f64;

pub(super) fn render(stats: &EngineStats, text: &mut Text) {
    let claims = || stats.tiers.iter().filter_map(|it| Some((&*it.name, it.claims.as_ref()?)));
    if claims().next().is_none() {
        return;
    }
    text.family("claims", "gauge", "Living claims, by state.");
    for (tier, claims) in claims() {
        for (state, count) in &claims.states {
            text.sample("claims", &[("tier", tier), ("state", state)], count);
        }
    }
    text.family("claims_total", "counter", "Claims, by what became of them; one can be several.");
    for (tier, claims) in claims() {
        for (event, count) in [
            ("recorded", claims.recorded),
            ("committed", claims.committed),
            ("ready", claims.ready),
            ("early", claims.early),
            ("late", claims.late),
            ("blocked", claims.blocked),
            ("demand", claims.demand),
            ("failed", claims.failed),
            ("cancelled", claims.cancelled),
            ("expired", claims.expired),
            ("refused", claims.refused),
            ("released", claims.released),
        ] {
            text.sample("claims_total", &[("tier", tier), ("event", event)], count);
        }
    }
    for (name, kind, help, value) in families() {
        text.family(name, kind, help);
        for (tier, claims) in claims() {
            text.sample(name, &[("tier", tier)], value(claims));
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "Prometheus values are doubles")]
fn families() -> [(&'static str, &'static str, &'static str, Value); 10] {
    const GIB: f64 = (1_u64 << 30) as f64;
    [
        ("claim_budget_bytes", "gauge", "Bytes that may be protected.", |it| {
            it.budget_bytes as f64
        }),
        ("claim_reserved_bytes", "gauge", "Bytes that count in the budget.", |it| {
            it.reserved_bytes as f64
        }),
        ("claim_protected_bytes", "gauge", "Bytes that the device protects.", |it| {
            it.protected_bytes as f64
        }),
        ("claim_protected_byte_seconds_total", "counter", "C: reserved bytes over time.", |it| {
            it.c_gib_s * GIB
        }),
        ("claim_early_seconds_total", "counter", "From ready to read, in sum.", |it| it.early_s),
        ("claim_staged_chunks_total", "counter", "Chunks staged.", |it| it.staged_chunks as f64),
        ("claim_staged_bytes_total", "counter", "Bytes of those that were absent.", |it| {
            it.staged_bytes as f64
        }),
        ("claim_failed_chunks_total", "counter", "Chunks that were not staged.", |it| {
            it.failed_chunks as f64
        }),
        ("claim_protected_chunks_total", "counter", "Chunks read while protected.", |it| {
            it.protected_chunks as f64
        }),
        ("claim_demand_chunks_total", "counter", "Claimed chunks read without.", |it| {
            it.demand_chunks as f64
        }),
    ]
}
