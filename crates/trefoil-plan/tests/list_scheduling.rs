//! Baselines give valid schedules that no bound exceeds, and HEFT finds what it should on the obvious cases.

use trefoil_core::UnitKind;
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::list_scheduling::{fastest_unit, heft};
use trefoil_plan::testing::{ProfileBuilder, graph};
use trefoil_plan::{PlanRequest, Problem, model_bound};

#[test]
fn schedules_are_valid_and_above_the_bound() {
    for shape in Shape::ALL {
        for (operators, units, slowdown) in [(1, 1, 0.0), (9, 2, 1.3), (60, 3, 1.2), (200, 5, 0.0)] {
            let made = instance(&GraphSpec { shape, operators, units, slowdown, seed: 3 });
            let problem = Problem::from_request(&PlanRequest::new(&made.profile, &made.graph)).unwrap();
            let bound = model_bound(&problem).value;
            for schedule in [heft(&problem), fastest_unit(&problem)] {
                let evaluation = problem.evaluate(&schedule).unwrap();
                assert!(evaluation.makespan_ms >= bound * (1.0 - 1e-9), "{}", made.spec);
            }
        }
    }
}

#[test]
fn heft_spreads_independent_work_and_avoids_dear_transfers() {
    // Two branches of equal work on two equal units.
    let branches = |ms: f64| {
        let graph = graph(&[8, 8, 8, 8], &[(0, 1), (0, 2), (1, 3), (2, 3)]);
        let builder = ProfileBuilder::new(&graph)
            .unit("a:CPU", UnitKind::Cpu)
            .unit("b:CPU", UnitKind::Cpu)
            .operators(0, &[1.0, 4.0, 4.0, 1.0].map(Some))
            .operators(1, &[1.0, 4.0, 4.0, 1.0].map(Some))
            .transfers(&[(8, ms)]);
        let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
        problem.evaluate(&heft(&problem)).unwrap().makespan_ms
    };
    assert!((branches(0.5) - 7.0).abs() < 1e-9, "{}", branches(0.5));
    assert!((branches(50.0) - 10.0).abs() < 1e-9, "one unit alone: {}", branches(50.0));
}

#[test]
fn heft_fills_gaps() {
    // op0 runs on `a` only and feeds op1 (b only); op2 is free and short: it fits before op0's successor.
    let graph = graph(&[8, 8, 8], &[(0, 1)]);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(4.0), None, None])
        .operators(1, &[None, Some(4.0), Some(3.0)])
        .transfers(&[(8, 0.5)]);
    let problem = Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
    let evaluation = problem.evaluate(&heft(&problem)).unwrap();
    assert!((evaluation.makespan_ms - 8.5).abs() < 1e-9, "{}", evaluation.makespan_ms);
}
