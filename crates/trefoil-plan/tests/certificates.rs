//! Certificates against the checker, which shares no code with what made them: real ones pass, tampered ones do not.

use serde_json::{Value, json};
use trefoil_check::{CheckError, check};
use trefoil_core::{Objective, Plan, Profile, UnitKind};
use trefoil_plan::generate::{GraphSpec, Shape, instance};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{Budget, METHODS, Pin, PlanError, PlanOptions, PlanRequest, certificate, plan_several, plan_with};

/// A short search: what is checked is not how good plans are.
fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(30_000), ..PlanOptions::default() }
}

fn plan(method: &str, request: &PlanRequest<'_>) -> Result<Plan, PlanError> {
    plan_with(method, request, &quick())
}

fn value(profile: &Profile) -> Value {
    serde_json::to_value(profile).unwrap()
}

fn certify(method: &str, request: &PlanRequest<'_>) -> Value {
    let plan = plan(method, request).unwrap();
    serde_json::to_value(certificate(std::slice::from_ref(request), &plan).unwrap()).unwrap()
}

/// Planners of one model.
fn methods() -> impl Iterator<Item = &'static str> {
    // One is for streams, the other stands for as many names as there are units.
    METHODS.iter().map(|method| method.name).filter(|name| !["pipeline", "single:UNIT"].contains(name))
}

#[test]
fn every_planner_on_every_shape_is_verified() {
    let mut checked = 0;
    for shape in Shape::ALL {
        for (operators, units, slowdown) in [(1, 2, 0.0), (6, 2, 1.3), (25, 3, 0.0), (60, 4, 1.25)] {
            let made = instance(&GraphSpec { shape, operators, units, slowdown, seed: 11 });
            let profile = value(&made.profile);
            for objective in [Objective::Latency, Objective::Energy] {
                for method in methods() {
                    let request = PlanRequest { objective, ..PlanRequest::new(&made.profile, &made.graph) };
                    let plan = plan(method, &request).unwrap();
                    let paper =
                        serde_json::to_value(certificate(std::slice::from_ref(&request), &plan).unwrap()).unwrap();
                    let verdict = check(&paper, std::slice::from_ref(&profile))
                        .unwrap_or_else(|error| panic!("{method} on {} for {objective:?}: {error}", made.spec));
                    assert!(verdict.bound.is_some_and(|bound| bound > 0.0), "{method} on {}", made.spec);
                    checked += 1;
                }
            }
        }
    }
    assert!(checked >= 100, "{checked}");
}

#[test]
fn streams_and_several_models_are_verified() {
    let made = instance(&GraphSpec { shape: Shape::Network, operators: 30, units: 3, slowdown: 1.2, seed: 2 });
    let request = PlanRequest { objective: Objective::Throughput, ..PlanRequest::new(&made.profile, &made.graph) };
    let paper = certify("pipeline", &request);
    assert_eq!(paper["claim"]["rule"], "period");
    let verdict = check(&paper, &[value(&made.profile)]).unwrap();
    assert!(verdict.bound.is_some_and(|bound| bound > 0.0) && verdict.value < verdict.makespan_ms);

    let other = instance(&GraphSpec { shape: Shape::ForkJoin, operators: 20, units: 3, slowdown: 1.2, seed: 3 });
    // One machine: the second model's profile takes the first one's transfers and slowdowns.
    let mut second = other.profile.clone();
    second.measurements.retain(|record| record.units.len() == 1);
    second.measurements.extend(made.profile.measurements.iter().filter(|record| record.units.len() == 2).cloned());
    let requests = [PlanRequest::new(&made.profile, &made.graph), PlanRequest::new(&second, &other.graph)];
    let profiles = [value(&made.profile), value(&second)];
    for method in ["concurrent", "joint", "joint-units"] {
        let plan = plan_several(method, &requests, &quick()).unwrap();
        let paper = serde_json::to_value(certificate(&requests, &plan).unwrap()).unwrap();
        let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{method}: {error}"));
        assert!(verdict.bound.is_some_and(|bound| bound > 0.0), "{method}: {verdict:?}");
        let lacking = check(&paper, &profiles[..1]).unwrap_err();
        assert!(matches!(lacking, CheckError::OtherProfile(_)), "{method} with one profile of two: {lacking}");
    }
}

