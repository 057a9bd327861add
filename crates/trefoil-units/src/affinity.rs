//! Cores: which ones this process may use, and entering a unit (pinning a thread, flushing denormals).
//!
//! A unit is entered by the thread that compiles for it and runs it. Denormal numbers make some kernels 50 times slower
//! (FACTS: 1×1 convolutions with denormal weights), and the two CPU libraries flush them in their own worker threads
//! only, so the entering thread flushes them too.

use crate::UnitError;
use std::collections::BTreeSet;
use std::marker::PhantomData;
use std::sync::OnceLock;
use trefoil_core::{Resource, Unit, UnitAddress};

/// Cores this process may use, ascending, as the operating system allowed them when Trefoil first asked. Pinning a
/// thread later does not change the answer. Never empty.
pub fn allowed_cores() -> &'static [u32] {
    static ALLOWED: OnceLock<Vec<u32>> = OnceLock::new();
    ALLOWED.get_or_init(|| {
        let cores = platform::process_cores();
        if cores.is_empty() { vec![0] } else { cores }
    })
}

/// Core numbers as ranges and commas (`0-3,7`), the way unit addresses write them.
pub fn cores_text(cores: &[u32]) -> String {
    let text = UnitAddress::new("b", "d").with_cores(cores).to_string();
    text.strip_prefix("b:d@").unwrap_or_default().to_owned()
}

/// The cores that a CPU unit at `address` holds, as resources: its own core set, or all allowed cores without one.
///
/// # Errors
/// [`UnitError::Cores`] when the set holds a core that this process may not use.
pub fn core_resources(address: &UnitAddress) -> Result<BTreeSet<Resource>, UnitError> {
    let allowed = allowed_cores();
    if address.cores.iter().any(|core| !allowed.contains(core)) {
        return Err(UnitError::Cores { unit: address.to_string(), allowed: cores_text(allowed) });
    }
    let cores = if address.cores.is_empty() { allowed } else { &address.cores };
    Ok(cores.iter().map(|&core| Resource::Core(core)).collect())
}

/// The CPU cores a unit occupies: those among its resources, ascending. Empty for a device with a queue of its own.
pub fn unit_cores(unit: &Unit) -> Vec<u32> {
    let core = |resource: &Resource| if let Resource::Core(core) = resource { Some(*core) } else { None };
    unit.resources.iter().filter_map(core).collect()
}

/// A thread inside a unit. Dropping it (on the same thread) restores the thread's cores and floating-point mode.
#[derive(Debug)]
#[must_use = "the thread leaves the unit when this value is dropped"]
pub struct UnitThread {
    cores: Option<Vec<u32>>,
    mode: FloatMode,
    // The guard belongs to the thread it was made on.
    not_send: PhantomData<*const ()>,
}

/// Enters `unit`: pins the calling thread to the unit's cores and flushes denormals until the guard is dropped.
///
/// A device without cores of its own (GPU, NPU) pins the thread that drives it only if its address names cores.
/// Simulated units pin nothing.
///
/// # Errors
/// [`UnitError::Cores`] when the process may not use one of the cores.
pub fn enter_unit(unit: &Unit) -> Result<UnitThread, UnitError> {
    let allowed = allowed_cores();
    let mut cores = unit_cores(unit);
    if cores.is_empty() {
        cores.clone_from(&unit.address.cores);
    }
    let refuse = || UnitError::Cores { unit: unit.address.to_string(), allowed: cores_text(allowed) };
    let mut restore = None;
    if !unit.simulated && !cores.is_empty() {
        if cores.iter().any(|core| !allowed.contains(core)) {
            return Err(refuse());
        }
        let before = thread_cores();
        platform::pin(None, &cores).map_err(|_| refuse())?;
        restore = Some(before);
    }
    Ok(UnitThread { cores: restore, mode: FloatMode::flush_denormals(), not_send: PhantomData })
}

impl Drop for UnitThread {
    fn drop(&mut self) {
        self.mode.restore();
        if let Some(cores) = &self.cores {
            pin_current(cores);
        }
    }
}

/// Cores the calling thread may run on now, ascending.
pub fn thread_cores() -> Vec<u32> {
    platform::thread_cores()
}

/// Pins the calling thread without changing its floating-point mode. Cores that went offline are no error here.
pub(crate) fn pin_current(cores: &[u32]) {
    if !cores.is_empty() {
        let _ = platform::pin(None, cores);
    }
}

/// Pins another thread of this process, by its thread id.
pub(crate) fn pin_thread(thread: i32, cores: &[u32]) -> bool {
    platform::pin(Some(thread), cores).is_ok()
}

/// The control word of the floating-point unit before denormals were flushed.
#[derive(Debug)]
struct FloatMode {
    before: u64,
}

impl FloatMode {
    fn flush_denormals() -> Self {
        let before = float_mode::read();
        float_mode::write(before | float_mode::FLUSH);
        Self { before }
    }

    fn restore(&self) {
        // Only the flush bits: status flags raised meanwhile stay as they are.
        float_mode::write((float_mode::read() & !float_mode::FLUSH) | (self.before & float_mode::FLUSH));
    }
}

/// Whether the calling thread flushes denormals, both as results and as operands.
pub fn denormals_flushed() -> bool {
    float_mode::FLUSH != 0 && float_mode::read() & float_mode::FLUSH == float_mode::FLUSH
}

