//! Byte ranges.

use kv_cxl::{Extent, coalesce, total_bytes};
use proptest::{collection::vec, prelude::*};

fn any_extent() -> impl Strategy<Value = Extent> {
    (0..200_u64, 0..30_u64).prop_map(|(offset, bytes)| Extent { offset, bytes })
}

fn bytes_of(extents: &[Extent]) -> Vec<u64> {
    let mut bytes: Vec<u64> =
        extents.iter().flat_map(|extent| extent.offset..extent.offset + extent.bytes).collect();
    bytes.sort_unstable();
    bytes.dedup();
    bytes
}

#[test]
fn extents_print_as_offset_and_length() {
    assert_eq!(Extent { offset: 4096, bytes: 512 }.to_string(), "0x1000+0x200");
}

#[test]
fn ends_that_overflow_are_none() {
    assert_eq!(Extent { offset: u64::MAX, bytes: 1 }.end(), None);
    assert!(
        Extent { offset: u64::MAX - 1, bytes: 9 }.overlaps(Extent { offset: 0, bytes: u64::MAX })
    );
}

proptest! {
    #[test]
    fn coalescing_keeps_the_bytes_in_the_fewest_ranges(extents in vec(any_extent(), 0..20)) {
        let mut merged = extents.clone();
        coalesce(&mut merged);
        prop_assert_eq!(bytes_of(&merged), bytes_of(&extents));
        prop_assert_eq!(total_bytes(&merged), bytes_of(&extents).len() as u64);
        prop_assert!(merged.windows(2).all(|pair| pair[0].offset + pair[0].bytes < pair[1].offset));
    }

    #[test]
    fn widening_is_the_smallest_whole_granules(extent in any_extent(), shift in 0..6_u32) {
        let granule_bytes = 1 << shift;
        let wide = extent.widen(granule_bytes);
        prop_assert!(wide.offset.is_multiple_of(granule_bytes) && wide.bytes.is_multiple_of(granule_bytes));
        prop_assert!(wide.offset <= extent.offset && extent.end() <= wide.end());
        prop_assert!(extent.offset - wide.offset < granule_bytes);
        prop_assert!(wide.end().unwrap() - extent.end().unwrap() < granule_bytes);
    }

    #[test]
    fn two_extents_overlap_if_they_share_a_byte(one in any_extent(), two in any_extent()) {
        let shared = bytes_of(&[one]).iter().any(|byte| bytes_of(&[two]).contains(byte));
        prop_assert_eq!(one.bytes > 0 && two.bytes > 0 && one.overlaps(two), shared);
    }
}
