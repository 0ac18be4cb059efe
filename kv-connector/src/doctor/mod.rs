//! Whether a machine, a configuration and the settings of a serving engine are fit for each other.
//!
//! What can be tried is tried, in fresh directories inside those of the tiers, which are removed: an engine as
//! configured is opened there, writes, reads and verifies for some seconds. The rest is asked from the system. Nothing
//! of what is kept is read or written.

mod adapters;
mod machine;
mod memory;
mod place;
mod probe;
mod report;
mod serving;
mod versions;
mod words;

use crate::{Config, TierKind};

pub use self::{
    report::{Diagnosis, Line, Verdict},
    serving::Serving,
    versions::versions,
};

/// Looks at everything that `config` and `serving` name; without a configuration at the machine alone.
pub fn examine(config: Option<&Config>, serving: &Serving) -> Diagnosis {
    let mut diagnosis = Diagnosis::default();
    machine::examine(&mut diagnosis);
    memory::examine(&mut diagnosis, config);
    for (place, tier) in config.iter().flat_map(|config| config.tiers.iter().enumerate()) {
        let Some(config) = config else { continue };
        let what = format!("tier {}", tier.name);
        if tier.kind == TierKind::Memory {
            diagnosis.ok(what, "host memory; it ends with the process");
        } else if tier.kind == TierKind::Flash {
            let why = "what it can do is known when it is opened";
            let fix = "see its line in `kvbraid stat` of a running engine";
            diagnosis.warn(what, "memory on flash is not tried here", (why, fix));
        } else if place::examine(&mut diagnosis, tier) {
            probe::examine(&mut diagnosis, config, place);
        }
    }
    serving.examine(&mut diagnosis, config);
    diagnosis
}
