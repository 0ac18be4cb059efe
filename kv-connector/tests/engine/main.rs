//! The engine through its public interface.

#[cfg(test)]
mod common;
#[cfg(test)]
mod faults;
mod handing;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod round_trip;
#[cfg(test)]
mod window;
