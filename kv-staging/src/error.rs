//! What callers can do wrong.

use thiserror::Error;

use crate::{ClaimId, ClaimState, Move, ObjectId};

/// Why a call was refused. Nothing changed.
#[derive(Debug, Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum StagingError {
    /// The claim's state does not allow this move.
    #[error("claim {claim} is {state:?} and cannot {attempted:?}")]
    IllegalMove {
        /// The claim.
        claim: ClaimId,
        /// Its state, unchanged.
        state: ClaimState,
        /// What was tried.
        attempted: Move,
    },
    /// No such claim: never recorded, or released.
    #[error("claim {claim} is unknown or released")]
    UnknownClaim {
        /// The claim.
        claim: ClaimId,
    },
    /// No staging of this object is in flight.
    #[error("object {object} has no staging in flight")]
    NotInFlight {
        /// The object.
        object: ObjectId,
    },
    /// One object was recorded with two sizes.
    #[error(
        "object {object} has {recorded} bytes in another claim, {given} here: one object has one size"
    )]
    ObjectSize {
        /// The object.
        object: ObjectId,
        /// Bytes known.
        recorded: u64,
        /// Bytes given.
        given: u64,
    },
    /// As many claims as `claims_max` allows are alive.
    #[error("{claims_max} claims are alive: release some, or raise `claims_max`")]
    TooManyClaims {
        /// The bound.
        claims_max: usize,
    },
}
