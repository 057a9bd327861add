//! What-if replays, ports and plan diffs, on cases whose answers are obvious.

use trefoil_core::{Objective, Resource, UnitKind};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{PlanError, PlanOptions, PlanRequest, WhatIf, diff, plan, ports, what_if};

/// Three operators and one that takes no time, which makes dispatch free and so segments cost exactly their operators' sum.
fn two_units() -> (trefoil_core::OperatorGraph, ProfileBuilder) {
    let graph = chain(4, 64);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[2.0, 2.0, 2.0, 0.0].map(Some))
        .operators(1, &[1.0, 1.0, 1.0, 0.0].map(Some))
        .transfers(&[(64, 0.25)])
        .watts(0, 10.0)
        .watts(1, 20.0);
    (graph, builder)
}

fn changes(texts: &[&str]) -> Vec<WhatIf> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

#[test]
fn changes_parse_and_print_and_malformed_ones_are_one_line() {
    for text in ["slow:ort:CPU@0-1=1.5", "without:openvino:NPU", "busy:sim:x/GPU=4"] {
        assert_eq!(text.parse::<WhatIf>().unwrap().to_string(), text);
    }
    for text in ["", "slow", "slow:a:CPU", "slow:a:CPU=0", "slow:a:CPU=nan", "busy:a:CPU=-1", "without:a", "lost:a:CPU"]
    {
        let message = text.parse::<WhatIf>().unwrap_err().to_string();
        assert!(message.contains("is no change of the machine") && !message.contains('\n'), "{message}");
    }
}

#[test]
fn a_slowed_unit_is_replayed_and_planned_around() {
    let (graph, builder) = two_units();
    let request = PlanRequest::new(&builder.profile, &graph);
    let ask = |texts: &[&str]| what_if("interval", &request, &PlanOptions::default(), &changes(texts)).unwrap();
    let slow = ask(&["slow:b:CPU=1.5"]);
    assert_eq!((slow.before, slow.replayed, slow.replanned), (3.0, Some(4.5), 4.5));
    let slower = ask(&["slow:b:CPU=3"]);
    assert_eq!((slower.replayed, slower.replanned), (Some(9.0), 6.0));
    assert_eq!(slower.plan.segments[0].unit.to_string(), "a:CPU");
    let without = ask(&["without:b:CPU"]);
    assert_eq!((without.before, without.replayed, without.replanned), (3.0, None, 6.0));
    // What was measured stays measured; what was altered does not look like it.
    assert!(slow.plan.segments.iter().all(|segment| segment.cost.origin != trefoil_core::Origin::Measured));
}

#[test]
fn a_busy_unit_is_waited_for_or_avoided() {
    let (graph, builder) = two_units();
    let request = PlanRequest::new(&builder.profile, &graph);
    let ask = |texts: &[&str]| what_if("interval", &request, &PlanOptions::default(), &changes(texts)).unwrap();
    let short = ask(&["busy:b:CPU=1"]);
    assert_eq!((short.before, short.replayed), (3.0, Some(4.0)));
    assert!((short.replanned - 4.0).abs() < 1e-9, "{}", short.replanned);
    // Waiting 4 ms costs 7; the other unit alone 6; two operators there meanwhile and the third here 4 + 0.25 + 1.
    let long = ask(&["busy:b:CPU=4"]);
    assert_eq!(long.replayed, Some(7.0));
    assert!((long.replanned - 5.25).abs() < 1e-9, "{}", long.replanned);
    let energy = PlanRequest { objective: Objective::Energy, ..request.clone() };
    let replay = what_if("interval", &energy, &PlanOptions::default(), &changes(&["slow:b:CPU=1.5"])).unwrap();
    assert!((replay.before - 0.06).abs() < 1e-12 && replay.replanned <= replay.replayed.unwrap());
}

#[test]
fn a_unit_that_joins_late_is_used_late() {
    let graph = chain(7, 64);
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 0.0].map(Some))
        .operators(1, &[0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.0].map(Some))
        .transfers(&[(64, 0.1)]);
    let request = PlanRequest::new(&builder.profile, &graph);
    let replay = what_if("interval", &request, &PlanOptions::default(), &changes(&["busy:b:CPU=4"])).unwrap();
    assert_eq!((replay.before, replay.replayed), (3.0, Some(7.0)));
    // Two operators here while it is busy, the other four there: 4 + 0.1 + 2.
    assert!((replay.replanned - 6.1).abs() < 1e-9, "{} by {}", replay.replanned, replay.how);
    assert!(replay.plan.timeline.lanes.iter().flat_map(|lane| &lane.spans).any(|span| span.label.contains("busy")));
}

#[test]
fn units_that_are_not_there_and_nothing_left_are_errors() {
    let (graph, builder) = two_units();
    let request = PlanRequest::new(&builder.profile, &graph);
    let ask = |texts: &[&str]| what_if("interval", &request, &PlanOptions::default(), &changes(texts)).unwrap_err();
    assert!(ask(&["slow:z:CPU=2"]).to_string().contains("z:CPU"));
    let none_left = ask(&["without:a:CPU", "without:b:CPU"]);
    assert!(matches!(none_left, PlanError::NoUnitLeft { .. }), "{none_left:?}");
    assert!(none_left.to_string().contains("without:a:CPU, without:b:CPU leaves no unit"), "{none_left}");
}

