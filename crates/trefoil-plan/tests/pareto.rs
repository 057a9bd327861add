//! `pareto` against every assignment of small chains, and its promises elsewhere.

use proptest::prelude::*;
use trefoil_core::UnitKind;
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::list_scheduling::heft;
use trefoil_plan::pareto::{Cost, pareto};
use trefoil_plan::testing::{ProfileBuilder, chain};
use trefoil_plan::{Budget, PlanOptions, PlanRequest, Problem, pareto_plans};

/// Every undominated (latency, energy) of a chain, by trying all assignments: times and joules of one after another.
fn brute_force(ms: &[Vec<f64>], watts: &[f64], transfer: f64) -> Vec<(f64, f64)> {
    let (count, units) = (ms[0].len(), watts.len());
    let mut all: Vec<(f64, f64)> = Vec::new();
    for code in 0..units.pow(count as u32) {
        let unit = |at: usize| code / units.pow(at as u32) % units;
        let (mut time, mut joules) = (0.0, 0.0);
        for at in 0..count {
            let moved = if at > 0 && unit(at) != unit(at - 1) { transfer } else { 0.0 };
            let spent = ms[unit(at)][at] + moved;
            time += spent;
            joules += spent * watts[unit(at)] / 1e3;
        }
        all.push((time, joules));
    }
    let beaten = |point: &(f64, f64)| {
        all.iter().any(|other| {
            other.0 <= point.0 * (1.0 + 1e-9)
                && other.1 <= point.1 * (1.0 + 1e-9)
                && (other.0 < point.0 * (1.0 - 1e-9) || other.1 < point.1 * (1.0 - 1e-9))
        })
    };
    let mut front: Vec<(f64, f64)> = all.iter().copied().filter(|point| !beaten(point)).collect();
    front.sort_by(|a, b| a.0.total_cmp(&b.0));
    front.dedup_by(|a, b| (a.0 - b.0).abs() < 1e-9 * a.0 && (a.1 - b.1).abs() < 1e-9 * a.1);
    front
}

fn chain_problem(ms: &[Vec<f64>], watts: &[f64], transfer: f64) -> Problem {
    let graph = chain(ms[0].len(), 64);
    let mut builder = ProfileBuilder::new(&graph).cpus(ms.len());
    for (unit, row) in ms.iter().enumerate() {
        builder = builder.operators(unit, &row.iter().copied().map(Some).collect::<Vec<_>>()).watts(unit, watts[unit]);
    }
    builder = builder.transfers(&[(64, transfer)]);
    Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { 2000 } else { 150 }))]

    #[test]
    fn fronts_of_chains_are_exact(
        count in 1usize..7,
        numbers in proptest::collection::vec(0.1..5.0f64, 18),
        watts in proptest::collection::vec(1.0..30.0f64, 3),
        transfer in 0.0..1.0f64,
        units in 2usize..4,
    ) {
        let ms: Vec<Vec<f64>> = (0..units).map(|unit| numbers[unit * 6..][..count].to_vec()).collect();
        let problem = chain_problem(&ms, &watts[..units], transfer);
        let front = pareto(&problem, &[]);
        prop_assert!(front.exact);
        let expected = brute_force(&ms, &watts[..units], transfer);
        prop_assert_eq!(front.points.len(), expected.len(), "{:?} and {:?}", front.points, expected);
        for (point, (time, joules)) in front.points.iter().zip(expected) {
            prop_assert!((point.cost.latency_ms - time).abs() < 1e-9 * time);
            prop_assert!((point.cost.energy_j.unwrap() - joules).abs() < 1e-9 * joules);
            let evaluation = problem.evaluate(&point.schedule).unwrap();
            prop_assert!((evaluation.makespan_ms - time).abs() < 1e-9 * time, "the simulator agrees");
            prop_assert!((evaluation.energy_j.unwrap() - joules).abs() < 1e-9 * joules);
        }
    }
}

