//! One row for each policy: what is written and printed.

use kv_staging::Reservation;
use serde_json::{Map, Value, json};

use crate::{
    serve::Outcome,
    statistics::{Summary, percentile},
    workload::GIB,
};

/// Figures of one run.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Run {
    pub(crate) p95_ttft_s: f64,
    pub(crate) p95_wait_s: f64,
    pub(crate) mean_wait_s: f64,
    pub(crate) c_gib_s: f64,
    /// Parts of the requests.
    pub(crate) late: f64,
    pub(crate) early: f64,
    pub(crate) blocked: f64,
    pub(crate) queue_mean: f64,
    pub(crate) served_per_s: f64,
    /// Lowest, 5, 50 and 95 %, highest.
    pub(crate) margin_s: [f64; 5],
}

impl Run {
    /// Percentiles leave out the first tenth of the requests, which find an empty queue.
    pub(crate) fn of(outcome: &Outcome) -> Self {
        let requests = outcome.ttft_ns.len();
        let seconds = |ns: &[u64]| -> Vec<f64> {
            ns[requests / 10..].iter().map(|ns| *ns as f64 / 1e9).collect()
        };
        let wait_s = seconds(&outcome.wait_ns);
        let part = |count: u64| count as f64 / requests as f64;
        Self {
            p95_ttft_s: percentile(&seconds(&outcome.ttft_ns), 95),
            p95_wait_s: percentile(&wait_s, 95),
            mean_wait_s: wait_s.iter().sum::<f64>() / wait_s.len().max(1) as f64,
            c_gib_s: outcome.report.protected_byte_ns as f64 / GIB / 1e9 / requests as f64,
            late: part(outcome.report.late),
            early: part(outcome.report.early),
            blocked: part(outcome.report.blocked),
            queue_mean: outcome.queue_mean,
            served_per_s: requests as f64 / (outcome.end_ns as f64 / 1e9),
            margin_s: [0, 5, 50, 95, 100].map(|percent| percentile(&outcome.margins_s, percent)),
        }
    }
}

impl Run {
    /// What a child tells its parent.
    pub(crate) fn to_json(&self) -> Value {
        json!({
            "p95_ttft_s": self.p95_ttft_s, "p95_wait_s": self.p95_wait_s, "mean_wait_s": self.mean_wait_s,
            "c_gib_s": self.c_gib_s, "late": self.late, "early": self.early, "blocked": self.blocked,
            "queue_mean": self.queue_mean, "served_per_s": self.served_per_s,
        })
    }

    pub(crate) fn from_json(value: &Value) -> Self {
        let number = |key: &str| value[key].as_f64().unwrap_or(f64::NAN);
        Self {
            p95_ttft_s: number("p95_ttft_s"),
            p95_wait_s: number("p95_wait_s"),
            mean_wait_s: number("mean_wait_s"),
            c_gib_s: number("c_gib_s"),
            late: number("late"),
            early: number("early"),
            blocked: number("blocked"),
            queue_mean: number("queue_mean"),
            served_per_s: number("served_per_s"),
            margin_s: [0.0; 5],
        }
    }
}

/// A policy at one point, with a run for each seed.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) scenario: &'static str,
    pub(crate) varied: Option<(&'static str, f64)>,
    pub(crate) utilisation: f64,
    pub(crate) offered_per_s: f64,
    pub(crate) policy: &'static str,
    pub(crate) reservation: Reservation,
    pub(crate) runs: Vec<Run>,
}

/// A row and what it is measured against.
pub(crate) struct Compared<'a> {
    pub(crate) row: &'a Row,
    pub(crate) p95_ttft_s: Summary,
    pub(crate) p95_cut: Summary,
    /// Of the gain of `immediate`.
    pub(crate) kept: f64,
    pub(crate) c_gib_s: Summary,
    /// Mean of the pairs' cuts.
    pub(crate) c_cut: Summary,
    pub(crate) p95_wait_cut: Summary,
}

