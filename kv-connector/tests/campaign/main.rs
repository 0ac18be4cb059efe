//! Thousands of short lives of an engine, each over media that fail in ways of its own.
//!
//! Every run follows from its seed: which tiers, sizes and caps, which faults and when, what is stored, loaded, purged,
//! deleted, cut, restarted. Of every run is required: no wrong byte, no hang, no cap exceeded as `du` counts, every fault
//! counted, no panic, nothing held at its end.
//!
//! Where a tier is a directory that many nodes share, two engines live at once, and files of it are removed, cut, rotten,
//! exchanged and left behind under them; its cap, which lags behind what nodes write at one moment, must hold at rest.
//!
//! `KVBRAID_RUNS` is the number of runs (200), `KVBRAID_SEED` repeats the one of that seed. What several threads do has
//! an order that no seed decides: a failure may need some repetitions, which `KVBRAID_REPEAT` gives.

#[cfg(test)]
mod life;
#[cfg(test)]
mod model;
#[cfg(test)]
mod pool;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod shared;
#[cfg(test)]
#[path = "../support/small_tmpfs.rs"]
mod small_tmpfs;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;
#[cfg(test)]
mod tmpfs;

#[test]
fn no_run_serves_a_wrong_byte_hangs_exceeds_a_cap_or_loses_count_of_a_fault() {
    pool::run();
}
