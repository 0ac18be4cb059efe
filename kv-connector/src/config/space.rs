//! How a tier of kind nvme uses its space: the floor of free space, and room ahead of writes.

use super::{TierConfig, TierKind};
use crate::{ByteSize, EngineError};

/// A store more than this full makes room ahead of writes ...
const HIGH_PERMILLE: u32 = 990;
/// ... until it is so much less full.
const GAP_PERMILLE: u32 = 10;
const MIN_FREE_MAX: ByteSize = ByteSize::gib(1 << 20);

impl TierConfig {
    /// High and low watermark in thousandths; what is not given follows from what is.
    pub(crate) fn watermarks_permille(&self) -> (u32, u32) {
        let low = self.low_watermark_permille;
        let high = self.high_watermark_permille.unwrap_or(HIGH_PERMILLE.max(low.unwrap_or(0)));
        (high, low.unwrap_or(high.saturating_sub(GAP_PERMILLE).max(1)))
    }
}

pub(super) fn check(tier: &TierConfig, at: &impl Fn(&str) -> String) -> Result<(), EngineError> {
    let fail =
        |field, problem: String, fix: &str| Err(EngineError::config(at(field), problem, fix));
    let marks = [
        ("high_watermark_permille", tier.high_watermark_permille),
        ("low_watermark_permille", tier.low_watermark_permille),
    ];
    if tier.kind != TierKind::Nvme {
        let marks = marks.iter().find(|(_, mark)| mark.is_some()).map(|(field, _)| *field);
        let floor = tier.min_free_bytes.is_some().then_some("min_free_bytes");
        let Some(field) = floor.or(marks) else { return Ok(()) };
        let fix = match tier.kind {
            TierKind::Shared if floor.is_some() => "write `min_free` in [tier.shared] instead",
            _ => "remove it",
        };
        return fail(field, "only a tier of kind nvme has it".to_owned(), fix);
    }
    if let Some(floor) = tier.min_free_bytes.filter(|floor| *floor > MIN_FREE_MAX) {
        return fail("min_free_bytes", format!("{floor} is out of range"), "write 0 to 1024 TiB");
    }
    for (field, mark) in marks {
        if let Some(mark) = mark.filter(|mark| !(1..=1000).contains(mark)) {
            return fail(field, format!("{mark} thousandths"), "write 1 to 1000");
        }
    }
    let (high, low) = tier.watermarks_permille();
    if low > high {
        let problem = format!("{low} thousandths are above the high watermark of {high}");
        return fail("low_watermark_permille", problem, "write high_watermark_permille or less");
    }
    Ok(())
}