impl Row {
    pub(crate) fn reservation_name(&self) -> &'static str {
        match self.reservation {
            Reservation::Eager => "eager",
            Reservation::Lazy => "lazy",
        }
    }

    pub(crate) fn mean(&self, figure: impl Fn(&Run) -> f64) -> f64 {
        self.summary(figure).mean
    }

    fn summary(&self, figure: impl Fn(&Run) -> f64) -> Summary {
        Summary::of(&self.runs.iter().map(figure).collect::<Vec<f64>>())
    }

    fn is_at(&self, other: &Self) -> bool {
        (self.scenario, self.varied, self.reservation)
            == (other.scenario, other.varied, other.reservation)
            && self.utilisation.total_cmp(&other.utilisation).is_eq()
    }

    /// By how much less than `other`'s, pair by pair.
    fn cut(&self, other: &Self, figure: impl Fn(&Run) -> f64) -> Summary {
        let cut = |(ours, theirs): (&Run, &Run)| {
            let theirs = figure(theirs);
            if theirs > 0.0 { 1.0 - figure(ours) / theirs } else { 0.0 }
        };
        Summary::of(&self.runs.iter().zip(&other.runs).map(cut).collect::<Vec<f64>>())
    }
}

/// Every row with `demand` and `immediate` of the same reservation.
pub(crate) fn compare(rows: &[Row]) -> Vec<Compared<'_>> {
    let compared = |row| {
        let of = |policy| rows.iter().find(|other| other.policy == policy && other.is_at(row));
        let (demand, immediate) = (of("demand")?, of("immediate")?);
        let p95_cut = row.cut(demand, |run| run.p95_ttft_s);
        Some(Compared {
            row,
            p95_ttft_s: row.summary(|run| run.p95_ttft_s),
            p95_cut,
            kept: p95_cut.mean / immediate.cut(demand, |run| run.p95_ttft_s).mean,
            c_gib_s: row.summary(|run| run.c_gib_s),
            c_cut: row.cut(immediate, |run| run.c_gib_s),
            p95_wait_cut: row.cut(demand, |run| run.p95_wait_s),
        })
    };
    rows.iter().filter_map(compared).collect()
}

impl Compared<'_> {
    pub(crate) fn json(&self) -> Value {
        let row = self.row;
        let mut value = json!({
            "scenario": row.scenario,
            "utilisation": row.utilisation,
            "offered_per_s": row.offered_per_s,
            "policy": row.policy,
            "reservation": row.reservation_name(),
            "p95_ttft_s": self.p95_ttft_s.mean,
            "p95_cut_vs_demand": self.p95_cut.mean,
            "p95_gain_kept": self.kept,
            "c_gib_s_per_request": self.c_gib_s.mean,
            "c_cut_vs_immediate": self.c_cut.mean,
            "p95_retrieval_wait_s": row.mean(|run| run.p95_wait_s),
            "p95_retrieval_wait_cut_vs_demand": self.p95_wait_cut.mean,
            "mean_retrieval_wait_s": row.mean(|run| run.mean_wait_s),
            "se": {
                "p95_ttft_s": self.p95_ttft_s.se,
                "p95_cut_vs_demand": self.p95_cut.se,
                "c_gib_s_per_request": self.c_gib_s.se,
                "c_cut_vs_immediate": self.c_cut.se,
                "p95_retrieval_wait_cut_vs_demand": self.p95_wait_cut.se,
            },
            "seeds": row.runs.len(),
            "late": row.mean(|run| run.late),
            "early": row.mean(|run| run.early),
            "blocked": row.mean(|run| run.blocked),
            "queue_mean": row.mean(|run| run.queue_mean),
            "served_per_s": row.mean(|run| run.served_per_s),
        });
        if let (Some((name, varied)), Some(fields)) = (row.varied, value.as_object_mut()) {
            fields.insert(name.to_owned(), json!(varied));
        }
        value
    }
}

/// How far use was from readiness when a request came to the head of the queue.
pub(crate) fn margins(rows: &[Row]) -> Vec<Value> {
    let of_interest = |row: &&Row| {
        row.policy == "immediate" && row.reservation == Reservation::Eager && row.varied.is_none()
    };
    let names = ["min", "p5", "p50", "p95", "max"];
    rows.iter()
        .filter(of_interest)
        .map(|row| {
            let mut value = Map::new();
            value.insert("scenario".to_owned(), json!(row.scenario));
            value.insert("utilisation".to_owned(), json!(row.utilisation));
            for (at, name) in names.into_iter().enumerate() {
                value.insert(format!("{name}_s"), json!(row.mean(|run| run.margin_s[at])));
            }
            Value::Object(value)
        })
        .collect()
}
