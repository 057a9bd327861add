//! Several models at once: arrivals, deadlines, weights, links and repeats.

mod support;

use support::{Dice, close};
use trefoil_core::{Objective, OperatorGraph, TensorId};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{
    Application, ConcurrentRequest, PlanError, PlanOptions, PlanRequest, Stage, StageLink, concurrent,
    concurrent_problem, plan,
};

fn named(mut graph: OperatorGraph, name: &str, seed: u64) -> OperatorGraph {
    name.clone_into(&mut graph.model);
    graph.fingerprint = format!("{seed:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{seed:016x}{at:016x}");
    }
    graph
}

fn profiled(graph: &OperatorGraph, times: &[&[f64]]) -> ProfileBuilder {
    let mut builder = ProfileBuilder::new(graph).cpus(times.len()).transfers(&[(0, 0.0)]);
    for (unit, times) in times.iter().enumerate() {
        builder = builder.operators(unit, &times.iter().map(|&ms| Some(ms)).collect::<Vec<_>>());
    }
    builder
}

#[test]
fn complementary_models_overlap() {
    let one = named(chain(3, 8), "one", 1);
    let two = named(chain(3, 8), "two", 2);
    let first = profiled(&one, &[&[1.0, 1.0, 1.0], &[9.0, 9.0, 9.0]]);
    let second = profiled(&two, &[&[9.0, 9.0, 9.0], &[1.0, 1.0, 1.0]]);
    let applications = vec![Application::new(&first.profile, &one), Application::new(&second.profile, &two)];
    let found = concurrent(&ConcurrentRequest::new(applications), &PlanOptions::default()).unwrap();
    assert!(found.simulated_ms <= 3.0 + 1e-9, "{}", found.simulated_ms);
    found.check(&[&one, &two]).unwrap();
    assert_eq!(found.models.len(), 2);
    assert_eq!(found.requests.len(), 2);
}

#[test]
fn items_of_one_model_may_use_different_units_and_wait_for_their_arrival() {
    let graph = named(chain(4, 8), "stream", 3);
    let builder = profiled(&graph, &[&[1.0; 4], &[1.5; 4]]);
    let application = Application::new(&builder.profile, &graph).every(3, 0.0, 1.0);
    let found = concurrent(&ConcurrentRequest::new(vec![application]), &PlanOptions::default()).unwrap();
    found.check(&[&graph]).unwrap();
    found.check_costs(&builder.profile.index()).unwrap();
    // Item 0 takes 0..4 on one, item 1 1..7 on the other, item 2 4..8: no better is possible without splitting.
    assert!(found.simulated_ms <= 8.0 + 1e-9, "{}", found.simulated_ms);
    assert!(found.model_bound.unwrap() <= found.simulated_ms);
    for span in found.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        let item = found.tasks[span.task.0 as usize].item;
        assert!(span.start_ms >= f64::from(item) - 1e-12, "item {item} starts at {}", span.start_ms);
    }
    assert!(found.tasks.iter().map(|task| task.item).max() == Some(2));
}

#[test]
fn deadlines_come_before_makespan() {
    let long = named(chain(1, 8), "long", 4);
    let short = named(chain(1, 8), "short", 5);
    let first = profiled(&long, &[&[10.0]]);
    let second = profiled(&short, &[&[1.0]]);
    let urgent = Application::new(&second.profile, &short).within(1.5);
    let applications = vec![Application::new(&first.profile, &long), urgent];
    let found = concurrent(&ConcurrentRequest::new(applications), &PlanOptions::default()).unwrap();
    let end = |item_model: &str| {
        let model = found.models.iter().position(|model| model.name == item_model).unwrap() as u32;
        let spans = found.timeline.lanes.iter().flat_map(|lane| &lane.spans);
        spans
            .filter(|span| match found.tasks[span.task.0 as usize].work {
                trefoil_core::Work::Segment { segment } => found.segments[segment.0 as usize].model == model,
                _ => false,
            })
            .map(|span| span.end_ms)
            .fold(0.0, f64::max)
    };
    assert!(close(end("short"), 1.0) && close(end("long"), 11.0));
    // Impossible deadlines are told.
    let late = Application::new(&second.profile, &short).within(0.5);
    let found = concurrent(&ConcurrentRequest::new(vec![late]), &PlanOptions::default()).unwrap();
    assert!(found.notes.iter().any(|note| note.contains("1 of 1 items miss")), "{:?}", found.notes);
}

#[test]
fn weights_decide_who_goes_first() {
    let one = named(chain(1, 8), "one", 6);
    let two = named(chain(1, 8), "two", 7);
    let first = profiled(&one, &[&[2.0]]);
    let second = profiled(&two, &[&[3.0]]);
    let ask = |weights: (f64, f64)| {
        let applications = vec![
            Application::new(&first.profile, &one).weighing(weights.0),
            Application::new(&second.profile, &two).weighing(weights.1),
        ];
        let request = ConcurrentRequest { weighted: true, ..ConcurrentRequest::new(applications) };
        concurrent(&request, &PlanOptions::default()).unwrap().claimed
    };
    // Smith's rule: 2 then 5, or 3 then 5.
    assert!(close(ask((1.0, 1.0)), 3.5));
    assert!(close(ask((1.0, 3.0)), (3.0 * 3.0 + 5.0) / 4.0));
}

