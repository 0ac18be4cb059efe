//! What models are asked for: conversations that go on, the late ones more probably, and prompts that many begin with.

use hashlink::LinkedHashSet;

/// Conversations that may go on.
const CONVERSATIONS: usize = 48;
/// Chunks of a conversation after which it ends.
const CHUNKS_MAX: usize = 32;
/// Prompts that conversations begin with, of so many chunks.
const PROMPTS: u32 = 8;
const PROMPT_CHUNKS: u32 = 3;

/// One model and its conversations.
pub(crate) struct Model {
    pub(crate) id: u32,
    pub(crate) payload_bytes: u64,
    /// Chunks asked for, and of them those that nobody had asked for before.
    pub(crate) asked: u64,
    pub(crate) new: u64,
    conversations: Vec<Vec<u32>>,
    random: fastrand::Rng,
    next: u32,
}

impl Model {
    pub(crate) fn new(id: u32, payload_bytes: u64) -> Self {
        Self {
            id,
            payload_bytes,
            asked: 0,
            new: 0,
            conversations: Vec::new(),
            random: fastrand::Rng::with_seed(u64::from(id)),
            next: id << 24,
        }
    }

    /// Every number that a chunk of this model has, or had.
    pub(crate) fn numbers(&self) -> std::ops::Range<u32> {
        self.id << 24..self.next
    }

    fn fresh(&mut self, count: u32) -> std::ops::Range<u32> {
        let from = self.next;
        self.next += count;
        self.new += u64::from(count);
        from..self.next
    }

    /// The chunks that the next request wants, in the order of its tokens.
    pub(crate) fn request(&mut self) -> Vec<u32> {
        if self.numbers().is_empty() {
            self.fresh(PROMPTS * PROMPT_CHUNKS);
        }
        let count = self.conversations.len();
        let mut chunks = if count < CONVERSATIONS || self.random.u32(..4) == 0 {
            let prompt = (self.id << 24) + self.random.u32(..PROMPTS) * PROMPT_CHUNKS;
            (prompt..prompt + PROMPT_CHUNKS).collect()
        } else {
            // The last one is the likeliest.
            let latest = [(); 3].map(|()| self.random.usize(..count)).into_iter().max();
            self.conversations.remove(latest.unwrap_or(0))
        };
        let turn = 1 + self.random.u32(..4);
        chunks.extend(self.fresh(turn));
        if chunks.len() < CHUNKS_MAX {
            self.conversations.push(chunks.clone());
        }
        if self.conversations.len() > CONVERSATIONS {
            self.conversations.remove(0);
        }
        self.asked += chunks.len() as u64;
        chunks
    }
}

/// What a cache that drops the least recently used chunk would have held.
pub(crate) struct Lru {
    pub(crate) hits: u64,
    room: u64,
    order: LinkedHashSet<u32>,
}

impl Lru {
    pub(crate) fn new(room: u64) -> Self {
        Self { hits: 0, room, order: LinkedHashSet::new() }
    }

    pub(crate) fn serve(&mut self, chunks: &[u32]) {
        let held = chunks.iter().take_while(|&chunk| self.order.to_back(chunk)).count();
        self.hits += held as u64;
        for &chunk in &chunks[held..] {
            self.order.insert(chunk);
            if self.order.len() as u64 > self.room {
                self.order.pop_front();
            }
        }
    }
}
