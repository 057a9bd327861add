//! Requests, pins, errors, baselines, explanations: what a user meets.

use trefoil_core::{CoreError, Objective, OperatorGraph, OperatorId, Origin, Outcome, Samples, UnitKind, Work};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{METHODS, PlanError, PlanOptions, PlanRequest, baselines, explain, import, plan, plan_several};

/// Four operators; the second runs on `b` only, the fourth on `a` only.
fn sample() -> (OperatorGraph, ProfileBuilder) {
    let graph = chain(4, 100);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(1.0), None, Some(1.0), Some(1.0)])
        .operators(1, &[Some(2.0), Some(1.0), Some(2.0), None])
        .transfers(&[(0, 0.25)]);
    (graph, builder)
}

#[test]
fn a_model_that_no_unit_runs_alone_is_split() {
    let (graph, builder) = sample();
    for method in ["auto", "interval", "sequential"] {
        let found = plan(method, &PlanRequest::new(&builder.profile, &graph)).unwrap();
        found.check(&[&graph]).unwrap();
        found.check_costs(&builder.profile.index()).unwrap();
        let units: Vec<_> = found.segments.iter().map(|s| (s.unit.to_string(), s.operators.len())).collect();
        assert_eq!(units, [("a:CPU".into(), 1), ("b:CPU".into(), 1), ("a:CPU".into(), 2)], "{method}");
    }
    let error = plan("single:a:CPU", &PlanRequest::new(&builder.profile, &graph)).unwrap_err();
    assert_eq!(
        error,
        PlanError::Core(CoreError::Unplaceable {
            operator: 1,
            name: "op1".into(),
            kind: "Relu".into(),
            reasons: "a:CPU: compile: unsupported".into()
        })
    );
}

#[test]
fn deleting_any_operator_measurement_fails_with_its_name() {
    let (graph, builder) = sample();
    let count = builder.profile.measurements.len();
    for index in 0..count {
        let mut profile = builder.profile.clone();
        let gone = profile.measurements.remove(index);
        let subject_is_transfer = gone.units.len() == 2;
        for method in ["auto", "interval", "sequential"] {
            let message = plan(method, &PlanRequest::new(&profile, &graph)).unwrap_err().to_string();
            if subject_is_transfer {
                assert!(message.contains(&format!("from {} to {}; run", gone.units[0], gone.units[1])), "{message}");
            } else {
                assert!(message.contains(&gone.id.0), "{message}");
            }
        }
    }
    // A plan made before the deletion is caught by the check that readers of plan files do.
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    let mut profile = builder.profile.clone();
    let cited = found.segments[0].cost.measurements[0].clone();
    profile.measurements.retain(|measurement| measurement.id != cited);
    assert!(found.check_costs(&profile.index()).unwrap_err().to_string().contains(&cited.0));
}

#[test]
fn an_operator_that_runs_nowhere_is_named_with_every_reason() {
    let graph = chain(2, 4);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(1.0), None])
        .operators(1, &[Some(1.0), None])
        .transfers(&[(0, 0.0)]);
    let message = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap_err().to_string();
    assert!(
        message.contains("op1") && message.contains("a:CPU: compile") && message.contains("b:CPU: compile"),
        "{message}"
    );
}

#[test]
fn bad_requests_say_what_to_do() {
    let (graph, mut builder) = sample();
    let request = PlanRequest::new(&builder.profile, &graph);
    let message = plan("best", &request).unwrap_err().to_string();
    assert!(METHODS.iter().all(|method| message.contains(method.name)), "{message}");
    let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
    let message = plan("auto", &energy).unwrap_err().to_string();
    assert!(message.contains("a:CPU, b:CPU") && message.contains("--watts a:CPU=15"), "{message}");
    let throughput = PlanRequest { objective: Objective::Throughput, ..request.clone() };
    assert!(plan("interval", &throughput).unwrap_err().to_string().contains("throughput"));
    assert_eq!(plan("auto", &throughput).unwrap().method, "pipeline");
    let stranger = PlanRequest { units: vec!["c:NPU".parse().unwrap()], ..request.clone() };
    assert!(plan("auto", &stranger).unwrap_err().to_string().contains("c:NPU"));
    assert!(plan("single:nonsense", &request).unwrap_err().to_string().contains("nonsense"));
    let mut other = graph.clone();
    other.fingerprint = "7".repeat(32);
    assert!(plan("auto", &PlanRequest::new(&builder.profile, &other)).unwrap_err().to_string().contains("synthetic"));
    let mut empty = builder.profile.clone();
    empty.units.clear();
    assert_eq!(plan("auto", &PlanRequest::new(&empty, &graph)).unwrap_err(), PlanError::NoUnits);
    for bad in [f64::NAN, -1.0] {
        let mut profile = builder.profile.clone();
        if let Outcome::Ok { timing, .. } = &mut profile.measurements[0].outcome {
            timing.total = Some(Samples::exactly(bad));
        }
        let message = plan("auto", &PlanRequest::new(&profile, &graph)).unwrap_err().to_string();
        assert!(message.contains(&builder.profile.measurements[0].id.0), "{message}");
    }
    builder.profile.declared_watts.insert("a:CPU".into(), f64::NAN);
    assert!(plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap_err().to_string().contains("a:CPU"));
}