#[test]
fn memory_limits_are_obeyed() {
    let mut graph = chain(4, 64);
    graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 100);
    let mut builder = ProfileBuilder::new(&graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("b:NPU", UnitKind::Npu)
        .operators(0, &[2.0, 2.0, 2.0, 2.0].map(Some))
        .operators(1, &[1.0, 1.0, 1.0, 1.0].map(Some))
        .transfers(&[(64, 0.01)])
        .watts(0, 10.0)
        .watts(1, 10.0);
    builder.profile.units[1].limits.memory_bytes = Some(250);
    let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
    let front = pareto(&problem, &[]);
    assert!(front.exact && front.points.len() == 1);
    // Two of four fit on the faster unit, side by side at one end: one crossing.
    let on = front.points[0].schedule.unit.iter().filter(|&&unit| unit == 1).count();
    assert_eq!((on, front.points[0].cost.memory_bytes), (2, 400));
    assert!((front.points[0].cost.latency_ms - 6.01).abs() < 1e-9);
}

#[test]
fn shared_weights_make_a_front_of_latency_and_memory() {
    // One model, two iterations of it after each other: weights are held once where both run on one unit.
    let mut graph = chain(2, 64);
    graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 1000);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[1.0, 3.0].map(Some))
        .operators(1, &[3.0, 1.0].map(Some))
        .transfers(&[(64, 0.1)]);
    let single = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
    let mut jobs = single.jobs().to_vec();
    jobs.extend(single.jobs().iter().cloned().map(|mut job| {
        job.iteration = 1;
        job.ms.reverse();
        job
    }));
    let mut tensors: Vec<_> = single.tensors().iter().filter(|tensor| tensor.producer.is_some()).cloned().collect();
    tensors[0].consumers = vec![1];
    tensors.truncate(1);
    for producer in [1, 2] {
        let mut next = tensors[0].clone();
        next.producer = Some(producer);
        next.consumers = vec![producer + 1];
        tensors.push(next);
    }
    let problem = Problem::new(
        single.units().to_vec(),
        single.resources().to_vec(),
        jobs,
        tensors,
        single.requests().to_vec(),
        single.factors().clone(),
        None,
    )
    .unwrap();
    let front = pareto(&problem, &[]);
    assert!(front.exact);
    let costs: Vec<(f64, u64)> =
        front.points.iter().map(|point| (point.cost.latency_ms, point.cost.memory_bytes)).collect();
    // Fastest: 1 + 1 + 1 + 1 with a crossing in the first and the second iteration, everything held twice. Least memory: each
    // operator on one unit in both iterations.
    assert_eq!(costs.first().map(|cost| cost.1), Some(4000));
    assert_eq!(costs.last().map(|cost| cost.1), Some(2000));
    assert!(costs.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1), "{costs:?}");
}

#[test]
fn elsewhere_the_front_holds_the_planners_own_plans_and_nothing_dominated() {
    let made = instance(&GraphSpec { shape: Shape::Network, operators: 39, units: 3, slowdown: 1.2, seed: 6 });
    let request = PlanRequest::new(&made.profile, &made.graph);
    let front =
        pareto_plans(&request, &PlanOptions { budget: Budget::Steps(100_000), ..PlanOptions::default() }).unwrap();
    assert!(!front.exact && front.points.len() > 3, "{}", front.points.len());
    let covers = |a: &Cost, b: &Cost| {
        a.latency_ms <= b.latency_ms && a.energy_j.unwrap() <= b.energy_j.unwrap() && a.memory_bytes <= b.memory_bytes
    };
    for (at, (cost, plan)) in front.points.iter().enumerate() {
        assert!((plan.claimed - cost.latency_ms).abs() < 1e-9 * cost.latency_ms);
        assert!(front.points.iter().enumerate().all(|(other, point)| other == at || !covers(&point.0, cost)));
    }
    let problem = Problem::from_request(&request).unwrap();
    let heft = problem.evaluate(&heft(&problem)).unwrap();
    assert!(front.points[0].0.latency_ms <= heft.makespan_ms * (1.0 + 1e-9));
    assert!(front.points.last().unwrap().0.energy_j.unwrap() <= heft.energy_j.unwrap() * (1.0 + 1e-9));
}
