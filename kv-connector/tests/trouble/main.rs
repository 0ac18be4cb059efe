//! What goes wrong around an engine, and what it must make of it: failing media, hostile input, restarts, pressure.
//!
//! Everything random follows from a seed that is printed: `KVBRAID_SEED` repeats one, `KVBRAID_SEEDS` tries more.

#[cfg(test)]
mod common;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod hangs;
#[cfg(test)]
mod identity;
#[cfg(test)]
mod input;
#[cfg(test)]
mod late;
#[cfg(test)]
mod leases;
#[cfg(test)]
mod restart;
#[cfg(test)]
mod space;
#[cfg(test)]
mod stagings;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;
