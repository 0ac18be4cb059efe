//! Length-prefixed fields, of which a canonical key consists.

use crate::KeyError;

/// Appends one field: its length as a little-endian u32, then its bytes.
///
/// A field of 4 GiB saturates the length; the key is refused as too long right after.
pub(crate) fn put(out: &mut Vec<u8>, field: &[u8]) {
    out.extend_from_slice(&u32::try_from(field.len()).unwrap_or(u32::MAX).to_le_bytes());
    out.extend_from_slice(field);
}

/// Reads fields off untrusted bytes; every failure says where.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    offset: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, offset: 0 }
    }

    pub(crate) fn malformed(&self) -> KeyError {
        KeyError::Malformed { offset: self.offset }
    }

    pub(crate) fn field(&mut self) -> Result<&'a [u8], KeyError> {
        let length = self.take(4)?.try_into().map_err(|_| self.malformed())?;
        let length = usize::try_from(u32::from_le_bytes(length)).map_err(|_| self.malformed())?;
        self.take(length)
    }

    pub(crate) fn text(&mut self) -> Result<&'a str, KeyError> {
        let field = self.field()?;
        std::str::from_utf8(field).map_err(|_| self.malformed())
    }

    pub(crate) fn number(&mut self) -> Result<u32, KeyError> {
        let field = self.field()?.try_into().map_err(|_| self.malformed())?;
        Ok(u32::from_le_bytes(field))
    }

    /// Fails unless every byte was read.
    pub(crate) fn finish(&self) -> Result<(), KeyError> {
        if self.offset == self.bytes.len() { Ok(()) } else { Err(self.malformed()) }
    }

    fn take(&mut self, bytes: usize) -> Result<&'a [u8], KeyError> {
        let rest = self.bytes.get(self.offset..).unwrap_or_default();
        let taken = rest.get(..bytes).ok_or_else(|| self.malformed())?;
        self.offset += bytes;
        Ok(taken)
    }
}
