//! What happens to the devices while a step is read.

use clap::ValueEnum;

use super::{Device, schedule::Schedule};

/// A case that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Scenario {
    /// Two devices at constant limits.
    TwoTiers,
    /// Another process reads from the slow one.
    Colocated,
    /// The fast one's limit falls to a fifth and rises to two thirds while the step runs.
    ChangingLimit,
    /// Chunks are staged for writing while the step reads.
    WritesQueued,
    /// Four ranks wait for a quarter of the chunks each.
    FourRanks,
    /// The fast one alone and without a limit, against fio.
    OneDevice,
}

impl Scenario {
    pub(super) const ALL: [Self; 6] = [
        Self::TwoTiers,
        Self::Colocated,
        Self::ChangingLimit,
        Self::WritesQueued,
        Self::FourRanks,
        Self::OneDevice,
    ];

    /// Its name in every table and file.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::TwoTiers => "two_tiers",
            Self::Colocated => "colocated",
            Self::ChangingLimit => "changing_limit",
            Self::WritesQueued => "writes_queued",
            Self::FourRanks => "four_ranks",
            Self::OneDevice => "one_device",
        }
    }

    /// The limits of the devices during a step that takes about `seconds` at their first limits.
    pub(super) fn schedules(self, devices: &[Device], seconds: f64) -> Vec<Schedule> {
        let mut schedules: Vec<Schedule> =
            devices.iter().map(|device| Schedule::constant(device.bytes_per_s)).collect();
        if self == Self::ChangingLimit {
            let first = schedules[0].first;
            schedules[0].changes = vec![(0.3 * seconds, first / 5), (0.6 * seconds, first / 3 * 2)];
        }
        schedules
    }

    /// What the other process reads from the slow device, in MB/s.
    pub(super) fn others_mbps(self, devices: &[Device]) -> Option<u32> {
        let slow = devices.last().map_or(0, |device| device.bytes_per_s);
        (self == Self::Colocated).then(|| u32::try_from(slow * 3 / 10 / 1_000_000).unwrap_or(1))
    }

    /// Ranks that wait for the step.
    pub(super) fn ranks(self) -> usize {
        if self == Self::FourRanks { 4 } else { 1 }
    }

    /// Chunks that are stored while the step reads.
    pub(super) fn stored(self) -> usize {
        if self == Self::WritesQueued { 12 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices() -> Vec<Device> {
        ["fast=/a,7:0,300", "slow=/b,7:1,100"].map(|text| text.parse().unwrap()).into()
    }

    #[test]
    fn the_changing_limit_is_300_60_200() {
        let schedules = Scenario::ChangingLimit.schedules(&devices(), 5.0);
        assert_eq!(schedules[0].first, 300_000_000);
        assert_eq!(schedules[0].changes, [(1.5, 60_000_000), (3.0, 200_000_000)]);
        assert_eq!(schedules[1], Schedule::constant(100_000_000));
        assert!(Scenario::TwoTiers.schedules(&devices(), 5.0)[0].changes.is_empty());
    }

    #[test]
    fn names_on_the_command_line_are_those_in_files() {
        for scenario in Scenario::ALL {
            assert_eq!(Scenario::from_str(scenario.name(), false), Ok(scenario));
        }
        assert_eq!(Scenario::Colocated.others_mbps(&devices()), Some(30));
    }
}
