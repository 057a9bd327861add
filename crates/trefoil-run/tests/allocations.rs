//! After the first run the executor allocates nothing of its own.

mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use support::{Behaviour, Fake, FakeSource, chain, unit};
use trefoil_run::{Executor, ExecutorOptions};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: forwards to the system allocator; the counter does not touch memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// One test function: others running beside it would be counted too.
#[test]
fn no_allocation_between_the_second_and_the_hundredth_run() {
    let cores = |address: &str, cores: &[u32]| {
        let mut unit = unit(address, &[]);
        unit.resources = cores.iter().map(|&core| trefoil_core::Resource::Core(core)).collect();
        unit
    };
    let all = trefoil_units::allowed_cores();
    let layouts = [
        // Two units of one lane on different cores: its thread moves between them.
        vec![cores("fake:one", &all[..1]), cores("fake:all", all)],
        vec![unit("fake:a", &["a"])],
        vec![unit("fake:a", &["a"]), unit("fake:b", &["b"])],
        vec![unit("fake:a", &["a"]), unit("fake:b", &["b"]), unit("fake:ab", &["a", "b"])],
    ];
    for units in layouts {
        for spin in [std::time::Duration::ZERO, std::time::Duration::from_micros(50)] {
            let (graph, plan) = chain(40, &units, 256);
            let fake = Fake::leak(Behaviour { idle: true, ..Behaviour::default() });
            let find = fake.find(&plan);
            let options = ExecutorOptions { spin, ..ExecutorOptions::default() };
            let mut executor = Executor::new(plan, &[&graph], &FakeSource(&graph), &find, &options).unwrap();
            executor.run_bound().unwrap();
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            for _ in 1..100 {
                executor.run_bound().unwrap();
            }
            let after = ALLOCATIONS.load(Ordering::SeqCst);
            assert_eq!(after - before, 0, "{} units, spin {spin:?}", units.len());
        }
    }
}
