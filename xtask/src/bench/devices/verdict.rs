//! What the figures were to show, and whether they do.

use std::fmt::Write;

use serde_json::Value;

use super::table::{Reps, mean, number, rows};

/// Scenario and the gap that KVBraid may have at most.
const GAPS_MAX: [(&str, f64); 4] =
    [("two_tiers", 0.03), ("writes_queued", 0.03), ("colocated", 0.043), ("four_ranks", 0.04)];
/// The changing limit costs at most this part of the best fixed split's gap.
const CHANGING_PART_MAX: f64 = 0.5;
const FIO_PART_MIN: f64 = 0.97;
/// How far charged bytes may be from the bytes read.
const CHARGED_OFF_MAX: f64 = 0.01;
/// A mean below the bound by more than this and two standard errors is no noise.
const NOISE: f64 = 0.002;

/// One line for each aim that was measured.
pub(super) fn draw(value: &Value) -> String {
    let mut out = String::from("\naims\n");
    for (met, what) in verdicts(value) {
        let _ = writeln!(out, "{:<6} {what}", if met { "met" } else { "MISSED" });
    }
    out
}

fn verdicts(value: &Value) -> Vec<(bool, String)> {
    let row = |scenario: &str, policy: &str| {
        rows(value, "results").find(|row| row["scenario"] == scenario && row["policy"] == policy)
    };
    let mut found = Vec::new();
    for (scenario, most) in GAPS_MAX {
        if let Some(row) = row(scenario, "kvbraid") {
            let (gap, se) = (number(row, "gap_mean"), number(row, "gap_se"));
            let what =
                format!("{scenario}: {} over the bound, at most {}", shown(gap, se), percent(most));
            found.push((gap <= most, what));
        }
    }
    let changing = |policy| row("changing_limit", policy).map(|row| number(row, "gap_mean"));
    if let (Some(ours), Some(fixed)) = (changing("kvbraid"), changing("static_best")) {
        let most = fixed * CHANGING_PART_MAX;
        let what = format!(
            "changing_limit: {} over the bound, at most half of the best fixed split's {}",
            percent(ours),
            percent(fixed)
        );
        found.push((ours <= most, what));
    }
    if let (Some(ours), Some(fio)) = (row("one_device", "kvbraid"), row("one_device", "fio")) {
        let copy = number(&value["parameters"], "copy_s_per_gb");
        found.extend(against_fio(ours, fio, copy));
    }
    let mut all = rows(value, "results").peekable();
    if all.peek().is_some() {
        found.push(yardstick(value));
        found.push(charged(value));
    }
    found
}

fn against_fio(ours: &Value, fio: &Value, copy: f64) -> [(bool, String); 2] {
    let rates = |row: &Value| -> Vec<f64> {
        let reps = Reps::of(row);
        reps.bytes.iter().zip(&reps.seconds).map(|(bytes, seconds)| bytes / seconds).collect()
    };
    let pairs: Vec<f64> =
        rates(ours).iter().zip(rates(fio)).map(|(ours, fio)| ours / fio).collect();
    let ratio = mean(&pairs);
    let half = half_interval(&pairs);
    let (cpu, theirs, crc) =
        (number(ours, "cpu_s_per_gb"), number(fio, "cpu_s_per_gb"), number(ours, "crc_s_per_gb"));
    [
        (
            ratio >= FIO_PART_MIN,
            format!(
                "one_device: {ratio:.3} of fio's throughput (95 %: {:.3} to {:.3}, {} pairs), at least {FIO_PART_MIN}",
                ratio - half,
                ratio + half,
                pairs.len()
            ),
        ),
        (
            cpu <= theirs + crc,
            format!(
                "one_device: CPU {cpu:.3} s/GB, at most fio's {theirs:.3} and the CRC pass' {crc:.3} \
                (the copy to the caller alone costs {copy:.3})"
            ),
        ),
    ]
}