#[test]
fn pins_hold_and_impossible_pins_are_named() {
    let (graph, builder) = sample();
    let request = |pins: &[&str]| PlanRequest {
        pins: pins.iter().map(|pin| pin.parse().unwrap()).collect(),
        ..PlanRequest::new(&builder.profile, &graph)
    };
    for method in ["auto", "interval", "sequential"] {
        let found = plan(method, &request(&["*=a:CPU", "op[012]*=b:CPU"][..1])).unwrap_err();
        assert!(matches!(found, PlanError::PinImpossible { operator: 1, .. }), "{found}");
        assert!(found.to_string().contains("`*=a:CPU`") && found.to_string().contains("unsupported"), "{found}");
        let found = plan(method, &request(&["op0=b:CPU", "op2=b:CPU"])).unwrap();
        let sizes: Vec<_> = found.segments.iter().map(|s| (s.unit.to_string(), s.operators.len())).collect();
        assert_eq!(sizes, [("b:CPU".into(), 3), ("a:CPU".into(), 1)], "{method}");
        let found = plan(method, &request(&["op2=b:CPU"])).unwrap();
        assert_eq!(found.segments.last().unwrap().operators.len(), 1);
        let disagree = plan(method, &request(&["op2=b:CPU", "op2=a:CPU"])).unwrap_err();
        assert!(matches!(disagree, PlanError::PinConflict { operator: 2, .. }), "{disagree}");
        assert!(disagree.to_string().contains("`op2=b:CPU` and `op2=a:CPU`"), "{disagree}");
    }
    let error = plan("auto", &request(&["Conv*=a:CPU"])).unwrap_err().to_string();
    assert!(error.contains("Conv*=a:CPU") && error.contains("matches no operator"), "{error}");
    let error = plan("auto", &request(&["*=c:CPU"])).unwrap_err().to_string();
    assert!(error.contains("c:CPU") && error.contains("a:CPU, b:CPU"), "{error}");
}

#[test]
fn auto_keeps_one_unit_when_the_gain_is_noise() {
    let graph = chain(4, 100);
    let of = |second: f64| {
        ProfileBuilder::new(&graph)
            .cpus(2)
            .operators(0, &[Some(1.0); 4])
            .operators(1, &[Some(3.0), Some(3.0), Some(3.0), Some(second)])
            .transfers(&[(0, 0.0)])
            .whole(0, 4.0)
            .segment(0, &[0, 1, 2], Some(3.0))
    };
    let small = of(0.95);
    let request = PlanRequest::new(&small.profile, &graph);
    let found = plan("auto", &request).unwrap();
    assert_eq!((found.method.as_str(), found.claimed), ("single:a:CPU", 4.0));
    assert!(
        found.all_measured && found.notes.iter().any(|note| note.contains("one unit is best")),
        "{:?}",
        found.notes
    );
    assert_eq!(plan("interval", &request).unwrap().segments.len(), 2);
    let large = of(0.5);
    let found = plan("auto", &PlanRequest::new(&large.profile, &graph)).unwrap();
    assert_eq!((found.method.as_str(), found.claimed), ("interval", 3.5));
    assert!(found.all_measured && found.exact);
}

#[test]
fn a_whole_measurement_stands_for_operators_that_fail_alone() {
    let (graph, builder) = sample();
    let builder = builder.whole(0, 3.0);
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert_eq!((found.method.as_str(), found.claimed, found.all_measured), ("single:a:CPU", 3.0, true));
    // Also when it is the only unit, and by name.
    let only = PlanRequest { units: vec![builder.address(0)], ..PlanRequest::new(&builder.profile, &graph) };
    for method in ["auto", "interval", "single:a:CPU"] {
        assert_eq!(plan(method, &only).unwrap().segments.len(), 1, "{method}");
    }
    assert!(plan("sequential", &only).unwrap_err().to_string().contains("runs on no unit"));
    let lines = baselines(&PlanRequest::new(&builder.profile, &graph));
    assert_eq!((lines[0].ms, lines[1].ms), (Some(3.0), None));
    assert!(lines[1].reason.as_ref().unwrap().contains("not measured"));
}

