//! Registration of an arena with a device, in pieces.

use std::fmt;

use crate::ArenaView;

/// One range of memory that a device is told about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DmaPiece {
    /// Where it begins.
    pub address: usize,
    /// Its length.
    pub bytes: u64,
}

/// Why an arena is not registered. Nothing of it is.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError<E> {
    /// The arena has no memory (a simulation), or pieces of no bytes were asked for.
    #[error("there is nothing to register")]
    Nothing,
    /// The device refused a piece; those before it were taken back.
    #[error("the device refused piece {index}, {bytes} bytes at {address:#x}", bytes = .piece.bytes, address = .piece.address)]
    Refused {
        /// Which.
        index: usize,
        /// The piece.
        piece: DmaPiece,
        /// The device's words.
        source: E,
    },
}

/// An arena that a device knows; dropped, it is taken back, last piece first.
///
/// Devices take only so much at once: 1 GiB for a fixed buffer of io_uring, and some drivers fail at 512 GiB where many
/// smaller pieces are fine.
///
/// ```
/// use std::cell::RefCell;
/// use kv_cxl::{ArenaView, Registration};
///
/// let arena = ArenaView { bytes: 5 << 20, base_address: Some(0x20_0000) };
/// let known = RefCell::new(Vec::new());
/// let register = |piece: kv_cxl::DmaPiece| { known.borrow_mut().push(piece.bytes >> 20); Ok::<_, i32>(()) };
/// let registration = Registration::new(arena, 2 << 20, register, |_| { known.borrow_mut().pop(); })?;
/// assert_eq!(*known.borrow(), [2, 2, 1]);
/// assert_eq!(registration.find(0x20_0000 + (3 << 20)), Some((1, 1 << 20)));
/// drop(registration);
/// assert!(known.borrow().is_empty());
/// # Ok::<(), kv_cxl::RegisterError<i32>>(())
/// ```
pub struct Registration<U: FnMut(DmaPiece)> {
    pieces: Vec<DmaPiece>,
    unregister: U,
}

impl<U: FnMut(DmaPiece)> Registration<U> {
    /// Calls `register` with each piece of at most `piece_bytes`, in order. If one is refused, the ones before are taken
    /// back by `unregister`. What is sticky in the device's state after a refusal is for `register` to clear.
    pub fn new<E>(
        arena: ArenaView,
        piece_bytes: u64,
        mut register: impl FnMut(DmaPiece) -> Result<(), E>,
        unregister: U,
    ) -> Result<Self, RegisterError<E>> {
        let base = arena.base_address.filter(|_| arena.bytes > 0 && piece_bytes > 0);
        let Some(base) = base else { return Err(RegisterError::Nothing) };
        let mut registration = Self { pieces: Vec::new(), unregister };
        let mut done = 0;
        while done < arena.bytes {
            let bytes = piece_bytes.min(arena.bytes - done);
            let start = usize::try_from(done).map_err(|_| RegisterError::Nothing)?;
            let piece = DmaPiece { address: base + start, bytes };
            let index = registration.pieces.len();
            register(piece).map_err(|source| RegisterError::Refused { index, piece, source })?;
            registration.pieces.push(piece);
            done += bytes;
        }
        Ok(registration)
    }

    /// The pieces, in order.
    pub fn pieces(&self) -> &[DmaPiece] {
        &self.pieces
    }

    /// Which piece an address lies in, and how far into it.
    pub fn find(&self, address: usize) -> Option<(usize, u64)> {
        let inside = |piece: &DmaPiece| {
            let offset = address.checked_sub(piece.address)? as u64;
            (offset < piece.bytes).then_some(offset)
        };
        self.pieces.iter().enumerate().find_map(|(index, piece)| Some((index, inside(piece)?)))
    }
}

impl<U: FnMut(DmaPiece)> fmt::Debug for Registration<U> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("pieces", &self.pieces).finish_non_exhaustive()
    }
}

impl<U: FnMut(DmaPiece)> Drop for Registration<U> {
    fn drop(&mut self) {
        while let Some(piece) = self.pieces.pop() {
            (self.unregister)(piece);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_refused_piece_takes_back_those_before_it() {
        let arena = ArenaView { bytes: 10, base_address: Some(100) };
        let log = RefCell::new(Vec::new());
        let refused = Registration::new(
            arena,
            4,
            |piece| {
                log.borrow_mut().push(format!("+{}", piece.address));
                if piece.address == 108 { Err("full") } else { Ok(()) }
            },
            |piece| log.borrow_mut().push(format!("-{}", piece.address)),
        );
        let piece = DmaPiece { address: 108, bytes: 2 };
        let expected = RegisterError::Refused { index: 2, piece, source: "full" };
        assert_eq!(refused.unwrap_err(), expected);
        assert_eq!(*log.borrow(), ["+100", "+104", "+108", "-104", "-100"]);
    }

    #[test]
    fn an_arena_without_memory_is_refused() {
        let arena = ArenaView { bytes: 10, base_address: None };
        let refused = Registration::new(arena, 4, |_| Ok::<_, ()>(()), |_| {});
        assert_eq!(refused.unwrap_err(), RegisterError::Nothing);
    }
}