#[test]
fn the_port_that_gains_most_comes_first_and_says_what_it_assumes() {
    let mut graph = chain(7, 8);
    for (at, kind) in ["MatMul", "CumSum", "MatMul", "Gather", "MatMul", "CumSum"].into_iter().enumerate() {
        kind.clone_into(&mut graph.operators[at].kind);
    }
    // Unit b runs MatMul four times as fast, and neither of the others.
    let builder = ProfileBuilder::new(&graph)
        .cpus(2)
        .operators(0, &[4.0, 4.0, 4.0, 1.0, 4.0, 2.0, 0.0].map(Some))
        .operators(1, &[Some(1.0), None, Some(1.0), None, Some(1.0), None, Some(0.0)])
        .transfers(&[(8, 0.5)]);
    let request = PlanRequest::new(&builder.profile, &graph);
    let found = ports("interval", &request, &PlanOptions::default()).unwrap();
    let names: Vec<(&str, usize)> = found.iter().map(|port| (port.kind.as_str(), port.operators)).collect();
    assert_eq!(names, [("CumSum", 2), ("Gather", 1)]);
    assert!((found[0].assumed_ratio - 0.25).abs() < 1e-9);
    assert!(found[0].gain() > found[1].gain() && found[1].gain() > 0.0);
    let text = found[0].to_string();
    assert!(text.contains("assumed 0.25x") && text.contains("compile: unsupported"), "{text}");
    // Nothing to port where everything runs everywhere.
    let (graph, builder) = two_units();
    assert!(
        ports("interval", &PlanRequest::new(&builder.profile, &graph), &PlanOptions::default()).unwrap().is_empty()
    );
}

#[test]
fn diffs_list_moves_and_refuse_other_models() {
    let (graph, builder) = two_units();
    let request = PlanRequest::new(&builder.profile, &graph);
    let first = plan("single:a:CPU", &request).unwrap();
    let second = plan("interval", &request).unwrap();
    let changed = diff(&first, &second, &[&graph]).unwrap();
    assert_eq!((changed.moves.len(), changed.unchanged), (4, 0));
    let text = changed.to_string();
    assert!(text.contains("`op0` (Relu): a:CPU → b:CPU") && text.contains("-50.00%"), "{text}");
    let same = diff(&first, &first, &[&graph]).unwrap();
    assert_eq!((same.moves.len(), same.unchanged), (0, 4));
    let mut other = graph.clone();
    other.fingerprint = "6".repeat(32);
    assert!(matches!(diff(&first, &second, &[&other]), Err(PlanError::Core(_))));
}

#[test]
fn core_counts_are_modes_of_a_unit() {
    // One core, or both: the wide branch wants both, two narrow ones want a core each.
    let graph = graph(&[8; 5], &[(0, 1), (0, 2), (1, 3), (2, 3), (3, 4)]);
    let mut builder = ProfileBuilder::new(&graph)
        .unit("a:CPU@0", UnitKind::Cpu)
        .unit("a:CPU@1", UnitKind::Cpu)
        .unit("a:CPU@0-1", UnitKind::Cpu);
    for (unit, cores) in [(0, vec![0]), (1, vec![1]), (2, vec![0, 1])] {
        builder.profile.units[unit].resources = cores.into_iter().map(Resource::Core).collect();
    }
    let builder = builder
        .operators(0, &[8.0, 3.0, 3.0, 8.0, 0.0].map(Some))
        .operators(1, &[8.0, 3.0, 3.0, 8.0, 0.0].map(Some))
        .operators(2, &[4.0, 2.9, 2.9, 4.0, 0.0].map(Some))
        .transfers(&[(8, 0.0)]);
    let found = plan("dag", &PlanRequest::new(&builder.profile, &graph)).unwrap();
    assert!((found.claimed - 11.0).abs() < 1e-9, "{}", found.claimed);
    let unit = |operator: u32| {
        let of = found.segments.iter().find(|segment| segment.operators.iter().any(|id| id.0 == operator)).unwrap();
        of.unit.to_string()
    };
    assert_eq!([unit(0), unit(3)], ["a:CPU@0-1", "a:CPU@0-1"]);
    assert_ne!(unit(1), unit(2), "memory-bound operators take a core each");
}

#[test]
fn changes_that_make_times_endless_are_refused_in_one_short_line() {
    let (graph, builder) = two_units();
    let request = PlanRequest::new(&builder.profile, &graph);
    for change in ["slow:a:CPU=1e308", "slow:a:CPU=1e12", "slow:a:CPU=1e-300", "busy:b:CPU=1e308"] {
        let changes: Vec<WhatIf> = vec![change.parse().unwrap()];
        let error = what_if("dag", &request, &PlanOptions::default(), &changes).unwrap_err().to_string();
        assert!(error.contains(change) && error.contains("is no time (0, or from 1e-12 to 1e12 ms)"), "{error}");
        assert!(!error.contains('\n') && error.len() < 200, "{error}");
    }
    // What is merely very slow is planned around.
    let changes: Vec<WhatIf> = vec!["slow:a:CPU=1e9".parse().unwrap()];
    let replay = what_if("interval", &request, &PlanOptions::default(), &changes).unwrap();
    assert!(replay.replanned.is_finite() && replay.replanned < 1e6, "{replay}");
}
