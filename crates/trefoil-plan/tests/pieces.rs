//! `concurrent` with models that backends fuse: whole models and segments compete with single operators. Oracles share no code with the
//! crate: whole models are placed and ordered exhaustively, and plans of one model are put one after another by hand.

mod support;

use std::collections::BTreeMap;
use support::certified::{paper, value};
use support::{Dice, Instance, Tensor};
use trefoil_core::{Objective, OperatorGraph, Plan, TensorId, Work};
use trefoil_plan::testing::{ProfileBuilder, chain, graph};
use trefoil_plan::{
    Application, Budget, ConcurrentRequest, PlanOptions, PlanRequest, Stage, StageLink, concurrent, plan, plan_several,
};

fn quick() -> PlanOptions {
    PlanOptions { budget: Budget::Steps(60_000), ..PlanOptions::default() }
}

fn named(mut graph: OperatorGraph, name: &str, seed: u64) -> OperatorGraph {
    name.clone_into(&mut graph.model);
    graph.fingerprint = format!("{seed:032x}");
    for (at, operator) in graph.operators.iter_mut().enumerate() {
        operator.signature.0 = format!("{seed:016x}{at:016x}");
    }
    graph
}

/// Cases by default, and with `TREFOIL_LONG_TESTS=1`.
fn cases(few: u64, many: u64) -> u64 {
    if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { many } else { few }
}

/// Weight of what is late, how late, and the goal's value.
type Cost = (f64, f64, f64);

fn is_less(one: Cost, other: Cost) -> bool {
    let less = |a: f64, b: f64| a < b - 1e-9 * (1.0 + a.abs());
    let same = |a: f64, b: f64| !less(a, b) && !less(b, a);
    less(one.0, other.0)
        || same(one.0, other.0) && (less(one.1, other.1) || same(one.1, other.1) && less(one.2, other.2))
}

/// What is asked of each request: arrival, deadline, weight.
#[derive(Debug, Clone, Copy)]
struct Asked {
    arrival: f64,
    deadline: Option<f64>,
    weight: f64,
}

fn cost(asked: &[Asked], ends: &[f64], weighted: bool) -> Cost {
    let (mut late, mut tardiness, mut sum, mut weights) = (0.0, 0.0, 0.0, 0.0);
    for (asked, &end) in asked.iter().zip(ends) {
        if let Some(over) = asked.deadline.map(|deadline| end - deadline).filter(|&over| over > 1e-9) {
            late += asked.weight;
            tardiness += asked.weight * over;
        }
        sum += asked.weight * (end - asked.arrival);
        weights += asked.weight;
    }
    let makespan = ends.iter().copied().fold(0.0, f64::max);
    (late, tardiness, if weighted { sum / weights } else { makespan })
}

/// The same of a plan, from its timeline.
fn cost_of(plan: &Plan, asked: &[Asked], weighted: bool) -> Cost {
    let mut ends: BTreeMap<(u32, u32), f64> = BTreeMap::new();
    for span in plan.timeline.lanes.iter().flat_map(|lane| &lane.spans) {
        let task = &plan.tasks[span.task.0 as usize];
        let model = match task.work {
            Work::Segment { segment } => plan.segments[segment.0 as usize].model,
            Work::Transfer { model, .. } => model,
            Work::Blocks { .. } => unreachable!("no blocks here"),
        };
        let end = ends.entry((model, task.item)).or_insert(0.0);
        *end = end.max(span.end_ms);
    }
    let mut by_request = vec![0.0f64; asked.len()];
    for request in &plan.requests {
        let slot = &mut by_request[request.request as usize];
        *slot = slot.max(ends[&(request.model, request.item)]);
    }
    if plan.requests.is_empty() {
        by_request[0] = ends.values().copied().fold(0.0, f64::max);
    }
    cost(asked, &by_request, weighted)
}

/// Models that fuse: the whole of each costs a fraction of its operators' sum. All numbers are multiples of 1/64.
struct Case {
    graphs: Vec<OperatorGraph>,
    builders: Vec<ProfileBuilder>,
    /// Milliseconds of each model in one piece, by unit.
    whole: Vec<Vec<f64>>,
    transfer: f64,
    factor: Vec<Vec<f64>>,
    /// The application (model) and what is asked, request by request.
    requests: Vec<(usize, Asked)>,
    weighted: bool,
}

