//! A comparison as JSON, for machines. Fields are only ever added.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::replay::{Comparison, RunReport, Workload, commit, machine, percentile};

#[derive(Serialize)]
struct Document<'a> {
    rows: Vec<Row<'a>>,
    hits_uninterrupted: u64,
    hits_restarted: u64,
    lookups: u64,
    tiers: Vec<TierEntry<'a>>,
    trace: &'a str,
    machine: String,
    commit: String,
    requests: usize,
    steps: usize,
    chunk_bytes: usize,
    seeds: Seeds,
    static_grid: Vec<Split<'a>>,
    problems: BTreeMap<&'a str, u64>,
}

#[derive(Serialize)]
struct Row<'a> {
    policy: &'static str,
    /// Null if any byte was wrong or anything failed: such a run has no speed.
    retrieval_s: Option<f64>,
    storage_bytes: u64,
    bytes_per_tier: BTreeMap<&'a str, u64>,
    tier_alone_mbps: BTreeMap<&'a str, f64>,
    step_p50_s: Option<f64>,
    step_p99_s: Option<f64>,
    bytes_verified: u64,
    bytes_wrong: u64,
    cpu_s_per_gb: Option<f64>,
}

#[derive(Serialize)]
struct TierEntry<'a> {
    name: &'a str,
    paced_mbps: Option<f64>,
}

#[derive(Serialize)]
struct Seeds {
    schedule: u64,
}

#[derive(Serialize)]
struct Split<'a> {
    shares: &'a [f64],
    retrieval_s: f64,
}

#[derive(Serialize)]
struct RunDocument<'a> {
    rows: [Row<'a>; 1],
    hits: u64,
    lookups: u64,
    refused: u64,
    trace: &'a str,
    machine: String,
    commit: String,
    requests: usize,
    steps: usize,
    chunk_bytes: usize,
    seeds: Seeds,
    problems: &'a BTreeMap<String, u64>,
}

impl RunReport {
    /// This run as one JSON document; its only row looks like a comparison's, without rates measured alone.
    pub fn to_json(&self, tiers: &[&str], workload: &Workload) -> String {
        let document = RunDocument {
            rows: [row(self, tiers, &[])],
            hits: self.hits,
            lookups: self.lookups,
            refused: self.refused,
            trace: &workload.trace().name,
            machine: machine(),
            commit: commit(),
            requests: workload.trace().requests.len(),
            steps: workload.steps(),
            chunk_bytes: workload.chunk_bytes(),
            seeds: Seeds { schedule: workload.seed() },
            problems: &self.problems,
        };
        serde_json::to_string_pretty(&document).expect("plain numbers and strings")
    }
}

impl Comparison {
    /// This comparison as one JSON document. Rates are in MB/s (10^6 bytes), times in seconds.
    pub fn to_json(&self, workload: &Workload) -> String {
        let names: Vec<&str> = self.tiers.iter().map(String::as_str).collect();
        let lookups = self.uninterrupted.lookups;
        let mut problems = BTreeMap::new();
        for report in self.rows.iter().chain([&self.uninterrupted]) {
            for (problem, count) in &report.problems {
                *problems.entry(problem.as_str()).or_default() += count;
            }
        }
        let document = Document {
            rows: self
                .rows
                .iter()
                .map(|report| row(report, &names, &self.alone_bytes_per_s))
                .collect(),
            hits_uninterrupted: self.uninterrupted.hits,
            hits_restarted: self.rows.last().map_or(0, |restarted| restarted.hits),
            lookups,
            tiers: self.tier_entries(),
            trace: &workload.trace().name,
            machine: machine(),
            commit: commit(),
            requests: workload.trace().requests.len(),
            steps: workload.steps(),
            chunk_bytes: workload.chunk_bytes(),
            seeds: Seeds { schedule: workload.seed() },
            static_grid: self
                .grid
                .iter()
                .map(|(shares, retrieval_s)| Split { shares, retrieval_s: *retrieval_s })
                .collect(),
            problems,
        };
        serde_json::to_string_pretty(&document).expect("plain numbers and strings")
    }