#[cfg(target_arch = "x86_64")]
mod float_mode {
    //! MXCSR: flush-to-zero (bit 15) for results, denormals-are-zero (bit 6) for operands.
    use std::arch::asm;

    pub(super) const FLUSH: u64 = 1 << 15 | 1 << 6;

    pub(super) fn read() -> u64 {
        let mut word = 0u32;
        // SAFETY: stores four bytes to a local.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        u64::from(word)
    }

    pub(super) fn write(word: u64) {
        let word = word as u32;
        // SAFETY: loads a word that differs from the current one in the flush bits only, so rounding mode and
        // exception masks stay as Rust expects them; code between sees denormals as zero, which is what is asked for.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack, preserves_flags)) };
    }
}

#[cfg(target_arch = "aarch64")]
mod float_mode {
    //! FPCR: FZ (bit 24) for single and double precision, FZ16 (bit 19) for half precision; operands and results.
    use std::arch::asm;

    pub(super) const FLUSH: u64 = 1 << 24 | 1 << 19;

    pub(super) fn read() -> u64 {
        let word: u64;
        // SAFETY: reads a control register.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nomem, nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: u64) {
        // SAFETY: writes a word that differs from the current one in the flush bits only.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nomem, nostack, preserves_flags)) };
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod float_mode {
    pub(super) const FLUSH: u64 = 0;

    pub(super) fn read() -> u64 {
        0
    }

    pub(super) fn write(_word: u64) {}
}

#[cfg(any(target_os = "linux", target_os = "android"))]
mod platform {
    use rustix::io::Errno;
    use rustix::process::Pid;
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    fn listed(set: &CpuSet) -> Vec<u32> {
        (0..CpuSet::MAX_CPU).filter(|&core| set.is_set(core)).map(|core| core as u32).collect()
    }

    /// Cores of the process's first thread: what the process was started with, unless that thread was pinned.
    pub(super) fn process_cores() -> Vec<u32> {
        sched_getaffinity(Some(rustix::process::getpid())).map(|set| listed(&set)).unwrap_or_default()
    }

    pub(super) fn thread_cores() -> Vec<u32> {
        sched_getaffinity(None).map(|set| listed(&set)).unwrap_or_default()
    }

    pub(super) fn pin(thread: Option<i32>, cores: &[u32]) -> Result<(), Errno> {
        let thread = match thread {
            Some(id) => Some(Pid::from_raw(id).ok_or(Errno::SRCH)?),
            None => None,
        };
        let mut set = CpuSet::new();
        for &core in cores {
            if core as usize >= CpuSet::MAX_CPU {
                return Err(Errno::INVAL);
            }
            set.set(core as usize);
        }
        sched_setaffinity(thread, &set)
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
mod platform {
    //! Systems without a way to pin a thread: every core is allowed and pinning does nothing.

    pub(super) fn process_cores() -> Vec<u32> {
        let count = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        (0..count as u32).collect()
    }

    pub(super) fn thread_cores() -> Vec<u32> {
        process_cores()
    }

    pub(super) fn pin(_thread: Option<i32>, _cores: &[u32]) -> Result<(), std::convert::Infallible> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{UnitKind, UnitLimits};

    fn cpu_unit(text: &str) -> Unit {
        let address: UnitAddress = text.parse().unwrap();
        Unit {
            resources: core_resources(&address).unwrap(),
            address,
            kind: UnitKind::Cpu,
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        }
    }

    #[test]
    fn a_unit_is_entered_and_left() {
        let last = *allowed_cores().last().unwrap();
        let before = (thread_cores(), denormals_flushed());
        {
            let _guard = enter_unit(&cpu_unit(&format!("ort:CPU@{last}"))).unwrap();
            assert_eq!(thread_cores(), [last]);
            assert!(denormals_flushed());
            let tiny = std::hint::black_box(f32::MIN_POSITIVE);
            assert_eq!(std::hint::black_box(tiny * std::hint::black_box(0.5)).to_bits(), 0);
        }
        assert_eq!((thread_cores(), denormals_flushed()), before);
        let tiny = std::hint::black_box(f32::MIN_POSITIVE);
        assert!(std::hint::black_box(tiny * std::hint::black_box(0.5)) > 0.0);
    }

    #[test]
    fn units_nest() {
        let first = allowed_cores()[0];
        let outer = enter_unit(&cpu_unit(&format!("ort:CPU@{first}"))).unwrap();
        drop(enter_unit(&cpu_unit("ort:CPU")).unwrap());
        assert_eq!(thread_cores(), [first]);
        assert!(denormals_flushed());
        drop(outer);
    }

    #[test]
    fn a_forbidden_core_is_an_error_that_lists_the_allowed_ones() {
        let address: UnitAddress = "ort:CPU@4000".parse().unwrap();
        let error = core_resources(&address).unwrap_err().to_string();
        assert!(error.contains("ort:CPU@4000") && error.contains(&cores_text(allowed_cores())), "{error}");
        let mut unit = cpu_unit("ort:CPU");
        unit.resources.insert(Resource::Core(4000));
        assert!(matches!(enter_unit(&unit), Err(UnitError::Cores { .. })));
    }

    #[test]
    fn a_device_unit_pins_nothing() {
        let before = thread_cores();
        let mut unit = cpu_unit("openvino:GPU");
        unit.kind = UnitKind::Gpu;
        unit.resources = BTreeSet::from([Resource::Device("gpu0".into())]);
        let _guard = enter_unit(&unit).unwrap();
        assert_eq!(thread_cores(), before);
    }
}
