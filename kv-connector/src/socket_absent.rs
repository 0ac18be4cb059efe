//! The statistics socket in loom's builds, in which tokio has no network: it is refused.

use std::{io, path::Path, sync::Arc};

use crate::{EngineError, shared::Shared};

#[derive(Debug)]
pub(crate) struct StatsSocket;

impl StatsSocket {
    pub(crate) fn open(_: &Arc<Shared>, _: &Path) -> Result<Self, EngineError> {
        Err(EngineError::system("the socket", io::Error::from(io::ErrorKind::Unsupported)))
    }

    pub(crate) fn close(&self) {}
}