#[test]
fn the_paper_and_chains_are_certified_optimal() {
    for (seed, operators) in [(1, 5), (2, 40), (3, 200)] {
        let made = instance(&GraphSpec { shape: Shape::Chain, operators, units: 3, slowdown: 0.0, seed });
        let request = PlanRequest::new(&made.profile, &made.graph);
        for method in ["sequential", "interval"] {
            let verdict = check(&certify(method, &request), &[value(&made.profile)]).unwrap();
            assert!(verdict.is_optimal(), "{method} with {operators} operators: {verdict:?}");
        }
    }
    // The paper's model is exact on any graph.
    let made = instance(&GraphSpec { shape: Shape::Network, operators: 80, units: 3, slowdown: 1.2, seed: 4 });
    let verdict = check(&certify("sequential", &PlanRequest::new(&made.profile, &made.graph)), &[value(&made.profile)]);
    assert!(verdict.unwrap().is_optimal());
}

/// A profile with everything: segments measured whole, node times, failures, an accelerator, powers, and a pin.
fn rich() -> (trefoil_core::OperatorGraph, ProfileBuilder) {
    let graph = graph(&[100, 2000, 50, 700, 300, 10], &[(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5)]);
    let builder = ProfileBuilder::new(&graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("b:GPU", UnitKind::Gpu)
        .operators(0, &[Some(1.0), Some(5.0), Some(0.5), Some(2.0), Some(1.5), Some(0.1)])
        .operators(1, &[Some(0.8), Some(1.0), Some(0.9), None, Some(0.4), Some(0.6)])
        .transfers(&[(0, 0.05), (1000, 0.1), (4000, 0.6)])
        .whole_with_nodes(0, 7.0, &[0.7, 3.0, 0.3, 1.8, 0.9, 0.05])
        .segment(0, &[0, 1, 2], Some(4.0))
        .segment(1, &[4, 5], Some(0.7))
        .segment(1, &[1, 2], None)
        .slowdown(0, 1, 1.2)
        .slowdown(1, 0, 0.9)
        .watts(0, 15.0)
        .watts(1, 25.0);
    (graph, builder)
}

#[test]
fn estimates_segments_failures_and_pins_are_derived_anew() {
    let (graph, builder) = rich();
    let pins: Vec<Pin> = vec!["op4=b:GPU".parse().unwrap()];
    for objective in [Objective::Latency, Objective::Energy] {
        for pins in [Vec::new(), pins.clone()] {
            for method in methods() {
                let request =
                    PlanRequest { objective, pins: pins.clone(), ..PlanRequest::new(&builder.profile, &graph) };
                let Ok(plan) = plan(method, &request) else { continue };
                let paper = serde_json::to_value(certificate(&[request], &plan).unwrap()).unwrap();
                check(&paper, &[value(&builder.profile)])
                    .unwrap_or_else(|error| panic!("{method} for {objective:?} with {} pins: {error}", pins.len()));
            }
        }
    }
}

#[test]
fn a_chain_with_measured_segments_is_certified_optimal() {
    let graph = chain(6, 500);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[1.0, 5.0, 1.0, 1.0, 6.0, 1.0].map(Some))
        .operators(1, &[4.0, 1.0, 3.0, 3.0, 1.0, 2.0].map(Some))
        .transfers(&[(500, 0.3)])
        .segment(0, &[2, 3], Some(1.2))
        .segment(1, &[0, 1, 2, 3, 4, 5], Some(9.0));
    let mut paper = certify("interval", &PlanRequest::new(&builder.profile, &graph));
    let profiles = [value(&builder.profile)];
    let verdict = check(&paper, &profiles).unwrap();
    assert!(verdict.is_optimal(), "{verdict:?}");
    // Nothing follows from the potentials before the first operator, which are 0 all the same.
    for odd in [-1.0, 1e9] {
        let proofs = paper["bound"]["proofs"].as_array_mut().unwrap();
        let chain = proofs.iter_mut().find(|proof| proof["kind"] == "chain").unwrap();
        chain["potentials"][0][1] = serde_json::json!(odd);
        let error = check(&paper, &profiles).unwrap_err().to_string();
        assert!(error.contains("before the first operator are not 0"), "{error}");
    }
}

