//! The policies by name.

use kv_staging::{
    Controller, ControllerOptions, Outputs,
    policy::{Demand, Immediate, QueueDepth, Static, Tempo, TempoQ},
};

use crate::workload::{Setting, bytes, ns, whole};

/// Which policy, with its parameters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Demand,
    Immediate,
    Queue(usize),
    /// By the nominal rate and means.
    Static,
    /// By means, with a lead and no other margin.
    Tempo {
        lead_s: f64,
    },
    TempoQ(TempoQ),
}

pub(crate) const ALL: [(&str, Kind); 7] = [
    ("demand", Kind::Demand),
    ("immediate", Kind::Immediate),
    ("queue1", Kind::Queue(1)),
    ("queue4", Kind::Queue(4)),
    ("static", Kind::Static),
    ("tempo", Kind::Tempo { lead_s: 0.0 }),
    ("tempo_q", TEMPO_Q),
];

/// Chosen on seeds 1000 to 1029; what is reported uses others. The price is for objects of 5 GiB, and in proportion for
/// others.
pub(crate) const TEMPO_Q: Kind = Kind::TempoQ(TempoQ {
    late_price_bytes: 35 << 30,
    margin_percent: 0,
    margin_ns: 0,
    hold_percent: 200,
    soon_percent: 25,
});

impl Kind {
    /// What it assumes of outputs, and which quantile it takes; `None` if it does not ask when a claim is used.
    pub(crate) fn estimate(&self) -> Option<(Outputs, u32)> {
        match self {
            Self::Static | Self::Tempo { .. } => Some((Outputs::Mean, 50)),
            Self::TempoQ(_) => Some((Outputs::Drawn, 10)),
            Self::Demand | Self::Immediate | Self::Queue(_) => None,
        }
    }

    pub(crate) fn controller(&self, options: ControllerOptions, setting: &Setting) -> Controller {
        match *self {
            Self::Demand => Controller::new(options, Demand),
            Self::Immediate => Controller::new(options, Immediate),
            Self::Queue(claims) => Controller::new(options, QueueDepth { claims }),
            Self::Static => {
                let bytes_per_s = bytes(setting.staging_gib_s);
                Controller::new(options, Static { bytes_per_s, lead_ns: 0 })
            }
            Self::Tempo { lead_s } => {
                Controller::new(options, Tempo { margin_percent: 0, margin_ns: ns(lead_s) })
            }
            Self::TempoQ(policy) => {
                let scale = setting.object_gib / Setting::homogeneous().object_gib;
                let late_price_bytes = whole(policy.late_price_bytes as f64 * scale);
                Controller::new(options, TempoQ { late_price_bytes, ..policy })
            }
        }
    }
}
