//! A process that stores and loads is killed with SIGKILL at random points, again and again over the same directories.
//!
//! Whatever it had published before (it notes that in a file, with one system call each) must be there afterwards,
//! unless it was given up for eviction, and every byte must follow from the chunk's key.
//!
//! `KVBRAID_KILLS` is the number of kills (20), `KVBRAID_SEED` chooses the points.

#[cfg(test)]
#[macro_use]
#[path = "../support/forward.rs"]
mod forward;
#[cfg(test)]
mod child;
#[cfg(test)]
mod ledger;
#[cfg(test)]
mod noted;
#[cfg(test)]
mod parent;
#[cfg(test)]
mod store;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;

/// Set in the child: the root of the stores.
#[cfg(test)]
const CHILD: &str = "KVBRAID_KILL9_CHILD";

#[cfg(test)]
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().map_or(default, |text| text.parse().unwrap())
}

#[test]
fn what_was_published_survives_a_kill_and_nothing_else_is_served() {
    match std::env::var_os(CHILD) {
        Some(root) => child::run(root.as_ref()),
        None => parent::run(number("KVBRAID_KILLS", 20), number("KVBRAID_SEED", 1)),
    }
}
