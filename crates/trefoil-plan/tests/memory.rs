//! Memory limits of units: every method keeps to them or refuses in one line, and bounds count them.

mod support;

use serde_json::{Value, json};
use support::certified::{bound_refused, paper, proof, scale, value};
use support::{Dice, Instance, Shape};
use trefoil_check::{CheckError, check};
use trefoil_core::{Objective, OperatorGraph, OperatorId, UnitKind};
use trefoil_plan::problem::Goal;
use trefoil_plan::testing::{Numbers, ProfileBuilder, chain, graph};
use trefoil_plan::{
    Application, Budget, ConcurrentRequest, METHODS, PlanError, PlanOptions, PlanRequest, certificate, concurrent,
    import, model_bound, pareto_plans, plan_several, plan_with,
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

/// Oracle: every assignment within the limits in every order, by the tests' own simulator.
#[test]
fn bounds_with_limits_hold_and_are_higher_than_without() {
    let mut dice = Dice(41);
    let (mut higher, mut met, mut all, mut weighted_higher) = (0, 0, 0, 0);
    let rounds = if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { 8000 } else { 800 };
    for number in 0..rounds {
        let shape = Shape {
            jobs: 2 + dice.below(2),
            units: 2 + usize::from(number % 4 == 0),
            edges: [0.2, 0.5, 0.9][number % 3],
            transfers: [0.0, 0.3, 1.5][dice.below(3)],
            slowdown: number % 2 == 0,
            speedup: number % 8 == 0,
            shared: number % 5 == 0,
            requests: 1 + usize::from(number % 3 == 0),
        };
        let instance = Instance::random(shape, &mut dice).limited(&mut dice);
        let free = Instance { memory: vec![None; shape.units], ..instance.clone() };
        let (mut makespan, mut joules, mut weighted) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        instance.all_schedules(&mut |_, tasks, order| {
            let (end, energy, completion) = instance.simulate(tasks, order);
            (makespan, joules) = (makespan.min(end), joules.min(energy));
            let of = instance.requests.iter().zip(completion);
            let sum: f64 = of.map(|(&(release, _, weight), end)| weight * (end - release).max(0.0)).sum();
            weighted = weighted.min(sum / instance.requests.iter().map(|request| request.2).sum::<f64>());
        });
        let all_goals = [(Goal::Makespan, makespan), (Goal::Energy, joules), (Goal::WeightedCompletion, weighted)];
        for (goal, least) in all_goals {
            let bound = |instance: &Instance| model_bound(&instance.problem().with_goal(goal).unwrap()).value;
            let (with, without) = (bound(&instance), bound(&free));
            assert!(with <= least * (1.0 + 1e-9) + 1e-12, "{number} {goal:?}: {with} above {least}\n{instance:?}");
            assert!(with >= without * (1.0 - 1e-9), "{number} {goal:?}: {with} below {without}");
            all += 1;
            higher += usize::from(with > without * (1.0 + 1e-6));
            weighted_higher += usize::from(goal == Goal::WeightedCompletion && with > without * (1.0 + 1e-6));
            met += usize::from(with >= least * (1.0 - 1e-6));
        }
    }
    println!("{higher} of {all} bounds are higher with limits, {met} meet the optimum");
    assert!(higher * 10 > all && weighted_higher * 10 > rounds, "{higher} of {all}, {weighted_higher} of {rounds}");
}

/// Oracle: a knapsack. On a chain of lone operators without transfers the time is the sum of what each takes where it is.
#[test]
fn a_chain_within_a_limit_is_bounded_by_its_fractional_knapsack() {
    let mut roll = Numbers(9);
    let mut next = || roll.next().unwrap();
    let (mut gap, mut plain) = (0.0f64, 0.0f64);
    for count in [8u32, 20, 60] {
        let mut graph = chain(count as usize, 64);
        graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 50 + (50.0 * next()) as u64);
        let times: Vec<(f64, f64)> = (0..count).map(|_| (1.0 + next(), 0.2 + 0.5 * next())).collect();
        let mut builder = ProfileBuilder::new(&graph).cpus(2).transfers(&[(0, 0.0)]);
        builder = builder
            .operators(0, &times.iter().map(|times| Some(times.0)).collect::<Vec<_>>())
            .operators(1, &times.iter().map(|times| Some(times.1)).collect::<Vec<_>>());
        let total: u64 = graph.operators.iter().map(|operator| operator.weight_bytes).sum();
        let limit = total / 3;
        builder.profile.units[1].limits.memory_bytes = Some(limit);
        // What moving an operator over saves, best per byte first, until the room is used up.
        let mut saved: Vec<(f64, f64)> = times
            .iter()
            .zip(&graph.operators)
            .map(|(times, operator)| (times.0 - times.1, operator.weight_bytes as f64))
            .collect();
        saved.sort_by(|a, b| (b.0 / b.1).total_cmp(&(a.0 / a.1)));
        let mut left = limit as f64;
        let mut fractional: f64 = times.iter().map(|times| times.0).sum();
        for (ms, bytes) in saved {
            let share = (left / bytes).min(1.0);
            fractional -= share * ms;
            left -= share * bytes;
        }
        let request = PlanRequest::new(&builder.profile, &graph);
        let problem = trefoil_plan::Problem::from_request(&request).unwrap();
        let bound = model_bound(&problem).value;
        assert!(bound <= fractional * (1.0 + 1e-9), "{count}: {bound} above {fractional}");
        assert!(bound >= fractional * 0.99, "{count}: {bound} far below {fractional}");
        // Lone operators: segments save a dispatch.
        let own = plan_with("dag", &request, &quick()).unwrap().own.unwrap();
        assert!(own.value >= fractional * (1.0 - 1e-9));
        gap = gap.max(own.gap.unwrap());
        builder.profile.units[1].limits.memory_bytes = None;
        let free = trefoil_plan::Problem::from_request(&PlanRequest::new(&builder.profile, &graph)).unwrap();
        plain = plain.max(own.value / model_bound(&free).value - 1.0);
    }
    println!("largest gap {gap:.3} with prices of memory, {plain:.3} without");
    assert!(gap < 0.3 * plain, "{gap} with prices of memory, {plain} without");
}

