//! Repetitions, which of them count, and the figures drawn from those.

use serde_json::{Value, json};

use crate::bench::devices::throttle::Counts;

/// How far the bytes that devices charged may be from those that were verified.
const CHARGED_OFF_MAX: f64 = 0.03;
const GB: f64 = 1e9;

/// All repetitions of one back end.
pub(super) struct Row {
    pub(super) backend: &'static str,
    pub(super) reps: Vec<Value>,
    /// The least time that its devices allow, where they are known.
    pub(super) bound_s: Option<f64>,
}

/// What a worker answered, with what the devices counted, and why it does not count.
pub(super) fn rep(mut answer: Value, devices: &[Counts], seconds_min: f64) -> Value {
    let charged: Vec<u64> = devices.iter().map(|it| it.charged).collect();
    answer["charged_bytes"] = json!(charged.iter().sum::<u64>());
    answer["device_charged_bytes"] = json!(charged);
    answer["device_requests"] = json!(devices.iter().map(|it| it.requests).collect::<Vec<_>>());
    if let Some(why) = invalid(&answer, seconds_min) {
        answer["invalid"] = json!(why);
    }
    answer
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or(f64::NAN)
}

fn invalid(rep: &Value, seconds_min: f64) -> Option<String> {
    let bytes = number(rep, "bytes");
    let (hits, wanted) = (&rep["hits"], &rep["wanted"]);
    let off = (number(rep, "charged_bytes") - number(rep, "duplicate_bytes")) / bytes - 1.0;
    let seconds = number(rep, "seconds");
    if rep["bytes_wrong"] != 0 {
        Some(format!("{} bytes were WRONG", rep["bytes_wrong"]))
    } else if hits != wanted {
        Some(format!("{hits} of {wanted} chunks came"))
    } else if off.is_nan() || off.abs() > CHARGED_OFF_MAX {
        Some(format!("charged bytes are {:+.1} % off the verified ones", off * 100.0))
    } else if seconds.is_nan() || seconds < seconds_min {
        Some(format!("{seconds:.2} s is shorter than {seconds_min} s"))
    } else {
        None
    }
}

impl Row {
    pub(super) fn valid(&self) -> impl Iterator<Item = &Value> {
        self.reps.iter().filter(|rep| rep["invalid"].is_null())
    }

    /// In MB/s, of the repetitions that count.
    pub(super) fn rates(&self) -> Vec<f64> {
        self.valid().map(|rep| number(rep, "bytes") / number(rep, "seconds") / 1e6).collect()
    }

    /// Of the repetitions that count, in s.
    pub(super) fn seconds(&self) -> Vec<f64> {
        self.valid().map(|rep| number(rep, "seconds")).collect()
    }

    pub(super) fn cpu_s_per_gb(&self) -> f64 {
        let each = self.valid().map(|rep| number(rep, "cpu_s") / number(rep, "bytes") * GB);
        median(&each.collect::<Vec<_>>())
    }

    /// Read requests of both devices for each GB.
    pub(super) fn requests_per_gb(&self) -> f64 {
        let requests = |rep: &Value| -> f64 {
            rep["device_requests"].as_array().into_iter().flatten().filter_map(Value::as_f64).sum()
        };
        let each = self.valid().map(|rep| requests(rep) / number(rep, "bytes") * GB);
        median(&each.collect::<Vec<_>>())
    }

    /// Bytes that were read twice, as a part of those wanted.
    pub(super) fn duplicates(&self) -> f64 {
        let each = self.valid().map(|rep| number(rep, "duplicate_bytes") / number(rep, "bytes"));
        median(&each.collect::<Vec<_>>())
    }

    pub(super) fn to_json(&self) -> Value {
        let finite = |value: f64| if value.is_finite() { json!(value) } else { Value::Null };
        json!({
            "backend": self.backend,
            "reps": self.reps,
            "cpu_s_per_gb": finite(self.cpu_s_per_gb()),
            "mbps_median": finite(median(&self.rates())),
            "requests_per_gb": finite(self.requests_per_gb()),
            "bound_s": self.bound_s,
        })
    }
}

/// NaN of nothing.
pub(in crate::bench) fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    f64::midpoint(at(sorted.len().saturating_sub(1) / 2), at(sorted.len() / 2))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A repetition of a step of 2 GB that took so long.
    pub(in super::super) fn good(seconds: f64, cpu_s: f64) -> Value {
        let answer = json!({"seconds": seconds, "bytes": 2_000_000_000_u64, "hits": 500, "wanted": 500,
            "bytes_wrong": 0, "duplicate_bytes": 50_000_000, "cpu_s": cpu_s});
        let counts = [(1_550_000_000, 1500), (500_000_000, 500)];
        rep(answer, &counts.map(|(charged, requests)| Counts { charged, requests }), 5.0)
    }

    #[test]
    fn a_repetition_counts_if_the_devices_gave_what_was_verified() {
        let rep = good(5.1, 1.0);
        assert!(rep["invalid"].is_null(), "{rep}");
        assert_eq!(rep["charged_bytes"], 2_050_000_000_u64);
        let row = Row { backend: "kvbraid", reps: vec![rep], bound_s: None };
        assert_eq!((row.cpu_s_per_gb(), row.requests_per_gb()), (0.5, 1000.0));
    }

    #[test]
    fn what_does_not_count_says_why_and_gives_no_figure() {
        for (key, value, words) in [
            ("bytes_wrong", json!(1), "WRONG"),
            ("hits", json!(499), "499 of 500"),
            ("duplicate_bytes", json!(0), ""),
            ("duplicate_bytes", json!(200_000_000), "-7.5 % off"),
            ("seconds", json!(4.9), "shorter"),
        ] {
            let mut answer = good(5.1, 1.0);
            answer[key] = value;
            let why = invalid(&answer, 5.0).unwrap_or_default();
            assert!(why.contains(words) && why.is_empty() == words.is_empty(), "{key}: {why}");
            answer["invalid"] = json!(why);
            let row = Row { backend: "kvbraid", reps: vec![answer], bound_s: None };
            assert!(row.rates().is_empty() && row.to_json()["mbps_median"].is_null());
        }
    }

    #[test]
    fn a_median_is_in_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
        assert!(median(&[]).is_nan());
    }
}
