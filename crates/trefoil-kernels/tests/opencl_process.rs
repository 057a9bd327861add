//! What the OpenCL library does once per process: it is found or not, and its threads inherit cores. Each case is a process.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;

use std::collections::BTreeSet;
use std::process::{Command, Output};
use trefoil_kernels::opencl::{Device, DeviceKind, OpenClError};

/// Runs one of the ignored tests below in a process of its own.
fn in_a_process(test: &str, environment: &[(&str, &str)]) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--ignored", "--nocapture"])
        .envs(environment.iter().copied())
        .output()
        .unwrap()
}

#[test]
fn without_drivers_the_error_says_what_to_install() {
    if devices::devices().is_empty() {
        return;
    }
    // The loader looks for drivers in this folder.
    let output = in_a_process("process_lists_devices", &[("OCL_ICD_VENDORS", "/nonexistent/")]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("error: OpenCL has no device; install"), "{text}");
}

#[test]
#[ignore = "run by another test in a process of its own"]
fn process_lists_devices() {
    match Device::list() {
        Ok(devices) => println!("{} devices", devices.len()),
        Err(error) => println!("error: {error}"),
    }
}

#[test]
fn a_cpu_device_runs_on_the_cores_of_the_first_call() {
    if devices::devices().is_empty() {
        return;
    }
    let output = in_a_process("process_opens_on_a_core", &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Threads of this process and the cores that each may use.
#[cfg(target_os = "linux")]
fn threads() -> BTreeSet<(String, String)> {
    let allowed = |status: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.unwrap_or_default().trim().to_string()
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    tasks
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            Some((task.file_name().to_string_lossy().into_owned(), allowed(&status)))
        })
        .collect()
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "run by another test in a process of its own"]
fn process_opens_on_a_core() {
    let before = threads();
    let device = Device::open(0, Some(&[0])).unwrap();
    let started: Vec<_> = threads().difference(&before).cloned().collect();
    println!("{started:?}");
    if device.info().kind == DeviceKind::Cpu {
        assert!(started.iter().all(|(_, cores)| cores == "0"), "{started:?}");
    }
    // The caller keeps its own.
    assert!(before.is_subset(&threads()));
    assert!(Device::open(0, Some(&[0])).is_ok() && Device::open(0, None).is_ok());
    let error = Device::open(0, Some(&[0, 1])).unwrap_err();
    assert!(matches!(error, OpenClError::Cores { .. }), "{error}");
    assert!(error.to_string().contains("started the OpenCL library on cores [0]; use another process"), "{error}");
}
