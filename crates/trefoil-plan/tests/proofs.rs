//! The proofs that certificates gained: priced loads, minimum cuts, weighted completions, searches. Real ones pass, tampered ones fail.

mod support;

use serde_json::{Value, json};
use support::certified::{bound_refused as refused, has, paper, proof, refused as any_refused, value};
use trefoil_check::{CheckError, check};
use trefoil_core::OperatorClass::{Compute, Memory};
use trefoil_core::{Objective, Outcome, Samples, Subject};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, graph};
use trefoil_plan::{Application, Budget, ConcurrentRequest, PlanOptions, PlanRequest, concurrent, plan_with};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(60_000), ..PlanOptions::default() }
}

#[test]
fn loads_with_transfers_are_proven_and_tighten_the_bound() {
    let mut tighter = 0;
    for (shape, units, slowdown, seed) in [
        (Shape::Layered, 3, 1.25, 1),
        (Shape::ForkJoin, 2, 0.0, 2),
        (Shape::Network, 4, 1.25, 3),
        (Shape::Layered, 2, 1.25, 4),
    ] {
        let made = instance(&GraphSpec { shape, operators: 80, units, slowdown, seed });
        let request = PlanRequest::new(&made.profile, &made.graph);
        let plan = plan_with("dag", &request, &quick()).unwrap();
        let mut paper = paper(std::slice::from_ref(&request), &plan);
        let profiles = [value(&made.profile)];
        let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{}: {error}", made.spec));
        assert!(has(&verdict, "priced-load"), "{verdict:?}");
        let number = |paper: &mut Value, kind: &str| proof(paper, kind)["value"].as_f64().unwrap();
        let (load, priced) = (number(&mut paper, "load"), number(&mut paper, "priced-load"));
        tighter += usize::from(priced > load * (1.0 + 1e-6));
        refused(&paper, &profiles, "a higher value", |forged| {
            let more = 1.001 * number(forged, "priced-load");
            proof(forged, "priced-load")["value"] = json!(more);
        });
        refused(&paper, &profiles, "higher prices", |forged| {
            for price in proof(forged, "priced-load")["weights"].as_object_mut().unwrap().values_mut() {
                *price = json!([price[0].as_f64().unwrap() * 1.01, price[1].as_f64().unwrap() * 1.01]);
            }
        });
        for odd in [json!([0.0, 0.0, 0.0]), json!([0.0]), json!(0.0), json!([0.0, "0"]), Value::Null] {
            let error = any_refused(&paper, &profiles, "an odd price", |forged| {
                *proof(forged, "priced-load")["weights"].as_object_mut().unwrap().values_mut().next().unwrap() =
                    odd.clone();
            });
            assert!(error.to_string().contains("not a list of 2 numbers"), "{error}");
        }
        refused(&paper, &profiles, "no payments", |forged| proof(forged, "priced-load")["payments"] = json!([]));
        refused(&paper, &profiles, "a payment by a stranger", |forged| {
            let payment = &mut proof(forged, "priced-load")["payments"][0];
            let reader = payment["reader"].as_u64().unwrap();
            payment["reader"] = json!(u8::from(reader == 0));
        });
        refused(&paper, &profiles, "a payment that is no number", |forged| {
            proof(forged, "priced-load")["payments"][0]["paid"][0] = json!("much");
        });
        // The tensor gets back what its reader pays more, but for rounding.
        let error = any_refused(&paper, &profiles, "a payment so large that rounding counts", |forged| {
            for paid in proof(forged, "priced-load")["payments"][0]["paid"].as_array_mut().unwrap() {
                *paid = json!(paid.as_f64().unwrap() + 1e16);
            }
        });
        assert!(error.to_string().contains("is rounded by more than may count"), "{error}");
    }
    assert!(tighter >= 3, "{tighter} of 4 priced loads are above the plain load");
}

