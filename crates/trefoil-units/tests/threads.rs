//! Worker threads of the libraries stay on the cores of their unit, whatever was compiled before on other cores.
#![cfg(target_os = "linux")]

#[path = "libraries/bound.rs"]
mod bound;

use bound::Bound;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trefoil_core::{DataType, HostTensor, TensorInfo};
use trefoil_units::{CompileOptions, allowed_cores, cores_text, enter_unit, resolve};

/// Every thread of this process with the cores it may use, as the kernel writes them, and its processor time in ticks.
fn threads() -> BTreeMap<i32, (String, u64)> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir("/proc/self/task").unwrap().flatten() {
        let id: i32 = entry.file_name().to_str().unwrap().parse().unwrap();
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        let status = read("status");
        let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
        let stat = read("stat");
        let ticks = stat.rsplit_once(')').map_or(0, |(_, rest)| {
            let fields: Vec<u64> = rest.split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
            fields[11] + fields[12]
        });
        found.insert(id, (cores.trim().to_owned(), ticks));
    }
    found
}

/// Threads other than this one and those of `before` that computed since `start`: id, cores, ticks.
fn busy_workers(start: &BTreeMap<i32, (String, u64)>, before: &BTreeSet<i32>) -> Vec<(i32, String, u64)> {
    let me = rustix::thread::gettid().as_raw_nonzero().get();
    threads()
        .into_iter()
        .filter(|(id, _)| !before.contains(id) && *id != me)
        .map(|(id, (cores, ticks))| (id, cores, ticks - start.get(&id).map_or(0, |(_, ticks)| *ticks)))
        .filter(|(_, _, ticks)| *ticks > 0)
        .collect()
}

/// Seven bits a byte, least significant first.
fn varint(mut number: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
    bytes
}

/// A length-delimited protobuf field.
fn field(number: u8, contents: &[u8]) -> Vec<u8> {
    [vec![number << 3 | 2], varint(contents.len() as u64), contents.to_vec()].concat()
}

/// A square f32 matrix as `ValueInfoProto`.
fn value(name: &str, size: u64) -> Vec<u8> {
    let extent = field(1, &[vec![0x08], varint(size)].concat());
    let tensor = [vec![0x08, 0x01], field(2, &[extent.clone(), extent].concat())].concat();
    [field(1, name.as_bytes()), field(2, &field(1, &tensor))].concat()
}

/// A square matrix product `y = x · w`, large enough for several threads.
fn matmul_model(folder: &Path, size: u64) -> (PathBuf, Vec<HostTensor>, Vec<TensorInfo>) {
    let node = [field(1, b"x"), field(1, b"w"), field(2, b"y"), field(4, b"MatMul")].concat();
    let (name, x, w, y) = (field(2, b"g"), value("x", size), value("w", size), value("y", size));
    let graph = [field(1, &node), name, field(11, &x), field(11, &w), field(12, &y)].concat();
    // IR version 8, operator set 13 of the default domain.
    let model = [vec![0x08, 0x08], field(7, &graph), field(8, &[0x0a, 0x00, 0x10, 0x0d])].concat();
    let path = folder.join("matmul.onnx");
    fs::write(&path, model).unwrap();
    let values: Vec<f32> = (0..size * size).map(|index| (index % 7) as f32 - 3.0).collect();
    let inputs = ["x", "w"].map(|name| HostTensor::from_f32(name, [size, size], &values)).into();
    (path, inputs, vec![TensorInfo::new("y", DataType::F32, [size, size])])
}

/// The only test of its process: worker threads are shared by the whole process.
#[test]
fn workers_stay_on_the_cores_of_their_unit() {
    let required = std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_some_and(|value| value == "1");
    let allowed = allowed_cores();
    if allowed.len() < 2 {
        eprintln!("skipped: this process may use one core only");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (last, pair) = (cores_text(&allowed[allowed.len() - 1..]), cores_text(&allowed[..2]));
    for backend in ["openvino", "ort"] {
        let resolved = [&last, &pair].map(|cores| resolve(&format!("{backend}:CPU@{cores}").parse().unwrap()));
        let [Ok(one), Ok(two)] = resolved else {
            assert!(!required, "{backend} is required");
            eprintln!("skipped: {backend} is not available here");
            continue;
        };
        let before: BTreeSet<i32> = threads().into_keys().collect();
        let mut kept = Vec::new();
        // First on one core, which is where a library's shared workers would be born and stay.
        for (unit, label) in [(&one, &last), (&two, &pair)] {
            let _thread = enter_unit(unit).unwrap();
            let (path, inputs, outputs) = matmul_model(folder.path(), 384);
            let mut bound = Bound::new(&path, inputs, &outputs, unit, &CompileOptions::default()).unwrap();
            bound.run().unwrap();
            let expected = bound.outputs[0].to_f64();
            let (start, begun) = (threads(), Instant::now());
            // On a loaded machine a worker may sleep through many executions, so they go on until one took part.
            let busy = loop {
                for _ in 0..100 {
                    bound.run().unwrap();
                }
                let busy = busy_workers(&start, &before);
                if !busy.is_empty() || label == &last || begun.elapsed() > Duration::from_mins(1) {
                    break busy;
                }
            };
            assert_eq!(bound.outputs[0].to_f64(), expected);
            eprintln!("{backend}:CPU@{label}: workers (id, cores, ticks) {busy:?}");
            for (id, cores, _) in &busy {
                // All of the unit's cores, or one of them to itself.
                let own = unit.address.cores.iter().any(|core| *cores == core.to_string());
                assert!(own || cores == label, "{backend}: worker {id} of {} is on {cores}", unit.address);
            }
            if unit.address.cores.len() == 1 {
                assert!(busy.is_empty(), "{backend}: one core, but workers computed: {busy:?}");
            } else {
                assert!(!busy.is_empty(), "{backend}: no worker of {} computed anything", unit.address);
            }
            kept.push(bound);
        }
    }
}
