//! A comparison as one table, for people.

use std::fmt::{self, Display, Write};

use crate::replay::{Comparison, RunReport, Workload, machine, percentile};

impl Comparison {
    /// This comparison as text: what ran, a row for each policy, and what it shows.
    pub fn to_table(&self, workload: &Workload) -> String {
        let mut text = String::new();
        self.write_table(workload, &mut text).expect("a string takes everything");
        text
    }

    fn write_table(&self, workload: &Workload, out: &mut String) -> fmt::Result {
        self.write_setting(workload, out)?;
        let tiers: String =
            self.tiers.iter().map(|name| format!("{:>9}", short(name, 9))).collect();
        writeln!(
            out,
            "\n{:<12}{:>10}{:>10}{:>9}{:>8}{tiers}{:>10}{:>8}{:>10}{:>7}{:>7}",
            "",
            "retrieval",
            "over the",
            "storage",
            "MB/s",
            "step p50",
            "p99",
            "verified",
            "wrong",
            "CPU"
        )?;
        let of_which = format!("{:>width$}", "of which", width = 9 * self.tiers.len());
        writeln!(
            out,
            "{:<12}{:>10}{:>10}{:>9}{:>8}{of_which}{:>10}{:>8}{:>10}{:>7}{:>7}",
            "policy", "s", "bound", "MB", "in all", "ms", "ms", "MB", "bytes", "s/GB"
        )?;
        for report in &self.rows {
            self.write_row(report, out)?;
        }
        self.write_findings(out)
    }

    fn write_setting(&self, workload: &Workload, out: &mut String) -> fmt::Result {
        let trace = workload.trace();
        writeln!(
            out,
            "{}: {} requests in {} steps, chunks of {} KiB for {} tokens",
            trace.name,
            trace.requests.len(),
            workload.steps(),
            workload.chunk_bytes() / 1024,
            trace.chunk_tokens
        )?;
        writeln!(out, "{}", machine())?;
        write!(out, "tiers alone:")?;
        for ((name, rate), pace) in
            self.tiers.iter().zip(&self.alone_bytes_per_s).zip(&self.paced_bytes_per_s)
        {
            write!(out, "  {name} {:.0} MB/s", rate / 1e6)?;
            match pace {
                Some(pace) => write!(out, " (paced to {:.0})", *pace as f64 / 1e6)?,
                None => write!(out, " (not paced)")?,
            }
        }
        let all: f64 = self.alone_bytes_per_s.iter().sum();
        writeln!(out, "  the bound is their sum, {:.0} MB/s", all / 1e6)
    }

    fn write_row(&self, report: &RunReport, out: &mut String) -> fmt::Result {
        // A run with wrong bytes or failures has no speed to show.
        let speed = |value: f64, digits: usize| match report.is_clean() {
            true => format!("{value:.digits$}"),
            false => "-".to_owned(),
        };
        let rate = |bytes: u64| speed(bytes as f64 / report.retrieval_s.max(1e-9) / 1e6, 0);
        let tiers: String =
            report.tier_bytes.iter().map(|bytes| format!("{:>9}", rate(*bytes))).collect();
        let over = match report.is_clean() {
            true => format!("{:+.1} %", report.over_bound(&self.alone_bytes_per_s) * 100.0),
            false => "-".to_owned(),
        };
        writeln!(
            out,
            "{:<12}{:>10}{over:>10}{:>9.0}{:>8}{tiers}{:>10}{:>8}{:>10.0}{:>7}{:>7}",
            report.policy.name(),
            speed(report.retrieval_s, 3),
            report.storage_bytes as f64 / 1e6,
            rate(report.storage_bytes),
            speed(percentile(&report.step_s, 0.5) * 1e3, 1),
            speed(percentile(&report.step_s, 0.99) * 1e3, 1),
            report.bytes_verified as f64 / 1e6,
            report.bytes_wrong,
            speed(report.cpu_s_per_gb(), 2),
        )
    }