/// Nothing is faster than what the devices can do.
fn yardstick(value: &Value) -> (bool, String) {
    let broken: Vec<String> = rows(value, "results")
        .filter(|row| row["scenario"] != "one_device")
        .filter(|row| number(row, "gap_mean") < -NOISE - 2.0 * number(row, "gap_se"))
        .map(|row| format!("{} {}", row["scenario"], row["policy"]))
        .collect();
    let ok = broken.is_empty();
    let what = if ok {
        "no policy is faster than its bound".to_owned()
    } else {
        format!("BROKEN YARDSTICK: faster than the bound: {}", broken.join(", "))
    };
    (ok, what)
}

fn charged(value: &Value) -> (bool, String) {
    let off = |row: &Value| (number(row, "charged_over_read") - 1.0).abs();
    let most = rows(value, "results").map(off).fold(0.0, f64::max);
    (most <= CHARGED_OFF_MAX, format!("charged bytes are the bytes read, within {}", percent(most)))
}

/// Half the width of the 95 % interval of the mean (Student's t).
fn half_interval(values: &[f64]) -> f64 {
    const T: [f64; 10] = [12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23];
    let n = values.len();
    if n < 2 {
        return f64::INFINITY;
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let se = (squares / (n - 1) as f64 / n as f64).sqrt();
    T.get(n - 2).copied().unwrap_or(2.2) * se
}

fn percent(fraction: f64) -> String {
    format!("{:.2} %", fraction * 100.0)
}

fn shown(gap: f64, se: f64) -> String {
    format!("{:.2} +- {:.2} %", gap * 100.0, se * 100.0)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::table::tests::row, *};

    fn judged(rows: &[Value]) -> Vec<(bool, String)> {
        verdicts(&json!({"results": rows}))
    }

    #[track_caller]
    fn says(found: &[(bool, String)], met: bool, words: &str) {
        let line = found.iter().find(|(_, line)| line.contains(words));
        assert_eq!(line.map(|(met, _)| *met), Some(met), "{words}: {found:?}");
    }

    #[test]
    fn gaps_are_held_against_their_aims() {
        let found =
            judged(&[row("two_tiers", "kvbraid", &[5.1]), row("colocated", "kvbraid", &[5.3])]);
        says(&found, true, "two_tiers");
        says(&found, false, "colocated");
        assert!(!found.iter().any(|(_, line)| line.contains("four_ranks")), "it was not measured");
    }

    #[test]
    fn the_changing_limit_is_held_against_the_best_fixed_split() {
        let fixed = row("changing_limit", "static_best", &[5.4]);
        let half = judged(&[row("changing_limit", "kvbraid", &[5.1]), fixed.clone()]);
        says(&half, true, "changing_limit");
        says(&judged(&[row("changing_limit", "kvbraid", &[5.3]), fixed]), false, "changing_limit");
    }

    #[test]
    fn a_gap_below_zero_is_a_broken_yardstick() {
        says(&judged(&[row("two_tiers", "window", &[4.9])]), false, "BROKEN");
        says(&judged(&[row("two_tiers", "window", &[4.999])]), true, "no policy is faster");
    }

    #[test]
    fn fio_is_compared_pair_by_pair() {
        let found = judged(&[
            row("one_device", "kvbraid", &[5.0, 6.0]),
            row("one_device", "fio", &[4.95, 5.94]),
        ]);
        says(&found, true, "0.990 of fio's throughput (95 %: 0.990 to 0.990, 2 pairs)");
        says(&found, true, "CPU 0.300 s/GB, at most fio's 0.300");
    }

    #[test]
    fn bytes_charged_twice_are_seen() {
        let mut twice = row("two_tiers", "kvbraid", &[5.0]);
        twice["charged_over_read"] = json!(2.0);
        says(&judged(&[twice]), false, "within 100.00 %");
        says(&judged(&[row("two_tiers", "kvbraid", &[5.0])]), true, "within 0.00 %");
    }
}
