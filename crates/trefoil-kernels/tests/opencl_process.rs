//! What the OpenCL library does once per process: it is found or not, and its threads inherit cores. Each case is a process.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;

use std::collections::{BTreeMap, BTreeSet};
use std::process::{Command, Output};
use trefoil_kernels::bench::Workload;
use trefoil_kernels::opencl::bench::Prepared;
use trefoil_kernels::opencl::{Device, DeviceKind, Kernels, OpenClError};

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
fn queues_that_run_a_kernel_at_once_over_different_grids_do_not_disturb_each_other() {
    if devices::devices().is_empty() {
        return;
    }
    let output = in_a_process("process_runs_many_queues", &[]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// PoCL compiles the dispatches of a kernel apart by grid and offset, and once mixed up which of them still ran.
#[test]
#[ignore = "run by another test in a process of its own, since the driver's abort would end all tests"]
fn process_runs_many_queues() {
    for device in devices::devices() {
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let device = &device;
                scope.spawn(move || {
                    let kernels = Kernels::best(device, Some(&devices::cache())).unwrap();
                    let terms = kernels.copied(&[1.5f32; 3 * 1000 + 3]).unwrap();
                    // Each wider than those before it in all threads, so that none fits what was compiled before.
                    for length in (1..1000).map(|round| 3 * round + thread) {
                        let term = terms.slice("the terms", 0, length).unwrap();
                        let mut out = kernels.zeroed::<f32>(length).unwrap();
                        kernels.add(term, term, &mut out).unwrap();
                        assert!(out.read().unwrap().iter().all(|sum| sum.to_bits() == 3f32.to_bits()));
                    }
                });
            }
        });
    }
}

#[test]
fn a_cpu_device_runs_on_the_cores_it_is_given_and_moves_between_engines() {
    if devices::devices().is_empty() {
        return;
    }
    for first in ["named", "all"] {
        let output = in_a_process("process_opens_on_cores", &[("FIRST_CALL", first)]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "first call on {first} cores: {text}");
        print!("{text}");
    }
}

/// Threads of this process: the cores that each may use, and the nanoseconds that it ran.
#[cfg(target_os = "linux")]
fn threads() -> BTreeMap<String, (String, u64)> {
    let allowed = |status: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        line.unwrap_or_default().trim().to_string()
    };
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().filter_map(Result::ok);
    tasks
        .filter_map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).ok()?;
            let times = std::fs::read_to_string(task.path().join("schedstat")).unwrap_or_default();
            let ran = times.split_whitespace().next().and_then(|word| word.parse().ok()).unwrap_or(0);
            Some((task.file_name().to_string_lossy().into_owned(), (allowed(&status), ran)))
        })
        .collect()
}

/// Computes for a while, so that it shows which threads work.
#[cfg(target_os = "linux")]
fn compute(device: &Device) {
    let kernels = Kernels::best(device, Some(&devices::cache())).unwrap();
    let workload = Workload::GemmW8a8 { m: 480, k: 512, n: 1024 };
    let mut prepared = Prepared::new(&kernels, workload).unwrap();
    for _ in 0..10 {
        prepared.run().unwrap();
    }
}

#[cfg(target_os = "linux")]
#[test]
#[ignore = "run by another test in a process of its own"]
fn process_opens_on_cores() {
    let before = threads();
    if std::env::var("FIRST_CALL").is_ok_and(|value| value == "all") {
        Device::list().unwrap();
    }
    let device = Device::open(0, Some(&[0])).unwrap();
    if device.info().kind != DeviceKind::Cpu {
        return;
    }
    let ours: BTreeSet<String> = threads().into_keys().filter(|thread| !before.contains_key(thread)).collect();
    assert!(!ours.is_empty(), "the driver started no thread, so nothing is bound");
    let on = |cores: &str| {
        let now = threads();
        assert!(ours.iter().all(|thread| now[thread].0 == cores), "{cores}: {now:?}");
        // The caller and everyone else keep theirs.
        assert!(before.iter().all(|(thread, (allowed, _))| now[thread].0 == *allowed));
    };
    on("0");
    assert_eq!(device.cores(), Some(&[0][..]));
    assert!(Device::open(0, Some(&[0])).is_ok() && Device::open(0, None).is_ok());
    // Once compiled, one core has one thread that works.
    compute(&device);
    let start = threads();
    compute(&device);
    let end = threads();
    let busy = ours.iter().filter(|thread| end[*thread].1 > start[*thread].1 + 1_000_000).count();
    println!("{} driver threads, {busy} busy on one core", ours.len());
    assert_eq!(busy, 1, "{start:?} {end:?}");
    let error = Device::open(0, Some(&[0, 1])).unwrap_err();
    assert!(matches!(error, OpenClError::Cores { .. }), "{error}");
    assert!(
        error.to_string().contains("another engine of this process has the driver's threads on cores [0]"),
        "{error}"
    );
    let Some(last) = (1..1024).rev().find(|core| before.values().any(|(allowed, _)| lists(allowed, *core))) else {
        return eprintln!("skipped: this process may use one core");
    };
    // Buffers keep the cores as well as devices do.
    let kernels = Kernels::best(&device, Some(&devices::cache())).unwrap();
    drop(device);
    assert!(Device::open(0, Some(&[last])).is_err());
    drop(kernels);
    let moved = Device::open(0, Some(&[last])).unwrap();
    on(&last.to_string());
    compute(&moved);
    drop(moved);
    let both = Device::open(0, Some(&[0, last])).unwrap();
    on(&if last == 1 { "0-1".to_string() } else { format!("0,{last}") });
    compute(&both);
    drop(both);
    let error = Device::open(0, Some(&[1000])).unwrap_err().to_string();
    assert!(error.contains("cores [1000]") && error.contains("cannot run there"), "{error}");
}

/// Whether `0-3,8` has `core` in it.
#[cfg(target_os = "linux")]
fn lists(allowed: &str, core: usize) -> bool {
    allowed.split(',').any(|part| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        matches!((first.parse::<usize>(), last.parse::<usize>()), (Ok(first), Ok(last)) if (first..=last).contains(&core))
    })
}
