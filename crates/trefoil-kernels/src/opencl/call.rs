//! Setting arguments and enqueueing bounded pieces of work.

use super::buffer::Session;
use super::error::During;
use super::{Buffer, OpenClError, Rows, Vector};
use opencl3::error_codes::{CL_INVALID_VALUE, ClError};
use opencl3::kernel::Kernel;
use opencl3::types::cl_mem;

/// Most multiply-adds of one dispatch of a product. Mobile drivers kill work that holds the GPU for long; at 50 billion
/// multiply-adds a second this many take 21 ms.
pub const DISPATCH_MULTIPLY_ADDS: usize = 1 << 30;
/// Most elements of one dispatch of a row operator, a packing or a softmax: 64 MiB of f32.
pub const DISPATCH_ELEMENTS: usize = 1 << 24;

/// Destinations, as in types.cl.
pub(super) const SINK_F32: u32 = 0;
pub(super) const SINK_CODES: u32 = 1;
pub(super) const SINK_RESIDUAL: u32 = 2;
pub(super) const SINK_DYNAMIC: u32 = 3;

/// Numbers that kernels take by value.
pub(super) trait Scalar: Copy {}
impl Scalar for u32 {}
impl Scalar for u64 {}
impl Scalar for f32 {}
/// A `float16`.
impl Scalar for [f32; 16] {}

/// A kernel whose arguments are being set, in order.
pub(super) struct Call<'k> {
    kernel: &'k Kernel,
    name: &'static str,
    next: u32,
    /// The library's code for the first argument that it refused.
    result: Result<(), i32>,
}

impl<'k> Call<'k> {
    pub(super) fn new(kernel: &'k Kernel, name: &'static str) -> Call<'k> {
        Call { kernel, name, next: 0, result: Ok(()) }
    }

    fn set<T>(&mut self, value: &T) {
        if self.result.is_ok() {
            // SAFETY: the library checks index and size; the types are those of the source, which the tests run.
            self.result = unsafe { self.kernel.set_arg(self.next, value) }.map_err(|ClError(code)| code);
        }
        self.next += 1;
    }

    /// A number.
    pub(super) fn value<S: Scalar>(mut self, value: S) -> Self {
        self.set(&value);
        self
    }

    /// A `uint`; a size that does not fit one is refused like any bad argument.
    pub(super) fn size(mut self, value: usize) -> Self {
        if u32::try_from(value).is_err() {
            self.result = Err(CL_INVALID_VALUE);
        }
        self.value(value as u32)
    }

    /// A whole buffer.
    pub(super) fn buffer<T: super::Element>(mut self, buffer: &Buffer<T>) -> Self {
        let memory: cl_mem = buffer.memory();
        self.set(&memory);
        self
    }

    /// A buffer and where in it to start.
    pub(super) fn at<T: super::Element>(self, buffer: &Buffer<T>, first: usize) -> Self {
        self.buffer(buffer).value(first as u64)
    }

    /// A matrix: buffer, start, row stride.
    pub(super) fn rows<T: super::Element>(self, rows: &Rows<'_, T>) -> Self {
        self.at(rows.buffer, rows.first).size(rows.stride)
    }

    /// A vector, or any buffer where there is none (the flags say that it is not read).
    pub(super) fn vector<T: super::Element>(self, vector: Option<Vector<'_, T>>, nothing: &Buffer<T>) -> Self {
        match vector {
            Some(vector) => self.at(vector.buffer, vector.first),
            None => self.at(nothing, 0),
        }
    }

    /// Enqueues work-items `first .. first + count` of each dimension and sends them to the device.
    pub(super) fn run(
        &self,
        session: &Session,
        ranges: [(usize, usize); 3],
        group: [usize; 3],
    ) -> Result<(), OpenClError> {
        self.result.map_err(|code| OpenClError::Call { action: "set an argument", code })?;
        let (offsets, sizes) = (ranges.map(|(first, _)| first), ranges.map(|(_, count)| count));
        debug_assert!(
            sizes.iter().zip(group).all(|(size, group)| size.is_multiple_of(group)),
            "{sizes:?} in {group:?}"
        );
        if sizes.contains(&0) {
            return Ok(());
        }
        // SAFETY: all arguments were set; buffers outlive the work, because dropping one waits for the queue.
        let event = unsafe {
            session.queue.enqueue_nd_range_kernel(
                self.kernel.get(),
                3,
                offsets.as_ptr(),
                sizes.as_ptr(),
                group.as_ptr(),
                &[],
            )
        };
        event.during(self.name)?;
        // Sent on its own: drivers bound the time of what is sent together.
        session.queue.flush().during("send work to the device")
    }
}

/// Cuts a grid of `columns × rows` items of equal cost into pieces of at most `budget`, whole rows of items where one fits:
/// calls `piece((first column, columns), (first row, rows))`. `grain` columns stay together.
pub(super) fn cut_grid(
    (columns, grain, rows): (usize, usize, usize),
    item_cost: usize,
    budget: usize,
    mut piece: impl FnMut((usize, usize), (usize, usize)) -> Result<(), OpenClError>,
) -> Result<(), OpenClError> {
    let items = (budget / item_cost.max(1)).max(1);
    if items >= columns {
        let step = items / columns.max(1);
        for first in (0..rows).step_by(step.max(1)) {
            piece((0, columns), (first, step.min(rows - first)))?;
        }
        return Ok(());
    }
    let step = (items / grain).max(1) * grain;
    for row in 0..rows {
        for first in (0..columns).step_by(step) {
            piece((first, step.min(columns - first)), (row, 1))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_grid_once_and_keep_the_budget() {
        for (columns, grain, rows, cost, budget) in
            [(48, 1, 7, 10, 1000), (48, 1, 7, 10, 100), (64, 32, 3, 10, 400), (64, 32, 3, 10, 1), (5, 1, 9, 1, 1 << 30)]
        {
            let mut seen = vec![0; columns * rows];
            cut_grid((columns, grain, rows), cost, budget, |(column, width), (row, height)| {
                assert!(width % grain == 0 && width > 0 && height > 0);
                assert!(width * height * cost <= budget.max(cost * grain), "{width}×{height}");
                for row in row..row + height {
                    seen[row * columns + column..][..width].iter_mut().for_each(|count| *count += 1);
                }
                Ok(())
            })
            .unwrap();
            assert!(seen.iter().all(|&count| count == 1), "{columns} {grain} {rows} {cost} {budget}: {seen:?}");
        }
    }
}
