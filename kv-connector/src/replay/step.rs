//! One scheduler step: which chunks it wants, loading them, and checking what came.

use std::{ops::Range, time::Instant};

use kv_chunk::ChunkKey;

use crate::{
    Engine, Lease, MissReason, Outcome, StepReport, TierId, TierMask, Want,
    replay::{Policy, RunReport, content::wrong_bytes, report::cpu_time},
};

/// What a step looks up: every chunk of its requests, each once.
#[derive(Debug)]
pub(crate) struct Plan {
    /// The chunks, in the order of the requests.
    pub(crate) keys: Vec<ChunkKey>,
    /// The prompts, one behind the other: places in `keys`.
    pub(crate) chunks: Vec<usize>,
    /// Each request's stretch of `chunks`.
    pub(crate) requests: Vec<Range<usize>>,
    /// Prompt tokens of all requests.
    pub(crate) tokens: u64,
    /// Tokens in a chunk.
    pub(crate) chunk_tokens: u64,
}

/// What a step loads after its look-up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Places in the plan's keys: of each request the hits before its first miss, each chunk once.
    pub(crate) places: Vec<usize>,
    /// How many of them each request brought in.
    pub(crate) groups: Vec<usize>,
    /// Tokens that no hit covers: the forward pass computes them.
    pub(crate) tokens: u64,
}

impl Plan {
    /// What to load when `hits` are readable.
    pub(crate) fn wanted(&self, hits: &[bool]) -> Wanted {
        let mut seen = vec![false; self.keys.len()];
        let mut wanted = Wanted { places: Vec::new(), groups: Vec::new(), tokens: self.tokens };
        for request in &self.requests {
            let before = wanted.places.len();
            for &place in self.chunks[request.clone()].iter().take_while(|&&place| hits[place]) {
                wanted.tokens = wanted.tokens.saturating_sub(self.chunk_tokens);
                if !std::mem::replace(&mut seen[place], true) {
                    wanted.places.push(place);
                }
            }
            wanted.groups.push(wanted.places.len() - before);
        }
        wanted
    }
}

/// How the chunks of a step are read, and by what.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    pub(crate) engine: &'a Engine,
    pub(crate) policy: &'a Policy,
    /// The tier that policies with one tier read from.
    pub(crate) fastest: TierId,
    pub(crate) chunk_bytes: usize,
}

impl Reader<'_> {
    /// Loads `wanted` into `buffer`, checks every byte, and adds what happened to `report`.
    ///
    /// Returns the places that the lease promised and that were not delivered.
    pub(crate) fn load(
        &self,
        lease: &Lease,
        plan: &Plan,
        wanted: &Wanted,
        buffer: &mut [u8],
        report: &mut RunReport,
    ) -> Vec<usize> {
        let chunks = wanted.places.len();
        let used = &mut buffer[..chunks * self.chunk_bytes];
        // What an earlier step left would pass for this step's bytes where one chunk comes to the same place twice.
        used.fill(0xa5);
        let masks = self.policy.masks(chunks, self.fastest);
        let wants = wanted.places.iter().zip(used.chunks_exact_mut(self.chunk_bytes)).zip(masks);
        let wants = wants.map(|((&place, dest), mask)| {
            let mut want = Want::new(&plan.keys[place], dest);
            want.tiers = mask;
            want
        });
        let groups: &[usize] = match self.policy {
            Policy::Serial => &wanted.groups,
            _ => &[chunks],
        };
        let wants = timed(self.engine, lease, wants.collect(), groups, report);
        check(&wants, report);
        let missed = wants.iter().filter(|want| !want.outcome.is_hit());
        missed.filter_map(|missed| plan.keys.iter().position(|key| key == missed.key)).collect()
    }
}

/// The part that counts as retrieval: from the first load's begin to the last chunk.
fn timed<'a>(
    engine: &Engine,
    lease: &Lease,
    mut wants: Vec<Want<'a>>,
    groups: &[usize],
    report: &mut RunReport,
) -> Vec<Want<'a>> {
    let storage_bytes_before = report.storage_bytes;
    let (cpu_before, began) = (cpu_time(), Instant::now());
    let mut rest = wants.as_mut_slice();
    for &count in groups.iter().filter(|&&count| count > 0) {
        let (now, later) = rest.split_at_mut(count);
        count_bytes(&engine.load(lease, now), report);
        rest = later;
    }
    let masked = |want: &Want<'_>| want.outcome == Outcome::Miss(MissReason::TierMasked);
    let (mut again, mut wants): (Vec<_>, Vec<_>) = wants.into_iter().partition(masked);
    if !again.is_empty() {
        // Not yet replicated to the tier that the policy chose: any policy must then take what there is.
        again.iter_mut().for_each(|want| want.tiers = TierMask::all(u8::MAX));
        count_bytes(&engine.load(lease, &mut again), report);
        wants.append(&mut again);
    }
    let seconds = began.elapsed().as_secs_f64();
    report.cpu_s += (cpu_time() - cpu_before).as_secs_f64();
    if report.storage_bytes > storage_bytes_before {
        report.retrieval_s += seconds;
        report.step_s.push(seconds);
    }
    wants
}

fn count_bytes(step: &StepReport, report: &mut RunReport) {
    report.memory_bytes += step.memory_bytes;
    report.storage_bytes += step.storage_bytes;
    report.duplicate_bytes += step.duplicate_bytes;
    for (total, tier) in report.tier_bytes.iter_mut().zip(&step.tiers) {
        *total += tier.payload_bytes;
    }
}

/// Compares every delivered byte with what its chunk's key says it must be.
fn check(wants: &[Want<'_>], report: &mut RunReport) {
    for want in wants {
        match want.outcome {
            Outcome::Hit(_) => {
                report.hits += 1;
                report.bytes_verified += want.dest.len() as u64;
                report.bytes_wrong += wrong_bytes(want.key.digest(), want.dest);
            }
            Outcome::Miss(reason) => {
                report.problem(format!("promised chunk missed: {reason:?}"), 1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::replay::workload::tests::workload;

    use super::*;

    /// Two requests, each with 64 tokens beyond its three full chunks.
    fn plan() -> Plan {
        workload(&[&[0, 1, 2], &[0, 1, 3]], 4096).unwrap().plan(0)
    }

    #[test]
    fn a_chunk_that_requests_share_is_wanted_once() {
        let wanted = plan().wanted(&[true, true, false, true]);
        assert_eq!(wanted.places, [0, 1, 3]);
        assert_eq!(wanted.groups, [2, 1]);
        assert_eq!(wanted.tokens, 3200 - 5 * 512, "both requests save what they share");
    }

    #[test]
    fn hits_behind_a_miss_are_of_no_use() {
        let wanted = plan().wanted(&[true, false, true, true]);
        assert_eq!(wanted, Wanted { places: vec![0], groups: vec![1, 0], tokens: 3200 - 2 * 512 });
    }
}