/// Whether some proof of a certificate counts prices of memory.
fn priced(paper: &Value) -> bool {
    paper["bound"]["proofs"].as_array().unwrap().iter().any(|proof| proof.get("memory").is_some())
}

#[test]
fn certificates_count_limits_and_tampered_prices_fail() {
    let diamonds = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (6, 8), (0, 7), (7, 8)];
    let (mut with_prices, mut checked) = (0, 0);
    for seed in 1..=6u64 {
        for shape in [chain(9, 64), graph(&[64; 9], &diamonds)] {
            let mut graph = shape;
            let mut numbers = Numbers(seed * 7919 + 11);
            let mut roll = || numbers.next().unwrap();
            roll();
            graph.operators.iter_mut().for_each(|operator| operator.weight_bytes = 10 + (90.0 * roll()) as u64);
            let count = graph.len();
            let mut ms = |scale: f64| (0..count).map(|_| Some(scale * (0.5 + roll()))).collect::<Vec<_>>();
            let (cpu, npu) = (ms(2.0), ms(0.7));
            let mut builder = ProfileBuilder::new(&graph)
                .unit("a:CPU", UnitKind::Cpu)
                .unit("b:NPU", UnitKind::Npu)
                .operators(0, &cpu)
                .operators(1, &npu)
                .transfers(&[(0, 0.02), (64, 0.05)])
                .watts(0, 12.0)
                .watts(1, 6.0);
            builder.profile.declared_watts.insert("idle".to_owned(), 1.5);
            let total: u64 = graph.operators.iter().map(|operator| operator.weight_bytes).sum();
            builder.profile.units[1].limits.memory_bytes = Some(total / 3);
            let profiles = [serde_json::to_value(&builder.profile).unwrap()];
            for (method, objective) in [
                ("interval", Objective::Latency),
                ("interval", Objective::Energy),
                ("dag", Objective::Latency),
                ("dag", Objective::Energy),
                ("pipeline", Objective::Throughput),
            ] {
                let what = format!("{method} for {objective:?}, seed {seed}");
                let request = PlanRequest { objective, ..PlanRequest::new(&builder.profile, &graph) };
                let plan = plan_with(method, &request, &quick()).unwrap_or_else(|error| panic!("{what}: {error}"));
                let paper = certificate(std::slice::from_ref(&request), &plan).unwrap();
                let paper = serde_json::to_value(paper).unwrap();
                let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{what}: {error}"));
                assert!(verdict.bound.is_some_and(|bound| bound > 0.0), "{what}");
                checked += 1;
                if !priced(&paper) {
                    continue;
                }
                with_prices += 1;
                for factor in [0.0, 0.5, 1.5] {
                    let mut forged = paper.clone();
                    let mut sums = 0.0;
                    for proof in forged["bound"]["proofs"].as_array_mut().unwrap() {
                        if let Some(prices) = proof.get_mut("memory").and_then(Value::as_object_mut) {
                            prices.values_mut().for_each(|price| *price = json!(price.as_f64().unwrap() * factor));
                            // What nobody can prove.
                            proof["value"] = json!(proof["value"].as_f64().unwrap() * 1.02);
                            sums += 1.0;
                        }
                    }
                    assert!(sums > 0.0);
                    let error = check(&forged, &profiles).expect_err(&what);
                    assert!(matches!(error, CheckError::Bound(_)), "{what}, prices times {factor}: {error}");
                }
                // Memory that has no limit has no price.
                let mut forged = paper.clone();
                for proof in forged["bound"]["proofs"].as_array_mut().unwrap() {
                    if let Some(prices) = proof.get_mut("memory").and_then(Value::as_object_mut) {
                        prices.insert("a:CPU".to_owned(), json!(1.0));
                    }
                }
                assert!(check(&forged, &profiles).unwrap_err().to_string().contains("no limit"), "{what}");
                // With less memory the schedule is not feasible; with more the bound is not proven.
                for (change, infeasible) in [(0, true), (10 * total, false)] {
                    let mut other = profiles[0].clone();
                    other["units"][1]["limits"]["memory_bytes"] = json!(change);
                    let error = check(&paper, &[other]).unwrap_err();
                    assert!(matches!(error, CheckError::Schedule(_)) == infeasible, "{what}: {error}");
                }
            }
        }
    }
    assert!(with_prices * 2 > checked, "{with_prices} of {checked}");
}