#[test]
fn the_minimum_cut_of_two_units_is_proven_by_its_flow() {
    let mut improved = 0;
    for (shape, seed) in [(Shape::Network, 1), (Shape::SeriesParallel, 2), (Shape::Layered, 3), (Shape::ForkJoin, 4)] {
        let made = instance(&GraphSpec { shape, operators: 40, units: 2, slowdown: 0.0, seed });
        let mut profile = made.profile.clone();
        // Without idle power the energy is the sum of work and transfers, and the cut is all there is to it.
        profile.declared_watts.insert("idle".to_owned(), 0.0);
        let request = PlanRequest { objective: Objective::Energy, ..PlanRequest::new(&profile, &made.graph) };
        let plan = plan_with("dag", &request, &quick()).unwrap();
        let mut paper = paper(std::slice::from_ref(&request), &plan);
        let profiles = [value(&profile)];
        let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{}: {error}", made.spec));
        let energy = proof(&mut paper, "energy");
        if energy.get("payments").is_none() {
            continue;
        }
        improved += 1;
        assert!(verdict.gap().is_some_and(|gap| gap < 0.25), "{}: {verdict:?}", made.spec);
        let text = energy["value"].as_f64().unwrap();
        refused(&paper, &profiles, "a higher value", |forged| proof(forged, "energy")["value"] = json!(text * 1.001));
        refused(&paper, &profiles, "no payments", |forged| {
            proof(forged, "energy").as_object_mut().unwrap().remove("payments");
        });
        refused(&paper, &profiles, "other payments", |forged| {
            for payment in proof(forged, "energy")["payments"].as_array_mut().unwrap() {
                payment["paid"][1] = json!(payment["paid"][1].as_f64().unwrap() * 1.5 + 0.01);
            }
        });
    }
    assert!(improved >= 3, "{improved}");
}

#[test]
fn weighted_completions_are_verified() {
    let made = instance(&GraphSpec { shape: Shape::Network, operators: 24, units: 3, slowdown: 1.2, seed: 9 });
    let one = Application::new(&made.profile, &made.graph).every(2, 0.5, 1.0).weighing(3.0);
    let two = Application::new(&made.profile, &made.graph).every(1, 0.0, 0.0);
    let asked = ConcurrentRequest { weighted: true, ..ConcurrentRequest::new(vec![one, two]) };
    let plan = concurrent(&asked, &quick()).unwrap();
    assert!(plan.weighted && plan.requests.len() == 3);
    let request = PlanRequest::new(&made.profile, &made.graph);
    let paper = paper(&[request], &plan);
    let profiles = [value(&made.profile)];
    assert_eq!(paper["claim"]["rule"], "weighted-completion");
    let verdict = check(&paper, &profiles).unwrap();
    assert!(has(&verdict, "completions") && verdict.bound.is_some_and(|bound| bound > 0.0), "{verdict:?}");
    assert!((verdict.value - plan.simulated()).abs() <= 1e-6 * verdict.value);
    refused(&paper, &profiles, "a higher bound", |forged| {
        let forged = proof(forged, "completions");
        forged["value"] = json!(forged["value"].as_f64().unwrap() * 1.01);
    });
    let mut forged = paper.clone();
    forged["requests"][0]["weight"] = json!(30.0);
    assert!(matches!(check(&forged, &profiles), Err(CheckError::Claim(_) | CheckError::Bound(_))));
}