#[test]
fn energy_can_choose_otherwise() {
    let graph = chain(3, 8);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(1.0); 3])
        .operators(1, &[Some(2.0); 3])
        .transfers(&[(0, 0.1)])
        .watts(0, 20.0)
        .watts(1, 5.0);
    let request = PlanRequest::new(&builder.profile, &graph);
    assert_eq!(plan("sequential", &request).unwrap().segments[0].unit.to_string(), "a:CPU");
    let energy = PlanRequest { objective: Objective::Energy, ..request };
    let found = plan("sequential", &energy).unwrap();
    assert_eq!(found.segments[0].unit.to_string(), "b:CPU");
    assert!((found.claimed - 6.0 * 5.0 / 1e3).abs() < 1e-12);
    let found = plan("auto", &energy).unwrap();
    let joules: f64 = found.tasks.iter().map(|task| task.cost.joules.unwrap()).sum();
    assert!((found.claimed - joules).abs() < 1e-12);
}

#[test]
fn accelerators_pay_for_model_inputs_and_outputs() {
    let graph = chain(2, 64);
    let mut builder =
        ProfileBuilder::new(&graph).unit("s:NPU", UnitKind::Npu).operators(0, &[Some(1.0), Some(1.0)]).whole(0, 1.5);
    builder.profile.units[0].simulated = true;
    for measurement in &mut builder.profile.measurements {
        measurement.origin = Origin::Simulated;
        if let Outcome::Ok { timing, .. } = &mut measurement.outcome {
            timing.h2d = Some(Samples::exactly(0.25));
            timing.d2h = Some(Samples::exactly(0.125));
        }
    }
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    found.check(&[&graph]).unwrap();
    assert!((found.claimed - (0.25 + 1.5 + 0.125)).abs() < 1e-12);
    assert!((found.simulated_ms - found.claimed).abs() < 1e-12);
    let works: Vec<_> = found.tasks.iter().map(|task| matches!(task.work, Work::Transfer { .. })).collect();
    assert_eq!(works, [true, false, true]);
    assert_eq!(found.timeline.origin, Origin::Simulated);
    assert!(found.tasks.iter().all(|task| task.cost.origin == Origin::Simulated));
    assert_eq!(found.timeline.lanes[0].spans[0].label, "x");
}

#[test]
fn imports_must_be_assignments() {
    let (graph, builder) = sample();
    let request = PlanRequest::new(&builder.profile, &graph);
    let on = |units: [&str; 4]| -> Vec<_> {
        units.iter().enumerate().map(|(at, unit)| (OperatorId(at as u32), unit.parse().unwrap())).collect()
    };
    let found = import(&request, &on(["b:CPU", "b:CPU", "a:CPU", "a:CPU"])).unwrap();
    assert_eq!((found.segments.len(), found.method.as_str()), (2, "imported"));
    let message = |assignment: &[_]| import(&request, assignment).unwrap_err().to_string();
    let good = on(["b:CPU", "b:CPU", "a:CPU", "a:CPU"]);
    assert!(message(&good[..3]).contains("operator 3 `op3` is assigned to no unit"));
    assert!(message(&[good.clone(), good[..1].to_vec()].concat()).contains("operator 0 `op0` is assigned twice"));
    assert!(
        message(&[good.clone(), vec![(OperatorId(9), good[0].1.clone())]].concat())
            .contains("operator 9 does not exist")
    );
    assert!(message(&on(["b:CPU", "b:CPU", "a:CPU", "b:CPU"])).contains("operator 3 `op3`"));
    assert!(message(&on(["b:CPU", "c:CPU", "a:CPU", "a:CPU"])).contains("c:CPU"));
}

