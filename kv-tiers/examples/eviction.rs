//! How many chunks of a trace are still held when they are asked for: the NVMe tier's eviction beside LRU and SIEVE.
//!
//! Reads a trace of Mooncake's form (a request a line, with `input_length` and `hash_ids`) from standard input:
//!
//!     zcat trace.jsonl.gz | cargo run --release -p kv-tiers --example eviction
//!
//! A request reads the chunks of its prompt up to the first that is not held, and writes the rest. A chunk that is not
//! full (its tokens change with the next request) is left out. Cache sizes are parts of the distinct chunks.

#![expect(clippy::print_stdout, reason = "the table is the result")]

use std::{
    collections::{HashMap, HashSet, VecDeque},
    io::{self, BufRead},
};

use hashlink::LinkedHashSet;
use kv_tiers::synthetic;

const CHUNK_TOKENS: usize = 512;

trait Cache {
    fn read(&mut self, chunk: u64) -> bool;
    fn write(&mut self, chunk: u64);
}

impl Cache for synthetic::Cache {
    fn read(&mut self, chunk: u64) -> bool {
        synthetic::Cache::read(self, chunk)
    }

    fn write(&mut self, chunk: u64) {
        synthetic::Cache::write(self, chunk);
    }
}

struct Lru {
    room: usize,
    order: LinkedHashSet<u64>,
}

impl Cache for Lru {
    fn read(&mut self, chunk: u64) -> bool {
        self.order.to_back(&chunk)
    }

    fn write(&mut self, chunk: u64) {
        if self.order.len() == self.room {
            self.order.pop_front();
        }
        self.order.insert(chunk);
    }
}

/// SIEVE, with the chunks that the hand has passed in a queue of their own.
struct Sieve {
    room: usize,
    passed: VecDeque<u64>,
    ahead: VecDeque<u64>,
    used: HashMap<u64, bool>,
}

impl Cache for Sieve {
    fn read(&mut self, chunk: u64) -> bool {
        self.used.get_mut(&chunk).map(|used| *used = true).is_some()
    }

    fn write(&mut self, chunk: u64) {
        while self.used.len() >= self.room {
            let Some(eldest) = self.ahead.pop_front() else {
                // The hand is past the youngest, and begins with the eldest again.
                std::mem::swap(&mut self.ahead, &mut self.passed);
                continue;
            };
            if self.used.insert(eldest, false) == Some(true) {
                self.passed.push_back(eldest);
            } else {
                self.used.remove(&eldest);
            }
        }
        self.used.insert(chunk, false);
        self.ahead.push_back(chunk);
    }
}

fn numbers_after<'a>(line: &'a str, field: &str) -> Option<&'a str> {
    let rest = line.split_once(&format!("\"{field}\":"))?.1.trim_start();
    let rest = rest.trim_start_matches('[');
    rest.split(['}', ']']).next()
}

fn chunks_of(line: &str) -> Option<Vec<u64>> {
    let tokens: usize =
        numbers_after(line, "input_length")?.split(',').next()?.trim().parse().ok()?;
    let ids = numbers_after(line, "hash_ids")?.split(',');
    Some(ids.filter_map(|id| id.trim().parse().ok()).take(tokens / CHUNK_TOKENS).collect())
}

/// The part of all chunks asked for that was held.
fn hit_ratio(requests: &[Vec<u64>], cache: &mut dyn Cache) -> f64 {
    let (mut hits, mut asked) = (0, 0);
    for chunks in requests {
        let held = chunks.iter().take_while(|&&chunk| cache.read(chunk)).count();
        hits += held;
        asked += chunks.len();
        for &chunk in &chunks[held..] {
            if !cache.read(chunk) {
                cache.write(chunk);
            }
        }
    }
    hits as f64 / asked as f64
}

fn main() -> io::Result<()> {
    let lines: Vec<String> = io::stdin().lock().lines().collect::<Result<_, _>>()?;
    let requests: Vec<Vec<u64>> = lines.iter().filter_map(|line| chunks_of(line)).collect();
    let distinct: HashSet<u64> = requests.iter().flatten().copied().collect();
    println!("{} requests, {} distinct chunks", requests.len(), distinct.len());
    println!("| cache, part of them | LRU | SIEVE | S3-FIFO (ours) |");
    println!("|---|---|---|---|");
    for percent in [1, 2, 5, 10, 20, 40, 110] {
        let room = (distinct.len() * percent / 100).max(1);
        let mut lru = Lru { room, order: LinkedHashSet::new() };
        let mut sieve =
            Sieve { room, passed: VecDeque::new(), ahead: VecDeque::new(), used: HashMap::new() };
        let mut ours = synthetic::Cache::new(room as u64)?;
        let caches: [&mut dyn Cache; 3] = [&mut lru, &mut sieve, &mut ours];
        let ratios = caches.map(|cache| format!("{:.1} %", 100.0 * hit_ratio(&requests, cache)));
        println!("| {percent} % | {} |", ratios.join(" | "));
    }
    Ok(())
}