#[test]
fn what_was_searched_is_searched_anew() {
    let mut searched = 0;
    for seed in 1..=24u64 {
        let mut numbers = trefoil_plan::testing::Numbers(seed * 7919 + 1);
        let mut roll = || numbers.next().unwrap();
        roll();
        let jobs = 3 + seed as u32 % 3;
        let mut edges = Vec::new();
        for to in 1..jobs {
            edges.extend((0..to).filter(|_| roll() < 0.35).map(|from| (from, to)));
        }
        let bytes: Vec<u64> = (0..jobs).map(|_| (1e5 * roll()) as u64).collect();
        let graph = graph(&bytes, &edges);
        let mut builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.05), (100_000, 0.05 + 0.4 * roll())]);
        for unit in 0..2 {
            // One operator takes no time: dispatch is free, and segments save nothing.
            let ms: Vec<Option<f64>> = (0..jobs).map(|at| Some(if at == 0 { 0.0 } else { 0.2 + roll() })).collect();
            builder = builder.operators(unit, &ms).slowdown(unit, 1 - unit, 1.0 + 0.3 * roll());
        }
        let request = PlanRequest::new(&builder.profile, &graph);
        let plan = plan_with("dag", &request, &PlanOptions::default()).unwrap();
        let paper = paper(std::slice::from_ref(&request), &plan);
        let profiles = [value(&builder.profile)];
        let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{seed}: {error}"));
        if has(&verdict, "search") {
            searched += 1;
            assert!(verdict.is_optimal(), "{seed}: {verdict:?}");
            // The same claim of a worse schedule: everything on one unit, one after another.
            let mut forged = paper.clone();
            let (mut now, mut tasks) = (0.0, Vec::new());
            for at in 0..jobs as usize {
                let ms = builder.profile.measurements.iter().filter(|record| record.units.len() == 1).nth(at);
                let ms = ms.and_then(|record| record.total()).unwrap().median;
                tasks.push(json!({ "unit": 0, "model": 0, "item": 0, "iteration": 0, "operators": [at], "ms": ms,
                    "start_ms": now, "end_ms": now + ms }));
                now += ms;
            }
            if now > verdict.value * 1.001 {
                forged["tasks"] = json!(tasks);
                forged["claim"]["value"] = json!(now);
                forged["claim"]["simulated_ms"] = json!(now);
                forged["bound"]["value"] = json!(now);
                proof(&mut forged, "search")["value"] = json!(now);
                let error = check(&forged, &profiles).unwrap_err();
                assert!(error.to_string().contains("a schedule ends after"), "{seed}: {error}");
            }
        }
    }
    assert!(searched >= 3, "{searched}");
}

/// An operator that slows another more than a third does: waiting until the third is there gains.
#[test]
fn waiting_for_what_disturbs_less_is_searched_too() {
    let mut graph = graph(&[4, 8, 4, 4], &[(0, 2)]);
    for (operator, class) in graph.operators.iter_mut().zip([Memory, Compute, Compute, Compute]) {
        operator.class = class;
    }
    let mut builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .transfers(&[(4, 2.0)])
        // One operator takes no time: dispatch is free, and segments save nothing.
        .operators(0, &[Some(8.0), Some(1.0), Some(3.0), Some(0.0)])
        .operators(1, &[Some(6.0), None, Some(3.0), Some(0.0)]);
    for (slowed, other, class, interference, factor) in [
        (0, 1, Compute, Compute, 1.25),
        (0, 1, Compute, Memory, 1.5),
        (0, 1, Memory, Compute, 1.25),
        (0, 1, Memory, Memory, 1.5),
        (1, 0, Compute, Compute, 1.25),
        (1, 0, Compute, Memory, 1.25),
        (1, 0, Memory, Compute, 1.5),
        (1, 0, Memory, Memory, 1.25),
    ] {
        let units = [builder.address(slowed), builder.address(other)];
        let value = Outcome::Value { value: Samples::exactly(factor) };
        builder.record(Subject::Slowdown { class, interference }, &units, value);
    }
    let request = PlanRequest::new(&builder.profile, &graph);
    let plan = plan_with("dag", &request, &PlanOptions::default()).unwrap();
    // The memory-bound operator alone for 6 ms; beside the compute-bound one that it feeds, another waits until then.
    assert!(plan.claimed < 9.5 - 1e-9, "{plan:?}");
    let own = plan.own.as_ref().unwrap();
    assert!(own.exact && own.over == "schedules of single operators", "{own:?}");
    let paper = paper(std::slice::from_ref(&request), &plan);
    let profiles = [value(&builder.profile)];
    let verdict = check(&paper, &profiles).unwrap();
    assert!(has(&verdict, "search") && verdict.is_optimal(), "{verdict:?}");
}
