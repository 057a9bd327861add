//! Scratch memory of kernel calls: grows on first use, is counted, then allocates nothing.

/// One thread's scratch.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    /// Integer accumulators and scores.
    pub(crate) integers: Vec<i32>,
    /// Quantised probabilities.
    pub(crate) codes: Vec<i8>,
    /// Panels, states, rows.
    pub(crate) floats: Vec<f32>,
}

/// Scratch of all threads of a [`crate::Pool`]. Pass the same one to every call; contents carry no meaning between calls.
#[derive(Debug, Default)]
pub struct Workspace {
    slots: Vec<Slot>,
}

impl Workspace {
    /// An empty workspace.
    pub fn new() -> Workspace {
        Workspace::default()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.slots
            .iter()
            .map(|slot| slot.integers.capacity() * 4 + slot.codes.capacity() + slot.floats.capacity() * 4)
            .sum()
    }

    /// One slot per thread.
    pub(crate) fn slots(&mut self, threads: usize) -> &mut [Slot] {
        if self.slots.len() < threads {
            self.slots.resize_with(threads, Slot::default);
        }
        &mut self.slots[..threads]
    }
}

/// At least `len` elements of `buffer`; grows it where it is shorter.
pub(crate) fn at_least<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
    &mut buffer[..len]
}

/// Bytes of a cache line, and of the widest register.
pub(crate) const LINE: usize = 64;

/// Where the first cache line of `buffer` starts.
pub(crate) fn line_start<T>(buffer: &[T]) -> usize {
    // A pointer may refuse to be aligned; then only speed is lost.
    let start = buffer.as_ptr().align_offset(LINE);
    if start < LINE / size_of::<T>() { start } else { 0 }
}

/// As [`at_least`], from the start of a cache line on.
pub(crate) fn lines<T: Copy + Default>(buffer: &mut Vec<T>, len: usize) -> &mut [T] {
    at_least(buffer, len + LINE / size_of::<T>());
    let start = line_start(buffer);
    &mut buffer[start..start + len]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_starts_with_a_line_and_stays() {
        let mut buffer = Vec::new();
        for len in [0, 1, 100, 3] {
            let scratch = lines::<f32>(&mut buffer, len);
            assert_eq!(scratch.len(), len);
            assert!(scratch.as_ptr().addr().is_multiple_of(LINE) || cfg!(miri));
        }
        let held = buffer.capacity();
        lines(&mut buffer, 100).fill(1.0);
        assert_eq!(buffer.capacity(), held);
    }
}
