//! The engine through its public interface.

#[cfg(test)]
#[macro_use]
#[path = "../support/forward.rs"]
mod forward;
#[cfg(test)]
mod common;
#[cfg(test)]
mod faults;
mod handing;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod queue;
#[cfg(test)]
mod round_trip;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;
#[cfg(test)]
mod window;
