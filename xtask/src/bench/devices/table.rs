//! The table that is drawn from `retrieval-devices.json`.

use std::fmt::Write;

use serde_json::Value;

/// Repetitions' figures of a row.
pub(super) struct Reps {
    pub(super) seconds: Vec<f64>,
    pub(super) bytes: Vec<f64>,
    pub(super) gaps: Vec<f64>,
}

impl Reps {
    pub(super) fn of(row: &Value) -> Self {
        let list = |key: &str| -> Vec<f64> {
            let reps = row["reps"].as_array().into_iter().flatten();
            reps.filter_map(|rep| rep[key].as_f64()).collect()
        };
        let bound_s = number(row, "bound_s");
        let seconds = list("seconds");
        let gaps = seconds.iter().map(|seconds| seconds / bound_s - 1.0).collect();
        Self { seconds, bytes: list("bytes"), gaps }
    }
}

/// The rows of one part of the document.
pub(super) fn rows<'a>(value: &'a Value, part: &str) -> impl Iterator<Item = &'a Value> {
    value[part].as_array().into_iter().flatten()
}

pub(super) fn number(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or(f64::NAN)
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let at = |index: usize| sorted.get(index).copied().unwrap_or(f64::NAN);
    (at(sorted.len().saturating_sub(1) / 2) + at(sorted.len() / 2)) / 2.0
}

/// Every row, the short steps behind the others.
pub(super) fn draw(value: &Value) -> String {
    let mut out = String::new();
    heading(&mut out, "over the bound, %");
    for row in rows(value, "results") {
        line(&mut out, row, value);
    }
    let mut short = rows(value, "short_steps").peekable();
    if short.peek().is_some() {
        heading(&mut out, "steps of 1 s, not judged: the throttle counts in slices of 0.1 s");
        for row in short {
            line(&mut out, row, value);
        }
    }
    let mut copied = rows(value, "copied").peekable();
    if copied.peek().is_some() {
        heading(
            &mut out,
            "with the bytes copied to the caller, not judged: fio leaves its own where they landed",
        );
        for row in copied {
            line(&mut out, row, value);
        }
    }
    for (part, word) in [("skipped", "SKIP"), ("failed", "FAILED")] {
        for row in rows(value, part) {
            let text = |key: &str| row[key].as_str().unwrap_or("?");
            let _ = writeln!(out, "{word} {}: {}", text("scenario"), text("why"));
        }
    }
    out
}

fn heading(out: &mut String, what: &str) {
    let _ = writeln!(out, "\n{what}");
    let _ = writeln!(
        out,
        "{:<15} {:<12} {:>4} {:>8} {:>7} {:>6} {:>7} {:>15} {:>9} {:>8} {:>8}",
        "scenario",
        "policy",
        "reps",
        "seconds",
        "mean",
        "SE",
        "median",
        "range",
        "over nom.",
        "CPU s/GB",
        "charged"
    );
}

fn line(out: &mut String, row: &Value, value: &Value) {
    let reps = Reps::of(row);
    let percent = |fraction: f64| format!("{:.2}", fraction * 100.0);
    let least = reps.gaps.iter().copied().fold(f64::INFINITY, f64::min);
    let most = reps.gaps.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let scenario = row["scenario"].as_str().unwrap_or("?");
    let _ = writeln!(
        out,
        "{:<15} {:<12} {:>4} {:>8.3} {:>7} {:>6} {:>7} {:>15} {:>9} {:>8.3} {:>8.4}",
        scenario,
        row["policy"].as_str().unwrap_or("?"),
        reps.seconds.len(),
        mean(&reps.seconds),
        percent(number(row, "gap_mean")),
        percent(number(row, "gap_se")),
        percent(median(&reps.gaps)),
        format!("{}..{}", percent(least), percent(most)),
        over_nominal(scenario, &reps, value).map_or_else(|| "-".to_owned(), percent),
        number(row, "cpu_s_per_gb"),
        number(row, "charged_over_read"),
    );
}

/// Over the time at the devices' limits, where those hold.
fn over_nominal(scenario: &str, reps: &Reps, value: &Value) -> Option<f64> {
    if ["one_device", "changing_limit"].contains(&scenario) {
        return None;
    }
    let limits = value["parameters"]["limits_mbps"].as_array()?;
    let rate: f64 = limits.iter().filter_map(Value::as_f64).sum::<f64>() * 1e6;
    Some(mean(&reps.seconds) * rate / reps.bytes.first()? - 1.0)
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::*;

    /// A row of 2 GB steps against a bound of 5 s.
    pub(in super::super) fn row(scenario: &str, policy: &str, seconds: &[f64]) -> Value {
        let gaps: Vec<f64> = seconds.iter().map(|seconds| seconds / 5.0 - 1.0).collect();
        let reps: Vec<Value> = seconds
            .iter()
            .map(|seconds| {
                json!({"seconds": seconds, "bytes": 2_000_000_000_u64,
                    "bytes_per_tier": [1_500_000_000_u64, 500_000_000_u64]})
            })
            .collect();
        json!({
            "scenario": scenario, "policy": policy, "reps": reps, "bound_s": 5.0,
            "gap_mean": mean(&gaps), "gap_se": 0.001, "tier_alone_mbps": [300.0, 100.0],
            "cpu_s_per_gb": 0.3, "crc_s_per_gb": 0.1, "charged_over_read": 1.0,
        })
    }

    #[test]
    fn a_line_shows_mean_median_and_range_of_the_gaps() {
        let value = json!({
            "results": [row("two_tiers", "kvbraid", &[5.05, 5.1, 5.3])],
            "short_steps": [],
            "skipped": [{"scenario": "one_device", "why": "no fio"}],
            "failed": [{"scenario": "colocated", "why": "a disk went"}],
            "parameters": {"limits_mbps": [300, 100]},
        });
        let table = draw(&value);
        for due in [
            "5.150",
            "3.00",
            "2.00",
            "1.00..6.00",
            "SKIP one_device: no fio",
            "FAILED colocated: a disk went",
        ] {
            assert!(table.contains(due), "no {due} in {table}");
        }
        assert!(!table.contains("not judged"));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), 2.5);
    }
}
