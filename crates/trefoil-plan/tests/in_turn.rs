//! Plans of several models are never worse than each model's own plan in turn: modes of units, slowdowns, arrivals, deadlines and periods
//! included.

use proptest::prelude::*;
use std::collections::BTreeMap;
use trefoil_core::{Objective, OperatorGraph, Plan, Subject, Work};
use trefoil_plan::testing::{ProfileBuilder, chain, ok};
use trefoil_plan::{
    Application, Budget, ConcurrentRequest, PlanError, PlanOptions, PlanRequest, certificate, concurrent, plan_several,
    plan_with,
};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(20_000), modes: true, ..PlanOptions::default() }
}

/// A chain of three operators on two units that slow each other down; its whole time on the first one, and on one core of that, if any.
#[derive(Debug, Clone)]
struct Model {
    ms: [[f64; 3]; 2],
    whole: f64,
    mode: Option<f64>,
    slowdown: f64,
}

impl Model {
    fn build(&self, name: &str) -> (OperatorGraph, ProfileBuilder) {
        let mut graph = chain(3, 64);
        name.clone_into(&mut graph.model);
        let number = u64::from(name.as_bytes()[0]);
        graph.fingerprint = format!("{number:032x}");
        for (at, operator) in graph.operators.iter_mut().enumerate() {
            operator.signature.0 = format!("{number:016x}{at:016x}");
        }
        let [one, two] = self.ms.map(|ms| ms.map(Some));
        let mut builder = ProfileBuilder::new(&graph)
            .cpus(2)
            .operators(0, &one)
            .operators(1, &two)
            .transfers(&[(0, 0.1)])
            .whole(0, self.whole)
            .slowdown(0, 1, self.slowdown)
            .slowdown(1, 0, self.slowdown);
        if let Some(ms) = self.mode {
            let mut mode = builder.profile.units[0].clone();
            mode.address = mode.address.with_cores([0]);
            let subject = Subject::WholeModel { model: graph.fingerprint.clone() };
            builder.record(subject, std::slice::from_ref(&mode.address), ok(ms));
            builder.profile.modes.push(mode);
        }
        (graph, builder)
    }
}

fn model() -> impl Strategy<Value = Model> {
    let ms = || prop::array::uniform3(0.1f64..3.0);
    (ms(), ms(), 0.2f64..6.0, prop::option::of(0.2f64..6.0), prop::sample::select(vec![1.0, 1.5, 4.0]))
        .prop_map(|(a, b, whole, mode, slowdown)| Model { ms: [a, b], whole, mode, slowdown })
}

fn close_below(value: f64, most: f64) -> bool {
    value <= most * (1.0 + 1e-9)
}