#[test]
fn explanations_price_the_move() {
    // A diamond whose right branch is on b; moving it back joins everything.
    let graph = graph(&[50, 50, 50, 50], &[(0, 1), (0, 2), (1, 3), (2, 3)]);
    let builder = ProfileBuilder::new(&graph)
        .cpus(3)
        .operators(0, &[Some(1.0), Some(1.0), Some(9.0), Some(1.0)])
        .operators(1, &[Some(5.0), Some(5.0), Some(2.0), Some(5.0)])
        .operators(2, &[Some(5.0), Some(5.0), None, Some(5.0)])
        .transfers(&[(0, 0.5)])
        .segment(0, &[0, 1], Some(1.5))
        .whole(0, 10.0);
    let request = PlanRequest::new(&builder.profile, &graph);
    let found = plan("interval", &request).unwrap();
    // {0,1} on a 1.5, transfer 0.5, {2} on b 2.0, transfer 0.5, {3} on a 1.0.
    assert!((found.claimed - 5.5).abs() < 1e-12, "{}", found.claimed);
    let why = explain(&request, &found, OperatorId(2)).unwrap();
    assert_eq!((why.unit.to_string(), why.segment_operators), ("b:CPU".into(), 1));
    assert_eq!(why.alternatives[0].move_price, Some(10.0 - 5.5));
    assert!(why.alternatives[1].unavailable.as_ref().unwrap().contains("unsupported"));
    assert_eq!(why.next_best, Some(0));
    insta::assert_snapshot!(why.to_string());
    // Moving 0 to b splits {0,1}: 5 + T + {1} 1 ; op2 on b reads t0 where it is; then T + 1.
    let why = explain(&request, &found, OperatorId(0)).unwrap();
    let b = &why.alternatives[0];
    assert!((b.move_price.unwrap() - (5.0 + 0.5 + 1.0 + 2.0 + 0.5 + 1.0 - 5.5)).abs() < 1e-12, "{b:?}");
    assert!(matches!(explain(&request, &found, OperatorId(4)), Err(PlanError::NoOperator { operator: 4, .. })));
}

#[test]
fn an_empty_model_has_an_empty_plan() {
    let graph = graph(&[], &[]);
    let builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.1)]);
    for method in ["auto", "interval", "sequential", "single:a:CPU"] {
        let found = plan(method, &PlanRequest::new(&builder.profile, &graph)).unwrap();
        found.check(&[&graph]).unwrap();
        assert_eq!((found.claimed, found.tasks.len()), (0.0, 0), "{method}");
    }
}

#[test]
fn plans_survive_json() {
    let (graph, builder) = sample();
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    let text = serde_json::to_string_pretty(&found).unwrap();
    assert_eq!(serde_json::from_str::<trefoil_core::Plan>(&text).unwrap(), found);
}

#[test]
fn unit_limits_split_segments() {
    let graph = chain(7, 8);
    let mut builder = ProfileBuilder::new(&graph).cpus(1).operators(0, &[Some(1.0); 7]);
    builder.profile.units[0].limits.max_nodes = Some(3);
    for method in ["auto", "interval", "sequential"] {
        let found = plan(method, &PlanRequest::new(&builder.profile, &graph)).unwrap();
        found.check(&[&graph]).unwrap();
        assert!(found.segments.len() == 3 && found.segments.iter().all(|s| s.operators.len() <= 3), "{method}");
    }
    let message = plan("single:a:CPU", &PlanRequest::new(&builder.profile, &graph)).unwrap_err().to_string();
    assert!(message.contains("7 nodes") && message.contains("limit of 3"), "{message}");
}

#[test]
fn a_result_that_nobody_compared_does_not_clear_a_wrong_operator() {
    let (graph, mut builder) = sample();
    for measurement in &mut builder.profile.measurements {
        if measurement.failure().is_some() && measurement.units[0].to_string() == "a:CPU" {
            measurement.outcome = Outcome::Wrong { error_to_peak: 0.5, tolerance: 1e-3, reason: "output t1".into() };
        }
    }
    let mut builder = builder.whole(0, 0.5);
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert!((found.claimed - 0.5).abs() < 1e-12, "compared and right as a whole");
    let last = builder.profile.measurements.last_mut().unwrap();
    if let Outcome::Ok { error_to_peak, .. } = &mut last.outcome {
        *error_to_peak = None;
    }
    let found = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert!(found.segments.len() > 1, "not compared: the wrong operator stays away from a");
}

