//! Planning speed on one core. DESIGN 3: sequential 4,595 × 3 ≤ 50 µs and 24,917 × 3 ≤ 1 ms; joint 500 × 500 × 3 ≤ 20 ms
//! and 4,595 × 500 × 3 ≤ 200 ms.

use trefoil_core::{OperatorClass, OperatorGraph, Profile, Resource, Unit, UnitKind};
use trefoil_plan::dag::solve;
use trefoil_plan::stream::{StreamProblem, StreamUnit, VideoRates, plan_stream};
use trefoil_plan::testing::{Numbers, ProfileBuilder, graph};
use trefoil_plan::together::{RateStream, placed, served, tail_cuts};
use trefoil_plan::{
    AlignedCosts, Budget, PairCosts, PairOperators, PairRules, PlanOptions, PlanRequest, Problem, SharedModel,
    TogetherRequest, aligned_dp, joint_dp, joint_units_dp, model_bound, plan, sequential_dp,
};

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

/// A table of random costs.
fn table(numbers: &mut Numbers, operators: usize) -> Vec<f64> {
    numbers.take(operators * 3).map(|value| 0.05 + value).collect()
}

#[divan::bench(args = [500, 4_595])]
fn aligned_core(bencher: divan::Bencher<'_, '_>, operators: usize) {
    let mut numbers = Numbers(7);
    let mut next = || table(&mut numbers, operators);
    let (solo, together, enter, leave) = (next(), next(), next(), next());
    let costs = AlignedCosts { solo: &solo, together: &together, enter: &enter, leave: &leave };
    bencher.bench_local(|| aligned_dp(divan::black_box(costs), 3));
}

const PAIRS: [(usize, usize); 3] = [(500, 500), (4_595, 500), (4_595, 4_595)];

/// BIDENT's literal joint search.
#[divan::bench(args = PAIRS, sample_count = 20)]
fn joint_core(bencher: divan::Bencher<'_, '_>, (n, m): (usize, usize)) {
    let mut numbers = Numbers(7);
    let (w0, c0) = (table(&mut numbers, n), table(&mut numbers, n));
    let (w1, c1) = (table(&mut numbers, m), table(&mut numbers, m));
    let first = PairCosts { solo: &w0, concurrent: &c0 };
    let second = PairCosts { solo: &w1, concurrent: &c1 };
    bencher.bench_local(|| joint_dp(divan::black_box(first), second, 3));
}

/// With units in the state.
#[divan::bench(args = PAIRS, sample_count = 5)]
fn joint_units_core(bencher: divan::Bencher<'_, '_>, (n, m): (usize, usize)) {
    let mut numbers = Numbers(7);
    let classes = vec![OperatorClass::Memory; n.max(m)];
    let mut next = |count: usize| table(&mut numbers, count);
    let (w0, e0, l0, w1, e1, l1) = (next(n), next(n), next(n), next(m), next(m), next(m));
    let first = PairOperators { ms: &w0, enter: &e0, leave: &l0, classes: &classes[..n] };
    let second = PairOperators { ms: &w1, enter: &e1, leave: &l1, classes: &classes[..m] };
    let factors = vec![1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.17, 1.09, 1.0];
    let rules = PairRules {
        disjoint: (0..9).map(|at| at / 3 != at % 3).collect(),
        slowdown: std::array::from_fn(|_| std::array::from_fn(|_| factors.clone())),
        solo: vec![1.0; 3],
        overlap: vec![1.0; 9],
    };
    bencher.bench_local(|| joint_units_dp(divan::black_box(first), second, &rules, 3));
}

/// HeteroVDiff's 180 blocks and decoder over 2 to 4 units, each once.
#[divan::bench(args = [2, 3, 4], sample_count = 10)]
fn stream_stages(bencher: divan::Bencher<'_, '_>, units: usize) {
    let problem = stream(units, false, None);
    bencher.bench_local(|| plan_stream(divan::black_box(&problem)).map(|plan| plan.period));
}