#[test]
fn what_a_unit_does_not_take_in_one_piece_counts() {
    let graph = chain(7, 500);
    let ms = |scale: f64| [1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 1.0].map(|ms| Some(ms * scale)).to_vec();
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &ms(1.0))
        .operators(1, &ms(1.2))
        .transfers(&[(500, 0.1)])
        .whole(0, 9.0)
        .segment(1, &[1, 2], None)
        .segment(0, &[3, 4], None);
    let mut limited = builder.clone();
    limited.profile.units[0].limits.max_nodes = Some(3);
    for builder in [builder, limited] {
        let request = PlanRequest::new(&builder.profile, &graph);
        for method in ["interval", "auto", "dag"] {
            let paper = certify(method, &request);
            check(&paper, &[value(&builder.profile)]).unwrap_or_else(|error| panic!("{method}: {error}"));
        }
        // A segment that failed, at its estimate.
        let paper = certify("interval", &request);
        let tasks = json!([{ "unit": 1, "model": 0, "item": 0, "iteration": 0, "operators": [0, 1, 2, 3, 4, 5, 6],
            "ms": 9.0, "start_ms": 0.0, "end_ms": 9.0 }]);
        let error = refused(&paper, &value(&builder.profile), "what failed", |forged| forged["tasks"] = tasks.clone());
        assert!(error.to_string().contains("forbids"), "{error}");
    }
}

/// Applies a change to a certificate and expects the checker to refuse it.
fn refused(paper: &Value, profile: &Value, what: &str, tamper: impl Fn(&mut Value)) -> CheckError {
    let mut forged = paper.clone();
    tamper(&mut forged);
    assert_ne!(&forged, paper, "{what} changes something");
    match check(&forged, std::slice::from_ref(profile)) {
        Ok(verdict) => panic!("{what} passes: {verdict:?}"),
        Err(error) => error,
    }
}

fn scale(value: &mut Value, factor: f64) {
    *value = json!(value.as_f64().unwrap() * factor);
}

