//! The simulator against a time-stepped oracle, on random parallel plans.

use proptest::prelude::*;
use std::collections::BTreeMap;
use trefoil_core::{
    CostRef, Objective, OperatorClass, Origin, Plan, Resource, Task, TaskId, Timeline, Unit, UnitAddress, UnitKind,
    UnitLimits, Work,
};
use trefoil_plan::simulate::resource_keys;
use trefoil_plan::{PlanError, SimulationModel, simulate};

const UNITS: [&str; 4] = ["a:CPU@0", "a:CPU@0-1", "a:GPU", "a:NPU"];

fn units() -> Vec<Unit> {
    UNITS
        .iter()
        .map(|text| {
            let address: UnitAddress = text.parse().unwrap();
            let resources = match address.cores.as_slice() {
                [] => std::iter::once(Resource::Device(text.to_string())).collect(),
                cores => cores.iter().map(|&core| Resource::Core(core)).collect(),
            };
            Unit {
                address,
                kind: UnitKind::Cpu,
                resources,
                limits: UnitLimits::default(),
                simulated: false,
                description: None,
            }
        })
        .collect()
}

/// Tasks `(unit, ms, after)`; every resource runs them by id.
fn plan_of(tasks: &[(usize, f64, Vec<u32>)]) -> Plan {
    let units = units();
    let mut order: BTreeMap<String, Vec<TaskId>> = BTreeMap::new();
    for (index, (unit, ..)) in tasks.iter().enumerate() {
        for key in resource_keys(&units[*unit]) {
            order.entry(key).or_default().push(TaskId(index as u32));
        }
    }
    Plan {
        format: trefoil_core::plan::PLAN_FORMAT.to_owned(),
        version: trefoil_core::plan::PLAN_VERSION,
        method: "test".to_owned(),
        objective: Objective::Latency,
        models: Vec::new(),
        requests: Vec::new(),
        links: Vec::new(),
        segments: Vec::new(),
        tasks: tasks
            .iter()
            .map(|(unit, ms, after)| Task {
                work: Work::Blocks { first: 0, count: 1 },
                unit: units[*unit].address.clone(),
                iteration: 0,
                item: 0,
                after: after.iter().map(|&at| TaskId(at)).collect(),
                cost: CostRef { ms: *ms, joules: None, origin: Origin::Measured, measurements: Vec::new() },
            })
            .collect(),
        units,
        order,
        claimed: 0.0,
        simulated_ms: 0.0,
        model_bound: None,
        gap: None,
        exact: false,
        own: None,
        simulated_j: None,
        weighted: false,
        all_measured: false,
        notes: Vec::new(),
        timeline: Timeline { origin: Origin::Predicted, lanes: Vec::new() },
    }
}

fn model(factors: &[f64]) -> SimulationModel {
    let address = |at: usize| -> UnitAddress { UNITS[at].parse().unwrap() };
    let mut model = SimulationModel { idle_watts: Some(2.0), ..SimulationModel::default() };
    for slowed in 0..4 {
        model.watts.insert(address(slowed), 5.0 + slowed as f64);
        for other in (0..4).filter(|&other| other != slowed) {
            let class = (OperatorClass::Memory, OperatorClass::Memory);
            model
                .slowdown
                .insert((address(slowed), address(other)), BTreeMap::from([(class, factors[slowed * 4 + other])]));
        }
    }
    model
}

