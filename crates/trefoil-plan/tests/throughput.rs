//! Pipelines of a model against every assignment of small chains, and the period's bound.

use proptest::prelude::*;
use trefoil_core::{Objective, OperatorGraph};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, chain};
use trefoil_plan::{PlanError, PlanOptions, PlanRequest, certificate, plan, plan_several};

/// The shortest period of a chain over all assignments: the busiest unit's work for one item.
fn brute_force(ms: &[Vec<f64>], transfer: f64) -> f64 {
    let (count, units) = (ms[0].len(), ms.len());
    (0..units.pow(count as u32))
        .map(|code| {
            let unit = |at: usize| code / units.pow(at as u32) % units;
            let mut load = vec![0.0; units];
            for at in 0..count {
                let moved = if at > 0 && unit(at) != unit(at - 1) { transfer } else { 0.0 };
                load[unit(at)] += ms[unit(at)][at] + moved;
            }
            load.into_iter().fold(0.0, f64::max)
        })
        .fold(f64::INFINITY, f64::min)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn periods_lie_between_the_bound_and_one_unit_and_near_the_best(
        count in 2usize..8,
        numbers in proptest::collection::vec(0.5..5.0f64, 16),
        transfer in 0.0..0.5f64,
    ) {
        // The last operator takes no time: dispatch is free, and segments cost their operators' sum.
        let ms: Vec<Vec<f64>> = (0..2).map(|unit| [&numbers[unit * 8..][..count], &[0.0]].concat()).collect();
        let graph = chain(count + 1, 64);
        let mut builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(64, transfer)]);
        for (unit, row) in ms.iter().enumerate() {
            builder = builder.operators(unit, &row.iter().copied().map(Some).collect::<Vec<_>>());
        }
        let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&builder.profile, &graph) };
        let found = plan("pipeline", &request).unwrap();
        let best = brute_force(&ms, transfer);
        let alone = ms.iter().map(|row| row.iter().sum::<f64>()).fold(f64::INFINITY, f64::min);
        prop_assert!(found.model_bound.unwrap() <= best * (1.0 + 1e-9));
        prop_assert!(found.claimed <= alone * (1.0 + 1e-9), "{} and {alone}", found.claimed);
        prop_assert!(found.claimed <= best * 1.1 + 1e-9, "{} and {best}", found.claimed);
        prop_assert!(found.claimed >= found.model_bound.unwrap() * (1.0 - 1e-9));
    }
}

#[test]
fn streams_are_planned_on_every_shape() {
    for shape in Shape::ALL {
        let made = instance(&GraphSpec { shape, operators: 120, units: 3, slowdown: 1.2, seed: 9 });
        let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&made.profile, &made.graph) };
        let found = plan("auto", &request).unwrap();
        assert_eq!(found.objective, Objective::Throughput);
        assert!(found.claimed < found.simulated_ms, "{shape}: units work on different items");
        assert!(found.gap.is_some_and(|gap| gap < 2.6), "{shape}: {:?}", found.gap);
    }
}

/// A model whose whole takes these milliseconds, by unit; operators alone take twice that. Units slow each other by `factor`.
fn fused(number: u64, whole: &[f64], factor: f64) -> (OperatorGraph, ProfileBuilder) {
    let mut graph = chain(3, 64);
    graph.model = format!("model {number}");
    graph.fingerprint = format!("{number:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{number:016x}{at:016x}");
    }
    let units = whole.len();
    let mut builder = ProfileBuilder::new(&graph).cpus(units).transfers(&[(0, 0.05)]);
    for (unit, &ms) in whole.iter().enumerate() {
        builder = builder.operators(unit, &[Some(2.0 * ms / 3.0); 3]).whole(unit, ms);
        for other in (0..units).filter(|&other| other != unit) {
            builder = builder.slowdown(unit, other, factor);
        }
    }
    (graph, builder)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Rounds of whole models: no placement of them has a shorter period, and neither has any unit that takes turns.
    #[test]
    fn rounds_of_several_models_are_never_longer_than_whole_models_placed(
        whole in proptest::collection::vec(proptest::collection::vec(0.5..4.0f64, 3), 2..4),
        slow in prop_oneof![Just(1.0), 1.0..2.5f64],
    ) {
        let made: Vec<(OperatorGraph, ProfileBuilder)> =
            whole.iter().zip(1..).map(|(whole, number)| fused(number, whole, slow)).collect();
        let requests: Vec<PlanRequest<'_>> = made
            .iter()
            .map(|(graph, builder)| PlanRequest {
                objective: Objective::Throughput,
                ..PlanRequest::new(&builder.profile, graph)
            })
            .collect();
        let found = plan_several("auto", &requests, &PlanOptions::default()).unwrap();
        let graphs: Vec<&OperatorGraph> = made.iter().map(|(graph, _)| graph).collect();
        found.check(&graphs).unwrap();
        prop_assert_eq!(found.objective, Objective::Throughput);
        prop_assert!(found.model_bound.unwrap() <= found.claimed * (1.0 + 1e-9));
        // By hand: the busiest unit's work, every unit as slow as another makes it, if there is another.
        let models = whole.len() as u32;
        let best = (0..3usize.pow(models))
            .map(|code| {
                let mut load = [0.0; 3];
                whole.iter().zip(0..).for_each(|(ms, model)| {
                    let unit = code / 3usize.pow(model) % 3;
                    load[unit] += ms[unit];
                });
                let busy = load.iter().filter(|&&load| load > 0.0).count();
                load.into_iter().fold(0.0, f64::max) * if busy > 1 { slow } else { 1.0 }
            })
            .fold(f64::INFINITY, f64::min);
        prop_assert!(found.claimed <= best * (1.0 + 1e-9), "{} and by hand {best}", found.claimed);
        // The checker verifies the work of a round and its bound.
        let paper = serde_json::to_value(certificate(&requests, &found).unwrap()).unwrap();
        let profiles: Vec<_> =
            made.iter().map(|(_, builder)| serde_json::to_value(&builder.profile).unwrap()).collect();
        let verdict = trefoil_check::check(&paper, &profiles).map_err(|error| TestCaseError::fail(error.to_string()))?;
        let own = found.own.unwrap();
        prop_assert!((verdict.value - own.value).abs() <= 1e-9 * own.value);
        prop_assert!(verdict.bound.unwrap() <= own.value * (1.0 + 1e-9));
    }
}

#[test]
fn rounds_are_of_several_models_and_of_those_planners_that_can() {
    let (graph, builder) = fused(1, &[1.0, 1.0], 1.0);
    let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&builder.profile, &graph) };
    for (method, requests) in [("joint", vec![request.clone(), request.clone()]), ("concurrent", vec![request.clone()])]
    {
        let error = plan_several(method, &requests, &PlanOptions::default()).unwrap_err();
        assert!(matches!(error, PlanError::Objective { .. }), "{error}");
        assert!(error.to_string().contains("`concurrent` rounds of several"), "{error}");
    }
    // One model twice: each inference of a round on a unit of its own.
    let found = plan_several("concurrent", &[request.clone(), request], &PlanOptions::default()).unwrap();
    assert!((found.claimed - 1.0).abs() < 1e-9, "{}", found.claimed);
    assert!(found.notes.iter().any(|note| note.contains("of each of the")), "{:?}", found.notes);
}
