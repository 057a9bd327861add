//! Planning speed on one core. DESIGN 3: sequential 4,595 × 3 ≤ 50 µs and 24,917 × 3 ≤ 1 ms.

use trefoil_core::OperatorGraph;
use trefoil_plan::dag::solve;
use trefoil_plan::testing::{Numbers, ProfileBuilder, graph};
use trefoil_plan::{Budget, PlanOptions, PlanRequest, Problem, model_bound, plan, sequential_dp};

fn main() {
    divan::main();
}

/// Sizes of BIDENT's largest pipeline (VLA with denoising loop) and of the largest exported model.
#[divan::bench(args = [600, 4_595, 24_917])]
fn sequential_core(bencher: divan::Bencher<'_, '_>, operators: usize) {
    let mut numbers = Numbers(3);
    let mut table = || -> Vec<f64> { numbers.by_ref().take(operators * 3).collect() };
    let (w, h2d, d2h) = (table(), table(), table());
    bencher.bench_local(|| sequential_dp(divan::black_box(&w), &h2d, &d2h, &[false, true, true], 3));
}

/// A network with skip connections and branches, three units with random affinity, and whole-model times.
fn model(operators: u32) -> (OperatorGraph, ProfileBuilder) {
    let mut numbers = Numbers(9);
    let mut edges: Vec<(u32, u32)> = (1..operators).map(|to| (to - 1 - u32::from(to % 6 == 3 && to > 1), to)).collect();
    edges.extend((30..operators).step_by(11).map(|to| (to - 24, to)));
    let bytes: Vec<u64> = (0..operators).map(|_| 1000 + (2e6 * numbers.next().unwrap_or(0.0)) as u64).collect();
    let graph = graph(&bytes, &edges);
    let mut builder = ProfileBuilder::new(&graph).cpus(3).transfers(&[(0, 0.002), (2_000_000, 0.2)]);
    for unit in 0..3 {
        // Affinity comes in stretches of 40 operators, as layers of one kind do.
        let mut level = 1.0;
        let ms: Vec<Option<f64>> = (0..operators)
            .map(|at| {
                if at % 40 == 0 {
                    level = 0.2 + numbers.next().unwrap_or(0.0);
                }
                Some(level * (0.05 + numbers.next().unwrap_or(0.0)))
            })
            .collect();
        let total: f64 = ms.iter().flatten().sum();
        builder = builder.operators(unit, &ms).whole(unit, 0.6 * total);
    }
    (graph, builder)
}

#[divan::bench(args = [600, 5_000], sample_count = 10)]
fn interval(bencher: divan::Bencher<'_, '_>, operators: u32) {
    let (graph, builder) = model(operators);
    let request = PlanRequest::new(&builder.profile, &graph);
    bencher.bench_local(|| plan("interval", &request).map(|plan| plan.claimed));
}

/// The whole of `sequential`: reading the profile, the recurrence, pricing and simulating the plan.
#[divan::bench(args = [600, 5_000], sample_count = 10)]
fn sequential_whole(bencher: divan::Bencher<'_, '_>, operators: u32) {
    let (graph, builder) = model(operators);
    let request = PlanRequest::new(&builder.profile, &graph);
    bencher.bench_local(|| plan("sequential", &request).map(|plan| plan.claimed));
}

/// The scheduling problem of the same network, with slowdown while units overlap.
fn scheduled(operators: u32) -> Problem {
    let (graph, mut builder) = model(operators);
    for slowed in 0..3 {
        for other in (0..3).filter(|&other| other != slowed) {
            builder = builder.slowdown(slowed, other, 1.09);
        }
    }
    Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).expect("a sound profile")
}

/// Steps of one second on the machine that the default budget was set on; the makespan is what matters.
#[divan::bench(args = [600, 5_000], sample_count = 3)]
fn dag(bencher: divan::Bencher<'_, '_>, operators: u32) {
    let problem = scheduled(operators);
    bencher.bench_local(|| solve(&problem, &[], &PlanOptions::default()).map(|found| found.evaluation.makespan_ms));
}

/// One evaluation of a schedule by the simulator's engine.
#[divan::bench(args = [600, 5_000])]
fn evaluate(bencher: divan::Bencher<'_, '_>, operators: u32) {
    let problem = scheduled(operators);
    let found = solve(&problem, &[], &PlanOptions { budget: Budget::Steps(0), ..PlanOptions::default() });
    let schedule = found.expect("a schedule").schedule;
    bencher.bench_local(|| problem.evaluate(&schedule).map(|found| found.makespan_ms));
}

#[divan::bench(args = [600, 5_000])]
fn bound(bencher: divan::Bencher<'_, '_>, operators: u32) {
    let problem = scheduled(operators);
    bencher.bench_local(|| model_bound(&problem).value);
}