#[test]
fn tampered_certificates_fail() {
    let made = instance(&GraphSpec { shape: Shape::Network, operators: 26, units: 3, slowdown: 1.3, seed: 5 });
    let request = PlanRequest::new(&made.profile, &made.graph);
    let profile = value(&made.profile);
    for method in methods() {
        let Ok(plan) = plan(method, &request) else { continue };
        let paper = serde_json::to_value(certificate(std::slice::from_ref(&request), &plan).unwrap()).unwrap();
        check(&paper, std::slice::from_ref(&profile)).unwrap();
        let last = paper["tasks"].as_array().unwrap().len() - 1;
        let refuse =
            |what: &str, tamper: &dyn Fn(&mut Value)| refused(&paper, &profile, &format!("{method}: {what}"), tamper);
        let cost = refuse("a cheaper task", &|forged| scale(&mut forged["tasks"][0]["ms"], 0.5));
        assert!(matches!(cost, CheckError::Cost { task: 0, .. }), "{cost}");
        refuse("a missing task", &|forged| {
            forged["tasks"].as_array_mut().unwrap().remove(last);
        });
        if last == 0 {
            continue;
        }
        let early = refuse("a task that starts at once", &|forged| {
            let task = &mut forged["tasks"][last];
            let length = task["end_ms"].as_f64().unwrap() - task["start_ms"].as_f64().unwrap();
            task["start_ms"] = json!(0.0);
            task["end_ms"] = json!(length);
        });
        assert!(matches!(early, CheckError::Schedule(_)), "{early}");
        refuse("a lower claim", &|forged| scale(&mut forged["claim"]["value"], 0.99));
        refuse("a shorter makespan", &|forged| scale(&mut forged["claim"]["simulated_ms"], 0.99));
        let higher = refuse("a higher bound", &|forged| scale(&mut forged["bound"]["value"], 1.01));
        assert!(matches!(higher, CheckError::Bound(_)), "{higher}");
        refuse("a higher proof", &|forged| {
            scale(&mut forged["bound"]["proofs"][0]["value"], 1.01);
            scale(&mut forged["bound"]["value"], 1.01);
        });
        if paper["bound"]["proofs"][0].get("potentials").is_some() {
            refuse("higher potentials", &|forged| {
                for row in forged["bound"]["proofs"][0]["potentials"].as_array_mut().unwrap() {
                    row.as_array_mut()
                        .unwrap()
                        .iter_mut()
                        .filter(|value| value.is_f64())
                        .for_each(|value| scale(value, 1.01));
                }
                scale(&mut forged["bound"]["proofs"][0]["value"], 1.01);
            });
        }
        refuse("another version", &|forged| forged["version"] = json!(2));
        refuse("another model", &|forged| forged["models"][0]["fingerprint"] = json!("0"));
        refuse("another unit", &|forged| forged["units"][0] = json!("x:CPU"));
        // The same certificate with another profile: one operator takes longer than it says.
        let mut other = profile.clone();
        for record in other["measurements"].as_array_mut().unwrap() {
            if record["subject"]["kind"] == "operator" && record["outcome"]["result"] == "ok" {
                scale(&mut record["outcome"]["timing"]["total"]["median"], 1.5);
            }
        }
        assert!(check(&paper, &[other]).is_err(), "{method}: another profile");
    }
}

#[test]
fn overlaps_on_a_resource_and_missing_transfers_fail() {
    let made = instance(&GraphSpec { shape: Shape::ForkJoin, operators: 40, units: 2, slowdown: 0.0, seed: 8 });
    let request = PlanRequest::new(&made.profile, &made.graph);
    let profile = value(&made.profile);
    let paper = certify("interval", &request);
    let tasks = paper["tasks"].as_array().unwrap();
    let moved = tasks.iter().position(|task| task.get("tensor").is_some()).expect("something crosses");
    let error = refused(&paper, &profile, "a dropped transfer", |forged| {
        forged["tasks"].as_array_mut().unwrap().remove(moved);
    });
    assert!(error.to_string().contains("starts before tensor"), "{error}");
    // Everything at once.
    let error = refused(&paper, &profile, "no waiting", |forged| {
        for task in forged["tasks"].as_array_mut().unwrap() {
            task["end_ms"] = json!(task["end_ms"].as_f64().unwrap() - task["start_ms"].as_f64().unwrap());
            task["start_ms"] = json!(0.0);
        }
    });
    assert!(matches!(error, CheckError::Schedule(_)), "{error}");
}

#[test]
fn files_that_are_no_certificates_are_refused_with_the_place() {
    let (graph, builder) = rich();
    let paper = certify("interval", &PlanRequest::new(&builder.profile, &graph));
    let profile = value(&builder.profile);
    for (certificate, profiles) in [
        (json!({}), vec![profile.clone()]),
        (paper.clone(), Vec::new()),
        (paper.clone(), vec![json!({ "format": "trefoil-profile", "version": 1 })]),
        (profile.clone(), vec![paper.clone()]),
    ] {
        let error = check(&certificate, &profiles).unwrap_err();
        assert!(matches!(error, CheckError::Format { .. }), "{error}");
        assert!(!error.to_string().contains('\n'));
    }
}
