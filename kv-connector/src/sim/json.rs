//! A study as JSON, for machines. Fields are only ever added; ratios are ratios, not percent.

use serde_json::{Value, json};

use super::{
    case::{CHUNK_BLOCKS, CHUNK_BYTES, Outcome},
    policy::Policy,
    study::{Row, Study},
};

impl Study {
    /// The document: results, targets, the grid of fixed splits, parameters.
    #[must_use]
    pub fn to_json(&self) -> Value {
        json!({
            "what": "model in virtual time, not a measurement",
            "parameters": {
                "seeds": self.options.seeds,
                "first_seed": self.options.first_seed,
                "chunk_bytes": CHUNK_BYTES,
                "chunk_blocks": CHUNK_BLOCKS,
                "losers": "not recalled; steps back to back",
                "bound": "pathwise fluid, rates calibrated at whole chunks and full windows",
            },
            "targets": self.verdicts(),
            "results": self.rows.iter().map(result).collect::<Vec<_>>(),
            "static_grid": self.grid.iter().map(split).collect::<Vec<_>>(),
        })
    }
}

fn result(row: &Row) -> Value {
    let (gap, seconds) = (row.gap(), row.summary(Outcome::step_s));
    let over_nominal = row.summary(Outcome::over_nominal);
    let mut value = json!({
        "device": row.device,
        "chunks": row.case.chunks,
        "ranks": row.case.ranks,
        "tiers": row.tiers,
        "policy": row.policy.name(),
        "gap_mean": gap.mean,
        "gap_se": gap.se,
        "gap_median": gap.median,
        "gap_min": gap.min,
        "gap_max": gap.max,
        "seconds_mean": seconds.mean,
        "seconds_se": seconds.se,
        "seconds_median": seconds.median,
        "seconds_min": seconds.min,
        "seconds_max": seconds.max,
        "over_nominal_mean": over_nominal.mean,
        "over_nominal_se": over_nominal.se,
        "seeds": row.outcomes.len(),
        "steps_per_seed": row.case.schedule.steps,
        "duplicate_bytes_fraction": row.summary(Outcome::duplicates).mean,
        "reps": row.outcomes.iter().map(repetition).collect::<Vec<_>>(),
    });
    if let Policy::Static(factor) = row.policy {
        value["fast_share_factor"] = json!(factor);
    }
    value
}

fn repetition(outcome: &Outcome) -> Value {
    json!({
        "seconds": outcome.seconds,
        "bound_s": outcome.bound_s,
        "bytes": outcome.bytes,
        "duplicate_bytes": outcome.duplicate_bytes,
    })
}

fn split(row: &Row) -> Value {
    let Policy::Static(factor) = row.policy else { return json!({}) };
    json!({
        "device": row.device,
        "chunks": row.case.chunks,
        "ranks": row.case.ranks,
        "tiers": row.tiers,
        "fast_share_factor": factor,
        "gap_mean": row.gap().mean,
        "gap_se": row.gap().se,
    })
}
