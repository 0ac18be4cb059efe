//! The table, and what the figures were to show.

use std::fmt::Write;

use serde_json::Value;

use super::rows::{Row, median};

const OF_THE_SUM_MIN: f64 = 0.97;
const CPU_MAX: f64 = 1.3;
/// A median below the bound by more than this is no noise.
const NOISE: f64 = 0.005;

pub(super) fn draw(title: &str, rows: &[Row]) -> String {
    if rows.is_empty() {
        return String::new();
    }
    let mut out = format!("\n{title}\n");
    let _ = writeln!(
        out,
        "{:<17} {:>6} {:>8} {:>17} {:>11} {:>9} {:>11} {:>8}",
        "backend", "reps", "MB/s", "range", "over bound", "CPU s/GB", "requests/GB", "twice"
    );
    for row in rows {
        line(&mut out, row);
    }
    for row in rows {
        for (at, rep) in row.reps.iter().enumerate() {
            if let Some(why) = rep["invalid"].as_str() {
                let _ = writeln!(out, "INVALID {} repetition {}: {why}", row.backend, at + 1);
            }
        }
    }
    out
}

fn line(out: &mut String, row: &Row) {
    let rates = row.rates();
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rates.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let over = row.bound_s.map(|bound_s| median(&row.seconds()) / bound_s - 1.0);
    let reps = format!("{}/{}", rates.len(), row.reps.len());
    if rates.is_empty() {
        let _ = writeln!(out, "{:<17} {reps:>6} none counts", row.backend);
        return;
    }
    let _ = writeln!(
        out,
        "{:<17} {reps:>6} {:>8.1} {:>17} {:>11} {:>9.3} {:>11.0} {:>8}",
        row.backend,
        median(&rates),
        format!("{least:.1}..{most:.1}"),
        over.map_or_else(|| "-".to_owned(), percent),
        row.cpu_s_per_gb(),
        row.requests_per_gb(),
        percent(row.duplicates()),
    );
}

/// What the adapter costs its caller.
pub(super) fn overhead(found: &Value) -> String {
    let mut out = format!("\nour adapter, {} keys in one call, microseconds\n", found["keys"]);
    for (key, what) in [
        ("look_up_us", "look-up"),
        ("look_up_held_us", "look-up, interpreter held"),
        ("submit_us", "submit of a load"),
        ("submit_held_us", "submit, interpreter held"),
    ] {
        let list = found[key].as_array().into_iter().flatten();
        let list: Vec<f64> = list.filter_map(Value::as_f64).collect();
        let least = list.iter().copied().fold(f64::INFINITY, f64::min);
        let most = list.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let _ = writeln!(out, "{what:<26} {:>8.0} ({least:.0}..{most:.0})", median(&list));
    }
    out
}

fn percent(fraction: f64) -> String {
    format!("{:.2} %", fraction * 100.0)
}

/// One line for each aim that was measured at the devices' limits.
pub(super) fn verdicts(rows: &[Row], device_mbps: &[f64]) -> Vec<(bool, String)> {
    let counted = |row: &&Row| row.valid().next().is_some();
    let find = |name: &str| rows.iter().find(|row| row.backend == name).filter(counted);
    let mut found = Vec::new();
    if let (Some(ours), [fast, slow]) = (find("kvbraid"), device_mbps) {
        let stock = rows
            .iter()
            .filter(counted)
            .filter(|row| !["kvbraid", "two_stock"].contains(&row.backend));
        let rate = |row: &Row| median(&row.rates());
        if let Some(stock) = stock.max_by(|one, other| rate(one).total_cmp(&rate(other))) {
            let (ratio, sum) = (rate(ours) / rate(stock), (fast + slow) / fast);
            let least = OF_THE_SUM_MIN * sum;
            found.push((
                ratio >= least,
                format!(
                    "{ratio:.3} times {}, the best on one tier; at least {OF_THE_SUM_MIN} x {sum:.3} = {least:.3}",
                    stock.backend
                ),
            ));
        }
    }
    for row in rows.iter().filter(counted) {
        if let Some(bound_s) = row.bound_s {
            let off = median(&row.seconds()) / bound_s - 1.0;
            if off < -NOISE {
                let what =
                    format!("BROKEN YARDSTICK: {} is {} over its bound", row.backend, percent(off));
                found.push((false, what));
            }
        }
    }
    if let (Some(ours), Some(files)) = (find("kvbraid"), find("fs_native")) {
        let (ours, files) = (ours.cpu_s_per_gb(), files.cpu_s_per_gb());
        found.push((
            ours <= CPU_MAX * files,
            format!(
                "CPU {ours:.3} s/GB is {:.2} times fs_native's {files:.3}, which verifies nothing; at most {CPU_MAX}",
                ours / files
            ),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{super::rows::tests::good, *};

    fn row(backend: &'static str, seconds: f64, cpu_s: f64, bound_s: f64) -> Row {
        Row { backend, reps: vec![good(seconds, cpu_s)], bound_s: Some(bound_s) }
    }

    #[track_caller]
    fn says(rows: &[Row], met: bool, words: &str) {
        let found = verdicts(rows, &[300.0, 100.0]);
        let line = found.iter().find(|(_, line)| line.contains(words));
        assert_eq!(line.map(|(met, _)| *met), Some(met), "{words}: {found:?}");
    }

    #[test]
    fn ours_is_held_against_the_best_on_one_tier() {
        let stock = || [row("fs_native", 6.8, 0.4, 6.7), row("raw_block", 6.7, 0.5, 6.7)];
        let [files, raw] = stock();
        says(&[row("kvbraid", 5.05, 0.5, 5.0), files, raw], true, "1.327 times raw_block");
        let [files, raw] = stock();
        says(&[row("kvbraid", 5.4, 0.5, 5.0), files, raw], false, "1.241 times raw_block");
    }

    #[test]
    fn the_price_of_verifying_is_held_against_who_does_not() {
        let files = || row("fs_native", 6.8, 0.4, 6.7);
        says(&[row("kvbraid", 5.05, 0.5, 5.0), files()], true, "1.25 times");
        says(&[row("kvbraid", 5.05, 0.6, 5.0), files()], false, "1.50 times");
    }

    #[test]
    fn nothing_is_faster_than_its_devices() {
        says(&[row("kvbraid", 5.0, 0.5, 5.1)], false, "BROKEN");
        assert!(verdicts(&[row("kvbraid", 5.09, 0.5, 5.1)], &[300.0, 100.0]).is_empty());
    }

    #[test]
    fn a_row_without_a_valid_repetition_has_no_speed() {
        let mut bad = row("fs_native", 6.8, 0.4, 6.7);
        bad.reps[0]["invalid"] = serde_json::json!("4 bytes were WRONG");
        let text = draw("t", &[bad]);
        assert!(
            text.contains("none counts")
                && text.contains("INVALID fs_native repetition 1: 4 bytes")
        );
        assert!(!text.contains("294"), "{text}");
    }
}
