//! Several engines, as several nodes, on one shared directory.
//!
//! `KVBRAID_TEST_DIR` names a directory to work in, such as one on a mount of a network file system;
//! `KVBRAID_TEST_DIR_2` the same one as another mount shows it, for the second node. `KVBRAID_TEST_MOUNT_PID` is the
//! process that serves the mount: the test that needs a hanging mount stops it for a while.

#[cfg(test)]
mod common;
#[cfg(test)]
mod hang;
#[cfg(test)]
mod identity;
#[cfg(test)]
#[path = "../support/small_tmpfs.rs"]
mod small_tmpfs;
#[cfg(test)]
mod space;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;
#[cfg(test)]
mod together;
