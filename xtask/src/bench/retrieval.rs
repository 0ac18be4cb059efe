//! `cargo xtask bench retrieval`: how far steps stay behind the time that their tiers allow.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::{Line, directory, write};
use crate::run;

/// Policies over modelled devices, in virtual time; writes `retrieval-model.json`.
pub(super) fn model() -> Result<Vec<Line>> {
    let path = directory().join("retrieval-model.json");
    fs::create_dir_all(directory()).with_context(|| format!("create {}", directory().display()))?;
    let mut command = run::cargo();
    command.args(["run", "--release", "--quiet", "--locked", "--package", "kv-connector"]);
    command.args(["--bin", "kvbraid", "--", "sim", "retrieval", "--json"]).arg(&path);
    run::shown(&mut command)?;
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    let value: Value =
        serde_json::from_str(&text).with_context(|| format!("parse {}", path.display()))?;
    let lines = lines(&value)?;
    write("retrieval-model", value)?;
    Ok(lines)
}

/// The router's own rows on two tiers.
fn lines(value: &Value) -> Result<Vec<Line>> {
    let rows = value["results"].as_array().context("retrieval-model.json has no results")?;
    let percent = |row: &Value, key: &str| row[key].as_f64().unwrap_or(f64::NAN) * 100.0;
    let ours = rows.iter().filter(|row| row["policy"] == "kvbraid" && row["tiers"] == 2);
    let line = |row: &Value| Line {
        bench: "retrieval-model".to_owned(),
        what: format!(
            "device {}, {} chunks, {} ranks: over the bound",
            row["device"].as_str().unwrap_or("?"),
            row["chunks"],
            row["ranks"]
        ),
        figure: format!("{:.2} +- {:.2} %", percent(row, "gap_mean"), percent(row, "gap_se")),
    };
    Ok(ours.map(line).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn the_summary_shows_our_rows_on_two_tiers() {
        let row = |policy, tiers| {
            json!({"device": "H", "chunks": 64, "ranks": 1, "tiers": tiers, "policy": policy,
                "gap_mean": 0.018, "gap_se": 0.0005})
        };
        let value = json!({"results": [row("kvbraid", 2), row("window", 2), row("kvbraid", 3)]});
        let lines = super::lines(&value).unwrap();
        assert_eq!(lines.len(), 1);
        assert_eq!(lines[0].what, "device H, 64 chunks, 1 ranks: over the bound");
        assert_eq!(lines[0].figure, "1.80 +- 0.05 %");
        assert!(super::lines(&json!({})).is_err());
    }
}
