//! Trefoil's own cost per segment over the backend's call (goal: at most 3 µs), and what hand-offs cost.
//!
//! `cargo bench --release -p trefoil-run` prints divan's figures for a backend that does nothing (each run executes
//! 100 segments, so the fastest time divided by 100 is the cost of one), then a table of hand-offs, spinning and parked, and one for the real backends that are
//! here: a chain of 100 small Relu segments through the executor, and the same compiled segments called in a plain loop.

#[path = "../tests/support/models.rs"]
mod models;
#[path = "../tests/support/mod.rs"]
mod support;

use divan::Bencher;
use divan::counter::ItemsCount;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};
use support::{Behaviour, Fake, FakeSource, chain, unit};
use trefoil_core::{Resource, SegmentId, Unit};
use trefoil_run::{Executor, ExecutorOptions, PreparedSource, SegmentSource, registry_units};
use trefoil_units::{Buffer, CompileOptions, Compiled, enter_unit};

const SEGMENTS: u32 = 100;

fn main() {
    divan::main();
    if std::env::args().all(|argument| argument != "--test" && argument != "--list") {
        hand_offs();
        real_backends();
    }
}

/// Prints the median hand-off between two units on a core each: from the end of one's task to the start of the other's, which
/// waits for it, spinning or asleep (goals: 5 and 30 µs); and of an inference from the caller to its lane and back.
fn hand_offs() {
    let units = [core_unit("a", &[0]), core_unit("b", &[last_core()])];
    println!("\nhand-off{:>42}{:>12}{:>12}", "median", "p10", "p90");
    for (name, spin_us) in [("between units, spinning", 2000), ("between units, parked", 0)] {
        let mut executor = idle_executor(&units, SEGMENTS, Duration::from_micros(spin_us), Duration::ZERO);
        let mut gaps = Vec::new();
        for run in 0..500 {
            executor.run_bound().unwrap();
            let timings = executor.timings();
            if run >= 20 {
                gaps.extend(timings.windows(2).map(|pair| (pair[1].start_ms - pair[0].end_ms) * 1e3));
            }
        }
        print_spread(name, gaps);
    }
    for (name, linger_us) in [("caller to lane and back, lingering", 100), ("caller to lane and back, parked", 0)] {
        let mut executor = idle_executor(&units[..1], 1, Duration::ZERO, Duration::from_micros(linger_us));
        let mut times = Vec::new();
        for run in 0..5000 {
            let began = Instant::now();
            executor.run_bound().unwrap();
            if run >= 100 {
                times.push(began.elapsed().as_secs_f64() * 1e6);
            }
        }
        print_spread(name, times);
    }
}

fn print_spread(name: &str, mut micros: Vec<f64>) {
    if let Some(samples) = trefoil_core::Samples::from_values(&mut micros) {
        println!("{name:<40}{:>8.2} µs{:>9.2} µs{:>9.2} µs", samples.median, samples.p10, samples.p90);
    }
}

fn idle_executor(units: &[Unit], segments: u32, spin: Duration, linger: Duration) -> Executor {
    let (graph, plan) = chain(segments, units, 256);
    let fake = Fake::leak(Behaviour { idle: true, ..Behaviour::default() });
    let find = fake.find(&plan);
    let options = ExecutorOptions { spin, linger, ..ExecutorOptions::default() };
    Executor::new(plan, &[&graph], &FakeSource(&graph), &find, &options).unwrap()
}

fn core_unit(name: &str, cores: &[u32]) -> Unit {
    let mut unit = unit(&format!("fake:{name}"), &[]);
    unit.resources = cores.iter().map(|&core| Resource::Core(core)).collect::<BTreeSet<_>>();
    unit
}

/// 100 segments on one lane, hand-off to the lane and back included.
#[divan::bench]
fn one_lane(bencher: Bencher<'_, '_>) {
    let mut executor = idle_executor(&[unit("fake:a", &["a"])], SEGMENTS, Duration::ZERO, Duration::ZERO);
    bencher.counter(ItemsCount::new(SEGMENTS)).bench_local(|| executor.run_bound());
}

/// 100 segments alternating between two lanes on a core each, so that every segment waits for the other lane, which
/// spins for so many microseconds before it sleeps.
#[divan::bench(args = [0, 20, 2000])]
fn two_lanes(bencher: Bencher<'_, '_>, spin_us: u64) {
    let units = [core_unit("a", &[0]), core_unit("b", &[last_core()])];
    let mut executor = idle_executor(&units, SEGMENTS, Duration::from_micros(spin_us), Duration::ZERO);
    bencher.counter(ItemsCount::new(SEGMENTS)).bench_local(|| executor.run_bound());
}

/// 100 segments on one lane, alternating between a unit on one core and one on all: an affinity call per segment.
#[divan::bench]
fn one_lane_switching_cores(bencher: Bencher<'_, '_>) {
    let units = [core_unit("a", &[0]), core_unit("b", trefoil_units::allowed_cores())];
    let mut executor = idle_executor(&units, SEGMENTS, Duration::ZERO, Duration::ZERO);
    bencher.counter(ItemsCount::new(SEGMENTS)).bench_local(|| executor.run_bound());
}