/// Two units, each as often as handoffs allow.
#[divan::bench(args = [2, 3], sample_count = 10)]
fn stream_revisits(bencher: divan::Bencher<'_, '_>, handoffs: u32) {
    let problem = stream(2, true, Some(handoffs));
    bencher.bench_local(|| plan_stream(divan::black_box(&problem)).map(|plan| (plan.period, plan.exact)));
}

fn stream(units: usize, revisits: bool, most_handoffs: Option<u32>) -> StreamProblem {
    let mut problem = StreamProblem::from_rates(VideoRates { first: 13.25, second: 3.16, decoder: 267.0 }, 180);
    let mut numbers = Numbers(3);
    for extra in 2..units {
        problem.units.push(StreamUnit { name: format!("u{extra}"), resource: None, memory_bytes: None });
        for block in &mut problem.blocks {
            block.cost.push(Some(8.0 + 4.0 * numbers.next().unwrap_or(0.0)));
        }
    }
    problem.most_handoffs = most_handoffs;
    problem.revisits = revisits;
    problem
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

/// Models of 600 operators, each with its times on all of four cores and on one.
fn several(models: usize) -> (Vec<(OperatorGraph, Profile)>, Vec<Unit>) {
    let mut all = Vec::new();
    let mut units = Vec::new();
    for number in 0..models {
        let (graph, _) = model(600);
        let scale = 1.0 + number as f64;
        let mut builder = ProfileBuilder::new(&graph);
        for address in ["a:CPU", "a:CPU@0", "a:CPU@1", "a:CPU@2", "a:CPU@3"] {
            builder = builder.unit(address, UnitKind::Cpu);
        }
        for unit in 0..5 {
            let ms = if unit == 0 { scale } else { 2.2 * scale };
            builder = builder.operators(unit, &[Some(ms / 600.0); 600]).whole(unit, ms);
        }
        for unit in &mut builder.profile.units {
            let cores = if unit.address.cores.is_empty() { vec![0, 1, 2, 3] } else { unit.address.cores.clone() };
            unit.resources = cores.into_iter().map(Resource::Core).collect();
        }
        units.clone_from(&builder.profile.units);
        all.push((graph, builder.profile));
    }
    (all, units)
}

fn together_request<'a>(models: &'a [(OperatorGraph, Profile)], units: &[Unit]) -> TogetherRequest<'a> {
    let models = models.iter().map(|(graph, profile)| SharedModel { profile, graph }).collect();
    TogetherRequest::new(models, units.to_vec())
}

/// What `--adapt` does between two rounds.
#[divan::bench(args = [2, 4, 8], sample_count = 10)]
fn placed_together(bencher: divan::Bencher<'_, '_>, models: usize) {
    let (models, units) = several(models);
    let request = together_request(&models, &units);
    bencher.bench_local(|| placed(&request).map(|plan| plan.claimed));
}

#[divan::bench(args = [2, 4], sample_count = 10)]
fn cut_together(bencher: divan::Bencher<'_, '_>, models: usize) {
    let (models, units) = several(models);
    let request = together_request(&models, &units);
    bencher.bench_local(|| tail_cuts(&request, 1).map(|plans| plans.len()));
}

#[divan::bench(args = [2, 4], sample_count = 10)]
fn served_together(bencher: divan::Bencher<'_, '_>, models: usize) {
    let (models, units) = several(models);
    let request = together_request(&models, &units);
    let stream = |number: usize| RateStream {
        period_ms: 10.0 + number as f64,
        offset_ms: 0.0,
        deadline_ms: Some(20.0),
        priority: 0,
    };
    let streams: Vec<RateStream> = (0..models.len()).map(stream).collect();
    bencher.bench_local(|| served(&request, &streams, 1000.0).map(|(plan, _)| plan.claimed));
}
