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
