//! A tier's rate over time in which its window stayed full.

/// How much makes an interval.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quota {
    pub(crate) cycles: u32,
    pub(crate) reads: u32,
    pub(crate) ns: u64,
}

/// Adds up whole cycles: as many completions as the window has places, while it was full.
///
/// Reads that were started together also end together, so that only whole cycles are fair. The first cycle after the
/// window was filled or changed is not counted: its reads met another load. What lies between two spells of a full
/// window counts for nothing, so that short steps add up as well.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Meter {
    full: bool,
    /// Spells of a full window in a row that ended before any cycle did.
    pub(crate) vain_spells: u32,
    spell_cycles: u32,
    /// Completions to let pass.
    settling: u32,
    cycle_reads: u32,
    cycle_bytes: u64,
    cycle_from_ns: u64,
    cycles: u32,
    reads: u32,
    bytes: u64,
    ns: u64,
}

impl Meter {
    /// After the window was filled as far as it could be: whether it is full.
    pub(crate) fn refilled(&mut self, limit: u32, full: bool) {
        if full && !self.full {
            self.settling = limit;
            self.spell_cycles = 0;
        } else if self.full && !full && self.spell_cycles == 0 {
            self.vain_spells += 1;
        }
        self.full = full;
    }

    /// The limit is another one, and an interval begins.
    pub(crate) fn restart(&mut self) {
        *self = Self::default();
    }

    pub(crate) fn completed(&mut self, limit: u32, bytes: u64, now_ns: u64) {
        if !self.full {
            return;
        }
        if self.settling > 0 {
            self.settling -= 1;
            if self.settling == 0 {
                self.begin_cycle(now_ns);
            }
            return;
        }
        self.cycle_reads += 1;
        self.cycle_bytes += bytes;
        if self.cycle_reads >= limit {
            self.cycles += 1;
            self.spell_cycles += 1;
            self.vain_spells = 0;
            self.reads += self.cycle_reads;
            self.bytes += self.cycle_bytes;
            self.ns += now_ns.saturating_sub(self.cycle_from_ns);
            self.begin_cycle(now_ns);
        }
    }

    fn begin_cycle(&mut self, now_ns: u64) {
        (self.cycle_reads, self.cycle_bytes, self.cycle_from_ns) = (0, 0, now_ns);
    }

    /// Bytes a nanosecond over the interval if that is long enough; the next one begins.
    pub(crate) fn take(&mut self, quota: &Quota) -> Option<f64> {
        if self.cycles < quota.cycles || self.reads < quota.reads || self.ns < quota.ns {
            return None;
        }
        let rate = self.bytes as f64 / self.ns.max(1) as f64;
        (self.cycles, self.reads, self.bytes, self.ns) = (0, 0, 0, 0);
        (rate > 0.0).then_some(rate)
    }
}
