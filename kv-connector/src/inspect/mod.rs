//! Looking inside what an engine keeps: what is there, whether it is whole, and removing what belongs to one model or
//! one tenant.
//!
//! *Is*: [`Offline`], which takes the directories' locks and mends nothing; [`check`] (fsck); [`purge_offline`], which
//! proves by a second opening that what it removed stays away; [`ask`], which speaks to a running engine's socket.
//!
//! *Is not*: a way around a running engine. Where one holds a directory, opening fails and says whose it is.

mod check;
mod list;
mod live;
mod offline;
mod pages;
mod purge;
mod read;
mod select;
mod socket_client;

pub use self::{
    check::{CheckOptions, CheckReport, TierCheck, check},
    list::KeptChunk,
    live::{PurgeRefusal, PurgeReport, PurgeRequest, TierPurge},
    offline::{Offline, OfflineStats, OfflineStatus, OfflineTier, TierState},
    purge::{OfflinePurge, TierPurgeOffline, purge_offline},
    read::Damage,
    select::Selector,
    socket_client::ask,
};
pub(crate) use self::{live::Errand, pages::Pages, read::verify};
