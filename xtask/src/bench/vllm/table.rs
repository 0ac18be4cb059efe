//! The table, and where ours are not ahead.

use std::fmt::Write;

use super::{backends::is_ours, rows::Row, study::Found};

pub(super) fn draw(found: &Found) -> String {
    let mut out = String::new();
    let rates: Vec<_> = found.device_mbps.iter().map(|it| format!("{it:.1} MB/s")).collect();
    let _ = writeln!(out, "\nalone, the devices gave {}", rates.join(" and "));
    let _ = writeln!(out, "a request alone waits for its prefix, of its time to first token:");
    for (name, share) in &found.shares {
        let _ = writeln!(out, "  {name:<16} {:.0} %", share * 100.0);
    }
    let mut cell = None;
    for row in &found.rows {
        if cell != Some((row.rate, row.cv)) {
            cell = Some((row.rate, row.cv));
            let _ = writeln!(
                out,
                "\n{:.2} of what recomputing can do, {:.2} requests/s, CV {}\n{:<16} {:>5} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6} {:>7}",
                row.rate,
                row.per_s,
                row.cv,
                "backend",
                "reps",
                "TTFT mean",
                "p50",
                "p99 s",
                "tokens/s",
                "hits",
                "read",
                "differ"
            );
        }
        line(&mut out, row);
    }
    for row in &found.rows {
        for rep in &row.reps {
            if let Some(why) = rep["invalid"].as_str() {
                let _ = writeln!(out, "INVALID {} {} CV {}: {why}", row.backend, row.rate, row.cv);
            }
            if rep["tokens_differ"].as_u64().is_some_and(|it| it > 0) {
                let _ = writeln!(
                    out,
                    "DIFFER {} {} CV {}: requests {} say other tokens than when all is computed",
                    row.backend, row.rate, row.cv, rep["requests_that_differ"]
                );
            }
        }
    }
    out
}

fn line(out: &mut String, row: &Row) {
    let valid = row.valid().count();
    let reps = format!("{valid}/{}", row.reps.len());
    if valid == 0 {
        let _ = writeln!(out, "{:<16} {reps:>5} none counts", row.backend);
        return;
    }
    let percent = |part: f64| {
        if part.is_finite() { format!("{:.0} %", part * 100.0) } else { "-".to_owned() }
    };
    let _ = writeln!(
        out,
        "{:<16} {reps:>5} {:>9.3} {:>9.3} {:>9.3} {:>9.0} {:>6} {:>6} {:>7}",
        row.backend,
        row.figure("ttft_mean_s"),
        row.figure("ttft_p50_s"),
        row.figure("ttft_p99_s"),
        row.figure("tokens_per_s"),
        percent(row.hits()),
        percent(row.read()),
        row.total("tokens_differ"),
    );
}

/// For each of our rows and each of the others in its cell, whether ours is ahead in mean and p99.
pub(super) fn aims(rows: &[Row]) -> Vec<(bool, String)> {
    let counted = |row: &&Row| row.valid().next().is_some();
    let mut found = Vec::new();
    for ours in rows.iter().filter(|it| is_ours(it.backend)) {
        let others = rows.iter().filter(|it| !is_ours(it.backend) && it.is_of(ours.rate, ours.cv));
        for other in others.filter(counted) {
            let pair = |key: &str| (ours.figure(key), other.figure(key));
            let (mean, p99) = (pair("ttft_mean_s"), pair("ttft_p99_s"));
            let what = format!(
                "{} of {} at {:.1}, CV {}: mean {:.3} to {:.3} s, p99 {:.3} to {:.3} s",
                ours.backend, other.backend, ours.rate, ours.cv, mean.0, mean.1, p99.0, p99.1
            );
            found.push((mean.0 < mean.1 && p99.0 < p99.1, what));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{super::rows::tests::row, *};

    #[test]
    fn ours_is_ahead_only_if_it_is_in_mean_and_p99() {
        let rows =
            [row("fs", 0.2, 0.5), row("kvbraid_vllm", 0.1, 0.6), row("kvbraid_lmcache", 0.1, 0.4)];
        let found = aims(&rows);
        assert_eq!(found.iter().map(|(met, _)| *met).collect::<Vec<_>>(), [false, true]);
        assert!(found[0].1.contains("kvbraid_vllm of fs at 0.5, CV 1: mean 0.100 to 0.200 s"));
        let mut other = row("kvbraid_vllm", 0.1, 0.1);
        other.cv = 4.0;
        assert!(aims(&[row("fs", 0.2, 0.5), other]).is_empty(), "of another cell");
    }

    #[test]
    fn what_failed_is_not_ahead_of_anybody_and_has_no_speed() {
        let mut ours = row("kvbraid_vllm", 0.1, 0.2);
        ours.reps[0]["invalid"] = json!("1 of 2 requests FAILED");
        let rows = vec![row("fs", 0.2, 0.5), ours];
        assert!(!aims(&rows)[0].0);
        let found = Found { rows, ..Found::default() };
        let text = draw(&found);
        assert!(text.contains("none counts") && text.contains("INVALID kvbraid_vllm"), "{text}");
        assert!(
            text.contains("0.200     0.200     0.500") && text.contains("90 %   50 %"),
            "{text}"
        );
        assert!(!text.contains("0.100"), "{text}");
    }
}
