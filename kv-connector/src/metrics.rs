//! The statistics as Prometheus text.

use std::fmt::{Display, Write};

use serde::Serialize;

use crate::{EngineStats, WindowState};

mod claims;

/// Text under construction; writing to a `String` cannot fail.
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP kvbraid_{name} {help}\n# TYPE kvbraid_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let _ = write!(self.0, "kvbraid_{name}");
        for (index, (label, value)) in labels.iter().enumerate() {
            let open = if index == 0 { '{' } else { ',' };
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.0, "{open}{label}=\"{value}\"");
        }
        let close = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.0, "{close} {value}");
    }

    fn single(&mut self, name: &str, kind: &str, help: &str, value: impl Display) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }
}

impl EngineStats {
    /// Prometheus text exposition of these statistics; names begin with `kvbraid_`, sizes are bytes, times seconds.
    pub fn prometheus(&self) -> String {
        let mut text = Text(String::with_capacity(8 << 10));
        self.render_loads(&mut text);
        self.render_stores(&mut text);
        self.render_memory(&mut text);
        self.render_tiers(&mut text);
        claims::render(self, &mut text);
        text.0
    }

    fn render_loads(&self, text: &mut Text) {
        text.single("lookup_chunks_total", "counter", "Chunks looked up.", self.lookup_chunks);
        let help = "Chunks looked up that were readable.";
        text.single("lookup_hits_total", "counter", help, self.lookup_hits);
        text.single("steps_total", "counter", "Loads.", self.steps);
        text.single("wanted_chunks_total", "counter", "Chunks wanted by loads.", self.wanted);
        text.family("hits_total", "counter", "Wanted chunks delivered, by source.");
        text.sample("hits_total", &[("source", "host_cache")], self.hits_host_cache);
        text.sample("hits_total", &[("source", "staged")], self.hits_staged);
        for tier in &self.tiers {
            text.sample("hits_total", &[("source", &tier.name)], tier.hits);
        }
        text.family("misses_total", "counter", "Wanted chunks not delivered, by reason.");
        for (reason, count) in &self.miss_reasons {
            text.sample("misses_total", &[("reason", &word(reason))], count);
        }
    }

    fn render_stores(&self, text: &mut Text) {
        text.single("stored_chunks_total", "counter", "Chunks staged.", self.stored);
        text.family("refused_chunks_total", "counter", "Chunks refused, by reason.");
        for (reason, count) in &self.refused {
            text.sample("refused_chunks_total", &[("reason", &word(reason))], count);
        }
        text.single("pending_writes", "gauge", "Chunks staged now.", self.pending_writes);
        text.family("replicas_total", "counter", "Replicas, by what became of them.");
        for (outcome, count) in [
            ("written", self.replicas_written),
            ("failed", self.replicas_failed),
            ("dropped", self.replicas_dropped),
        ] {
            text.sample("replicas_total", &[("outcome", outcome)], count);
        }
        let help = "Staged chunks that no tier kept.";
        text.single("lost_writes_total", "counter", help, self.lost_writes);
    }

    fn render_memory(&self, text: &mut Text) {
        text.single("held_chunks", "gauge", "Chunks on any tier.", self.chunks_held);
        text.single("leased_chunks", "gauge", "Chunks under a lease.", self.chunks_leased);
        let help = "Chunks in the host cache.";
        text.single("host_cache_chunks", "gauge", help, self.host_cache.chunks);
        let arenas = [("reads", &self.read_memory), ("staging", &self.staging_memory)];
        text.family("memory_bytes", "gauge", "Memory for transfers.");
        for (arena, memory) in arenas {
            text.sample("memory_bytes", &[("arena", arena)], memory.bytes);
        }
        text.family("memory_huge_page_bytes", "gauge", "Of that, on huge pages.");
        for (arena, memory) in arenas {
            text.sample("memory_huge_page_bytes", &[("arena", arena)], memory.huge_page_bytes);
        }
        text.family("memory_free_slots", "gauge", "Slots that nobody holds.");
        for (arena, memory) in arenas {
            text.sample("memory_free_slots", &[("arena", arena)], memory.free_slots);
        }
    }