/// Steps of fixed length; a task that has less than a step left ends at the step's end. Times are off by at most one step
/// per task on the critical path.
fn by_steps(tasks: &[(usize, f64, Vec<u32>)], factors: &[f64], step: f64) -> (f64, f64) {
    let cores: [&[usize]; 4] = [&[0], &[0, 1], &[2], &[3]];
    let mut left: Vec<f64> = tasks.iter().map(|task| task.1).collect();
    let mut started = vec![false; tasks.len()];
    let mut ended = vec![false; tasks.len()];
    let (mut steps, mut joules) = (0u64, 0.0);
    while !ended.iter().all(|&e| e) {
        // Zero-length tasks may start and end without time passing, hence the inner loop.
        loop {
            for at in 0..tasks.len() {
                let (unit, _, after) = &tasks[at];
                let shares = |other: usize| cores[tasks[other].0].iter().any(|core| cores[*unit].contains(core));
                let turn = (0..at).all(|before| !shares(before) || ended[before]);
                if !started[at] && turn && after.iter().all(|&before| ended[before as usize]) {
                    started[at] = true;
                }
            }
            let finished: Vec<_> =
                (0..tasks.len()).filter(|&at| started[at] && !ended[at] && left[at] <= 1e-12).collect();
            if finished.is_empty() {
                break;
            }
            for at in finished {
                ended[at] = true;
            }
        }
        let running: Vec<_> = (0..tasks.len()).filter(|&at| started[at] && !ended[at]).collect();
        if running.is_empty() {
            break;
        }
        for &at in &running {
            let others = running.iter().filter(|&&other| other != at);
            let factor = others.map(|&other| factors[tasks[at].0 * 4 + tasks[other].0]).reduce(f64::max).unwrap_or(1.0);
            left[at] = (left[at] - step / factor).max(0.0);
        }
        let watts: f64 = running.iter().map(|&at| 5.0 + tasks[at].0 as f64 - 2.0).sum();
        joules += (2.0 + watts) * step / 1e3;
        steps += 1;
    }
    (steps as f64 * step, joules)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn agrees_with_small_steps(
        tasks in proptest::collection::vec((0usize..4, 0.0..3.0f64, proptest::collection::vec(0u32..8, 0..3)), 1..8),
        factors in proptest::collection::vec(0.7..2.0f64, 16),
    ) {
        let tasks: Vec<_> = tasks
            .into_iter()
            .enumerate()
            .map(|(at, (unit, ms, after))| (unit, ms, after.into_iter().filter(|&before| (before as usize) < at).collect::<Vec<_>>()))
            .collect();
        let step = 2e-4;
        let found = simulate(&plan_of(&tasks), &model(&factors)).unwrap();
        let (makespan, joules) = by_steps(&tasks, &factors, step);
        let slack = step * (tasks.len() as f64 + 1.0) * 2.0;
        prop_assert!((found.makespan_ms - makespan).abs() <= slack, "{} and {makespan}", found.makespan_ms);
        prop_assert!((found.energy_j.unwrap() - joules).abs() <= slack * 40.0 / 1e3, "{:?} and {joules}", found.energy_j);
        // Nothing overlaps on a resource, and lanes hold every task once.
        let spans: usize = found.timeline.lanes.iter().map(|lane| lane.spans.len()).sum();
        prop_assert_eq!(spans, tasks.len());
        for lane in &found.timeline.lanes {
            prop_assert!(lane.spans.windows(2).all(|pair| pair[0].end_ms <= pair[1].start_ms + 1e-12));
        }
    }
}

#[test]
fn two_units_slow_each_other_only_while_both_run() {
    // GPU 2 ms, NPU 1 ms, both from 0; each halves the other. NPU ends at 2 with the GPU half done: 2 + 1.
    let mut factors = [1.0; 16];
    (factors[2 * 4 + 3], factors[3 * 4 + 2]) = (2.0, 2.0);
    let found = simulate(&plan_of(&[(2, 2.0, vec![]), (3, 1.0, vec![])]), &model(&factors)).unwrap();
    assert!((found.makespan_ms - 3.0).abs() < 1e-12);
    // 2 ms of both (7 + 8 − 2 W) and 1 ms of the GPU (7 W).
    assert!((found.energy_j.unwrap() - (2.0 * 13.0 + 7.0) / 1e3).abs() < 1e-12);
}

#[test]
fn unknown_power_is_none_and_idle_matters_only_where_it_counts() {
    let mut no_idle = model(&[1.0; 16]);
    no_idle.idle_watts = None;
    let alone = simulate(&plan_of(&[(2, 2.0, vec![]), (3, 1.0, vec![0])]), &no_idle).unwrap();
    assert!((alone.energy_j.unwrap() - (2.0 * 7.0 + 8.0) / 1e3).abs() < 1e-12);
    assert_eq!(simulate(&plan_of(&[(2, 2.0, vec![]), (3, 1.0, vec![])]), &no_idle).unwrap().energy_j, None);
    no_idle.watts.clear();
    assert_eq!(simulate(&plan_of(&[(2, 2.0, vec![])]), &no_idle).unwrap().energy_j, None);
}

#[test]
fn a_circle_between_order_and_inputs_is_named() {
    let mut plan = plan_of(&[(2, 1.0, vec![]), (2, 1.0, vec![0])]);
    plan.order.insert("device:a:GPU".to_owned(), vec![TaskId(1), TaskId(0)]);
    let error = simulate(&plan, &SimulationModel::default()).unwrap_err();
    assert!(matches!(&error, PlanError::Stuck { reason } if reason.contains("task 0 on a:GPU")), "{error}");
    let mut missing = plan_of(&[(2, 1.0, vec![])]);
    missing.tasks[0].after.push(TaskId(9));
    assert!(simulate(&missing, &SimulationModel::default()).unwrap_err().to_string().contains("task 9"));
}
