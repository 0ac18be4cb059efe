//! Little-endian integers of alignment 1, for structs that are cast from stored bytes.

use bytemuck::{Pod, Zeroable};

macro_rules! little_endian {
    ($name:ident, $int:ty) => {
        #[doc = concat!("A little-endian `", stringify!($int), "` of alignment 1.")]
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Pod, Zeroable)]
        #[repr(transparent)]
        pub struct $name([u8; size_of::<$int>()]);

        impl $name {
            /// The value.
            pub const fn get(self) -> $int {
                <$int>::from_le_bytes(self.0)
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                Self(value.to_le_bytes())
            }
        }
    };
}

little_endian!(Le16, u16);
little_endian!(Le32, u32);
little_endian!(Le64, u64);
