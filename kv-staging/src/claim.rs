//! One request's hold on the objects it will read, and the states it goes through.

use std::fmt;

use crate::StagingError;

/// Names a claim; never reused by one controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimId(pub u64);

impl fmt::Display for ClaimId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Names an object (a chunk, or a run of chunks) on the device; a chunk's digest will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId(pub u128);

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// What is staged, protected and reserved as a whole. Several claims may share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Object {
    /// Which.
    pub id: ObjectId,
    /// Bytes of fast memory it takes, whole granules of the device.
    pub bytes: u64,
}

/// Where a claim stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ClaimState {
    /// A hit is known. Metadata only.
    Recorded,
    /// Its time has come, or its retrieval is requested; it waits for room.
    Eligible,
    /// It will be staged, in its turn.
    Committed,
    /// Its objects are being brought in.
    Staging,
    /// Every object is in fast memory and protected.
    Ready,
    /// The accelerator reads it.
    Retrieving,
    /// Cancelled or failed while objects were coming in: protected until that I/O is done.
    StageDraining,
    /// Cancelled while the accelerator was reading: protected until it has finished.
    RetrievalDraining,
    /// It holds nothing. Its objects may still be cached: release is not eviction.
    Released,
}

/// A step from one state to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Move {
    /// Recorded -> Eligible.
    BecomeEligible,
    /// Eligible -> Committed.
    Commit,
    /// Committed -> Staging.
    StartStaging,
    /// Staging -> Ready.
    FinishStaging,
    /// Staging -> `StageDraining`.
    FailStaging,
    /// `StageDraining` -> Released.
    FinishDraining,
    /// Ready -> Retrieving.
    StartRetrieval,
    /// Recorded, Eligible or Committed -> Retrieving, without protection.
    RetrieveOnDemand,
    /// Retrieving or `RetrievalDraining` -> Released.
    FinishRetrieval,
    /// Legal everywhere: to Released, or to the draining state while I/O or a retrieval is under way; where the claim
    /// already drains or is released it changes nothing.
    Cancel,
}

impl ClaimState {
    /// The state after `step`, or `None` if it is illegal here.
    pub const fn after(self, step: Move) -> Option<Self> {
        Some(match (self, step) {
            (Self::Recorded, Move::BecomeEligible) => Self::Eligible,
            (Self::Eligible, Move::Commit) => Self::Committed,
            (Self::Committed, Move::StartStaging) => Self::Staging,
            (Self::Staging, Move::FinishStaging) => Self::Ready,
            (Self::Ready, Move::StartRetrieval)
            | (Self::Recorded | Self::Eligible | Self::Committed, Move::RetrieveOnDemand) => {
                Self::Retrieving
            }
            (Self::Retrieving | Self::RetrievalDraining, Move::FinishRetrieval)
            | (Self::StageDraining, Move::FinishDraining)
            | (
                Self::Recorded | Self::Eligible | Self::Committed | Self::Ready | Self::Released,
                Move::Cancel,
            ) => Self::Released,
            (Self::Staging, Move::FailStaging)
            | (Self::Staging | Self::StageDraining, Move::Cancel) => Self::StageDraining,
            (Self::Retrieving | Self::RetrievalDraining, Move::Cancel) => Self::RetrievalDraining,
            _ => return None,
        })
    }
}

/// A claim: which objects, and its state. Every change goes through [`apply`](Self::apply).
#[derive(Clone, Debug)]
pub struct Claim {
    id: ClaimId,
    objects: Box<[Object]>,
    state: ClaimState,
    /// Its objects count in the budget.
    pub(crate) reserved: bool,
    /// It was eligible and did not fit, at least once.
    pub(crate) blocked: bool,
    pub(crate) requested_ns: Option<u64>,
    pub(crate) ready_ns: Option<u64>,
}

impl Claim {
    /// A recorded claim on `objects`; an object named twice counts once.
    pub fn new(id: ClaimId, objects: &[Object]) -> Self {
        let mut objects = objects.to_vec();
        objects.sort_unstable_by_key(|object| object.id);
        objects.dedup_by_key(|object| object.id);
        let state = ClaimState::Recorded;
        let objects = objects.into();
        Self {
            id,
            objects,
            state,
            reserved: false,
            blocked: false,
            requested_ns: None,
            ready_ns: None,
        }
    }

    /// Its name.
    pub fn id(&self) -> ClaimId {
        self.id
    }

    /// Its objects, ascending by id, each once.
    pub fn objects(&self) -> &[Object] {
        &self.objects
    }

    /// Bytes of all its objects, shared or not.
    pub fn bytes(&self) -> u64 {
        self.objects.iter().fold(0, |sum, object| sum.saturating_add(object.bytes))
    }

    /// Where it stands.
    pub fn state(&self) -> ClaimState {
        self.state
    }

    /// Whether its objects are protected or about to be, and count in the budget.
    pub fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// Takes `step`; an illegal one changes nothing.
    pub fn apply(&mut self, step: Move) -> Result<ClaimState, StagingError> {
        let illegal =
            StagingError::IllegalMove { claim: self.id, state: self.state, attempted: step };
        self.state = self.state.after(step).ok_or(illegal)?;
        Ok(self.state)
    }
}
