//! How many reads each tier may have in flight: fixed, or learned within what memory holds.

use kv_router::KneeConfig;
use kv_tiers::record_bytes;

use super::Config;

/// Where learning begins with small chunks.
const START: u32 = 8;
/// With large ones it begins with about so many bytes: what a slow tier has in flight when nothing is left to claim is
/// what a step ends with.
const START_BYTES: u64 = 16 << 20;
/// But with no fewer reads than this.
const START_LEAST: u32 = 4;
/// The largest learned window unless `window_max` says otherwise.
const MAX: u32 = 32;
/// And the smallest such bound, however little memory there is.
const MAX_LEAST: u32 = 4;
/// Memory that learned windows may ask for if `read_buffer` is not set; windows of `START` come first.
const MEMORY_BYTES: u64 = 512 << 20;

/// Each tier's window, in the order of the configuration. Of a fixed one all three numbers are equal.
///
/// Storage reads land in memory of our own: it holds two windows of every tier, one that is read and one that is
/// verified and copied. Where `read_buffer` is smaller, it holds one: a device that hangs keeps what it was given, and
/// must leave the other tiers theirs.
pub(crate) fn windows(config: &Config) -> Vec<KneeConfig> {
    let record = record_bytes(config.engine.chunk_bytes_max.0);
    let known = |tier: &super::TierConfig| tier.window.or(tier.window_max);
    let taken: u64 = config.tiers.iter().filter_map(known).map(u64::from).sum();
    let learned = config.tiers.iter().filter(|tier| known(tier).is_none()).count() as u64;
    let (bytes, least) = match config.engine.read_buffer {
        Some(buffer) => (buffer.0, MAX_LEAST),
        None => (MEMORY_BYTES, START),
    };
    let left = (bytes / record / 2).saturating_sub(taken) / learned.max(1);
    let max = u32::try_from(left).unwrap_or(MAX).clamp(least, MAX);
    let start = u32::try_from(START_BYTES / record).unwrap_or(START).clamp(START_LEAST, START);
    let window = |tier: &super::TierConfig| match tier.window {
        Some(fixed) => KneeConfig { min: fixed, max: fixed, start: fixed },
        None => {
            let max = tier.window_max.unwrap_or(max);
            KneeConfig { min: 1, max, start: start.min(max) }
        }
    };
    let mut windows: Vec<_> = config.tiers.iter().map(window).collect();
    if let Some(buffer) = config.engine.read_buffer {
        share(&mut windows, buffer.0 / record);
    }
    windows
}

/// Makes windows smaller, in proportion, until together they have no more places than there are slots.
fn share(windows: &mut [KneeConfig], slots: u64) {
    let places: u64 = windows.iter().map(|window| u64::from(window.max)).sum();
    if places <= slots {
        return;
    }
    for window in windows {
        let most = slots * u64::from(window.max) / places;
        let most = u32::try_from(most).unwrap_or(u32::MAX).max(1);
        let KneeConfig { min, start, .. } = *window;
        *window = KneeConfig { min: min.min(most), max: most, start: start.min(most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteSize, TierConfig};

    fn maxima(config: &Config) -> Vec<u32> {
        windows(config).iter().map(|window| window.max).collect()
    }

    #[test]
    fn learned_windows_stay_within_memory() {
        let tier = || TierConfig::memory("m", ByteSize::gib(1));
        let mut config = Config::new(vec![tier(), tier()]);
        assert_eq!(maxima(&config), [31, 31], "127 records of 4 MiB and their headers");
        config.tiers.push(tier());
        assert_eq!(maxima(&config), [21; 3], "a third of 63");
        config.engine.chunk_bytes_max = ByteSize::mib(64);
        assert_eq!(maxima(&config), [8; 3], "no less than where learning begins");
        config.engine.read_buffer = Some(ByteSize::gib(4));
        assert_eq!(maxima(&config), [10; 3], "63 records of 64 MiB and their headers");
    }

    #[test]
    fn learning_begins_with_fewer_reads_of_larger_chunks() {
        let mut config = Config::new(vec![TierConfig::memory("m", ByteSize::gib(1))]);
        let mut start = |chunk| {
            config.engine.chunk_bytes_max = chunk;
            windows(&config)[0].start
        };
        assert_eq!(start(ByteSize::mib(1)), 8);
        assert_eq!(start(ByteSize(3 << 20)), 5);
        assert_eq!(start(ByteSize::mib(4)), 4);
        assert_eq!(start(ByteSize::mib(64)), 4);
    }

    #[test]
    fn a_small_buffer_leaves_every_tier_a_part_of_it() {
        let tier = || TierConfig::memory("m", ByteSize::gib(1));
        let mut config = Config::new((0..8).map(|_| tier()).collect());
        config.engine.read_buffer =
            Some(ByteSize(8 * record_bytes(config.engine.chunk_bytes_max.0)));
        assert_eq!(maxima(&config), [1; 8]);
        config.tiers.truncate(2);
        assert_eq!(maxima(&config), [4, 4]);
        config.tiers[0].window = Some(1024);
        config.tiers[1].window = Some(300);
        assert_eq!(maxima(&config), [6, 1]);
        let fixed = KneeConfig { min: 6, max: 6, start: 6 };
        assert_eq!(windows(&config)[0], fixed);
    }

    #[test]
    fn a_number_fixes_a_window_and_takes_its_part_of_the_memory() {
        let tier = || TierConfig::memory("m", ByteSize::gib(1));
        let mut config = Config::new(vec![tier(), tier(), tier()]);
        config.tiers[0].window = Some(40);
        config.tiers[1].window_max = Some(3);
        let windows = windows(&config);
        assert_eq!(windows[0], KneeConfig { min: 40, max: 40, start: 40 });
        assert_eq!(windows[1], KneeConfig { min: 1, max: 3, start: 3 });
        assert_eq!(windows[2], KneeConfig { min: 1, max: 20, start: 4 }, "63 slots less 43");
    }
}
