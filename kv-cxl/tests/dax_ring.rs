//! Device memory registered with a ring: reads land in it without a copy.

#![expect(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]
#![expect(unsafe_code, reason = "hands device memory to a ring")]

use std::{cell::RefCell, env, fs::File, io::Write, os::fd::AsRawFd};

use io_uring::{IoUring, opcode, types::Fd};
use kv_cxl::{DeviceDax, DeviceDaxConfig, DmaPiece, FastTier, Medium, Registration};

const MIB: usize = 1 << 20;

#[test]
fn a_ring_reads_a_file_into_registered_device_memory() {
    let Some(path) = env::var_os("KVBRAID_DAX") else {
        println!("SKIP device memory registered with a ring: there is no device (KVBRAID_DAX)");
        return;
    };
    let mut part = DeviceDaxConfig::new(path);
    part.bytes = Some(8 * MIB as u64);
    let device = DeviceDax::open(&part).unwrap();
    let ring = match IoUring::new(4) {
        Ok(ring) => RefCell::new(ring),
        Err(error) => {
            println!("SKIP device memory registered with a ring: {error}");
            return;
        }
    };
    let mut pieces = Vec::new();
    // A ring registers a whole table at once: the plan first, then one call.
    let plan = |piece: DmaPiece| {
        let len = usize::try_from(piece.bytes).unwrap();
        pieces.push(libc::iovec { iov_base: piece.address as *mut _, iov_len: len });
        Ok::<_, std::io::Error>(())
    };
    let arena = device.arena();
    let registration = Registration::new(arena, 4 * MIB as u64, plan, |_| {}).unwrap();
    // SAFETY: the pieces are a live mapping, which outlives the ring's use of it below.
    let registered = unsafe { ring.borrow().submitter().register_buffers(&pieces) };
    if registered.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP)) {
        println!("SKIP device memory registered with a ring: this kernel refuses it (EOPNOTSUPP)");
        return;
    }
    registered.unwrap();
    let mut source = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..MIB).map(|at| (at % 253).to_le_bytes()[0]).collect();
    source.write_all(&bytes).unwrap();
    let offset = 5 * MIB;
    let into = arena.base_address.unwrap() + offset;
    let (index, _) = registration.find(into).unwrap();
    read_fixed(&mut ring.borrow_mut(), &source, into, bytes.len(), index);
    let mut read = vec![0; bytes.len()];
    device.medium().read(offset as u64, &mut read).unwrap();
    assert!(read == bytes);
    ring.borrow().submitter().unregister_buffers().unwrap();
}

fn read_fixed(ring: &mut IoUring, file: &File, into: usize, bytes: usize, index: usize) {
    let length = u32::try_from(bytes).unwrap();
    let index = u16::try_from(index).unwrap();
    let read = opcode::ReadFixed::new(Fd(file.as_raw_fd()), into as *mut u8, length, index)
        .offset(0)
        .build();
    // SAFETY: the file is open and the memory mapped until the completion, which is waited for here.
    unsafe { ring.submission().push(&read) }.unwrap();
    ring.submit_and_wait(1).unwrap();
    let completion = ring.completion().next().unwrap();
    assert_eq!(completion.result(), i32::try_from(bytes).unwrap());
}