    fn write_findings(&self, out: &mut String) -> fmt::Result {
        writeln!(out)?;
        let row = |name: &str| {
            let named = self.rows.iter().find(|report| report.policy.name() == name);
            named.filter(|report| report.is_clean()).map(|report| report.retrieval_s)
        };
        if let (Some(ours), Some(fast), Some(serial)) =
            (row("kvbraid"), row("fast_only"), row("serial"))
        {
            let fastest = self.alone_bytes_per_s.iter().copied().fold(f64::NAN, f64::max);
            let bound = self.alone_bytes_per_s.iter().sum::<f64>() / fastest;
            writeln!(
                out,
                "kvbraid retrieves {:.2}x as fast as the fastest tier alone (bound {bound:.2}x), {:.2}x as fast as request by request",
                fast / ours,
                serial / ours
            )?;
        }
        let splits = self.grid.iter().map(|(shares, seconds)| {
            let percent = shares.iter().map(|share| format!("{:.0}", share * 100.0));
            format!("{} {seconds:.3} s", percent.collect::<Vec<_>>().join(":"))
        });
        writeln!(out, "static splits tried: {}", join(splits))?;
        if let Some(restarted) = self.rows.last() {
            writeln!(
                out,
                "engine closed and reopened half-way: {} of {} lookups served, {} without the restart ({:.2} %)",
                restarted.hits,
                restarted.lookups,
                self.uninterrupted.hits,
                100.0 * restarted.hits as f64 / (self.uninterrupted.hits as f64).max(1.0)
            )?;
        }
        let drain_s: f64 = self.rows.iter().map(|report| report.drain_s).sum();
        if drain_s >= 0.1 {
            writeln!(
                out,
                "forward passes took {drain_s:.1} s longer than modelled for writes to drain"
            )?;
        }
        for report in self.rows.iter().chain([&self.uninterrupted]) {
            if report.refused > 0 {
                writeln!(
                    out,
                    "{}: {} chunks not kept, staging was full",
                    report.policy.name(),
                    report.refused
                )?;
            }
            for (problem, count) in &report.problems {
                writeln!(out, "{}: FAILED {count} x {problem}", report.policy.name())?;
            }
        }
        Ok(())
    }
}

impl RunReport {
    /// This run as text.
    pub fn to_text(&self, tiers: &[&str]) -> String {
        let speed =
            |text: String| if self.is_clean() { text } else { "none: the run failed".to_owned() };
        let rate = |bytes: u64| bytes as f64 / self.retrieval_s.max(1e-9) / 1e6;
        let shares = tiers.iter().zip(&self.tier_bytes);
        let shares =
            join(shares.map(|(name, bytes)| format!("{name} {:.0} MB", *bytes as f64 / 1e6)));
        let mut text = format!(
            "{}: {} of {} lookups served; {:.0} MB from storage ({shares}), {:.0} MB from memory\n",
            self.policy.name(),
            self.hits,
            self.lookups,
            self.storage_bytes as f64 / 1e6,
            self.memory_bytes as f64 / 1e6,
        );
        let (p50, p99) =
            (percentile(&self.step_s, 0.5) * 1e3, percentile(&self.step_s, 0.99) * 1e3);
        text += &format!(
            "retrieval {}\n",
            speed(format!(
                "{:.3} s, {:.0} MB/s; steps p50 {p50:.1} ms, p99 {p99:.1} ms; {:.2} CPU s/GB",
                self.retrieval_s,
                rate(self.storage_bytes),
                self.cpu_s_per_gb()
            ))
        );
        text += &format!(
            "{:.0} MB verified, {} bytes wrong; {} chunks not kept as staging was full\n",
            self.bytes_verified as f64 / 1e6,
            self.bytes_wrong,
            self.refused
        );
        for (problem, count) in &self.problems {
            text += &format!("FAILED {count} x {problem}\n");
        }
        text
    }
}

fn join(parts: impl Iterator<Item = impl Display>) -> String {
    parts.map(|part| part.to_string()).collect::<Vec<_>>().join(", ")
}

fn short(name: &str, width: usize) -> &str {
    name.get(..width - 1).filter(|_| name.len() >= width).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use crate::replay::{compare::tests::example, workload::tests::workload};

    #[test]
    fn a_row_for_each_policy_and_what_it_shows() {
        let workload = workload(&[&[1, 2]], 4096).unwrap();
        let table = example().to_table(&workload);
        for words in [
            "fast 300 MB/s (paced to 300)",
            "slow 100 MB/s (not paced)",
            "+11.1 %",
            "1.32x as fast as the fastest tier alone (bound 1.33x)",
            "70:30 0.011 s, 75:25 0.011 s",
            "10 of 12 lookups served, 10 without the restart (100.00 %)",
        ] {
            assert!(table.contains(words), "{words:?} is not in\n{table}");
        }
        for policy in ["serial ", "fast_only ", "static_best ", "kvbraid "] {
            assert!(table.lines().any(|line| line.starts_with(policy)), "no row for {policy}");
        }
    }

    #[test]
    fn a_failed_row_shows_no_speed() {
        let workload = workload(&[&[1, 2]], 4096).unwrap();
        let mut comparison = example();
        comparison.rows[3].bytes_wrong = 7;
        let table = comparison.to_table(&workload);
        let row = table.lines().find(|line| line.starts_with("kvbraid ")).unwrap();
        let shown: Vec<_> = row.split_whitespace().collect();
        assert_eq!(shown, ["kvbraid", "-", "-", "4", "-", "-", "-", "-", "-", "4", "7", "-"]);
        assert!(!table.contains("as fast as"), "no claim is made of a failed run");
    }
}
