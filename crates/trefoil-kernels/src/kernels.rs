//! The handle: an instruction set and the threads that use it.

use crate::isa::Supported;
use crate::kernel::TILE_ROWS;
use crate::math::environment_is_default;
use crate::pool::MAX_WORKERS;
use crate::workspace::Slot;
use crate::{Isa, KernelError, Pool, Workspace};

/// An instruction set and a set of cores; its methods are the operators. One call at a time uses the cores.
#[derive(Debug)]
pub struct Kernels {
    isa: Supported,
    pool: Pool,
}

/// What one thread does of a call: rows `first .. first + rows`.
pub(crate) struct Part<'s, Sink> {
    pub(crate) first: usize,
    pub(crate) rows: usize,
    pub(crate) sink: Sink,
    pub(crate) slot: &'s mut Slot,
}

impl Kernels {
    /// Kernels of `isa` on the threads of `pool`.
    ///
    /// # Errors
    /// [`KernelError::IsaUnavailable`] where the processor lacks it, [`KernelError::Environment`] where this thread does
    /// not compute with the default floating-point environment (workers inherit it from the thread that made the pool).
    pub fn new(isa: Isa, pool: Pool) -> Result<Kernels, KernelError> {
        let mut is_default = [environment_is_default(); MAX_WORKERS];
        pool.run(&mut is_default[..pool.threads()], |is_default| *is_default &= environment_is_default());
        if is_default.contains(&false) {
            return Err(KernelError::Environment);
        }
        Ok(Kernels { isa: Supported::check(isa)?, pool })
    }

    /// The fastest instruction set here, on `cores`, one pinned thread each.
    pub fn best(cores: &[usize]) -> Result<Kernels, KernelError> {
        Kernels::new(Isa::best(), Pool::pinned(cores)?)
    }

    /// Instruction set that runs: the one asked for, always.
    pub fn isa(&self) -> Isa {
        self.isa.isa()
    }

    /// Threads that run.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn supported(&self) -> Supported {
        self.isa
    }

    /// Cuts `rows` into one run per thread, whole row tiles each, and does `work` on it. `take(n)` splits the next n rows
    /// off the destination.
    pub(crate) fn run_parts<Sink: Send>(
        &self,
        rows: usize,
        workspace: &mut Workspace,
        take: impl FnMut(usize) -> Sink,
        work: impl Fn(&mut Part<'_, Sink>) + Sync,
    ) {
        self.run_grains(rows, TILE_ROWS, workspace, take, work);
    }

    /// [`Kernels::run_parts`] with runs of whole multiples of `grain`.
    pub(crate) fn run_grains<Sink: Send>(
        &self,
        rows: usize,
        grain: usize,
        workspace: &mut Workspace,
        mut take: impl FnMut(usize) -> Sink,
        work: impl Fn(&mut Part<'_, Sink>) + Sync,
    ) {
        let threads = self.pool.threads();
        let step = rows.div_ceil(grain).div_ceil(threads).max(1) * grain;
        let mut slots = workspace.slots(threads).iter_mut();
        let mut first = 0;
        // A fixed array: a call allocates nothing.
        let mut parts: [Option<Part<'_, Sink>>; MAX_WORKERS] = std::array::from_fn(|_| {
            let count = step.min(rows - first);
            if count == 0 {
                return None;
            }
            let part = Part { first, rows: count, sink: take(count), slot: slots.next()? };
            first += count;
            Some(part)
        });
        debug_assert_eq!(first, rows, "every row is in a part");
        let count = parts.iter().flatten().count();
        self.pool.run(&mut parts[..count], |part| {
            if let Some(part) = part {
                work(part);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_thread_that_flushes_subnormals_is_refused() {
        /// Sets the control register of this thread.
        fn set_control(value: u32) {
            // SAFETY: reads four bytes; the thread ends before other code could be surprised by the modes.
            unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const value, options(nostack)) };
        }
        assert!(Kernels::new(Isa::Scalar, Pool::on_caller()).is_ok());
        std::thread::spawn(|| {
            // Flush to zero and denormals are zero, as inference libraries set them.
            set_control(0x1f80 | 0x8040);
            let error = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap_err();
            assert!(error.to_string().contains("flushes subnormal numbers"), "{error}");
            // Round towards minus infinity.
            set_control(0x1f80 | 0x2000);
            assert!(Kernels::new(Isa::Scalar, Pool::on_caller()).is_err());
            set_control(0x1f80);
            assert!(Kernels::new(Isa::Scalar, Pool::on_caller()).is_ok());
        })
        .join()
        .unwrap();
    }
}
