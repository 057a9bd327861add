//! What plans say of their quality: one meaning for every method, and no method that another one beats the bound of.

// Names follow the papers; numbers are compared with a tolerance.
#![allow(clippy::float_cmp)]

use trefoil_core::{Objective, Plan};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{
    Application, Budget, Clock, ConcurrentRequest, METHODS, PlanOptions, PlanRequest, concurrent, plan, plan_several,
    plan_with,
};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(60_000), ..PlanOptions::default() }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs())
}

/// Planners of one inference.
fn methods() -> Vec<String> {
    let names = METHODS.iter().map(|method| method.name).filter(|name| !["pipeline", "single:UNIT"].contains(name));
    names.map(str::to_owned).collect()
}

#[test]
fn bound_and_gap_mean_the_same_for_every_method() {
    let mut compared = 0;
    for shape in Shape::ALL {
        for (operators, units, slowdown, seed) in [(5, 2, 1.3, 1), (9, 3, 0.0, 2), (40, 3, 1.25, 3), (90, 2, 0.0, 4)] {
            let made = instance(&GraphSpec { shape, operators, units, slowdown, seed });
            for objective in [Objective::Latency, Objective::Energy] {
                let request = PlanRequest { objective, ..PlanRequest::new(&made.profile, &made.graph) };
                let mut names = methods();
                names.extend(made.profile.units.iter().map(|unit| format!("single:{}", unit.address)));
                let plans: Vec<(String, Plan)> = names
                    .into_iter()
                    .filter_map(|name| Some((name.clone(), plan_with(&name, &request, &quick()).ok()?)))
                    .collect();
                assert!(plans.len() >= methods().len());
                let bound = plans[0].1.model_bound.unwrap();
                let least = plans.iter().map(|(_, plan)| plan.simulated()).fold(f64::INFINITY, f64::min);
                assert!(bound > 0.0 && bound <= least * (1.0 + 1e-9), "{}: {bound} and {least}", made.spec);
                for (name, plan) in &plans {
                    let what = format!("{name} on {} for {objective:?}", made.spec);
                    // A bound above a plan's own cost by rounding is cut down to it.
                    assert!(close(plan.model_bound.unwrap(), bound), "{what}: {:?} and {bound}", plan.model_bound);
                    assert!(close(plan.gap.unwrap(), plan.simulated() / bound - 1.0), "{what}");
                    assert_eq!(plan.exact, plan.simulated() <= bound * (1.0 + 1e-9), "{what}");
                    let own = plan.own.as_ref().unwrap();
                    assert!(own.bound.is_none_or(|bound| bound <= own.value * (1.0 + 1e-9)), "{what}: {own:?}");
                    assert!(!own.over.is_empty(), "{what}");
                    compared += 1;
                }
            }
        }
    }
    assert!(compared > 200, "{compared}");
}

#[test]
fn the_papers_formula_may_claim_less_than_any_plan_costs_and_says_so_apart() {
    // Two equal branches that both prefer one unit: the formula runs them beside each other on it.
    let graph = graph(&[1; 4], &[(0, 1), (0, 2), (1, 3), (2, 3)]);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[1.0, 4.0, 4.0, 1.0].map(Some))
        .operators(1, &[9.0, 36.0, 36.0, 9.0].map(Some))
        .transfers(&[(0, 0.5)]);
    let found = plan("phases", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    let own = found.own.as_ref().unwrap();
    assert!(own.value < found.model_bound.unwrap(), "{own:?} {:?}", found.model_bound);
    assert!(own.over.contains("BIDENT 3.3.2"), "{}", own.over);
    assert!(found.simulated() >= found.model_bound.unwrap() && found.gap.unwrap() >= 0.0);
}

#[test]
fn auto_proves_what_interval_proves() {
    // One unit is best by far: `auto` and `interval` give the same plan, and it is proven best.
    let graph = chain(6, 500);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[1.0; 6].map(Some))
        .operators(1, &[5.0; 6].map(Some))
        .transfers(&[(0, 1.0)])
        .whole(0, 5.5);
    let request = PlanRequest::new(&builder.profile, &graph);
    let (auto, interval) = (plan("auto", &request).unwrap(), plan("interval", &request).unwrap());
    assert_eq!(auto.segments, interval.segments);
    let (one, other) = (auto.own.unwrap(), interval.own.unwrap());
    assert!(one.exact && other.exact && close(one.bound.unwrap(), other.bound.unwrap()), "{one:?} {other:?}");
    assert!(auto.exact && interval.exact);
}

#[test]
fn chains_of_any_length_are_proven() {
    for (operators, units) in [(3, 2), (200, 3), (3_000, 3)] {
        let made = instance(&GraphSpec { shape: Shape::Chain, operators, units, slowdown: 1.2, seed: 5 });
        let found = plan("interval", &PlanRequest::new(&made.profile, &made.graph)).unwrap();
        assert!(found.gap.unwrap() < 0.02, "{operators}: {:?}", found.gap);
    }
}

#[test]
fn concurrent_and_dag_agree_on_one_model_for_time_and_energy() {
    for (shape, seed) in [(Shape::ForkJoin, 1), (Shape::Network, 2), (Shape::Layered, 3)] {
        let made = instance(&GraphSpec { shape, operators: 30, units: 3, slowdown: 1.2, seed });
        for objective in [Objective::Latency, Objective::Energy] {
            let request = PlanRequest { objective, ..PlanRequest::new(&made.profile, &made.graph) };
            let one = plan_with("dag", &request, &quick()).unwrap();
            let two = plan_with("concurrent", &request, &quick()).unwrap();
            let three = plan_several("concurrent", std::slice::from_ref(&request), &quick()).unwrap();
            for other in [&two, &three] {
                assert!(close(one.simulated(), other.simulated()), "{} and {}", one.simulated(), other.simulated());
                assert!(close(one.model_bound.unwrap(), other.model_bound.unwrap()));
            }
        }
    }
}

/// A clock whose time is over.
fn over() -> f64 {
    1e9
}

#[test]
fn a_budget_that_is_over_still_gives_a_plan_of_every_anytime_method() {
    let made = instance(&GraphSpec { shape: Shape::Layered, operators: 400, units: 4, slowdown: 1.2, seed: 6 });
    let options = PlanOptions { budget: Budget::Until(Clock { now_ms: over, end_ms: 0.0 }), ..PlanOptions::default() };
    for method in ["dag", "concurrent", "phases-exclusive"] {
        let found = plan_with(method, &PlanRequest::new(&made.profile, &made.graph), &options).unwrap();
        found.check(&[&made.graph]).unwrap();
    }
    let applications = vec![Application::new(&made.profile, &made.graph).every(3, 0.0, 5.0); 2];
    let found = concurrent(&ConcurrentRequest::new(applications), &options).unwrap();
    assert!(found.simulated_ms > 0.0 && found.model_bound.is_some());
}
