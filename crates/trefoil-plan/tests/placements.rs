//! Bounds over all placements in certificates: tried anew by the checker, with code of its own.

mod support;

use serde_json::json;
use support::certified::{bound_refused, has, paper, proof, refused, value};
use trefoil_check::{CheckError, check};
use trefoil_core::Objective;
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, graph};
use trefoil_plan::{Budget, PlanOptions, PlanRequest, plan_several, plan_with};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(200_000), ..PlanOptions::default() }
}

#[test]
fn placements_close_gaps_and_are_never_above_a_plan() {
    let (mut stated, mut gained, mut certified) = (0, 0, 0);
    for seed in 0..24 {
        let shape = [Shape::ForkJoin, Shape::Layered, Shape::SeriesParallel][seed as usize % 3];
        let slowdown = if seed % 2 == 0 { 1.3 } else { 0.0 };
        let operators = 6 + seed as usize % 7;
        let made = instance(&GraphSpec { shape, operators, units: 2 + seed as usize % 2, slowdown, seed });
        let profile = [value(&made.profile)];
        for objective in [Objective::Latency, Objective::Energy] {
            let request = PlanRequest { objective, ..PlanRequest::new(&made.profile, &made.graph) };
            let plan = plan_with("dag", &request, &quick()).unwrap();
            let mut certificate = paper(std::slice::from_ref(&request), &plan);
            let verdict = check(&certificate, &profile).unwrap_or_else(|error| panic!("{}: {error}", made.spec));
            certified += 1;
            if !has(&verdict, "placements") {
                continue;
            }
            stated += 1;
            // Without it the rest proves less (an energy counts it as time that is idled at least).
            let own = proof(&mut certificate, "placements")["value"].as_f64().unwrap();
            let others = certificate["bound"]["proofs"].as_array().unwrap().iter();
            let times =
                others.filter(|proof| ["path", "load", "priced-load"].contains(&proof["kind"].as_str().unwrap()));
            let best = times.filter_map(|proof| proof["value"].as_f64()).fold(0.0, f64::max);
            assert!(own > best, "{}: {own} and {best}", made.spec);
            gained += usize::from(own > 1.02 * best);
            if objective == Objective::Energy {
                continue;
            }
            assert!(own <= verdict.value * (1.0 + 1e-9), "{}: {own} above {}", made.spec, verdict.value);
            // More than the plan takes is refused, and so are prices that let too much be done.
            bound_refused(&certificate, &profile, "a bound above the plan", |paper| {
                let claim = paper["claim"]["value"].as_f64().unwrap();
                proof(paper, "placements")["value"] = json!(1.001 * claim);
            });
            bound_refused(&certificate, &profile, "prices that are too high", |paper| {
                for weights in proof(paper, "placements")["weights"].as_object_mut().unwrap().values_mut() {
                    *weights = json!([9.0, 9.0]);
                }
            });
        }
    }
    assert!(certified == 48 && stated >= 8 && gained >= 4, "{stated} of {certified} state placements, {gained} gain");
}

/// What no plan takes less than bounds those that run one segment after another: transfers that their own bound leaves out.
#[test]
fn serial_plans_are_bounded_by_what_bounds_every_plan() {
    let graph = graph(&[8; 4], &[(0, 1), (0, 2), (1, 3), (2, 3)]);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(1.0), Some(9.0), Some(9.0), Some(1.0)])
        .operators(1, &[Some(9.0), Some(1.0), Some(1.0), Some(9.0)])
        .transfers(&[(0, 3.0)])
        .watts(0, 1.0)
        .watts(1, 1.0);
    let profile = [value(&builder.profile)];
    for method in ["interval", "single:a:CPU"] {
        let request = PlanRequest::new(&builder.profile, &graph);
        let plan = plan_with(method, &request, &quick()).unwrap();
        let certificate = paper(std::slice::from_ref(&request), &plan);
        assert_eq!(certificate["claim"]["rule"], "busy-sum");
        let verdict = check(&certificate, &profile).unwrap();
        // 1 + 3 + 1 + 3 + 1 on the longest path, where operators alone sum up to 4.
        assert!(verdict.bound.unwrap() >= 9.0 - 1e-6 && has(&verdict, "path"), "{verdict:?}");
        assert!(verdict.bound.unwrap() <= plan.model_bound.unwrap() * (1.0 + 1e-6), "{verdict:?}");
        // Of energy they say nothing.
        refused(&certificate, &profile, "another objective", |paper| paper["objective"] = json!("energy"));
    }
}

#[test]
fn two_models_are_placed_together_and_streams_are_not() {
    let made = instance(&GraphSpec { shape: Shape::ForkJoin, operators: 7, units: 3, slowdown: 1.3, seed: 5 });
    let other = instance(&GraphSpec { shape: Shape::ForkJoin, operators: 6, units: 3, slowdown: 1.3, seed: 6 });
    let mut second = other.profile.clone();
    second.measurements.retain(|record| record.units.len() == 1);
    second.measurements.extend(made.profile.measurements.iter().filter(|record| record.units.len() == 2).cloned());
    let requests = [PlanRequest::new(&made.profile, &made.graph), PlanRequest::new(&second, &other.graph)];
    let profiles = [value(&made.profile), value(&second)];
    let plan = plan_several("concurrent", &requests, &quick()).unwrap();
    let certificate = paper(&requests, &plan);
    let verdict = check(&certificate, &profiles).unwrap();
    assert!(has(&verdict, "placements"), "{verdict:?}");
    assert!(verdict.bound.unwrap() <= verdict.value);
    // Something that arrives later is another question.
    let late = refused(&certificate, &profiles, "an arrival", |paper| {
        let least = 1e-6;
        paper["requests"][0]["arrival_ms"] = json!(least);
    });
    assert!(matches!(late, CheckError::Bound(_) | CheckError::Schedule(_)), "{late}");
}