/// Weight of what is late, how late by weight, and the goal's value.
fn score(asked: &[(Application<'_>, usize)], ends: &BTreeMap<(usize, usize), f64>, weighted: bool) -> [f64; 3] {
    let (mut late, mut tardiness, mut sum, mut weights, mut last) = (0.0, 0.0, 0.0, 0.0, 0.0f64);
    for (application, model) in asked {
        for (item, arrival) in application.arrivals_ms.iter().enumerate() {
            let end = ends[&(*model, item)];
            if let Some(over) = application.deadline_ms.map(|deadline| end - arrival - deadline)
                && over > 1e-9
            {
                late += application.weight;
                tardiness += application.weight * over;
            }
            sum += application.weight * (end - arrival);
            weights += application.weight;
            last = last.max(end);
        }
    }
    [late, tardiness, if weighted { sum / weights } else { last }]
}

fn ends(plan: &Plan) -> BTreeMap<(usize, usize), f64> {
    let mut ends = BTreeMap::new();
    for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        let task = &plan.tasks[span.task.0 as usize];
        let model = match &task.work {
            Work::Segment { segment } => plan.segments[segment.0 as usize].model,
            Work::Transfer { model, .. } => *model,
            Work::Blocks { .. } => 0,
        };
        let slot = ends.entry((model as usize, task.item as usize)).or_insert(0.0f64);
        *slot = slot.max(span.end_ms);
    }
    ends
}

/// Not worse in the first number that differs.
fn no_worse(one: [f64; 3], other: [f64; 3]) -> bool {
    let differs = one.iter().zip(&other).find(|(a, b)| (*a - *b).abs() > 1e-8 * (1.0 + a.abs()));
    differs.is_none_or(|(a, b)| a < b)
}

/// Two models that run fastest on one core each, of which nothing else is known.
#[test]
fn modes_compete_in_plans_of_several_models() {
    let of = |mode| Model { ms: [[2.0; 3]; 2], whole: 5.0, mode: Some(mode), slowdown: 1.0 };
    let ((one, first), (two, second)) = (of(1.0).build("one"), of(1.5).build("two"));
    for objective in [Objective::Latency, Objective::Throughput] {
        let requests = [(&first, &one), (&second, &two)]
            .map(|(builder, graph)| PlanRequest { objective, ..PlanRequest::new(&builder.profile, graph) });
        let plan = plan_several("auto", &requests, &quick()).unwrap();
        plan.check(&[&one, &two]).unwrap();
        assert!((plan.claimed - 2.5).abs() < 1e-12, "{plan:?}");
        assert!(plan.segments.iter().all(|segment| segment.unit.to_string() == "a:CPU@0"), "{plan:?}");
        assert!(plan.model_bound.is_some_and(|bound| bound > 1.4 && bound <= 2.5), "{plan:?}");
        // No certificate is about modes of several models; who names the method plans on the units.
        let error = certificate(&requests, &plan).unwrap_err();
        assert!(matches!(&error, PlanError::OnlyWhole { unit, .. } if unit == "a:CPU@0"), "{error}");
        let plan = plan_several("concurrent", &requests, &quick()).unwrap();
        assert!(plan.claimed > 2.5 && plan.units.iter().all(|unit| unit.address.cores.is_empty()), "{plan:?}");
        assert!(
            plan.notes.iter().any(|note| note.contains("over plans on the units alone") && note.contains("2.5000 ms"))
        );
        let paper = serde_json::to_value(certificate(&requests, &plan).unwrap()).unwrap();
        let profiles = [&first, &second].map(|builder| serde_json::to_value(&builder.profile).unwrap());
        trefoil_check::check(&paper, &profiles).unwrap();
        // One model: the stream is not slower than one inference after another.
        let one = plan_with("auto", &requests[0], &quick()).unwrap();
        assert!((one.claimed - 1.0).abs() < 1e-12 && one.model_bound.is_some_and(|bound| bound <= 1.0), "{one:?}");
    }
}

/// Backends of one processor never run at once, so models wait for one another on modes as on units.
#[test]
fn plans_on_modes_of_one_processor_are_proven() {
    let of = |mode| Model { ms: [[2.0; 3]; 2], whole: 5.0, mode: Some(mode), slowdown: 1.0 };
    let mut built = [of(1.0).build("one"), of(1.5).build("two")];
    for (_, builder) in &mut built {
        let one = builder.profile.units[0].resources.clone();
        builder
            .profile
            .units
            .iter_mut()
            .chain(&mut builder.profile.modes)
            .for_each(|unit| unit.resources.clone_from(&one));
    }
    for objective in [Objective::Latency, Objective::Throughput] {
        let requests = [0, 1].map(|at| {
            let (graph, builder) = &built[at];
            PlanRequest { objective, ..PlanRequest::new(&builder.profile, graph) }
        });
        let plan = plan_several("auto", &requests, &quick()).unwrap();
        assert!((plan.claimed - 2.5).abs() < 1e-12 && plan.exact, "{plan:?}");
        assert!(plan.model_bound.is_some_and(|bound| (bound - 2.5).abs() < 1e-9), "{plan:?}");
    }
    // The second comes while the first runs: no schedule has a smaller mean than half of both.
    let [one, two] = [0, 1].map(|at| Application::new(&built[at].1.profile, &built[at].0));
    let request = ConcurrentRequest {
        weighted: true,
        ..ConcurrentRequest::new(vec![one, Application { arrivals_ms: vec![0.5], ..two }])
    };
    let plan = concurrent(&request, &quick()).unwrap();
    assert!((plan.claimed - 1.5).abs() < 1e-12, "{plan:?}");
    assert!(plan.model_bound.is_some_and(|bound| bound > 1.45 && bound <= 1.5), "{plan:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn several_models_are_never_slower_than_their_own_plans(one in model(), two in model()) {
        let built = [one.build("one"), two.build("two")];
        let request = |at: usize, objective: Objective| {
            let (graph, builder) = &built[at];
            PlanRequest { objective, ..PlanRequest::new(&builder.profile, graph) }
        };
        let own = |at: usize, objective: Objective| plan_with("auto", &request(at, objective), &quick()).unwrap();
        let latency = [0, 1].map(|at| own(at, Objective::Latency).simulated_ms);
        let period = [0, 1].map(|at| own(at, Objective::Throughput).claimed);
        prop_assert!(close_below(period[0], latency[0]) && close_below(period[1], latency[1]), "{period:?} {latency:?}");
        for (objective, most) in
            [(Objective::Latency, latency[0] + latency[1]), (Objective::Throughput, period[0] + period[1])]
        {
            let plan = plan_several("auto", &[request(0, objective), request(1, objective)], &quick()).unwrap();
            plan.check(&[&built[0].0, &built[1].0]).unwrap();
            prop_assert!(close_below(plan.claimed, most), "{objective:?}: {} above {most}: {:?}", plan.claimed, plan.notes);
            prop_assert!(plan.model_bound.is_some_and(|bound| close_below(bound, plan.claimed)));
        }
    }

    #[test]
    fn workloads_are_never_worse_than_own_plans_in_turn(
        one in model(),
        two in model(),
        asked in prop::array::uniform2((1u32..3, 0.0f64..2.0, 0.5f64..5.0, prop::option::of(0.5f64..8.0), 1u32..6)),
        weighted: bool,
    ) {
        let built = [one.build("one"), two.build("two")];
        let applications: Vec<(Application<'_>, usize)> = built
            .iter()
            .zip(&asked)
            .enumerate()
            .map(|(at, ((graph, builder), &(items, offset, every, deadline, weight)))| {
                let mut application = Application::new(&builder.profile, graph).every(items, offset, every);
                application.deadline_ms = deadline;
                (application.weighing(f64::from(weight)), at)
            })
            .collect();
        let only = applications.iter().map(|(application, _)| application.clone()).collect();
        let plan = concurrent(&ConcurrentRequest { weighted, ..ConcurrentRequest::new(only) }, &quick()).unwrap();
        let found = score(&applications, &ends(&plan), weighted);
        prop_assert!(plan.model_bound.is_some_and(|bound| close_below(bound, found[2])), "{plan:?}");
        let alone = [0, 1].map(|at| {
            let (graph, builder) = &built[at];
            plan_with("auto", &PlanRequest::new(&builder.profile, graph), &quick()).unwrap().simulated_ms
        });
        let mut items: Vec<(usize, usize, f64)> = Vec::new();
        for (application, model) in &applications {
            items.extend(application.arrivals_ms.iter().enumerate().map(|(item, &arrival)| (*model, item, arrival)));
        }
        // Every order there is.
        let orders: usize = (1..=items.len()).product();
        for mut code in 0..orders {
            let (mut rest, mut now, mut done) = (items.clone(), 0.0f64, BTreeMap::new());
            while !rest.is_empty() {
                let (model, item, arrival) = rest.remove(code % rest.len());
                code /= rest.len() + 1;
                now = now.max(arrival) + alone[model];
                done.insert((model, item), now);
            }
            let turn = score(&applications, &done, weighted);
            prop_assert!(no_worse(found, turn), "{found:?} worse than {turn:?}, {done:?}");
        }
    }
}
