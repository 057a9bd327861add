//! `submit` and `wait` of the libraries' backends allocate nothing of ours once warm. The libraries' own allocations do
//! not pass through Rust's allocator and are not counted.

#[path = "libraries/bound.rs"]
mod bound;
#[path = "libraries/npz.rs"]
mod npz;
#[path = "libraries/own_models.rs"]
mod own_models;

use bound::Bound;
use own_models::OwnModel;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};
use trefoil_units::{CompileOptions, allowed_cores, cores_text, enter_unit, resolve};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: forwards to the system allocator; counting has no effect on memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: by the caller's contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: by the caller's contract.
        unsafe { System.dealloc(pointer, layout) };
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The only test of its process, so that nobody else allocates meanwhile.
#[test]
fn submit_and_wait_allocate_nothing() {
    let required = std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_some_and(|value| value == "1");
    let all = cores_text(allowed_cores());
    let first = cores_text(&allowed_cores()[..1]);
    for address in [
        format!("openvino:CPU@{first}"),
        format!("openvino:CPU@{all}"),
        format!("ort:CPU@{first}"),
        format!("ort:CPU@{all}"),
    ] {
        let unit = match resolve(&address.parse().unwrap()) {
            Ok(unit) => unit,
            Err(error) => {
                assert!(!required, "{error}");
                eprintln!("skipped: {error}");
                continue;
            }
        };
        let _thread = enter_unit(&unit).unwrap();
        let model = OwnModel::load("conv_3x3");
        let infos = model.output_infos();
        let mut bound = Bound::new(&model.path, model.inputs, &infos, &unit, &CompileOptions::default()).unwrap();
        for _ in 0..5 {
            bound.run().unwrap();
        }
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for _ in 0..50 {
            bound.run().unwrap();
        }
        let counted = ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(counted, 0, "{address} allocated {counted} times in 50 executions");
        // The counter does count.
        std::hint::black_box(Box::new(1u64));
        assert!(ALLOCATIONS.load(Ordering::Relaxed) > before);
    }
}
