//! Reads 4 MiB records one after the other from an NVMe tier, 8 ops at a time, in each way of I/O.
//!
//! Besides criterion's times it prints CPU seconds per GB (1e9 B) and device requests, which depend less on other work
//! on the machine. The disk is the one below the target directory.

#![expect(clippy::unwrap_used, reason = "a failed set-up is a failed benchmark")]
#![expect(clippy::print_stdout, reason = "figures are printed")]

#[path = "../tests/nvme_support/mod.rs"]
mod nvme_support;

use std::{hint::black_box, os::fd::AsFd, sync::Arc, time::Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_tiers::{
    Arena, ArenaConfig, Completion, IoEngine, IoMode, NvmeConfig, NvmeTier, Op, OpId, Purpose,
    ReadOp, Record, Slot, Tier, Unguarded, WriteOp,
};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::resource::{UsageWho, getrusage},
};
use nvme_support::{MIB, digest, key, on_disk, payload, write_id};

const CHUNKS: u32 = 128;
const PAYLOAD_BYTES: u64 = 4 * MIB;
const WINDOW: usize = 8;

fn complete(tier: &mut NvmeTier) -> Vec<Completion> {
    let mut completions = Vec::new();
    loop {
        tier.poll(0, &Unguarded, &mut completions);
        if !completions.is_empty() {
            return completions;
        }
        let fd = tier.wake_fd().unwrap();
        let waited =
            poll(&mut [PollFd::new(fd.as_fd(), PollFlags::POLLIN)], PollTimeout::from(10_000u16));
        assert_eq!(waited, Ok(1), "no completion within 10 s");
    }
}

fn fill(tier: &mut NvmeTier, arena: &Arc<Arena>) {
    for number in 0..CHUNKS {
        let slot = arena.try_take().unwrap();
        let bytes = payload(number, 1, PAYLOAD_BYTES);
        let record = Record::encode(slot, &key(number), write_id(number, 1), &bytes).unwrap();
        let write = WriteOp { id: OpId(number.into()), record: Arc::new(record) };
        tier.submit(Op::Write(write), 0).unwrap();
        for completion in complete(tier) {
            assert!(matches!(completion, Completion::Write { result: Ok(()), .. }));
        }
    }
}

/// One pass over all chunks.
fn read_all(tier: &mut NvmeTier, slots: &mut Vec<Slot>) {
    let (mut next, mut done) = (0, 0);
    while done < CHUNKS {
        while next < CHUNKS
            && let Some(slot) = slots.pop()
        {
            let (id, digest) = (OpId(next.into()), digest(next));
            tier.submit(
                Op::Read(ReadOp { id, digest, blocks: 0..u32::MAX, slot, purpose: Purpose::Use }),
                0,
            )
            .unwrap();
            next += 1;
        }
        for completion in complete(tier) {
            let Completion::Read { slot, result, .. } = completion else { panic!() };
            black_box(result.unwrap());
            slots.push(slot);
            done += 1;
        }
    }
}

fn cpu_seconds() -> f64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF).unwrap();
    let seconds = |time: nix::sys::time::TimeVal| {
        std::time::Duration::new(
            time.tv_sec().try_into().unwrap(),
            u32::try_from(time.tv_usec()).unwrap() * 1000,
        )
        .as_secs_f64()
    };
    seconds(usage.user_time()) + seconds(usage.system_time())
}

/// What glommio does, if it works at all.
#[cfg(feature = "glommio")]
fn glommio_mode() -> IoMode {
    let mut mode = IoMode::default();
    (mode.ring, mode.direct) = (true, true);
    mode
}

fn sequential_reads(criterion: &mut Criterion) {
    let mut no_registration = IoMode::ALL;
    (no_registration.registered_buffers, no_registration.registered_files) = (false, false);
    let mut threads = IoMode::default();
    threads.direct = true;
    let own = [("registered", IoMode::ALL), ("plain", no_registration), ("threads", threads)];
    let ways = own.map(|(name, allow)| (name, allow, IoEngine::Own));
    #[cfg(feature = "glommio")]
    let ways = ways.into_iter().chain([("glommio", glommio_mode(), IoEngine::Glommio)]);
    let directory = on_disk();
    let arena = Arena::new(ArenaConfig::new(5 << 20, 2 * WINDOW)).unwrap();
    println!("arena: {:?}", arena.stats());
    let open = |allow, engine| {
        let mut config = NvmeConfig::new("nvme", directory.path(), 1024 * MIB);
        (config.allow, config.engine) = (allow, engine);
        NvmeTier::open(config, &[Arc::clone(&arena)], 0).unwrap()
    };
    fill(&mut open(IoMode::ALL, IoEngine::Own), &arena);
    let mut group = criterion.benchmark_group("nvme sequential 4 MiB, window 8");
    let pass_bytes = u64::from(CHUNKS) * PAYLOAD_BYTES;
    group.sample_size(10).throughput(Throughput::Bytes(pass_bytes));
    for (name, allow, engine) in ways {
        let mut tier = open(allow, engine);
        assert_eq!(tier.stats().io_mode, allow);
        let mut slots: Vec<Slot> = (0..WINDOW).map(|_| arena.try_take().unwrap()).collect();
        group.bench_function(name, |bencher| bencher.iter(|| read_all(&mut tier, &mut slots)));
        let (before, requests) = (cpu_seconds(), tier.stats().device_requests);
        let start = Instant::now();
        read_all(&mut tier, &mut slots);
        let (seconds, cpu) = (start.elapsed().as_secs_f64(), cpu_seconds() - before);
        #[expect(clippy::cast_precision_loss, reason = "a figure to read")]
        let gigabytes = pass_bytes as f64 / 1e9;
        println!(
            "{name}: {:.2} GB/s, {:.4} CPU s/GB, {} requests of a pass of {gigabytes:.2} GB",
            gigabytes / seconds,
            cpu / gigabytes,
            tier.stats().device_requests - requests,
        );
    }
    group.finish();
}

criterion_group!(benches, sequential_reads);
criterion_main!(benches);
