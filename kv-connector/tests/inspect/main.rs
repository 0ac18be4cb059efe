//! The tools that look inside: what they say of an engine's directories, and what they change in them.

#[cfg(test)]
#[macro_use]
#[path = "../support/forward.rs"]
mod forward;
#[cfg(test)]
mod common;
#[cfg(test)]
mod fsck;
#[cfg(test)]
mod private;
#[cfg(test)]
mod prometheus;
#[cfg(test)]
mod purge;
#[cfg(test)]
mod scrub;
#[cfg(test)]
mod shared;
#[cfg(test)]
mod stat;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;
