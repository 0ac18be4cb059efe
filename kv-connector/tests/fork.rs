//! An engine in a forked child: its threads, locks and memory stayed with the parent, so everything is refused at once.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed test")]

use std::time::Duration;

use kv_connector::{
    ByteSize, Config, Engine, MissReason, Outcome, StoreRefusal, Stored, TierConfig, Want,
};
use nix::{
    libc,
    sys::wait::{WaitStatus, waitpid},
    unistd::{ForkResult, alarm, fork},
};

#[path = "../src/testing.rs"]
mod testing;

use testing::key;

const SOON: Duration = Duration::from_secs(20);

/// Runs `child` in a forked child, for a minute at most; true if it returned true.
fn in_child(child: impl FnOnce() -> bool) -> bool {
    // SAFETY: the child calls only `child`, which asks the engine things that it must answer without any lock that
    // another thread may have held at the fork, and leaves through `_exit`.
    match unsafe { fork() }.unwrap() {
        ForkResult::Child => {
            alarm::set(60);
            let status = i32::from(!child());
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(status) }
        }
        ForkResult::Parent { child } => {
            matches!(waitpid(child, None).unwrap(), WaitStatus::Exited(_, 0))
        }
    }
}

fn load(engine: &Engine) -> (Outcome, [u8; 5]) {
    let (key, mut dest) = (key(1), [0; 5]);
    let lease = engine.lookup(std::slice::from_ref(&key));
    let mut wants = [Want::new(&key, &mut dest)];
    engine.load(&lease, &mut wants);
    (wants[0].outcome, dest)
}

#[test]
fn a_forked_child_gets_refusals_at_once_and_leaves_the_parent_alone() {
    let directory = tempfile::tempdir().unwrap();
    let nvme = TierConfig::nvme("files", directory.path().join("kv"), ByteSize::mib(32));
    let mut config = Config::new(vec![TierConfig::memory("memory", ByteSize::mib(32)), nvme]);
    config.engine.chunk_bytes_max = ByteSize::mib(1);
    config.engine.host_cache = ByteSize::mib(4);
    config.engine.staging = ByteSize::mib(4);
    let socket = directory.path().join("socket");
    config.engine.socket = Some(socket.clone());
    let engine = Engine::open(config).unwrap();
    assert_eq!(engine.store(&key(1), b"bytes"), Stored::Staged);
    assert!(engine.flush(SOON).drained);
    let lease = engine.lookup(&[key(1)]);
    assert_eq!(lease.prefix_hits(), 1);

    // The child's copies are dropped there.
    let mut in_child_only = Some((engine, lease));
    let well = in_child(|| {
        let (engine, lease) = in_child_only.take().unwrap();
        let loaded = load(&engine) == (Outcome::Miss(MissReason::Closed), [0; 5]);
        let looked_up = engine.lookup(&[key(1)]).prefix_hits() == 0;
        let stored = engine.store(&key(2), b"x") == Stored::Refused(StoreRefusal::Closed);
        engine.forward_began();
        let flushed = !engine.flush(SOON).drained;
        let counted = engine.stats().steps == 0;
        engine.close(SOON);
        drop((engine, lease));
        loaded && looked_up && stored && flushed && counted
    });
    assert!(well);

    let (engine, lease) = in_child_only.take().unwrap();
    assert!(socket.exists());
    assert_eq!(engine.stats().chunks_leased, 1);
    drop(lease);
    assert!(matches!(load(&engine), (Outcome::Hit(_), bytes) if bytes == *b"bytes"));
    assert!(engine.close(SOON).drained);
}
