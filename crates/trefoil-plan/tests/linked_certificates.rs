//! Certificates of linked and repeated stages, of several profiles and of weighted requests, against the independent checker.

mod support;

use serde_json::{Value, json};
use support::certified::{has, paper, proof, refused, scale, value};
use trefoil_check::check;
use trefoil_core::{Objective, OperatorGraph, OperatorId, Outcome, Profile, Samples, TensorEdge, TensorId, UnitKind};
use trefoil_plan::testing::{Numbers, ProfileBuilder, graph};
use trefoil_plan::{Application, Budget, ConcurrentRequest, PlanOptions, PlanRequest, Stage, StageLink, concurrent};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(40_000), ..PlanOptions::default() }
}

/// A model of its own name; tensors of 64 bytes, with the input `x` and, read by the second operator, the input `state`.
fn model(name: &str, number: u64, count: usize, edges: &[(u32, u32)]) -> OperatorGraph {
    let mut graph = graph(&vec![64; count], edges);
    name.clone_into(&mut graph.model);
    graph.fingerprint = format!("{number:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{number:016x}{at:016x}");
        operator.weight_bytes = 100;
    }
    let state = TensorId(graph.tensors.len() as u32);
    let like = graph.tensors[0].clone();
    graph.tensors.push(TensorEdge { name: "state".to_owned(), consumers: vec![OperatorId(1)], ..like });
    graph.operators[1].inputs.push(state);
    graph.inputs.push(state);
    graph
}

/// A CPU and an accelerator that takes time to be handed inputs and to hand over outputs, both with powers.
fn profiled(graph: &OperatorGraph, seed: u64, transfer: f64) -> Profile {
    let mut numbers = Numbers(seed * 7919 + 3);
    let mut ms = |scale: f64| -> Vec<Option<f64>> {
        (0..graph.len()).map(|_| Some(scale * (0.3 + numbers.next().unwrap()))).collect()
    };
    let (cpu, npu) = (ms(1.0), ms(0.8));
    let builder = ProfileBuilder::new(graph)
        .unit("a:CPU", UnitKind::Cpu)
        .unit("b:NPU", UnitKind::Npu)
        .operators(0, &cpu)
        .operators(1, &npu)
        .transfers(&[(0, transfer), (64, 2.0 * transfer)])
        .slowdown(0, 1, 1.2)
        .slowdown(1, 0, 1.1)
        .watts(0, 12.0)
        .watts(1, 7.0);
    let mut profile = builder.profile;
    profile.declared_watts.insert("idle".to_owned(), 2.0);
    for record in &mut profile.measurements {
        let on_npu = record.units.len() == 1 && record.units[0].to_string() == "b:NPU";
        if let (true, Outcome::Ok { timing, .. }) = (on_npu, &mut record.outcome) {
            timing.h2d = Some(Samples::exactly(0.06));
            timing.d2h = Some(Samples::exactly(0.04));
        }
    }
    profile
}

struct Linked {
    graphs: [OperatorGraph; 3],
    profiles: [Profile; 3],
}

impl Linked {
    fn new(seed: u64) -> Self {
        let diamond = [(0, 1), (0, 2), (1, 3), (2, 3)];
        let graphs =
            [model("text", 1, 3, &[(0, 1), (1, 2)]), model("prefix", 2, 4, &diamond), model("denoise", 3, 4, &diamond)];
        // Each profile has transfers of its own, as if they were measured apart.
        let profiles = [0, 1, 2].map(|at| profiled(&graphs[at], seed + at as u64, 0.02 * (1.0 + at as f64)));
        Self { graphs, profiles }
    }