    fn render_tiers(&self, text: &mut Text) {
        type Value = fn(&crate::TierStatus) -> f64;
        #[expect(clippy::cast_precision_loss, reason = "Prometheus values are doubles")]
        let families: [(&str, &str, &str, Value); 22] = [
            ("used_bytes", "gauge", "Space that counts against the cap.", |t| t.used_bytes as f64),
            ("capacity_bytes", "gauge", "The cap.", |t| t.capacity_bytes as f64),
            ("chunks", "gauge", "Readable chunks.", |t| t.chunks as f64),
            ("recovered_chunks", "gauge", "Found at open.", |t| t.recovered_chunks as f64),
            ("up", "gauge", "1 if the tier is read.", |t| f64::from(t.breaker == "closed")),
            ("writes_paused", "gauge", "1 if writes rest.", |t| f64::from(t.writes_paused)),
            ("payload_bytes_total", "counter", "Payload delivered first.", |t| {
                t.payload_bytes as f64
            }),
            ("late_bytes_total", "counter", "Payload too late to count.", |t| t.late_bytes as f64),
            ("read_bytes_total", "counter", "Payload read.", |t| t.read_bytes as f64),
            ("device_requests_total", "counter", "Requests sent to the device.", |t| {
                t.device_requests as f64
            }),
            ("window_reads", "gauge", "Reads in flight thought best.", |t| f64::from(t.window)),
            ("purged_chunks_total", "counter", "Removed by purges.", |t| t.purged_chunks as f64),
            ("scrubbed_chunks_total", "counter", "Verified in idle time.", |t| {
                t.scrubbed_chunks as f64
            }),
            ("scrubbed_bytes_total", "counter", "Payload of those.", |t| t.scrubbed_bytes as f64),
            ("scrub_damaged_chunks_total", "counter", "Found damaged and dropped.", |t| {
                t.scrub_damaged as f64
            }),
            ("write_bytes_total", "counter", "Payload written.", |t| t.write_bytes as f64),
            ("evictions_total", "counter", "Chunks dropped to make room.", |t| t.evictions as f64),
            ("lost_chunks_total", "counter", "Chunks gone or damaged.", |t| t.lost_chunks as f64),
            ("corrupt_reads_total", "counter", "Reads of wrong bytes.", |t| t.corrupt_reads as f64),
            ("timed_out_reads_total", "counter", "Reads past their deadline.", |t| {
                t.timed_out_reads as f64
            }),
            ("window_settled", "gauge", "0 while that is being learned.", |t| {
                f64::from(t.window_search.state != WindowState::Learning)
            }),
            ("busy_seconds_total", "counter", "Time with reads in flight.", |t| t.busy_s),
        ];
        for (name, kind, help, value) in families {
            let name = format!("tier_{name}");
            text.family(&name, kind, help);
            for tier in &self.tiers {
                text.sample(&name, &[("tier", &tier.name)], value(tier));
            }
        }
        text.family("tier_window_probed", "gauge", "Reads in flight that a trial at open found.");
        for tier in &self.tiers {
            if let Some(window) = tier.window_search.probe.as_ref().and_then(|probe| probe.window) {
                text.sample("tier_window_probed", &[("tier", &tier.name)], window);
            }
        }
        text.family("tier_errors_total", "counter", "Failed operations, by kind.");
        for tier in &self.tiers {
            for (kind, count) in &tier.errors {
                text.sample("tier_errors_total", &[("tier", &tier.name), ("kind", kind)], count);
            }
        }
    }
}

/// The word that a unit variant has in JSON.
fn word(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_default();
    json.trim_matches('"').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MissReason, TierStatus};

    #[test]
    fn samples_carry_their_labels_and_every_family_is_described() {
        let tier = |name: &str, hits| {
            let errors = [("Io".to_owned(), 3)].into();
            TierStatus { name: name.to_owned(), hits, errors, ..TierStatus::default() }
        };
        let stats = EngineStats {
            tiers: vec![tier("fast", 7), tier("slow", 2)],
            miss_reasons: [(MissReason::NotHeld, 4)].into(),
            ..EngineStats::default()
        };
        let text = stats.prometheus();
        for line in [
            "kvbraid_hits_total{source=\"fast\"} 7",
            "kvbraid_misses_total{reason=\"not_held\"} 4",
            "kvbraid_tier_errors_total{tier=\"slow\",kind=\"Io\"} 3",
            "kvbraid_pending_writes 0",
        ] {
            assert!(text.lines().any(|found| found == line), "no `{line}` in\n{text}");
        }
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let family = line.split(['{', ' ']).next().unwrap();
            assert!(text.contains(&format!("# TYPE {family} ")), "{family} has no type");
        }
    }
}
