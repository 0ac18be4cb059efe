//! What a caller's scheduler runs and has waiting, in tokens.

use std::time::Duration;

/// A scheduler's state after one of its iterations. From it the engine projects when each waiting request that claimed
/// something begins to read: see [`Engine::schedule`](crate::Engine::schedule).
///
/// All decoding requests write a token each iteration; a prompt's tokens are computed between them. A waiting request starts
/// when a running one has ended, in the order given. How long outputs are is learnt from those that have ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Schedule {
    /// Requests that run at once; at least 1 is assumed.
    pub slots: usize,
    /// How long an iteration takes that only decodes, without the part that grows with the batch.
    pub iteration: Duration,
    /// What each decoding request adds to it.
    pub iteration_per_request: Duration,
    /// What each prompt token that is computed takes.
    pub prompt_token: Duration,
    /// In any order.
    pub running: Vec<RequestWork>,
    /// In the order in which they will start.
    pub waiting: Vec<RequestWork>,
    /// So many of the first waiting ones begin to read as soon as the first of them does; the others when they start.
    pub read_ahead: usize,
    /// Tokens of outputs that have ended by themselves since the last schedule.
    pub ended: Vec<u64>,
}

/// What is left of one request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestWork {
    /// Its name, the same as in its claim if it has one.
    pub request: String,
    /// Tokens of its prompt still to be computed, without those that are to be read.
    pub prompt_tokens: u64,
    /// Tokens written so far.
    pub output_tokens: u64,
    /// The most that it may write, if there is such a limit.
    pub output_tokens_max: Option<u64>,
}

impl RequestWork {
    /// A request that has written nothing, of any length.
    pub fn new(request: impl Into<String>, prompt_tokens: u64) -> Self {
        Self { request: request.into(), prompt_tokens, ..Self::default() }
    }
}
