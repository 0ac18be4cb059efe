//! Repetitions of a cell, which of them count, and the figures drawn from those.

use serde_json::{Value, json};

use super::backends::{RECOMPUTE, TOKEN_BYTES};
use crate::bench::{devices::throttle::Counts, lmcache::rows::median};

/// All repetitions of one back end at one rate and burstiness.
pub(super) struct Row {
    pub(super) backend: &'static str,
    /// Part of what recomputing can do.
    pub(super) rate: f64,
    pub(super) cv: f64,
    pub(super) per_s: f64,
    pub(super) reps: Vec<Value>,
}

/// What a worker answered, with what the devices counted, and why it does not count.
pub(super) fn rep(backend: &str, mut answer: Value, devices: &[Counts]) -> Value {
    let charged: Vec<u64> = devices.iter().map(|it| it.charged).collect();
    answer["charged_bytes"] = json!(charged.iter().sum::<u64>());
    answer["device_charged_bytes"] = json!(charged);
    if let Some(why) = invalid(backend, &answer) {
        answer["invalid"] = json!(why);
    }
    answer
}

fn invalid(backend: &str, rep: &Value) -> Option<String> {
    if rep["failed"] != 0 {
        return Some(format!("{} of {} requests FAILED", rep["failed"], rep["requests"]));
    }
    let came = rep["hit_tokens"] != 0;
    if came == (backend == RECOMPUTE) {
        return Some(format!("{} tokens came from storage", rep["hit_tokens"]));
    }
    (came && rep["charged_bytes"] == 0).then(|| "no device was read".to_owned())
}

/// Holds the tokens of every back end against those of recomputing, request by request, and forgets them.
pub(super) fn compare(reps: &mut [(&'static str, Value)]) {
    let tokens = |rep: &mut Value| match rep["tokens"].take() {
        Value::Array(requests) => requests,
        _ => Vec::new(),
    };
    let said: Vec<(bool, Vec<Value>)> =
        reps.iter_mut().map(|(name, rep)| (*name == RECOMPUTE, tokens(rep))).collect();
    let due = said.iter().find(|(is_computed, _)| *is_computed).map(|(_, requests)| requests);
    for ((_, rep), (_, found)) in reps.iter_mut().zip(&said) {
        if let Some(fields) = rep.as_object_mut() {
            fields.remove("tokens");
        }
        let differ: Option<Vec<usize>> = due.map(|due| {
            (0..due.len().max(found.len())).filter(|at| due.get(*at) != found.get(*at)).collect()
        });
        rep["tokens_differ"] = json!(differ.as_ref().map(Vec::len));
        rep["requests_that_differ"] = json!(differ);
    }
}

impl Row {
    pub(super) fn is_of(&self, rate: f64, cv: f64) -> bool {
        (self.rate - rate).abs() < 1e-9 && (self.cv - cv).abs() < 1e-9
    }

    pub(super) fn valid(&self) -> impl Iterator<Item = &Value> {
        self.reps.iter().filter(|rep| rep["invalid"].is_null())
    }

    /// The median of the repetitions that count.
    pub(super) fn figure(&self, key: &str) -> f64 {
        median(&self.valid().filter_map(|rep| rep[key].as_f64()).collect::<Vec<_>>())
    }

    /// Over all repetitions, also those that do not count.
    pub(super) fn total(&self, key: &str) -> u64 {
        self.reps.iter().filter_map(|rep| rep[key].as_u64()).sum()
    }

    /// The part of the tokens that were stored before which came from storage.
    pub(super) fn hits(&self) -> f64 {
        self.total("hit_tokens") as f64 / self.total("wanted_tokens") as f64
    }

    /// Bytes that the devices gave for each that was to come from storage; memory in between gives the rest.
    pub(super) fn read(&self) -> f64 {
        self.total("charged_bytes") as f64 / (self.total("hit_tokens") * TOKEN_BYTES) as f64
    }

    pub(super) fn to_json(&self) -> Value {
        // All of the process: the model's steps too.
        let cpu = self.figure("cpu_s") / (self.figure("hit_tokens") * TOKEN_BYTES as f64) * 1e9;
        json!({
            "backend": self.backend, "rate": self.rate, "cv": self.cv, "requests_per_s": self.per_s,
            "reps": self.reps,
            "cpu_s_per_gb": if cpu.is_finite() { json!(cpu) } else { Value::Null },
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn row(backend: &'static str, mean_s: f64, p99_s: f64) -> Row {
        let hits = if backend == RECOMPUTE { 0 } else { 900 };
        let answer = json!({"requests": 2, "failed": 0, "tokens": [[1, 2], [3, 4]], "hit_tokens": hits,
            "wanted_tokens": 1000, "seconds": 1.0, "ttft_mean_s": mean_s, "ttft_p50_s": mean_s,
            "ttft_p99_s": p99_s, "tokens_per_s": 50.0, "cpu_s": 1.0});
        let counts = Counts { charged: hits * TOKEN_BYTES / 2, requests: 1 };
        let mut reps = vec![(backend, rep(backend, answer, &[counts]))];
        compare(&mut reps);
        Row { backend, rate: 0.5, cv: 1.0, per_s: 2.0, reps: vec![reps.remove(0).1] }
    }

    #[test]
    fn a_request_that_says_something_else_is_counted_and_named() {
        let said = |tokens| json!({"tokens": tokens});
        let mut reps = vec![
            ("fs", said(json!([[1, 2], [3, 5], []]))),
            (RECOMPUTE, said(json!([[1, 2], [3, 4], [5]]))),
        ];
        compare(&mut reps);
        assert_eq!(reps[0].1, json!({"tokens_differ": 2, "requests_that_differ": [1, 2]}));
        assert_eq!(reps[1].1, json!({"tokens_differ": 0, "requests_that_differ": []}));
        let mut alone = vec![("fs", said(json!([[1]])))];
        compare(&mut alone);
        assert!(alone[0].1["tokens_differ"].is_null(), "there was nothing to hold it against");
    }

    #[test]
    fn a_cell_with_failed_requests_or_without_hits_has_no_speed() {
        for (backend, key, value, words) in [
            ("fs", "failed", 1, "1 of 2 requests FAILED"),
            ("fs", "hit_tokens", 0, "0 tokens came"),
            ("fs", "charged_bytes", 0, "no device"),
            (RECOMPUTE, "hit_tokens", 5, "5 tokens came"),
        ] {
            let mut row = row(backend, 0.1, 0.2);
            assert_eq!(row.figure("ttft_mean_s"), 0.1);
            row.reps[0][key] = json!(value);
            let why = invalid(backend, &row.reps[0]).unwrap_or_default();
            assert!(why.contains(words), "{backend} {key}: {why}");
            row.reps[0]["invalid"] = json!(why);
            assert!(row.figure("ttft_mean_s").is_nan());
        }
    }

    #[test]
    fn hits_and_what_was_read_for_them_are_parts() {
        let row = row("fs", 0.1, 0.2);
        assert_eq!((row.hits(), row.read()), (0.9, 0.5));
    }
}