/// A whole run of one segment: what handing an inference to a lane costs when lane and caller linger for so many
/// microseconds.
#[divan::bench(args = [0, 100])]
fn handoff(bencher: Bencher<'_, '_>, linger_us: u64) {
    let linger = Duration::from_micros(linger_us);
    let mut executor = idle_executor(&[core_unit("a", &[0])], 1, Duration::ZERO, linger);
    bencher.bench_local(|| executor.run_bound());
}

/// The alternative to a hand-off: the caller enters the unit and leaves it again around every inference.
#[divan::bench]
fn caller_enters_and_leaves(bencher: Bencher<'_, '_>) {
    let unit = core_unit("a", &[0]);
    bencher.bench_local(|| drop(enter_unit(&unit).unwrap()));
}

fn last_core() -> u32 {
    *trefoil_units::allowed_cores().last().unwrap()
}

/// Executor against a plain loop, interleaved, medians.
fn real_backends() {
    let folder = tempfile::tempdir().unwrap();
    let model = models::relu_chain(folder.path(), SEGMENTS as usize, 64);
    println!("\nµs per segment   {:^29} {:^29}", "fastest of 100", "median of 100");
    println!(
        "{:<16} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}",
        "unit", "direct", "executor", "ours", "direct", "executor", "ours"
    );
    for backend in ["rten", "ort", "openvino"] {
        let address = format!("{backend}:CPU@0").parse().unwrap();
        let unit = match registry_units(&address) {
            Ok((_, unit)) => unit,
            Err(error) => {
                println!("{address:<16} skipped: {error}");
                continue;
            }
        };
        let plan = models::plan_of(&model.graph, &[unit], |_| 0);
        let source = PreparedSource::new(&model.prepared, &model.graph, folder.path().join("segments"));
        let mut executor =
            Executor::new(plan.clone(), &[&model.graph], &source, &registry_units, &ExecutorOptions::default())
                .unwrap();
        let (mut direct, mut ours) = (Vec::new(), Vec::new());
        // The direct loop runs on a thread of its own inside the unit, as the lane does; the two take turns.
        let (to_loop, orders) = std::sync::mpsc::channel::<()>();
        let (done, answers) = std::sync::mpsc::channel::<f64>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let (orders, done) = (orders, done);
                let (backend, unit) = registry_units(&address).unwrap();
                let mut segments = Direct::new(&plan, &source);
                segments.run();
                while orders.recv().is_ok() {
                    let began = Instant::now();
                    backend.run_inside(&unit, &mut || (0..10).for_each(|_| segments.run())).unwrap();
                    done.send(began.elapsed().as_secs_f64() * 1e6 / 10.0 / f64::from(SEGMENTS)).unwrap();
                }
            });
            executor.run_bound().unwrap();
            for _ in 0..100 {
                to_loop.send(()).unwrap();
                direct.push(answers.recv().unwrap());
                let began = Instant::now();
                for _ in 0..10 {
                    executor.run_bound().unwrap();
                }
                ours.push(began.elapsed().as_secs_f64() * 1e6 / 10.0 / f64::from(SEGMENTS));
            }
            drop(to_loop);
        });
        let median = |samples: &mut Vec<f64>| trefoil_run::stats::median_interval(samples).unwrap().median;
        let (direct_median, ours_median) = (median(&mut direct), median(&mut ours));
        // `median_interval` has sorted them: the fastest is what remains where nothing else ran meanwhile.
        println!(
            "{:<16} {:>9.3} {:>9.3} {:>9.3} {direct_median:>9.3} {ours_median:>9.3} {:>9.3}",
            address.to_string(),
            direct[0],
            ours[0],
            ours[0] - direct[0],
            ours_median - direct_median
        );
    }
}

/// The same segments, compiled and called without an executor.
struct Direct {
    compiled: Vec<Box<dyn Compiled>>,
    _buffers: Vec<trefoil_core::tensor::AlignedBytes>,
}

impl Direct {
    fn new(plan: &trefoil_core::Plan, source: &dyn SegmentSource) -> Self {
        let (backend, unit) = registry_units(&plan.segments[0].unit).unwrap();
        let _inside = enter_unit(&unit).unwrap();
        let mut buffers: Vec<_> =
            (0..=plan.segments.len()).map(|_| trefoil_core::tensor::AlignedBytes::zeroed(64 * 4)).collect();
        let bound: Vec<_> =
            buffers.iter_mut().map(|bytes| Buffer { pointer: bytes.as_mut_ptr(), length: bytes.len() }).collect();
        let compiled = (0..plan.segments.len())
            .map(|index| {
                let model = source.segment(plan, SegmentId(index as u32)).unwrap();
                let mut compiled = backend.compile(&model, &unit, &CompileOptions::default()).unwrap();
                // SAFETY: the buffers live as long as the compiled segments, beside them.
                unsafe { compiled.bind(&bound[index..=index], &bound[index + 1..index + 2]).unwrap() };
                compiled
            })
            .collect();
        Self { compiled, _buffers: buffers }
    }

    fn run(&mut self) {
        for compiled in &mut self.compiled {
            compiled.submit().unwrap();
            compiled.wait().unwrap();
        }
    }
}
