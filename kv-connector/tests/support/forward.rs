//! Tiers of tests around a tier: what they do not change, they hand on.

/// The methods of `Tier` but `poll` and `submit`, handed on to a field; `+ submit` hands on that, too.
macro_rules! forward_tier {
    ($inner:ident + submit) => {
        fn submit(&mut self, op: kv_tiers::Op, now_ns: u64) -> Result<(), kv_tiers::Rejected> {
            self.$inner.submit(op, now_ns)
        }

        forward_tier!($inner);
    };
    ($inner:ident) => {
        fn name(&self) -> &str {
            self.$inner.name()
        }

        fn capabilities(&self) -> kv_tiers::Capabilities {
            self.$inner.capabilities()
        }

        fn hold_writes(&mut self, hold: bool) {
            self.$inner.hold_writes(hold);
        }

        fn contains(&self, digest: kv_chunk::Digest) -> Option<kv_tiers::Held> {
            self.$inner.contains(digest)
        }

        fn locate(&mut self, digest: kv_chunk::Digest, now_ns: u64) -> kv_tiers::Located {
            self.$inner.locate(digest, now_ns)
        }

        fn remove(&mut self, digest: kv_chunk::Digest, now_ns: u64) -> bool {
            self.$inner.remove(digest, now_ns)
        }

        fn list(&self, visit: &mut dyn FnMut(kv_chunk::Digest, kv_tiers::Held)) {
            self.$inner.list(visit);
        }

        fn list_from(
            &self,
            from: kv_tiers::ListCursor,
            max: usize,
            visit: &mut dyn FnMut(kv_chunk::Digest, kv_tiers::Held),
        ) -> Option<kv_tiers::ListCursor> {
            self.$inner.list_from(from, max, visit)
        }

        fn in_flight(&self) -> usize {
            self.$inner.in_flight()
        }

        fn stats(&self) -> kv_tiers::TierStats {
            self.$inner.stats()
        }

        fn wake_fd(&self) -> Option<std::os::fd::BorrowedFd<'_>> {
            self.$inner.wake_fd()
        }

        fn close(&mut self) {
            self.$inner.close();
        }
    };
}
