//! Random operations against the model.

use super::{Outcome, case::Case, content::key};

const OPERATIONS: u32 = 600;
const CHUNKS: u32 = 24;
const SEED: u64 = 0x6b76_6272;

pub(super) fn random_operations_follow_the_model(case: &mut Case<'_, '_>) -> Outcome {
    let mut random = fastrand::Rng::with_seed(SEED);
    let sizes = case.sizes()?;
    for _ in 0..OPERATIONS {
        let number = random.u32(0..CHUNKS);
        match random.u32(0..100) {
            0..35 => {
                let content = case.content(number, sizes[random.usize(0..sizes.len())]);
                case.submit_write(content)?;
            }
            35..75 => {
                let first = random.u32(0..3);
                case.submit_read(number, first..first + random.u32(0..4))?;
            }
            75..85 => {
                case.remove(number)?;
            }
            85..90 => {
                let digest = key(number).digest();
                if !case.guard.refused.remove(&digest) {
                    case.guard.refused.insert(digest);
                }
            }
            90..93 => {
                // Held writes keep their slots and places in the queue: let go before either runs out.
                case.settle()?;
                case.tier()?.hold_writes(true);
                let content = case.content(number, sizes[random.usize(0..sizes.len())]);
                case.submit_write(content)?;
                case.poll()?;
                case.tier()?.hold_writes(false);
            }
            _ => {
                case.step()?;
            }
        }
    }
    case.settle()?;
    case.read_all()
}
