//! A medium that is only looked at.

use std::path::Path;

use crate::{Extent, FastTierError, Medium};

/// Another medium, on which nothing changes: what is written is thrown away. For tools: a store on it recovers, as an
/// engine's would, and leaves the medium as it is.
#[derive(Debug)]
pub struct LookMedium(pub Box<dyn Medium>);

impl Medium for LookMedium {
    fn path(&self) -> &Path {
        self.0.path()
    }

    fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), FastTierError> {
        self.0.read(offset, into)
    }

    fn will_read(&self, extent: Extent) {
        self.0.will_read(extent);
    }

    fn write(&mut self, _offset: u64, _from: &[u8]) -> Result<(), FastTierError> {
        Ok(())
    }

    fn flush(&mut self, _extent: Extent) -> Result<(), FastTierError> {
        Ok(())
    }
}
