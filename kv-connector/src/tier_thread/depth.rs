//! How many reads the tier has in flight: the learner that sets the window, and what it may compare.

use kv_router::{Knee, KneeConfig};
use kv_tiers::{ReadDone, TierError};

use super::Worker;
use crate::{WindowSearch, WindowState};

/// What sets the window.
#[derive(Debug)]
pub(super) struct Depth {
    /// None where the configuration fixes the window.
    knee: Option<Knee>,
    max: u32,
    /// Reads of parts of chunks in flight: the tier's rate is another one meanwhile.
    pieces: u32,
    /// A read failed since the window was last filled.
    failed: bool,
}

impl Depth {
    pub(super) fn new(windows: KneeConfig) -> Self {
        let knee = (windows.min < windows.max).then(|| Knee::new(windows));
        Self { knee, max: windows.max, pieces: 0, failed: false }
    }

    pub(super) fn is_learned(&self) -> bool {
        self.knee.is_some()
    }

    /// Steps have shown what the window should be.
    pub(super) fn is_settled(&self) -> bool {
        self.knee.as_ref().is_some_and(Knee::is_settled)
    }

    pub(super) fn max(&self) -> u32 {
        self.max
    }

    pub(super) fn read_started(&mut self, is_piece: bool) {
        self.pieces += u32::from(is_piece);
    }

    fn read_ended(&mut self, is_piece: bool, result: &Result<ReadDone, TierError>, now_ns: u64) {
        self.pieces = self.pieces.saturating_sub(u32::from(is_piece));
        match (&mut self.knee, result) {
            (Some(knee), Ok(done)) if !is_piece => {
                knee.completed(done.payload_bytes as u64, now_ns);
            }
            (_, Ok(_)) => {}
            (_, Err(_)) => self.failed = true,
        }
    }

    pub(super) fn status(&self, limit: u32) -> WindowSearch {
        let state = match &self.knee {
            None => WindowState::Fixed,
            Some(knee) if knee.is_settled() => WindowState::Settled,
            Some(_) => WindowState::Learning,
        };
        WindowSearch { limit, max: self.max, state, probe: None }
    }
}

impl Worker {
    /// A read of a step ended: its place is free, and the window may be another one.
    pub(super) fn place_freed(
        &mut self,
        is_piece: bool,
        result: &Result<ReadDone, TierError>,
        now_ns: u64,
    ) {
        self.window.end();
        self.depth.read_ended(is_piece, result, now_ns);
        self.follow_knee();
    }

    /// The window was filled as far as there was work. A tier that also writes, or reads pieces, is not at its rate.
    pub(super) fn window_refilled(&mut self) {
        let writing = !self.writes.is_empty() && !self.holding_writes;
        let Depth { knee, pieces, failed, .. } = &mut self.depth;
        let Some(knee) = knee else { return };
        let alone = self.sounding.is_over() && self.chores.is_idle();
        let comparable = *pieces == 0 && !writing && !*failed && alone;
        knee.refilled(self.window.in_flight(), comparable);
        *failed = false;
        self.follow_knee();
    }

    /// Begins at what reading on trial found.
    pub(super) fn start_window_at(&mut self, window: u32) {
        if let Some(knee) = &mut self.depth.knee {
            knee.start_at(window);
        }
        self.follow_knee();
    }

    fn follow_knee(&mut self) {
        let Some(knee) = &self.depth.knee else { return };
        self.window.set_limit(knee.limit());
        if self.handle().window() != knee.base() {
            tracing::debug!(tier = self.handle().name, window = knee.base(), "window");
            self.handle().set_window(knee.base());
        }
    }
}