impl Case {
    fn random(dice: &mut Dice, seed: u64) -> Self {
        let units = 2 + dice.below(2);
        let models = 2 + dice.below(2);
        let grid = |ms: f64| (ms * 64.0).ceil() / 64.0;
        let transfer = grid(0.3 * dice.roll());
        let slow = dice.roll() < 0.7;
        let factor: Vec<Vec<f64>> = (0..units)
            .map(|one| (0..units).map(|two| if slow && one != two { 1.0 + dice.roll() } else { 1.0 }).collect())
            .collect();
        let (mut graphs, mut builders, mut wholes) = (Vec::new(), Vec::new(), Vec::new());
        for model in 0..models {
            let count = 2 + dice.below(3);
            let shape = if dice.roll() < 0.5 || count < 4 {
                chain(count, 64)
            } else {
                graph(&[64; 4], &[(0, 1), (0, 2), (1, 3), (2, 3)])
            };
            let graph = named(shape, &format!("m{model}"), 100 * seed + model as u64 + 1);
            let mut builder = ProfileBuilder::new(&graph).cpus(units).transfers(&[(0, transfer)]);
            let mut row = Vec::new();
            for unit in 0..units {
                let ms: Vec<f64> = (0..count).map(|_| grid(0.2 + dice.roll())).collect();
                let whole = grid(ms.iter().sum::<f64>() * (0.1 + 0.9 * dice.roll()));
                builder = builder.operators(unit, &ms.iter().map(|&ms| Some(ms)).collect::<Vec<_>>());
                if dice.roll() < 0.4 {
                    let head: Vec<u32> = (0..count as u32 - 1).collect();
                    builder = builder.segment(unit, &head, Some(grid(whole * dice.roll())));
                }
                builder = builder.whole(unit, whole);
                row.push(whole);
            }
            for (slowed, row) in factor.iter().enumerate().filter(|_| slow) {
                for (other, &factor) in row.iter().enumerate().filter(|&(other, _)| other != slowed) {
                    builder = builder.slowdown(slowed, other, factor);
                }
            }
            graphs.push(graph);
            builders.push(builder);
            wholes.push(row);
        }
        let mut requests = Vec::new();
        let spread = dice.roll() < 0.6;
        for model in 0..models {
            let items = if models == 2 && dice.roll() < 0.4 { 2 } else { 1 };
            let first = if spread { grid(dice.roll()) } else { 0.0 };
            let period = grid(dice.roll());
            let within = (dice.roll() < 0.3).then(|| grid(0.3 + 2.0 * dice.roll()));
            let weight = 1.0 + dice.below(4) as f64;
            for item in 0..items {
                let arrival = first + f64::from(item) * period;
                requests.push((model, Asked { arrival, deadline: within.map(|within| arrival + within), weight }));
            }
        }
        let weighted = dice.roll() < 0.4;
        Self { graphs, builders, whole: wholes, transfer, factor, requests, weighted }
    }