#[test]
fn fewer_cores_may_be_the_best_single_unit() {
    let graph = chain(2, 100);
    let mut builder = ProfileBuilder::new(&graph).cpus(1).operators(0, &[Some(3.0), Some(3.0)]).whole(0, 5.0);
    let mut mode = builder.profile.units[0].clone();
    mode.address = mode.address.with_cores([0]);
    let subject = trefoil_core::Subject::WholeModel { model: graph.fingerprint.clone() };
    let id = builder.record(subject, std::slice::from_ref(&mode.address), trefoil_plan::testing::ok(4.0));
    builder.profile.modes.push(mode.clone());
    let options = trefoil_plan::PlanOptions { modes: true, ..Default::default() };
    let found = trefoil_plan::plan_with("auto", &PlanRequest::new(&builder.profile, &graph), &options).unwrap();
    found.check(&[&graph]).unwrap();
    found.check_costs(&builder.profile.index()).unwrap();
    assert_eq!((found.segments[0].unit.clone(), found.claimed), (mode.address.clone(), 4.0));
    assert!(found.model_bound.is_some_and(|bound| bound <= found.claimed));
    // Who plans from a file may want to ask on about the plan.
    let plain = plan("auto", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert_eq!(plain.segments[0].unit.to_string(), "a:CPU");
    assert_eq!(found.segments[0].cost.measurements, [id]);
    // A pin decides: modes have no operator costs to plan with.
    let pinned = PlanRequest { pins: vec!["*=a:CPU".parse().unwrap()], ..PlanRequest::new(&builder.profile, &graph) };
    let found = trefoil_plan::plan_with("auto", &pinned, &options).unwrap();
    assert_eq!(found.segments[0].unit.to_string(), "a:CPU");
}

/// Of a mode only the whole model is known: what can be planned of it is planned by name, all else says so.
#[test]
fn modes_are_planned_by_name_certified_and_refused_for_all_else() {
    let graph = chain(2, 100);
    let mut builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[Some(3.0), Some(3.0)])
        .operators(1, &[Some(9.0), Some(9.0)])
        .transfers(&[(0, 1.0)])
        .whole(0, 5.0)
        .watts(0, 10.0)
        .watts(1, 10.0);
    for (core, ms) in [(0, 4.0), (1, 4.5)] {
        let mut mode = builder.profile.units[0].clone();
        mode.address = mode.address.with_cores([core]);
        let subject = trefoil_core::Subject::WholeModel { model: graph.fingerprint.clone() };
        builder.record(subject, std::slice::from_ref(&mode.address), trefoil_plan::testing::ok(ms));
        builder.profile.declared_watts.insert(mode.address.to_string(), 5.0);
        builder.profile.modes.push(mode);
    }
    let request = PlanRequest::new(&builder.profile, &graph);
    let profile = [serde_json::to_value(&builder.profile).unwrap()];
    let named = PlanRequest { units: vec!["a:CPU@1".parse().unwrap()], ..request.clone() };
    for (method, asked) in [("single:a:CPU@1", &request), ("single:a:CPU@1", &named), ("auto", &named)] {
        let found = plan(method, asked).unwrap();
        found.check(&[&graph]).unwrap();
        found.check_costs(&builder.profile.index()).unwrap();
        assert_eq!((found.method.as_str(), found.claimed), ("single:a:CPU@1", 4.5));
        // Another mode is faster, which the bound allows for.
        assert!(found.model_bound.is_some_and(|bound| bound > 0.0 && bound <= 4.0) && !found.exact, "{found:?}");
        let paper = trefoil_plan::certificate(std::slice::from_ref(asked), &found).unwrap();
        let mut paper = serde_json::to_value(&paper).unwrap();
        let verdict = trefoil_check::check(&paper, &profile).unwrap();
        assert_eq!((verdict.value, verdict.bound), (4.5, Some(4.0)));
        // A bound above another mode's time is refused, whatever is proven of the units.
        paper["bound"]["value"] = serde_json::json!(4.4);
        let error = trefoil_check::check(&paper, &profile).unwrap_err().to_string();
        assert!(error.contains("4 ms on a mode"), "{error}");
        // No other planner has costs there to have planned with.
        paper["method"] = serde_json::json!("interval");
        let error = trefoil_check::check(&paper, &profile).unwrap_err().to_string();
        assert!(error.contains("method `interval` has no costs to plan with on a:CPU@1"), "{error}");
    }
    let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
    let found = plan("single:a:CPU@0", &energy).unwrap();
    assert!((found.simulated_j.unwrap() - 4.0 * 5.0 / 1e3).abs() < 1e-12, "{found:?}");
    // What else is asked.
    let only = |error: PlanError| {
        let text = error.to_string();
        assert!(text.contains("only the whole model was measured on a:CPU@1"), "{text}");
        assert!(text.contains("--method single:a:CPU@1") && !text.contains('\n'), "{text}");
    };
    only(plan("dag", &named).unwrap_err());
    only(
        trefoil_plan::what_if("single:a:CPU@1", &request, &PlanOptions::default(), &["slow:b:CPU=2".parse().unwrap()])
            .unwrap_err(),
    );
    only(
        trefoil_plan::what_if("auto", &request, &PlanOptions::default(), &["slow:a:CPU@1=2".parse().unwrap()])
            .unwrap_err(),
    );
    let single = plan("single:a:CPU@1", &request).unwrap();
    only(explain(&request, &single, OperatorId(0)).unwrap_err());
    // What there is, is listed.
    for method in ["single:a:CPU@7", "single:c:CPU"] {
        let text = plan(method, &request).unwrap_err().to_string();
        assert!(text.contains("a:CPU, b:CPU; of the whole model also a:CPU@0, a:CPU@1"), "{text}");
    }
    let pinned = PlanRequest { pins: vec!["*=b:CPU".parse().unwrap()], ..request };
    assert!(plan("single:a:CPU@1", &pinned).unwrap_err().to_string().contains("*=b:CPU"));
}