    fn tier_entries(&self) -> Vec<TierEntry<'_>> {
        let paces = self.paced_bytes_per_s.iter().map(|pace| pace.map(|pace| pace as f64 / 1e6));
        self.tiers
            .iter()
            .zip(paces)
            .map(|(name, paced_mbps)| TierEntry { name, paced_mbps })
            .collect()
    }
}

fn row<'a>(report: &RunReport, tiers: &[&'a str], alone_bytes_per_s: &[f64]) -> Row<'a> {
    let speed = |value: f64| report.is_clean().then_some(value);
    let named = || tiers.iter().copied();
    Row {
        policy: report.policy.name(),
        retrieval_s: speed(report.retrieval_s),
        storage_bytes: report.storage_bytes,
        bytes_per_tier: named().zip(report.tier_bytes.iter().copied()).collect(),
        tier_alone_mbps: named().zip(alone_bytes_per_s.iter().map(|rate| rate / 1e6)).collect(),
        step_p50_s: speed(percentile(&report.step_s, 0.5)),
        step_p99_s: speed(percentile(&report.step_s, 0.99)),
        bytes_verified: report.bytes_verified,
        bytes_wrong: report.bytes_wrong,
        cpu_s_per_gb: speed(report.cpu_s_per_gb()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use crate::replay::{compare::tests::example, workload::tests::workload};

    fn keys(value: &Value) -> Vec<&str> {
        value.as_object().unwrap().keys().map(String::as_str).collect()
    }

    #[test]
    fn the_document_has_the_fields_that_readers_rely_on() {
        let workload = workload(&[&[1, 2]], 4096).unwrap();
        let document: Value = serde_json::from_str(&example().to_json(&workload)).unwrap();
        for field in [
            "rows",
            "hits_uninterrupted",
            "hits_restarted",
            "lookups",
            "tiers",
            "trace",
            "machine",
            "commit",
            "seeds",
        ] {
            assert!(!document[field].is_null(), "{field} is missing");
        }
        let row = &document["rows"][3];
        let mut fields = keys(row);
        fields.sort_unstable();
        let due = [
            "bytes_per_tier",
            "bytes_verified",
            "bytes_wrong",
            "cpu_s_per_gb",
            "policy",
            "retrieval_s",
            "step_p50_s",
            "step_p99_s",
            "storage_bytes",
            "tier_alone_mbps",
        ];
        assert_eq!(fields, due);
        let policies: Vec<_> = (0..4).map(|row| &document["rows"][row]["policy"]).collect();
        assert_eq!(policies, ["serial", "fast_only", "static_best", "kvbraid"]);
        assert_eq!(row["bytes_per_tier"]["slow"], 1_000_000);
        assert_eq!(row["tier_alone_mbps"]["fast"], 300.0);
        assert_eq!(row["cpu_s_per_gb"], 0.5);
        assert_eq!(document["hits_restarted"], 10);
    }

    #[test]
    fn a_run_with_a_wrong_byte_or_a_failure_has_no_speed() {
        let workload = workload(&[&[1, 2]], 4096).unwrap();
        let mut comparison = example();
        comparison.rows[3].bytes_wrong = 1;
        comparison.rows[1].problem("tier fast: eio".to_owned(), 2);
        let document: Value = serde_json::from_str(&comparison.to_json(&workload)).unwrap();
        for row in [1, 3] {
            for field in ["retrieval_s", "step_p50_s", "step_p99_s", "cpu_s_per_gb"] {
                assert!(document["rows"][row][field].is_null(), "row {row} shows {field}");
            }
        }
        assert!(document["rows"][0]["retrieval_s"].is_f64());
        assert_eq!(document["problems"]["tier fast: eio"], 2);
    }

    #[test]
    fn a_single_run_has_the_same_row() {
        let workload = workload(&[&[1, 2]], 4096).unwrap();
        let report = &example().rows[3];
        let text = report.to_json(&["fast", "slow"], &workload);
        let document: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(keys(&document["rows"][0]).len(), 10);
        assert_eq!(document["rows"][0]["bytes_per_tier"]["fast"], 2_600_000);
    }
}