    fn request(&self) -> ConcurrentRequest<'_> {
        let applications = self.graphs.iter().zip(&self.builders).enumerate().map(|(model, (graph, builder))| {
            let own: Vec<Asked> = self.requests.iter().filter(|one| one.0 == model).map(|one| one.1).collect();
            Application {
                arrivals_ms: own.iter().map(|asked| asked.arrival).collect(),
                deadline_ms: own[0].deadline.map(|deadline| deadline - own[0].arrival),
                weight: own[0].weight,
                ..Application::new(&builder.profile, graph)
            }
        });
        ConcurrentRequest { weighted: self.weighted, ..ConcurrentRequest::new(applications.collect()) }
    }

    fn asked(&self) -> Vec<Asked> {
        self.requests.iter().map(|one| one.1).collect()
    }

    /// Jobs with these times, one request each unless said otherwise, on units of their own.
    fn instance(&self, ms: Vec<Vec<Option<f64>>>, request: Vec<usize>, tensors: Vec<Tensor>) -> Instance {
        let units = self.factor.len();
        Instance {
            weights: vec![0; ms.len()],
            memory: vec![None; units],
            ms,
            tensors,
            resources: (0..units as u32).map(|unit| vec![unit]).collect(),
            factor: self.factor.clone(),
            watts: vec![1.0; units],
            idle: 0.0,
            request,
            requests: self.requests.iter().map(|(_, asked)| (asked.arrival, asked.deadline, asked.weight)).collect(),
        }
    }

    /// The best of all placements and orders of whole models.
    fn best_of_whole_models(&self) -> Cost {
        let ms = self.requests.iter().map(|(model, _)| self.whole[*model].iter().map(|&ms| Some(ms)).collect());
        let instance = self.instance(ms.collect(), (0..self.requests.len()).collect(), Vec::new());
        let asked = self.asked();
        let mut best = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
        instance.all_schedules(&mut |_, tasks, order| {
            let (_, _, ends) = instance.simulate(tasks, order);
            let found = cost(&asked, &ends, self.weighted);
            if is_less(found, best) {
                best = found;
            }
        });
        best
    }

    /// Requests one after another, each taking this long, by arrival.
    fn in_turn(&self, ms: impl Fn(usize) -> f64) -> Cost {
        let mut order: Vec<usize> = (0..self.requests.len()).collect();
        order.sort_by(|&a, &b| self.requests[a].1.arrival.total_cmp(&self.requests[b].1.arrival));
        let (mut now, mut ends) = (0.0f64, vec![0.0; order.len()]);
        for at in order {
            now = now.max(self.requests[at].1.arrival) + ms(self.requests[at].0);
            ends[at] = now;
        }
        cost(&self.asked(), &ends, self.weighted)
    }

    /// Each model's own plan, segment by segment, every unit taking the requests' segments by arrival.
    fn overlapped(&self, plans: &[Plan]) -> Cost {
        let units = self.factor.len();
        let mut by_arrival: Vec<usize> = (0..self.requests.len()).collect();
        by_arrival.sort_by(|&a, &b| self.requests[a].1.arrival.total_cmp(&self.requests[b].1.arrival));
        let (mut ms, mut request, mut unit, mut tensors) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for &number in &by_arrival {
            let plan = &plans[self.requests[number].0];
            let first = ms.len();
            for segment in &plan.segments {
                let here = ["a:CPU", "b:CPU", "c:CPU"].iter().position(|name| segment.unit.to_string() == *name);
                unit.push(here.unwrap());
                request.push(number);
                ms.push((0..units).map(|at| (Some(at) == here).then_some(segment.cost.ms)).collect());
            }
            for (maker, segment) in plan.segments.iter().enumerate() {
                for made in &segment.outputs {
                    let reads = |at: &usize| plan.segments[*at].inputs.contains(made);
                    let readers: Vec<usize> = (0..plan.segments.len()).filter(reads).map(|at| first + at).collect();
                    let price = (0..=units)
                        .map(|from| (0..units).map(|to| if from == to { 0.0 } else { self.transfer }).collect())
                        .collect();
                    let home = vec![0.0; units];
                    tensors.push(Tensor { maker: Some(first + maker), readers, price, home, output: false });
                }
            }
        }
        let instance = self.instance(ms, request, tensors);
        let tasks = instance.tasks(&unit);
        let mut order: Vec<usize> = Vec::new();
        for job in 0..unit.len() {
            // What it reads is brought right before it.
            let brings = |task: &usize| *task >= unit.len() && tasks[job].waits.contains(task) && !order.contains(task);
            let brought: Vec<usize> = (0..tasks.len()).filter(brings).collect();
            order.extend(brought);
            order.push(job);
        }
        let (_, _, ends) = instance.simulate(&tasks, &order);
        cost(&self.asked(), &ends, self.weighted)
    }
}