/// text → prefix → 10 denoising steps, as a VLA is linked.
#[test]
fn stages_are_linked_and_repeated() {
    let text = named(chain(2, 8), "text", 8);
    let prefix = named(chain(2, 8), "prefix", 9);
    let denoise = named(chain(3, 8), "denoise", 10);
    let fix = |mut graph: OperatorGraph| {
        graph.tensors[0].bytes = 8;
        graph
    };
    let (text, prefix, denoise) = (fix(text), fix(prefix), fix(denoise));
    let builders = [
        profiled(&text, &[&[1.0; 2], &[2.0; 2]]),
        profiled(&prefix, &[&[1.0; 2], &[0.5; 2]]),
        profiled(&denoise, &[&[1.0, 0.25, 0.25], &[0.25, 1.0, 0.25]]),
    ];
    let stage = |at: usize, graph, repeat| Stage { profile: &builders[at].profile, graph, repeat };
    let application = Application {
        stages: vec![stage(0, &text, 1), stage(1, &prefix, 1), stage(2, &denoise, 10)],
        links: vec![
            StageLink { from: (0, TensorId(2)), to: (1, TensorId(0)) },
            StageLink { from: (1, TensorId(2)), to: (2, TensorId(0)) },
            StageLink { from: (2, TensorId(3)), to: (2, TensorId(0)) },
        ],
        ..Application::new(&builders[0].profile, &text)
    };
    let request = ConcurrentRequest::new(vec![application.clone()]);
    let problem = concurrent_problem(&request).unwrap();
    assert_eq!(problem.jobs().len(), 2 + 2 + 30);
    // One chain: each operator where it is fastest, nothing to pay.
    let found = concurrent(&request, &PlanOptions::default()).unwrap();
    let ends = problem.topological().len();
    assert_eq!(ends, 34);
    found.check(&[&text, &prefix, &denoise]).unwrap();
    assert!(found.simulated_ms <= 2.0 + 1.0 + 10.0 * 0.75 + 1e-9, "{}", found.simulated_ms);
    assert!(found.tasks.iter().any(|task| task.iteration == 9));
    // A link of the wrong size, and one from nothing.
    let mut wrong = application.clone();
    wrong.links[0].from.1 = TensorId(0);
    let error = concurrent(&ConcurrentRequest::new(vec![wrong]), &PlanOptions::default()).unwrap_err();
    assert!(matches!(&error, PlanError::Workload { .. }) && error.to_string().contains("no operator makes"), "{error}");
    // Stages in a circle.
    let mut circle = application;
    circle.links.push(StageLink { from: (2, TensorId(3)), to: (0, TensorId(0)) });
    let error = concurrent(&ConcurrentRequest::new(vec![circle]), &PlanOptions::default()).unwrap_err();
    assert!(error.to_string().contains("waits for"), "{error}");
}

#[test]
fn one_model_is_what_dag_schedules() {
    let mut dice = Dice(6);
    for seed in 20..40 {
        let graph = named(graph(&[8; 6], &[(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]), "one", seed);
        let mut times = || (0..6).map(|_| 0.2 + dice.roll()).collect::<Vec<_>>();
        let (a, b) = (times(), times());
        let builder = profiled(&graph, &[&a, &b]);
        let request = PlanRequest::new(&builder.profile, &graph);
        let together = plan("concurrent", &request).unwrap();
        let dag = plan("dag", &request).unwrap();
        assert!(dag.simulated_ms <= together.simulated_ms * (1.0 + 1e-9));
    }
}

#[test]
fn bad_workloads_are_refused_in_one_line() {
    let graph = named(chain(2, 8), "one", 50);
    let builder = profiled(&graph, &[&[1.0, 1.0]]);
    let mut other = profiled(&graph, &[&[1.0, 1.0]]);
    other.profile.machine.cpu = "another".to_owned();
    let options = PlanOptions::default();
    let none = concurrent(&ConcurrentRequest::new(Vec::new()), &options).unwrap_err();
    let machines = vec![Application::new(&builder.profile, &graph), Application::new(&other.profile, &graph)];
    let machines = concurrent(&ConcurrentRequest::new(machines), &options).unwrap_err();
    let mut units = profiled(&graph, &[&[1.0, 1.0]]);
    units.profile.units[0].address = "z:CPU".parse().unwrap();
    let units_request = vec![Application::new(&builder.profile, &graph), Application::new(&units.profile, &graph)];
    let units = concurrent(&ConcurrentRequest::new(units_request), &options).unwrap_err();
    let throughput = ConcurrentRequest {
        objective: Objective::Throughput,
        ..ConcurrentRequest::new(vec![Application::new(&builder.profile, &graph)])
    };
    let throughput = concurrent(&throughput, &options).unwrap_err();
    let weight = ConcurrentRequest::new(vec![Application::new(&builder.profile, &graph).weighing(f64::NAN)]);
    let weight = concurrent(&weight, &options).unwrap_err();
    let pinned = ConcurrentRequest {
        pins: vec!["nothing=a:CPU".parse().unwrap()],
        ..ConcurrentRequest::new(vec![Application::new(&builder.profile, &graph)])
    };
    let pinned = concurrent(&pinned, &options).unwrap_err();
    for (error, word) in [
        (none, "no model"),
        (machines, "one machine"),
        (units, "no unit in common"),
        (throughput, "throughput"),
        (weight, "weight"),
        (pinned, "matches no operator"),
    ] {
        let text = error.to_string();
        assert!(text.contains(word) && !text.contains('\n'), "{text}");
    }
}
