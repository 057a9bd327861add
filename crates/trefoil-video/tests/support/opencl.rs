//! The OpenCL devices of this machine, for tests of the engine.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::sync::{Mutex, MutexGuard, PoisonError};
use trefoil_kernels::opencl::{Device, OpenClError};
use trefoil_video::engine::{EngineSpec, allowed_cores};

/// Held by each test: the driver's threads belong to the process, so engines on different cores take turns.
static TURN: Mutex<()> = Mutex::new(());

pub fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether there is a device that can run the kernels, or a message.
pub fn is_there() -> bool {
    match Device::list() {
        Ok(devices) if devices.iter().any(|device| device.unfit.is_none()) => true,
        Ok(devices) => skip(&format!("{devices:?} cannot run the kernels")),
        Err(error @ (OpenClError::Library | OpenClError::NoDevice)) => skip(&error.to_string()),
        Err(error) => panic!("{error}"),
    }
}

fn skip(why: &str) -> bool {
    let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
    assert!(!is_set("TREFOIL_REQUIRE_BACKENDS") || is_set("TREFOIL_TEST_WITHOUT_OPENCL"), "{why}");
    eprintln!("skipped: {why}");
    false
}

/// The `number`-th core of this machine, or the first where there are fewer.
pub fn core(number: usize) -> usize {
    let cores = allowed_cores();
    *cores.get(number).unwrap_or(&cores[0])
}

pub fn cpu(number: usize) -> EngineSpec {
    EngineSpec::cpu(&[core(number)])
}

pub fn opencl(number: usize) -> EngineSpec {
    EngineSpec::opencl(&[core(number)])
}
