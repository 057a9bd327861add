//! Memory limits of units: every method keeps to them or refuses in one line.

use trefoil_core::{Objective, OperatorGraph, OperatorId, UnitKind};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{
    Budget, METHODS, PlanError, PlanOptions, PlanRequest, import, pareto_plans, plan_several, plan_with,
};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(60_000), ..PlanOptions::default() }
}

/// Operators of 100 bytes each, all faster on the second unit, which has room for some of them.
fn sample(graph: &mut OperatorGraph, limits: [Option<u64>; 2], whole: bool) -> ProfileBuilder {
    graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 100);
    let count = graph.len();
    let mut builder = ProfileBuilder::new(graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("b:NPU", UnitKind::Npu)
        .operators(0, &vec![Some(2.0); count])
        .operators(1, &vec![Some(1.0); count])
        .transfers(&[(0, 0.01)])
        .watts(0, 10.0)
        .watts(1, 10.0);
    if whole {
        builder = builder.whole(0, 2.0 * count as f64).whole(1, count as f64);
    }
    for (unit, limit) in builder.profile.units.iter_mut().zip(limits) {
        unit.limits.memory_bytes = limit;
    }
    builder
}

#[test]
fn every_method_keeps_to_the_limits_or_refuses() {
    let names = METHODS.iter().map(|method| method.name).filter(|name| *name != "single:UNIT");
    let names: Vec<&str> = names.chain(["single:a:CPU", "single:b:NPU"]).collect();
    let (mut kept, mut refused) = (0, 0);
    for limits in
        [[None, Some(0)], [None, Some(250)], [Some(300), Some(300)], [Some(100), Some(100)], [Some(0), Some(0)]]
    {
        for whole in [false, true] {
            let shapes = [chain(6, 64), graph(&[64; 6], &[(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (0, 5)])];
            for mut graph in shapes {
                let builder = sample(&mut graph, limits, whole);
                let possible =
                    limits.iter().map(|limit| limit.unwrap_or(u64::MAX) / 100).fold(0, u64::saturating_add) >= 6;
                for &name in &names {
                    for objective in [Objective::Latency, Objective::Energy, Objective::Throughput] {
                        if (objective == Objective::Throughput) != (name == "pipeline") {
                            continue;
                        }
                        let request = PlanRequest { objective, ..PlanRequest::new(&builder.profile, &graph) };
                        let what = format!("{name} for {objective:?} within {limits:?}, whole {whole}");
                        match plan_with(name, &request, &quick()) {
                            Ok(plan) => {
                                assert_eq!(plan.over_memory(&[&graph]), None, "{what}");
                                assert!(possible, "{what}");
                                kept += 1;
                            }
                            Err(error) => {
                                let text = error.to_string();
                                assert!(text.contains("memory") && !text.contains('\n'), "{what}: {text}");
                                // Where there is a plan, the methods that know of memory find one.
                                let knows = ["auto", "interval", "dag", "concurrent", "pipeline"].contains(&name);
                                assert!(!(possible && knows), "{what}: {text}");
                                refused += 1;
                            }
                        }
                    }
                }
                let front = pareto_plans(&PlanRequest::new(&builder.profile, &graph), &quick());
                match front {
                    Ok(front) => assert!(front.points.iter().all(|point| point.1.over_memory(&[&graph]).is_none())),
                    Err(error) => assert!(!possible && error.to_string().contains("memory"), "{error}"),
                }
            }
        }
    }
    assert!(kept > 50 && refused > 50, "{kept} kept, {refused} refused");
}

#[test]
fn two_requests_and_hand_made_splits_are_refused_too() {
    let mut graph = chain(4, 64);
    let builder = sample(&mut graph, [Some(150), Some(150)], false);
    let request = PlanRequest::new(&builder.profile, &graph);
    for method in ["aligned", "joint", "joint-units", "concurrent"] {
        let error = plan_several(method, &[request.clone(), request.clone()], &quick()).unwrap_err();
        assert!(matches!(error, PlanError::Memory { .. }), "{method}: {error}");
    }
    let everything: Vec<_> = (0..4).map(|at| (OperatorId(at), builder.address(0))).collect();
    let error = import(&request, &everything).unwrap_err().to_string();
    assert!(error.contains("memory"), "{error}");
}
