//! What is written down: one row for each scenario and policy.

use serde_json::{Value, json};

use super::rig::Shot;

/// A repetition.
#[derive(Clone, Debug)]
pub(super) struct Rep {
    pub(super) shot: Shot,
    /// Charged to the cgroup, and read by its processes, from the begin of the step until its last read was over.
    pub(super) charged_bytes: u64,
    pub(super) read_bytes: u64,
    /// What others read from each device during the step, in bytes/s.
    pub(super) others_bytes_per_s: Vec<f64>,
}

/// All repetitions of one policy in one scenario.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) scenario: &'static str,
    pub(super) policy: &'static str,
    pub(super) reps: Vec<Rep>,
    pub(super) alone_mbps: Vec<f64>,
    pub(super) bound_s: f64,
    pub(super) crc_s_per_gb: f64,
}

impl Row {
    /// How much longer than its bound each repetition took.
    pub(super) fn gaps(&self) -> Vec<f64> {
        self.reps.iter().map(|rep| rep.shot.seconds / self.bound_s - 1.0).collect()
    }

    /// One row of the results.
    pub(super) fn to_json(&self) -> Value {
        let gaps = self.gaps();
        let sum = |of: fn(&Rep) -> f64| self.reps.iter().map(of).sum::<f64>();
        let gb = sum(|rep| rep.shot.bytes as f64) / 1e9;
        let rep = |rep: &Rep| {
            json!({
                "seconds": rep.shot.seconds,
                "bytes": rep.shot.bytes,
                "bytes_per_tier": rep.shot.tier_bytes,
            })
        };
        json!({
            "scenario": self.scenario,
            "policy": self.policy,
            "reps": self.reps.iter().map(rep).collect::<Vec<_>>(),
            "tier_alone_mbps": self.alone_mbps,
            "bound_s": self.bound_s,
            "gap_mean": mean(&gaps),
            "gap_se": standard_error(&gaps),
            "cpu_s_per_gb": sum(|rep| rep.shot.cpu_s) / gb,
            "crc_s_per_gb": self.crc_s_per_gb,
            "charged_over_read": self.charged_over_read(),
        })
    }

    /// 1 where every byte was charged once.
    pub(super) fn charged_over_read(&self) -> f64 {
        let sum = |of: fn(&Rep) -> u64| self.reps.iter().map(of).sum::<u64>() as f64;
        sum(|rep| rep.charged_bytes) / sum(|rep| rep.read_bytes)
    }

    /// Where the time went, by repetition.
    pub(super) fn to_detail(&self) -> Value {
        let rep = |rep: &Rep| {
            json!({
                "busy_s_per_tier": rep.shot.tier_busy_s,
                "duplicate_bytes": rep.shot.duplicate_bytes,
                "late_bytes": rep.shot.late_bytes,
                "others_mbps": rep.others_bytes_per_s.iter().map(|rate| rate / 1e6).collect::<Vec<_>>(),
            })
        };
        json!({
            "scenario": self.scenario,
            "policy": self.policy,
            "reps": self.reps.iter().map(rep).collect::<Vec<_>>(),
        })
    }
}

/// Whether any figure is missing or no number.
pub(super) fn has_null(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(values) => values.iter().any(has_null),
        Value::Object(values) => values.values().any(has_null),
        _ => false,
    }
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Of the mean; 0 for fewer than two values.
pub(super) fn standard_error(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let (mean, n) = (mean(values), values.len() as f64);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (n - 1.0) / n).sqrt()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn row() -> Row {
        let rep = |seconds, slow: u64| Rep {
            shot: Shot {
                seconds,
                bytes: 2_000_000_000,
                tier_bytes: vec![2_000_000_000 - slow, slow],
                tier_busy_s: vec![seconds; 2],
                cpu_s: 0.5,
                ..Shot::default()
            },
            charged_bytes: 2_100_000_000,
            read_bytes: 2_100_000_000,
            others_bytes_per_s: vec![0.0; 2],
        };
        Row {
            scenario: "two_tiers",
            policy: "kvbraid",
            reps: vec![rep(5.05, 500_000_000), rep(5.15, 510_000_000)],
            alone_mbps: vec![300.0, 100.0],
            bound_s: 5.0,
            crc_s_per_gb: 0.04,
        }
    }

    #[test]
    fn a_row_has_the_published_shape() {
        let value = row().to_json();
        let keys: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let mut due = [
            "scenario",
            "policy",
            "reps",
            "tier_alone_mbps",
            "bound_s",
            "gap_mean",
            "gap_se",
            "cpu_s_per_gb",
            "crc_s_per_gb",
            "charged_over_read",
        ];
        due.sort_unstable();
        let mut found = keys.clone();
        found.sort_unstable();
        assert_eq!(found, due);
        assert_eq!(value["reps"][1]["bytes"], 2_000_000_000_u64);
        assert_eq!(value["reps"][1]["bytes_per_tier"], json!([1_490_000_000_u64, 510_000_000_u64]));
        assert_eq!(value["reps"][0].as_object().unwrap().len(), 3);
        assert!(!has_null(&value));
        let near = |key: &str, due: f64| {
            let found = value[key].as_f64().unwrap();
            assert!((found - due).abs() < 1e-9, "{key}: {found}");
        };
        near("gap_mean", 0.02);
        near("gap_se", 0.01);
        near("cpu_s_per_gb", 0.25);
        near("charged_over_read", 1.0);
    }

    #[test]
    fn a_figure_that_is_no_number_is_seen() {
        assert!(!has_null(&row().to_json()) && !has_null(&row().to_detail()));
        let mut nothing_read = row();
        nothing_read.reps.iter_mut().for_each(|rep| (rep.charged_bytes, rep.read_bytes) = (0, 0));
        assert!(has_null(&json!([{"results": [nothing_read.to_json()]}])));
    }

    #[test]
    fn one_repetition_has_no_spread() {
        assert_eq!((standard_error(&[1.0]), standard_error(&[])), (0.0, 0.0));
        assert!((standard_error(&[1.0, 3.0]) - 1.0).abs() < 1e-12);
    }
}
