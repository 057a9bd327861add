//! Whole blocks: the same bits on every instruction set and number of threads, no allocation in steady state, and the
//! reference tensors within tolerance.

#[path = "support/golden.rs"]
mod golden;
mod support;

use golden::{DIT_A, DIT_A_GRID, golden, golden_block, step, tensor};
use safetensors::SafeTensors;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use support::block::{
    Block, Buffers, Calibration, FloatPath, Inputs, SMALL, SMALL_FINGERPRINT, SMALL_GRID, fingerprint, run_float,
    run_w8a8, small_run,
};
use support::{Random, bits, errors, every_kernels, name_of};
use trefoil_kernels::{Isa, Kernels, Pool, rotary_table};

/// Counts allocations of the threads that ask for it.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is passed on to the system's allocator unchanged; counting touches a constant-initialised cell.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_block_in_w8a8_has_the_same_bits_everywhere() {
    let all = every_kernels();
    let want = small_run(&all[0], &all[0]);
    assert!(want.iter().all(|value| value.is_finite()));
    for kernels in &all {
        let got = small_run(kernels, kernels);
        assert!(bits(&got) == bits(&want), "{} differs from {}", name_of(kernels), name_of(&all[0]));
    }
    // A cut between two engines, either way round.
    let (slowest, fastest) = (&all[0], &all[all.len() - 1]);
    assert!(bits(&small_run(slowest, fastest)) == bits(&want));
    assert!(bits(&small_run(fastest, slowest)) == bits(&want));
    assert_eq!(fingerprint(&want), SMALL_FINGERPRINT, "the arithmetic changed: {:#018x}", fingerprint(&want));
}

#[test]
fn float_paths_agree_across_instruction_sets_and_w8a8_is_near_them() {
    let block = Block::random(SMALL, 3);
    let mut random = Random::new(4);
    let context = random.normals(SMALL.text * SMALL.width, 1.0);
    let modulation = random.normals(6 * SMALL.width, 0.3);
    let rotary = rotary_table(SMALL_GRID, SMALL.head_dim()).unwrap();
    let start = random.normals(SMALL.tokens * SMALL.width, 1.0);
    let inputs = Inputs { context: &context, modulation: &modulation, rotary: &rotary, detail: true };
    let run = |kernels: &Kernels, path: FloatPath, record: Option<&mut Calibration>| {
        let mut state = start.clone();
        run_float(kernels, path, &block, &inputs, &mut state, &mut Buffers::new(SMALL), record);
        state
    };
    let all = every_kernels();
    let mut calibration = Calibration::default();
    let f32_state = run(&all[0], FloatPath::F32, Some(&mut calibration));
    let w8a16_state = run(&all[0], FloatPath::W8a16, None);
    for kernels in &all {
        let (relative, _) = errors(&run(kernels, FloatPath::F32, None), &f32_state);
        assert!(relative < 1e-6, "f32 on {}: {relative:e}", name_of(kernels));
        // FP16 rounding of nearly equal values may fall either way, so this is no bit comparison.
        let (relative, _) = errors(&run(kernels, FloatPath::W8a16, None), &w8a16_state);
        assert!(relative < 1e-4, "w8a16 on {}: {relative:e}", name_of(kernels));
    }
    let mut state = start.clone();
    run_w8a8(&all[0], &block, &calibration, &inputs, &mut state, &mut Buffers::new(SMALL));
    let (w8a16_error, _) = errors(&w8a16_state, &f32_state);
    let (w8a8_error, _) = errors(&state, &f32_state);
    println!("one block against f32: w8a16 {w8a16_error:.2e}, w8a8 {w8a8_error:.2e}");
    assert!(w8a16_error < 6e-3, "{w8a16_error:e}");
    assert!(w8a8_error < 2e-2, "{w8a8_error:e}");
}