    /// text → prefix → a loop of `repeat` denoising steps whose state begins at the host.
    fn application(&self, items: u32, repeat: u32) -> Application<'_> {
        let stage = |at: usize, repeat| Stage { profile: &self.profiles[at], graph: &self.graphs[at], repeat };
        let last = |at: usize| TensorId(self.graphs[at].len() as u32);
        let looped = TensorId(self.graphs[2].tensors.len() as u32 - 1);
        Application {
            stages: vec![stage(0, 1), stage(1, 1), stage(2, repeat)],
            links: vec![
                StageLink { from: (0, last(0)), to: (1, TensorId(0)) },
                StageLink { from: (1, last(1)), to: (2, TensorId(0)) },
                StageLink { from: (2, last(2)), to: (2, looped) },
            ],
            ..Application::new(&self.profiles[0], &self.graphs[0])
        }
        .every(items, 0.4, 1.5)
    }

    fn requests(&self, objective: Objective) -> Vec<PlanRequest<'_>> {
        let of = |at: usize| PlanRequest { objective, ..PlanRequest::new(&self.profiles[at], &self.graphs[at]) };
        (0..3).map(of).collect()
    }

    fn values(&self) -> Vec<Value> {
        self.profiles.iter().map(value).collect()
    }
}

#[test]
fn linked_stages_with_repeats_are_verified_and_tampered_ones_fail() {
    for seed in 1..=4u64 {
        let linked = Linked::new(10 * seed);
        let profiles = linked.values();
        for (objective, weighted) in
            [(Objective::Latency, false), (Objective::Latency, true), (Objective::Energy, false)]
        {
            let applications = vec![linked.application(2, 3), linked.application(1, 2).weighing(2.0)];
            let asked = ConcurrentRequest { objective, weighted, ..ConcurrentRequest::new(applications) };
            let plan = concurrent(&asked, &quick()).unwrap();
            let paper = paper(&linked.requests(objective), &plan);
            let what = format!("seed {seed}, {objective:?}, weighted {weighted}");
            let verdict = check(&paper, &profiles).unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(has(&verdict, "workload-path"), "{what}: {verdict:?}");
            let (bound, stated) = (verdict.bound.unwrap(), plan.model_bound.unwrap());
            assert!(bound > 0.3 * verdict.value, "{what}: {verdict:?}");
            if paper["bound"]["costs"] == "segments" {
                // The plan's own bound is over the same plans, and better searched.
                assert!(bound <= stated * (1.0 + 1e-6), "{what}: {bound} above {stated}");
            }
            let refuse = |what: &str, tamper: &dyn Fn(&mut Value)| refused(&paper, &profiles, what, tamper);
            refuse("no links", &|forged| forged["links"] = json!([]));
            refuse("a link less", &|forged| {
                forged["links"].as_array_mut().unwrap().remove(0);
            });
            refuse("a link from elsewhere", &|forged| forged["links"][0]["from"]["item"] = json!(1));
            refuse("a link twice", &|forged| {
                let first = forged["links"][0].clone();
                forged["links"].as_array_mut().unwrap().push(first);
            });
            refuse("a later arrival", &|forged| forged["requests"][0]["arrival_ms"] = json!(50.0));
            let tasks = paper["tasks"].as_array().unwrap();
            let last = tasks.iter().map(|task| task["iteration"].as_u64().unwrap()).max().unwrap();
            assert_eq!(last, 2);
            refuse("the last repetition left out", &|forged| {
                forged["tasks"].as_array_mut().unwrap().retain(|task| task["iteration"] != last);
            });
            refuse("a repetition that does not wait", &|forged| {
                let tasks = forged["tasks"].as_array_mut().unwrap();
                let later = tasks.iter_mut().find(|task| task["iteration"] == last && task.get("operators").is_some());
                let later = later.unwrap();
                let length = later["end_ms"].as_f64().unwrap() - later["start_ms"].as_f64().unwrap();
                later["start_ms"] = json!(0.5);
                later["end_ms"] = json!(0.5 + length);
            });
            refuse("a higher path", &|forged| {
                scale(&mut proof(forged, "workload-path")["value"], 1.001);
            });
            refuse("higher potentials", &|forged| {
                let executions = proof(forged, "workload-path")["executions"].as_array_mut().unwrap();
                for row in executions.iter_mut().flat_map(|one| one["potentials"].as_array_mut().unwrap()) {
                    row.as_array_mut().unwrap().iter_mut().for_each(|value| scale(value, 1.001));
                }
            });
            refuse("an execution without potentials", &|forged| {
                proof(forged, "workload-path")["executions"].as_array_mut().unwrap().pop();
            });
            refuse("a higher bound", &|forged| scale(&mut forged["bound"]["value"], 1.001));
            // The path of one model knows nothing of what others hand on.
            refuse("a path of one model", &|forged| {
                let rows: Vec<Vec<f64>> = vec![vec![0.0; 2]; 3];
                let path = json!({ "kind": "path", "model": 0, "value": 0.0, "potentials": rows });
                forged["bound"]["proofs"].as_array_mut().unwrap().push(path);
            });
        }
    }
}