#[test]
fn a_profile_that_repeats_a_unit_is_refused_with_its_name() {
    let (graph, builder) = sample();
    let mut profile = builder.profile;
    let first = profile.units[0].clone();
    profile.units.push(first);
    let error = plan("auto", &PlanRequest::new(&profile, &graph)).unwrap_err();
    assert_eq!(error, PlanError::Core(CoreError::RepeatedUnit { unit: "a:CPU".into() }));
    let text = error.to_string();
    assert!(text.contains("`a:CPU` twice") && !text.contains('\n'), "{text}");
}

#[test]
fn methods_of_one_model_say_who_plans_several() {
    let (graph, builder) = sample();
    let request = PlanRequest::new(&builder.profile, &graph);
    let pair = [request.clone(), request];
    for method in ["dag", "interval", "phases", "pipeline", "pareto", "single:a:CPU"] {
        let error = plan_several(method, &pair, &PlanOptions::default()).unwrap_err();
        let PlanError::OneModel { given: 2, .. } = &error else { panic!("{method}: {error}") };
        let text = error.to_string();
        assert!(text.contains(method) && text.contains("concurrent, aligned, joint, joint-units"), "{text}");
    }
    let error = plan_several("nonsense", &pair, &PlanOptions::default()).unwrap_err();
    assert!(matches!(error, PlanError::UnknownMethod { .. }), "{error}");
}

/// Bounds on energy hold for units that draw at least what the idle machine does; nothing else is let in, in one profile or spread over
/// two.
#[test]
fn a_busy_unit_that_draws_less_than_the_idle_machine_is_refused() {
    let declare = |builder: &ProfileBuilder, name: &str, watts: f64| {
        let mut profile = builder.profile.clone();
        profile.declared_watts.insert(name.to_owned(), watts);
        profile
    };
    let want = "a:CPU is said to draw 5 W while it works, less than the 25 W of the idle machine";
    for objective in [Objective::Latency, Objective::Energy] {
        let (graph, builder) = sample();
        let whole =
            [("measured", builder.watts(0, 5.0).watts(1, 30.0)), ("declared", sample().1)].map(|(how, builder)| {
                let mut profile = declare(&builder, "idle", 25.0);
                if how == "declared" {
                    profile.declared_watts.extend([("a:CPU".to_owned(), 5.0), ("b:CPU".to_owned(), 30.0)]);
                }
                profile
            });
        for profile in &whole {
            assert!(profile.validate().unwrap_err().to_string().starts_with(want));
            let request = PlanRequest { objective, ..PlanRequest::new(profile, &graph) };
            for method in ["auto", "dag", "sequential", "single:a:CPU"] {
                let message = plan(method, &request).unwrap_err().to_string();
                assert!(message.starts_with(want) && !message.contains('\n'), "{method}: {message}");
            }
        }
    }
    let (graph, builder) = sample();
    let (idle, busy) = (declare(&builder, "idle", 25.0), builder.watts(0, 5.0).watts(1, 30.0).profile);
    let requests = [&idle, &busy].map(|profile| PlanRequest::new(profile, &graph));
    let message = plan_several("auto", &requests, &PlanOptions::default()).unwrap_err().to_string();
    assert!(message.starts_with(want), "{message}");
    // A reading that a later one replaces does not count.
    let profile = declare(&sample().1.watts(0, 5.0).watts(0, 25.0), "idle", 25.0);
    assert_eq!(profile.validate(), Ok(()));
}
