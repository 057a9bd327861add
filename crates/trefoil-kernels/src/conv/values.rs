//! The memory of frames.

use memmap2::MmapMut;
use std::ops::{Deref, DerefMut};

/// Values from which on memory is pages of its own: 1 MiB.
const OWN_PAGES: usize = 1 << 18;

/// Zeroed floats. Many of them are pages of their own, which the system has back when they are dropped: an allocator would keep them, and
/// a decoder's frames are most of its memory.
#[derive(Debug)]
pub(super) enum Values {
    Few(Vec<f32>),
    Many(MmapMut),
}

impl Values {
    pub(super) fn zeroed(len: usize) -> Values {
        if len >= OWN_PAGES
            && let Some(bytes) = len.checked_mul(size_of::<f32>())
            && let Ok(pages) = MmapMut::map_anon(bytes)
        {
            // Large pages where the system gives them: a few faults instead of thousands. Without them all is the same.
            #[cfg(target_os = "linux")]
            let _ = pages.advise(memmap2::Advice::HugePage);
            return Values::Many(pages);
        }
        Values::Few(vec![0.0; len])
    }
}

impl Deref for Values {
    type Target = [f32];

    #[inline]
    fn deref(&self) -> &[f32] {
        match self {
            Values::Few(values) => values,
            // SAFETY: pages are aligned for f32, every bit pattern is one, and the length is whole values.
            Values::Many(pages) => unsafe {
                std::slice::from_raw_parts(pages.as_ptr().cast(), pages.len() / size_of::<f32>())
            },
        }
    }
}

impl DerefMut for Values {
    #[inline]
    fn deref_mut(&mut self) -> &mut [f32] {
        match self {
            Values::Few(values) => values,
            // SAFETY: as above, and the borrow is exclusive.
            Values::Many(pages) => unsafe {
                std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), pages.len() / size_of::<f32>())
            },
        }
    }
}

impl Clone for Values {
    fn clone(&self) -> Values {
        let mut copy = Values::zeroed(self.len());
        copy.copy_from_slice(self);
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_values_are_like_few() {
        for len in [0, 3, OWN_PAGES - 1, OWN_PAGES, OWN_PAGES + 5] {
            let mut values = Values::zeroed(len);
            assert_eq!(matches!(values, Values::Many(_)), len >= OWN_PAGES);
            assert!(values.len() == len && values.iter().all(|value| value.to_bits() == 0));
            values.iter_mut().enumerate().for_each(|(at, value)| *value = at as f32);
            let copy = values.clone();
            values.fill(0.0);
            assert!(
                copy.len() == len
                    && copy.iter().enumerate().all(|(at, value)| value.to_bits() == (at as f32).to_bits())
            );
        }
    }
}