#[test]
fn on_one_unit_only_what_segments_may_save_is_left_of_the_gap() {
    // Whatever is planned takes the sum; every operator counts with its part of the cheapest segment.
    let linked = Linked::new(5);
    let unit = linked.profiles[0].units[0].address.clone();
    let asked =
        ConcurrentRequest { units: vec![unit.clone()], ..ConcurrentRequest::new(vec![linked.application(1, 4)]) };
    let plan = concurrent(&asked, &quick()).unwrap();
    let mut requests = linked.requests(Objective::Latency);
    for request in &mut requests {
        request.units = vec![unit.clone()];
    }
    let verdict = check(&paper(&requests, &plan), &linked.values()).unwrap();
    assert!(verdict.gap().unwrap() < 0.15, "{verdict:?}");
}

#[test]
fn repetitions_without_links_share_what_the_host_hands_in_and_out() {
    let linked = Linked::new(3);
    for objective in [Objective::Latency, Objective::Energy] {
        for repeat in [2, 5] {
            let stage = Stage { profile: &linked.profiles[1], graph: &linked.graphs[1], repeat };
            let application =
                Application { stages: vec![stage], ..Application::new(&linked.profiles[1], &linked.graphs[1]) };
            let asked = ConcurrentRequest { objective, ..ConcurrentRequest::new(vec![application.every(2, 0.0, 0.3)]) };
            let plan = concurrent(&asked, &quick()).unwrap();
            let request = PlanRequest { objective, ..PlanRequest::new(&linked.profiles[1], &linked.graphs[1]) };
            let verdict = check(&paper(&[request], &plan), &[value(&linked.profiles[1])])
                .unwrap_or_else(|error| panic!("{repeat} for {objective:?}: {error}"));
            assert!(verdict.bound.is_some_and(|bound| bound > 0.0), "{verdict:?}");
        }
    }
}

/// What an exhaustive search proved of a few repetitions is more than the checker searches.
#[test]
fn small_repeated_and_weighted_plans_are_verified() {
    let graph = model("one", 4, 2, &[(0, 1)]);
    let profile = profiled(&graph, 8, 0.0);
    let request = PlanRequest::new(&profile, &graph);
    let input = TensorId(graph.tensors.len() as u32 - 1);
    let looped = vec![StageLink { from: (0, TensorId(2)), to: (0, input) }];
    for (repeat, links) in [(3, Vec::new()), (3, looped), (1, Vec::new())] {
        for weighted in [false, true] {
            let stage = Stage { profile: &profile, graph: &graph, repeat };
            let application =
                Application { stages: vec![stage], links: links.clone(), ..Application::new(&profile, &graph) };
            let asked = ConcurrentRequest { weighted, ..ConcurrentRequest::new(vec![application]) };
            let plan = concurrent(&asked, &quick()).unwrap();
            check(&paper(std::slice::from_ref(&request), &plan), &[value(&profile)])
                .unwrap_or_else(|error| panic!("{repeat} times, weighted {weighted}: {error}"));
        }
    }
}

#[test]
fn an_input_that_two_links_feed_is_refused() {
    let linked = Linked::new(1);
    let mut application = linked.application(1, 2);
    application.links.push(StageLink { from: (0, TensorId(1)), to: (1, TensorId(0)) });
    let error = concurrent(&ConcurrentRequest::new(vec![application]), &quick()).unwrap_err().to_string();
    assert!(error.contains("two links feed `x`") && !error.contains('\n'), "{error}");
}