#[test]
fn never_worse_than_whole_models_and_than_each_models_own_plan() {
    let mut dice = Dice(91);
    let (mut fused, mut overlaps, count) = (0, 0, cases(60, 3_000));
    for seed in 0..count {
        let case = Case::random(&mut dice, seed);
        let asked = case.asked();
        let found = concurrent(&case.request(), &quick()).unwrap();
        let graphs: Vec<&OperatorGraph> = case.graphs.iter().collect();
        found.check(&graphs).unwrap();
        let own = cost_of(&found, &asked, case.weighted);
        let stated = if case.weighted { found.claimed } else { found.simulated_ms };
        assert!((own.2 - stated).abs() < 1e-9 * (1.0 + stated), "{seed}: {stated} is stated of {own:?}");
        assert!(found.model_bound.unwrap() <= stated * (1.0 + 1e-9), "{seed}");
        let least = |model: usize| case.whole[model].iter().copied().fold(f64::INFINITY, f64::min);
        let plans: Vec<Plan> = case
            .graphs
            .iter()
            .zip(&case.builders)
            .map(|(graph, builder)| plan("interval", &PlanRequest::new(&builder.profile, graph)).unwrap())
            .collect();
        let best_whole = case.best_of_whole_models();
        for (what, baseline) in [
            ("whole models in turn", case.in_turn(least)),
            ("whole models placed and ordered at best", best_whole),
            ("`interval` in turn", case.in_turn(|model| plans[model].simulated_ms)),
            ("`interval` overlapped", case.overlapped(&plans)),
        ] {
            assert!(!is_less(baseline, own), "{seed}: {what} costs {baseline:?}, `concurrent` {own:?}");
        }
        fused += usize::from(found.segments.iter().any(|segment| segment.operators.len() > 1));
        overlaps += usize::from(is_less(own, best_whole));
    }
    // The cases are worth something: pieces are used, and sometimes beaten.
    assert!(
        fused * 2 > count as usize && overlaps > 0,
        "{fused} of {count} fused, {overlaps} better than whole models"
    );
}

/// Two small models on three units whose backends fuse, and slow each other down: operators take several times as long as whole models.
#[test]
fn fused_models_are_found_certified_and_said() {
    let (one, two) = (named(chain(4, 64), "one", 1), named(chain(4, 64), "two", 2));
    let measured = |graph: &OperatorGraph, whole: f64| {
        let mut builder = ProfileBuilder::new(graph).cpus(3).transfers(&[(0, 0.01)]);
        for unit in 0..3 {
            builder =
                builder.operators(unit, &[Some(0.04 + 0.002 * unit as f64); 4]).whole(unit, whole + 0.02 * unit as f64);
        }
        for slowed in 0..3 {
            for other in (0..3).filter(|&other| other != slowed) {
                builder = builder.slowdown(slowed, other, 2.0);
            }
        }
        builder
    };
    let (first, second) = (measured(&one, 0.03), measured(&two, 0.035));
    let requests = [PlanRequest::new(&first.profile, &one), PlanRequest::new(&second.profile, &two)];
    let found = plan_several("auto", &requests, &PlanOptions::default()).unwrap();
    assert!((found.simulated_ms - 0.065).abs() < 1e-12, "{}", found.simulated_ms);
    assert!(found.all_measured && found.segments.len() == 2, "{:?}", found.segments);
    let own = found.own.as_ref().unwrap();
    assert!(own.over.contains("whole models"), "{own:?}");
    assert!(found.notes.iter().any(|note| note.contains("the best schedule of single operators")), "{:?}", found.notes);
    let files = [value(&first.profile), value(&second.profile)];
    let verdict = trefoil_check::check(&paper(&requests, &found), &files).unwrap();
    assert!((verdict.value - 0.065).abs() < 1e-12);
    assert!(verdict.bound.unwrap() <= found.model_bound.unwrap() * (1.0 + 1e-9));
}

