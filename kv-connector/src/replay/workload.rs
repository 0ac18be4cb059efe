//! A trace made ready to run: steps, keys and buffers.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

use kv_chunk::{ChunkKey, KeyError, KeySpace, Namespace};

use crate::replay::{ReplayError, Schedule, ScheduleOptions, Trace, step::Plan};

/// Who looks on while a replay runs.
pub trait Watch {
    /// A part of the work begins: a policy's name, or what is measured.
    fn phase(&self, name: &str);

    /// One more step is done; false stops the replay.
    fn step(&self) -> bool;
}

/// Looks on in silence.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Watch for Silent {
    fn phase(&self, _name: &str) {}

    fn step(&self) -> bool {
        true
    }
}

/// A trace cut into steps, with the key of every chunk.
#[derive(Debug)]
pub struct Workload {
    trace: Trace,
    schedule: Schedule,
    seed: u64,
    chunk_bytes: usize,
    space: KeySpace,
    keys: HashMap<u64, ChunkKey>,
    chunks_in_a_step_max: usize,
}

impl Workload {
    /// Memory for one step's chunks, at most: a step that needs more is refused before anything runs.
    pub const STEP_BYTES_MAX: usize = 8 << 30;

    /// Cuts `trace` into steps. Every chunk has `chunk_bytes` of payload.
    pub fn new(
        trace: Trace,
        options: ScheduleOptions,
        chunk_bytes: usize,
    ) -> Result<Self, ReplayError> {
        let schedule = Schedule::new(&trace.requests, options);
        let seed = options.seed;
        let space = KeySpace::new(&namespace(&trace, chunk_bytes)).map_err(unusable)?;
        let ids: HashSet<u64> =
            trace.requests.iter().flat_map(|request| request.chunks.iter().copied()).collect();
        let key = |id: u64| Ok((id, space.key(0, 0, &id.to_le_bytes(), b"")?));
        let keys = ids.into_iter().map(key).collect::<Result<_, _>>().map_err(unusable)?;
        let mut workload =
            Self { trace, schedule, seed, chunk_bytes, space, keys, chunks_in_a_step_max: 0 };
        let sizes = (0..workload.steps()).map(|step| workload.plan(step).keys.len());
        workload.chunks_in_a_step_max = sizes.max().unwrap_or(0);
        let bytes = workload.chunks_in_a_step_max.saturating_mul(chunk_bytes);
        if chunk_bytes == 0 || bytes > Self::STEP_BYTES_MAX {
            return Err(ReplayError::Option {
                option: "--chunk-bytes",
                problem: format!(
                    "{chunk_bytes} bytes make steps of up to {bytes} bytes, at most {} fit",
                    Self::STEP_BYTES_MAX
                ),
                fix: "give smaller chunks (at least 1 byte) or a shorter --step-ms".to_owned(),
            });
        }
        Ok(workload)
    }

    /// The trace.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// Payload of every chunk.
    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Seed of the arrivals within a tick of the trace's clock.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Number of steps.
    pub fn steps(&self) -> usize {
        self.schedule.steps.len()
    }

    /// When a live scheduler would start a step, in milliseconds of trace time.
    pub(crate) fn start_ms(&self, step: usize) -> u64 {
        self.schedule.steps[step].start_ms
    }

    /// Memory for the chunks of any one step.
    pub(crate) fn buffer(&self) -> Vec<u8> {
        vec![0; self.chunks_in_a_step_max * self.chunk_bytes]
    }

    /// What a step looks up: each chunk once, in the order of its requests.
    pub(crate) fn plan(&self, step: usize) -> Plan {
        let mut places = HashMap::new();
        let mut keys: Vec<ChunkKey> = Vec::new();
        let mut chunks = Vec::new();
        let mut requests: Vec<Range<usize>> = Vec::new();
        let mut tokens = 0;
        for &request in &self.schedule.steps[step].requests {
            let request = &self.trace.requests[request];
            tokens += request.input_tokens;
            let begin = chunks.len();
            for id in &request.chunks {
                let place = *places.entry(*id).or_insert_with(|| {
                    keys.push(self.keys[id].clone());
                    keys.len() - 1
                });
                chunks.push(place);
            }
            requests.push(begin..chunks.len());
        }
        Plan { keys, chunks, requests, tokens, chunk_tokens: self.trace.chunk_tokens }
    }

    /// Keys that no request of the trace has, for measurements beside it.
    pub(crate) fn spare_keys(&self, count: usize) -> Vec<ChunkKey> {
        let key = |index: usize| {
            let hash = (index as u64).to_le_bytes();
            // Another object group: none of the trace's chunks is in it.
            self.space.key(0, 1, &hash, b"").expect("as long as the keys made in `new`")
        };
        (0..count).map(key).collect()
    }
}

fn unusable(error: KeyError) -> ReplayError {
    ReplayError::Option {
        option: "--trace",
        problem: error.to_string(),
        fix: "give the file another name".to_owned(),
    }
}

fn namespace(trace: &Trace, chunk_bytes: usize) -> Namespace {
    Namespace {
        model: "replay".to_owned(),
        weights: trace.name.clone(),
        dtype: "u64".to_owned(),
        layout: format!("{chunk_bytes} bytes"),
        chunk_tokens: u32::try_from(trace.chunk_tokens).unwrap_or(u32::MAX),
        serde: "raw".to_owned(),
        hash_algorithm: "trace id".to_owned(),
        hash_seed: "none".to_owned(),
        tensor_parallel: 1,
        pipeline_parallel: 1,
        context_parallel: 1,
        engine: "kvbraid replay".to_owned(),
        engine_major: 0,
        extra: BTreeMap::new(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::replay::Request;

    use super::*;

    /// Requests with these chunks, all at once.
    pub(crate) fn workload(
        prompts: &[&[u64]],
        chunk_bytes: usize,
    ) -> Result<Workload, ReplayError> {
        let request = |chunks: &&[u64]| Request {
            timestamp_ms: 0,
            input_tokens: 512 * chunks.len() as u64 + 64,
            output_tokens: 1,
            chunks: chunks.to_vec(),
        };
        let requests = prompts.iter().map(request).collect();
        let trace = Trace { name: "test.jsonl".to_owned(), chunk_tokens: 512, requests };
        let options = ScheduleOptions { tick_ms: 0, ..ScheduleOptions::default() };
        Workload::new(trace, options, chunk_bytes)
    }

    #[test]
    fn a_plan_names_each_chunk_once_in_the_order_of_the_requests() {
        let workload = workload(&[&[5, 6], &[5, 7]], 4096).unwrap();
        let plan = workload.plan(0);
        assert_eq!(plan.keys.len(), 3);
        assert_eq!(plan.chunks, [0, 1, 0, 2]);
        assert_eq!(plan.requests, [0..2, 2..4]);
        assert_eq!(plan.tokens, 2 * (1024 + 64));
        assert!(workload.spare_keys(9).iter().all(|spare| !plan.keys.contains(spare)));
        assert_eq!(workload.buffer().len(), 3 * 4096);
    }

    #[test]
    fn steps_beyond_the_machine_are_refused_with_a_fix() {
        for bytes in [0, 5 << 30] {
            let error = workload(&[&[5, 6]], bytes).unwrap_err();
            assert!(error.is_usage() && error.to_string().starts_with("--chunk-bytes"), "{error}");
        }
    }
}