#[test]
fn nothing_is_allocated_after_the_first_execution() {
    let kernels = Kernels::new(Isa::best(), Pool::on_caller()).unwrap();
    let block = Block::random(SMALL, 3);
    let context = vec![0.5; SMALL.text * SMALL.width];
    let modulation = vec![0.1; 6 * SMALL.width];
    let rotary = rotary_table(SMALL_GRID, SMALL.head_dim()).unwrap();
    let inputs = Inputs { context: &context, modulation: &modulation, rotary: &rotary, detail: true };
    let mut state = Random::new(4).normals(SMALL.tokens * SMALL.width, 1.0);
    let mut buffers = Buffers::new(SMALL);
    let mut calibration = Calibration::default();
    run_float(&kernels, FloatPath::F32, &block, &inputs, &mut state, &mut buffers, Some(&mut calibration));
    run_w8a8(&kernels, &block, &calibration, &inputs, &mut state, &mut buffers);
    let held = buffers.workspace.bytes();
    let before = ALLOCATIONS.get();
    run_float(&kernels, FloatPath::F32, &block, &inputs, &mut state, &mut buffers, None);
    run_w8a8(&kernels, &block, &calibration, &inputs, &mut state, &mut buffers);
    assert_eq!(ALLOCATIONS.get() - before, 0);
    assert_eq!(buffers.workspace.bytes(), held);
    // Far below one widened matrix of a real model: panels, scores and states of a few row tiles.
    assert!(held > 0 && held < 1 << 20, "{held} bytes");
}

#[test]
fn all_paths_are_near_the_reference_tensors() {
    let Some(golden) = golden() else { return };
    let weights = SafeTensors::deserialize(&golden.weights).unwrap();
    let io = SafeTensors::deserialize(&golden.io).unwrap();
    let trace = SafeTensors::deserialize(&golden.trace).unwrap();
    let rotary = rotary_table(DIT_A_GRID, DIT_A.head_dim()).unwrap();
    for (ours, theirs) in [(&rotary.cos, "rope.cos"), (&rotary.sin, "rope.sin")] {
        let (_, largest) = errors(ours, &tensor(&io, theirs));
        assert!(largest <= 6e-8, "{theirs}: {largest:e}");
    }
    let blocks: Vec<Block> = (0..4).map(|number| golden_block(&weights, number)).collect();
    for (name, detail) in [("t992", false), ("t905", true)] {
        let golden::Step { start, context, modulation } = step(&trace, name);
        let inputs = Inputs { context: &context, modulation: &modulation, rotary: &rotary, detail };
        for kernels in every_kernels() {
            let mut states = [start.clone(), start.clone(), start.clone()];
            let mut buffers = Buffers::new(DIT_A);
            for (number, block) in blocks.iter().enumerate() {
                let want = tensor(&trace, &format!("{name}.hidden.{number}"));
                let mut calibration = Calibration::default();
                let [exact, w8a16, w8a8] = &mut states;
                run_float(&kernels, FloatPath::F32, block, &inputs, exact, &mut buffers, Some(&mut calibration));
                run_float(&kernels, FloatPath::W8a16, block, &inputs, w8a16, &mut buffers, None);
                run_w8a8(&kernels, block, &calibration, &inputs, w8a8, &mut buffers);
                let [exact, w8a16, w8a8] = [exact, w8a16, w8a8].map(|state| errors(state, &want));
                if kernels.pool().threads() == 1 {
                    println!(
                        "{name} block {number} on {}: f32 {:.1e} (max {:.1e}), w8a16 {:.1e}, w8a8 {:.1e}",
                        kernels.isa(),
                        exact.0,
                        exact.1,
                        w8a16.0,
                        w8a8.0
                    );
                }
                // The reference's own gate for a float32 implementation.
                assert!(
                    exact.0 <= 2e-5 && exact.1 <= 2e-4,
                    "f32 {name} block {number} {}: {exact:?}",
                    name_of(&kernels)
                );
                assert!(w8a16.0 <= 2e-2, "w8a16 {name} block {number} {}: {w8a16:?}", name_of(&kernels));
                assert!(w8a8.0 <= 4e-2, "w8a8 {name} block {number} {}: {w8a8:?}", name_of(&kernels));
            }
        }
    }
}