#[test]
fn pins_memory_and_powers_hold_for_pieces() {
    let (one, mut two) = (named(chain(3, 64), "one", 3), named(chain(3, 64), "two", 4));
    two.operators.iter_mut().for_each(|operator| operator.weight_bytes = 100);
    let measured = |graph: &OperatorGraph| {
        ProfileBuilder::new(graph)
            .cpus(2)
            .transfers(&[(0, 0.1)])
            .operators(0, &[Some(1.0); 3])
            .operators(1, &[Some(2.0); 3])
            .whole(0, 0.5)
            .whole(1, 0.75)
            .watts(0, 20.0)
            .watts(1, 2.0)
    };
    let (first, mut second) = (measured(&one), measured(&two));
    let ask = |second: &ProfileBuilder, objective, pins: &[&str]| {
        let applications = vec![Application::new(&first.profile, &one), Application::new(&second.profile, &two)];
        let pins = pins.iter().map(|pin| pin.parse().unwrap()).collect();
        let request = ConcurrentRequest { objective, pins, ..ConcurrentRequest::new(applications) };
        concurrent(&request, &quick()).unwrap()
    };
    let units = |plan: &Plan| -> Vec<String> { plan.segments.iter().map(|segment| segment.unit.to_string()).collect() };
    let free = ask(&second, Objective::Latency, &[]);
    assert!((free.simulated_ms - 0.75).abs() < 1e-12, "{}", free.simulated_ms);
    // Both on one unit, and still whole.
    let pinned = ask(&second, Objective::Latency, &["*=b:CPU"]);
    assert_eq!(units(&pinned), ["b:CPU", "b:CPU"]);
    assert!((pinned.simulated_ms - 1.5).abs() < 1e-12, "{}", pinned.simulated_ms);
    let frugal = ask(&second, Objective::Energy, &[]);
    assert!((frugal.simulated_j.unwrap() - 1.5 * 2.0 / 1e3).abs() < 1e-12, "{frugal:?}");
    // Unit b does not hold the second model.
    second.profile.units[1].limits.memory_bytes = Some(250);
    let mut limited = first.profile.clone();
    limited.units[1].limits.memory_bytes = Some(250);
    let applications = vec![Application::new(&limited, &one), Application::new(&second.profile, &two)];
    let found = concurrent(&ConcurrentRequest::new(applications), &quick()).unwrap();
    assert!(found.over_memory(&[&one, &two]).is_none());
    assert!((found.simulated_ms - 0.75).abs() < 1e-12, "{}", found.simulated_ms);
}

/// A stage that a loop repeats, after another: each fused.
#[test]
fn linked_stages_run_whole() {
    let (text, denoise) = (named(chain(3, 64), "text", 5), named(chain(3, 64), "denoise", 6));
    let measured = |graph: &OperatorGraph, whole: f64| {
        ProfileBuilder::new(graph)
            .cpus(2)
            .transfers(&[(0, 0.125)])
            .operators(0, &[Some(1.0); 3])
            .operators(1, &[Some(1.5); 3])
            .whole(0, whole)
            .whole(1, 1.5 * whole)
    };
    let (first, second) = (measured(&text, 0.5), measured(&denoise, 0.25));
    let application = Application {
        stages: vec![
            Stage { profile: &first.profile, graph: &text, repeat: 1 },
            Stage { profile: &second.profile, graph: &denoise, repeat: 4 },
        ],
        links: vec![
            StageLink { from: (0, TensorId(3)), to: (1, TensorId(0)) },
            StageLink { from: (1, TensorId(3)), to: (1, TensorId(0)) },
        ],
        ..Application::new(&first.profile, &text)
    };
    let found = concurrent(&ConcurrentRequest::new(vec![application.clone()]), &quick()).unwrap();
    found.check(&[&text, &denoise]).unwrap();
    assert!((found.simulated_ms - 1.5).abs() < 1e-12, "{}", found.simulated_ms);
    // Two items: at worst one after the other, and beside each other if that is shorter.
    let two = Application { arrivals_ms: vec![0.0, 0.0], ..application.clone() };
    let found = concurrent(&ConcurrentRequest::new(vec![two]), &quick()).unwrap();
    assert!(found.simulated_ms <= 2.25 + 1e-12, "{}", found.simulated_ms);
    // What a link hands on must leave its segment: a tensor that only the next operator reads does not leave the whole model.
    let mut inner = application;
    inner.links[0].from.1 = TensorId(2);
    let found = concurrent(&ConcurrentRequest::new(vec![inner]), &quick()).unwrap();
    let hands_on = |segment: &trefoil_core::Segment| segment.model == 0 && segment.outputs.contains(&TensorId(2));
    assert!(found.segments.iter().any(hands_on), "{:?}", found.segments);
}