/// Requests of different weights share what a limited unit holds; raising any of it is refused.
#[test]
fn weighted_completions_count_limits_in_their_certificates() {
    let (mut counted, mut higher) = (0, 0.0f64);
    for seed in 1..=8u64 {
        let mut numbers = Numbers(seed * 7919 + 5);
        let mut roll = || numbers.next().unwrap();
        roll();
        // Each model fits on the second unit, both do not.
        let mut models = Vec::new();
        for number in 0..2 {
            let mut graph = chain(5, 64);
            graph.fingerprint = format!("{number:032x}");
            for (at, operator) in graph.operators.iter_mut().enumerate() {
                operator.signature.0 = format!("{number:016x}{at:016x}");
                operator.weight_bytes = 10 + (90.0 * roll()) as u64;
            }
            let mut ms = |scale: f64| (0..5).map(|_| Some(scale * (0.5 + roll()))).collect::<Vec<_>>();
            let (cpu, npu) = (ms(2.0), ms(0.7));
            let mut builder = ProfileBuilder::new(&graph)
                .unit("a:CPU", UnitKind::Cpu)
                .unit("b:NPU", UnitKind::Npu)
                .operators(0, &cpu)
                .operators(1, &npu)
                .transfers(&[(0, 0.02), (64, 0.05)]);
            builder.profile.units[1].limits.memory_bytes = Some(350);
            models.push((graph, builder.profile));
        }
        let applications = vec![
            Application::new(&models[0].1, &models[0].0).every(2, 0.0, 1.0).weighing(3.0),
            Application::new(&models[1].1, &models[1].0).every(1, 0.5, 1.0),
        ];
        let asked = ConcurrentRequest { weighted: true, ..ConcurrentRequest::new(applications) };
        let plan = concurrent(&asked, &quick()).unwrap();
        let requests = [0, 1].map(|at: usize| PlanRequest::new(&models[at].1, &models[at].0));
        let paper = paper(&requests, &plan);
        let profiles = [value(&models[0].1), value(&models[1].1)];
        let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{seed}: {error}"));
        let completions = |paper: &Value| {
            let proofs = paper["bound"]["proofs"].as_array().unwrap();
            proofs.iter().find(|proof| proof["kind"] == "completions").unwrap().clone()
        };
        if completions(&paper).get("memory").is_none() {
            continue;
        }
        counted += 1;
        higher = higher.max(verdict.bound.unwrap());
        let refuse = |what: &str, tamper: &dyn Fn(&mut Value)| {
            bound_refused(&paper, &profiles, &format!("{seed}: {what}"), |forged| tamper(proof(forged, "completions")));
        };
        refuse("a higher value", &|proof| scale(&mut proof["value"], 1.001));
        refuse("higher potentials", &|proof| {
            let rows = proof["executions"].as_array_mut().unwrap().iter_mut();
            for row in rows.flat_map(|one| one["potentials"].as_array_mut().unwrap()) {
                row.as_array_mut().unwrap().iter_mut().for_each(|value| scale(value, 1.001));
            }
        });
        refuse("an execution less", &|proof| drop(proof["executions"].as_array_mut().unwrap().pop()));
        refuse("limits that are worth nothing", &|proof| {
            proof["memory"].as_object_mut().unwrap().values_mut().for_each(|price| scale(price, 0.5));
        });
        refuse("memory that has no limit", &|proof| proof["memory"]["a:CPU"] = json!(1.0));
    }
    assert!(counted >= 3 && higher > 0.0, "{counted} of 8 count limits");
}
