//! What containers and ordinary users are denied: io_uring, and more than a little locked memory. The engine works
//! without, and says so once for each.

#[cfg(test)]
mod ordinary;
#[cfg(test)]
#[path = "../../src/testing.rs"]
mod testing;

#[cfg(test)]
use nix::errno::Errno;
#[cfg(test)]
use ordinary::{Denied, as_ordinary_user};

#[test]
fn nothing_denied_is_nothing_said() {
    as_ordinary_user("nothing_denied_is_nothing_said", Denied::default());
}

#[test]
fn io_uring_denied_as_containers_do_means_threads() {
    let denied = Denied { ring: Some(Errno::EPERM), memlock: false };
    as_ordinary_user("io_uring_denied_as_containers_do_means_threads", denied);
}

#[test]
fn a_kernel_without_io_uring_means_threads() {
    let denied = Denied { ring: Some(Errno::ENOSYS), memlock: false };
    as_ordinary_user("a_kernel_without_io_uring_means_threads", denied);
}

#[test]
fn memlock_of_64_kib_means_unregistered_and_unlocked_memory() {
    let denied = Denied { ring: None, memlock: true };
    as_ordinary_user("memlock_of_64_kib_means_unregistered_and_unlocked_memory", denied);
}

#[test]
fn both_denied_works_as_well() {
    let denied = Denied { ring: Some(Errno::EPERM), memlock: true };
    as_ordinary_user("both_denied_works_as_well", denied);
}
