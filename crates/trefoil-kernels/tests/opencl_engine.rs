//! Whole blocks on OpenCL devices, cut between them and the CPU, state in shared memory, and compiled programs kept.
#![cfg(feature = "opencl")]

#[path = "support/opencl.rs"]
mod devices;
#[path = "support/golden.rs"]
mod golden;
#[path = "support/opencl_block.rs"]
mod opencl_block;
mod support;

use devices::{ALL, devices};
use golden::{DIT_A, DIT_A_GRID, golden, golden_block, step};
use opencl_block::DeviceBlock;
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::bits;
use support::block::{
    Buffers, Calibration, FloatPath, Inputs, SMALL, SMALL_FINGERPRINT, SmallCase, fingerprint, run_float, run_w8a8,
};
use trefoil_kernels::opencl::{self, ProgramOrigin};
use trefoil_kernels::{Isa, Kernels, Pool, rotary_table};
use trefoil_weights::{Region, RegionKind};

#[test]
fn a_block_has_the_bits_of_the_cpu_and_may_be_cut_between_them() {
    let case = SmallCase::fixed();
    let cpu = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    for kernels in &*ALL {
        let inputs = case.inputs(true);
        let mut device = DeviceBlock::new(kernels, &case.block, &inputs, &case.start);
        device.run(&case.calibration, false);
        let handed_over = device.state.read().unwrap().to_vec();
        device.run(&case.calibration, true);
        let state = device.state.read().unwrap().to_vec();
        assert_eq!(fingerprint(&state), SMALL_FINGERPRINT, "{} differs", kernels.variant());
        // The second execution on the CPU.
        let (mut cut, mut buffers) = (handed_over, Buffers::new(SMALL));
        case.run(&cpu, true, &mut cut, &mut buffers);
        assert_eq!(fingerprint(&cut), SMALL_FINGERPRINT, "{} then CPU differs", kernels.variant());
        // The first one on the CPU.
        let mut cut = case.start.clone();
        case.run(&cpu, false, &mut cut, &mut buffers);
        device.state.write().unwrap().copy_from_slice(&cut);
        device.run(&case.calibration, true);
        assert_eq!(
            fingerprint(&device.state.read().unwrap()),
            SMALL_FINGERPRINT,
            "CPU then {} differs",
            kernels.variant()
        );
    }
}

#[test]
fn blocks_of_the_reference_model_have_the_bits_of_the_cpu() {
    let Some(golden) = golden() else { return };
    let (weights, trace) =
        (SafeTensors::deserialize(&golden.weights).unwrap(), SafeTensors::deserialize(&golden.trace).unwrap());
    let rotary = rotary_table(DIT_A_GRID, DIT_A.head_dim()).unwrap();
    let cpu = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    for (name, detail) in [("t992", false), ("t905", true)] {
        let golden::Step { start, context, modulation } = step(&trace, name);
        let inputs = Inputs { context: &context, modulation: &modulation, rotary: &rotary, detail };
        let mut buffers = Buffers::new(DIT_A);
        let (mut exact, mut state) = (start.clone(), start.clone());
        let mut on_devices: Vec<Vec<f32>> = ALL.iter().map(|_| start.clone()).collect();
        for number in 0..4 {
            let block = golden_block(&weights, number);
            let mut calibration = Calibration::default();
            run_float(&cpu, FloatPath::F32, &block, &inputs, &mut exact, &mut buffers, Some(&mut calibration));
            run_w8a8(&cpu, &block, &calibration, &inputs, &mut state, &mut buffers);
            for (kernels, on_device) in ALL.iter().zip(&mut on_devices) {
                let mut device = DeviceBlock::new(kernels, &block, &inputs, on_device);
                device.run(&calibration, detail);
                on_device.copy_from_slice(&device.state.read().unwrap());
                assert!(bits(on_device) == bits(&state), "{name} block {number} on {}", kernels.variant());
            }
        }
    }
}

#[test]
fn state_in_a_shared_region_is_written_in_place() {
    for kernels in &*ALL {
        let region = Arc::new(Region::shared(0, 4 * 64, RegionKind::Memfd, None).unwrap());
        let mut state: opencl::Buffer<f32> = kernels.share(region.clone()).unwrap();
        let term = kernels.copied(&[1.5f32; 64]).unwrap();
        let at = |element: usize| {
            let mut bytes = [0u8; 4];
            region.read_at(4 * element, &mut bytes).unwrap();
            f32::from_le_bytes(bytes).to_bits()
        };
        kernels.add(term.vector(), term.vector(), &mut state).unwrap();
        state.publish().unwrap();
        assert_eq!(at(63), 3f32.to_bits());
        // Another engine writes; the device reads that.
        region.write_at(4 * 63, &5f32.to_le_bytes()).unwrap();
        state.refresh().unwrap();
        let mut out = kernels.zeroed::<f32>(64).unwrap();
        kernels.add(state.vector(), term.vector(), &mut out).unwrap();
        assert_eq!(out.read().unwrap()[63].to_bits(), 6.5f32.to_bits());
        assert_eq!(out.read().unwrap()[0].to_bits(), 4.5f32.to_bits());
        // Others may map the region, so the host takes no reference.
        assert!(state.read().unwrap_err().to_string().contains("copy out of the region"));
        assert!(state.write().is_err());
    }
}

#[test]
fn compiled_programs_are_kept_and_damaged_ones_are_not_used() {
    // Queues that live at once may get copies of a program; the next of several one after the other gets the same copy, if
    // nobody makes others meanwhile.
    std::sync::LazyLock::force(&ALL);
    for device in devices() {
        let variant = device.info().variants[0];
        let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("opencl-{}", std::process::id()));
        // Where the program came from, and what was odd.
        let make = |folder: &Path| {
            let kernels = opencl::Kernels::new(&device, variant, Some(folder)).unwrap();
            (kernels.program_origin().clone(), kernels.note().map(String::from))
        };
        assert_eq!(make(&folder), (ProgramOrigin::Compiled, None));
        let (ProgramOrigin::Cached(path), None) = make(&folder) else { panic!("not read from the cache") };
        let mut bytes = std::fs::read(&path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(&path, &bytes).unwrap();
        let (origin, note) = make(&folder);
        assert_eq!(origin, ProgramOrigin::Compiled);
        assert!(note.as_deref().unwrap().contains("checksum"), "{note:?}");
        assert_eq!(make(&folder), (ProgramOrigin::Cached(path.clone()), None));
        // No temporary file stays.
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        // A folder that cannot be made costs the cache, not the kernels.
        assert!(make(&path.join("below a file")).1.is_some());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
