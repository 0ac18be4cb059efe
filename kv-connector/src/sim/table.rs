//! A study as text, for people.

use std::fmt::{self, Write};

use super::{
    case::Outcome,
    policy::Policy,
    profile::Profile,
    study::{Row, Study},
};

impl Study {
    /// Tables by number of tiers and size, the fixed splits tried, and the targets.
    #[must_use]
    pub fn to_table(&self) -> String {
        let mut text = String::new();
        self.write_all(&mut text).expect("a string takes everything");
        text
    }

    fn write_all(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "Step retrieval in a model, in virtual time: no measurement.")?;
        writeln!(
            out,
            "Time over the fluid bound in percent, mean and standard error of {} seeds; losers are not recalled, steps run back to back.",
            self.options.seeds
        )?;
        for profile in Profile::all(1) {
            if self.rows.iter().any(|row| row.device == profile.name) {
                writeln!(out, "  {} {}", profile.name, profile.about)?;
            }
        }
        let mut rest = self.rows.as_slice();
        while let Some(first) = rest.first() {
            let same = |row: &Row| (row.tiers, row.case) == (first.tiers, first.case);
            let end = rest.iter().position(|row| !same(row)).unwrap_or(rest.len());
            self.write_case(&rest[..end], out)?;
            rest = &rest[end..];
        }
        self.write_grid(out)?;
        self.write_targets(out)
    }

    fn write_case(&self, rows: &[Row], out: &mut String) -> fmt::Result {
        let Some(first) = rows.first() else { return Ok(()) };
        let case = first.case;
        let ranks =
            if case.ranks > 1 { format!(" for {} ranks", case.ranks) } else { String::new() };
        write!(out, "\n{} tiers, {} chunks{ranks}\n{:<7}", first.tiers, case.chunks, "device")?;
        for policy in Self::POLICIES {
            write!(out, "{policy:>16}")?;
        }
        writeln!(out, "{:>10}{:>12}{:>12}", "step s", "over nom. %", "twice %")?;
        for of_device in rows.chunk_by(|a, b| a.device == b.device) {
            let Some(ours) = of_device.first() else { continue };
            write!(out, "{:<7}", ours.device)?;
            for row in of_device {
                let gap = row.gap();
                write!(out, "{:>9.2} +-{:>5.2}", gap.mean * 100.0, gap.se * 100.0)?;
            }
            let mean = |figure: fn(&Outcome) -> f64| ours.summary(figure).mean;
            writeln!(
                out,
                "{:>10.4}{:>12.2}{:>12.2}",
                mean(Outcome::step_s),
                mean(Outcome::over_nominal) * 100.0,
                mean(Outcome::duplicates) * 100.0
            )?;
        }
        Ok(())
    }

    fn write_grid(&self, out: &mut String) -> fmt::Result {
        writeln!(
            out,
            "\nFixed splits tried: gap in percent by the fastest tier's share over its part of the calibrated rates"
        )?;
        let same = |a: &Row, b: &Row| (a.device, a.tiers, a.case) == (b.device, b.tiers, b.case);
        for of_one in self.grid.chunk_by(same) {
            let Some(Row { device, tiers, case, .. }) = of_one.first() else { continue };
            write!(out, "{device} {tiers} tiers {:>3} x{}:", case.chunks, case.ranks)?;
            for row in of_one {
                if let Policy::Static(factor) = row.policy {
                    write!(out, "  {factor:.2} {:.1}", row.gap().mean * 100.0)?;
                }
            }
            writeln!(out)?;
        }
        Ok(())
    }

    fn write_targets(&self, out: &mut String) -> fmt::Result {
        writeln!(out, "\nTargets (percent)")?;
        for verdict in self.verdicts() {
            writeln!(
                out,
                "  {:<6} {:<52} {:>6.2} +- {:>4.2}, at most {:>5.1}",
                if verdict.met { "met" } else { "MISSED" },
                verdict.what,
                verdict.figure * 100.0,
                verdict.se * 100.0,
                verdict.limit * 100.0
            )?;
        }
        Ok(())
    }
}
