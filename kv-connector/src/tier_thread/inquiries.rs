//! Look-ups of chunks that other nodes wrote: asked of the tier, entered into the directory when found.

use kv_chunk::Digest;
use kv_tiers::Located;

use super::Worker;
use crate::{Event, shared::Inquiry};

/// Look-ups that are open at once; beyond, the answer is "absent".
const OPEN_MAX: usize = 256;
/// They leave room for those whose answers are waited for.
const UNWAITED_MAX: usize = OPEN_MAX / 4;

impl Worker {
    pub(super) fn take_inquiries(&mut self, inquiries: Vec<Inquiry>, now_ns: u64) {
        for inquiry in inquiries {
            let most = if inquiry.is_waited_for() { OPEN_MAX } else { UNWAITED_MAX };
            if self.gone || !self.handle().is_readable() || self.inquiries.len() >= most {
                continue;
            }
            self.inquiries.push(inquiry);
        }
        self.answer_inquiries(now_ns);
    }

    /// Asks again what was not known yet. Answered inquiries are dropped, which tells who waits.
    pub(super) fn answer_inquiries(&mut self, now_ns: u64) {
        let mut inquiries = std::mem::take(&mut self.inquiries);
        if self.gone {
            return;
        }
        inquiries.retain_mut(|inquiry| {
            inquiry.digests.retain(|digest| !self.is_answered(*digest, now_ns));
            !inquiry.digests.is_empty()
        });
        self.inquiries = inquiries;
    }

    fn is_answered(&mut self, digest: Digest, now_ns: u64) -> bool {
        match self.tier.locate(digest, now_ns) {
            Located::Held(_) => {
                if self.shared.directory.set(digest, self.id.0) {
                    self.shared.tell(Event::Published { digest, tier: self.id.0 });
                }
                true
            }
            Located::Absent => true,
            Located::Asked => false,
        }
    }
}
