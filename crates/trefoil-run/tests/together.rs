//! Several models at once: what they compute is what each computes alone, and no request is lost.

#[path = "support/models.rs"]
mod models;
mod support;

use models::{SmallModel, real_unit, relu_chain, two_branches, whole_plan};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;
use support::{Behaviour, Fake, Mishap, Random, graph, plan, unit};
use trefoil_core::{
    DataType, HostTensor, OperatorGraph, Plan, SegmentId, Task, TaskId, TensorId, TensorInfo, Unit, Work,
};
use trefoil_profile::StoreWriter;
use trefoil_run::together::{
    Activity, AdaptReport, AdaptRule, Arrangement, Arrivals, Compiling, ContestOptions, Entrant, Equality, LoopLimit,
    Outputs, Rounds, ServeOptions, ServeReport, Server, Situation, WatchRule, adapting_loop, closed_loop, contest,
    slowdown, solo_outputs,
};
use trefoil_run::{
    ExecutorOptions, ExtractedSegments, PreparedModelSource, PreparedSource, Reason, RunError, RunSampling,
    SegmentSource, WorkerCommand, registry_units,
};
use trefoil_units::SubModel;

static NEVER: AtomicBool = AtomicBool::new(false);

fn long_tests() -> bool {
    std::env::var_os("TREFOIL_LONG_TESTS").is_some_and(|value| value == "1")
}

/// Runs `body` on a thread and fails the test if it takes longer than a minute (or ten, of the long tests): a hang is a failure,
/// not a wait.
fn within_a_minute(body: impl FnOnce() + Send + 'static) {
    let (done, waited) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        body();
        done.send(()).unwrap();
    });
    match waited.recv_timeout(Duration::from_mins(if long_tests() { 10 } else { 1 })) {
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs"),
        _ => thread.join().unwrap(),
    }
}

/// One plan of several single-model plans; every resource takes the tasks of the first, then those of the second, …
fn merged(plans: &[Plan]) -> Plan {
    let mut whole = Plan { models: Vec::new(), segments: Vec::new(), tasks: Vec::new(), ..plans[0].clone() };
    whole.units.clear();
    whole.order.clear();
    for (model, plan) in plans.iter().enumerate() {
        let (segments, tasks) = (whole.segments.len() as u32, whole.tasks.len() as u32);
        whole.models.extend(plan.models.iter().cloned());
        let new = |unit: &&Unit| !whole.units.iter().any(|known| known.address == unit.address);
        let added: Vec<Unit> = plan.units.iter().filter(new).cloned().collect();
        whole.units.extend(added);
        whole.segments.extend(
            plan.segments.iter().map(|segment| trefoil_core::Segment { model: model as u32, ..segment.clone() }),
        );
        for task in &plan.tasks {
            let Work::Segment { segment } = task.work else { panic!("segments only") };
            let work = Work::Segment { segment: SegmentId(segment.0 + segments) };
            let after = task.after.iter().map(|before| TaskId(before.0 + tasks)).collect();
            whole.tasks.push(Task { work, after, ..task.clone() });
        }
        for (resource, order) in &plan.order {
            whole.order.entry(resource.clone()).or_default().extend(order.iter().map(|id| TaskId(id.0 + tasks)));
        }
    }
    whole
}

/// Sub-models of fake segments of several graphs, named by their number in the whole plan.
struct FakeSources<'a>(Vec<&'a OperatorGraph>);

impl SegmentSource for FakeSources<'_> {
    fn segment(&self, plan: &Plan, segment: SegmentId) -> Result<SubModel, RunError> {
        let description = &plan.segments[segment.0 as usize];
        let graph = self.0[description.model as usize];
        let infos = |tensors: &[TensorId]| tensors.iter().map(|&tensor| graph.tensor(tensor).info()).collect();
        Ok(SubModel {
            path: PathBuf::from(format!("{}.onnx", segment.0)),
            inputs: infos(&description.inputs),
            outputs: infos(&description.outputs),
        })
    }
}

fn input(value: u8) -> HostTensor {
    HostTensor::from_bytes(TensorInfo::new("x", DataType::U8, [64]), &[value; 64]).unwrap()
}

/// A random layered graph whose operators are spread over the units.
fn layered(random: &mut Random, segments: u32, units: &[Unit]) -> (OperatorGraph, Plan) {
    let edges: Vec<(u32, u32)> =
        (1..segments).map(|to| (to - 1 - random.below(4.min(to as usize)) as u32, to)).collect();
    let graph = graph(segments, &edges, |index| 8 + u64::from(index % 5) * 40);
    let cuts: Vec<_> = (0..segments).map(|operator| (vec![operator], random.below(units.len()))).collect();
    let sequence: Vec<_> = (0..segments as usize).map(|segment| (segment, 0)).collect();
    let plan = plan(&graph, units, &cuts, &sequence, false);
    (graph, plan)
}

fn two_lanes() -> [Unit; 2] {
    [unit("fake:a", &["a"]), unit("fake:b", &["b"])]
}

/// Two models on both units, what each gives alone, and the whole plan.
struct Pair {
    graphs: [OperatorGraph; 2],
    plan: Plan,
    inputs: [HostTensor; 2],
}

impl Pair {
    fn new(segments: [u32; 2]) -> Self {
        let mut random = Random(7);
        let units = two_lanes();
        let [(first, one), (second, two)] = segments.map(|count| layered(&mut random, count, &units));
        Self { plan: merged(&[one, two]), graphs: [first, second], inputs: [input(3), input(200)] }
    }

    fn rounds(&self, fake: &'static Fake, ordered: bool, spin: Duration) -> (Rounds, Outputs) {
        let graphs: Vec<&OperatorGraph> = self.graphs.iter().collect();
        let (source, find) = (FakeSources(graphs.clone()), fake.find(&self.plan));
        let options = ExecutorOptions { spin, ..ExecutorOptions::default() };
        let inputs: Vec<Vec<&HostTensor>> = self.inputs.iter().map(|input| vec![input]).collect();
        let alone = solo_outputs(&self.plan, &graphs, &source, &find, &options, &inputs).unwrap();
        let arrangement = Arrangement { plan: self.plan.clone(), ordered };
        (Rounds::new(&arrangement, &graphs, &source, &find, &options, &inputs).unwrap(), alone)
    }

    fn server(&self, behaviour: Behaviour) -> (Server, Outputs) {
        let graphs: Vec<&OperatorGraph> = self.graphs.iter().collect();
        let fake = Fake::leak(behaviour);
        let (source, find) = (FakeSources(graphs.clone()), fake.find(&self.plan));
        let options = ExecutorOptions::default();
        let inputs: Vec<Vec<&HostTensor>> = self.inputs.iter().map(|input| vec![input]).collect();
        let sane = Fake::leak(Behaviour::default());
        let sane_find = sane.find(&self.plan);
        let alone = solo_outputs(&self.plan, &graphs, &source, &sane_find, &options, &inputs).unwrap();
        (Server::new(&self.plan, true, &graphs, &source, &find, &options, &inputs).unwrap(), alone)
    }
}

/// Rounds of two models: 100,000 inferences under `TREFOIL_LONG_TESTS=1`, fewer otherwise.
fn many(usually: u64) -> u64 {
    if long_tests() { 50_000 } else { usually }
}

#[test]
fn every_round_gives_what_each_model_gives_alone() {
    within_a_minute(|| {
        let pair = Pair::new([20, 7]);
        for (ordered, spin) in [(true, 0), (true, 20), (false, 20)] {
            let fake = Fake::leak(Behaviour::default());
            let (mut rounds, alone) = pair.rounds(fake, ordered, Duration::from_micros(spin));
            assert_ne!(alone[&(0, 0)][0].bytes(), alone[&(1, 0)][0].bytes());
            let count = many(500);
            let limit = LoopLimit { warmup: 2, rounds: count, time: Duration::from_mins(10), stop: &NEVER };
            let mut samples = Vec::new();
            let report = closed_loop(&mut rounds, 2, Some(&alone), &limit, &mut |ms| samples.push(ms)).unwrap();
            assert_eq!((report.rounds, samples.len() as u64, report.round.count), (count, count, count));
            let outputs: usize = alone.values().map(Vec::len).sum();
            assert_eq!(report.equality.compared, count * outputs as u64);
            assert_eq!(report.equality.different, 0, "{}", report.equality.summary());
            assert!(report.equality.ok());
            assert_eq!(report.utilisation.len(), 2);
            for model in &report.models {
                assert!(model.count == count && model.p50_ms <= model.p99_ms && model.p99_ms <= model.max_ms);
            }
        }
    });
}

#[test]
fn a_wrong_output_is_told() {
    let pair = Pair::new([5, 5]);
    let (mut rounds, mut alone) = pair.rounds(Fake::leak(Behaviour::default()), true, Duration::ZERO);
    alone.get_mut(&(1, 0)).unwrap()[0].bytes_mut()[0] ^= 0x40;
    let limit = LoopLimit { warmup: 1, rounds: 4, time: Duration::from_secs(9), stop: &NEVER };
    let report = closed_loop(&mut rounds, 2, Some(&alone), &limit, &mut |_| {}).unwrap();
    assert_eq!(report.equality.different, 4);
    assert!(!report.equality.ok() && report.equality.summary().contains("not bit-equal"));
}

#[test]
fn a_failing_round_leaves_everything_usable() {
    within_a_minute(|| {
        let pair = Pair::new([6, 6]);
        for ordered in [true, false] {
            // Segment 8 belongs to the second model; solo and warm runs come before its fourth execution.
            let behaviour = Behaviour { mishaps: BTreeMap::from([(8, (4, Mishap::Error))]), ..Behaviour::default() };
            let (mut rounds, alone) = pair.rounds(Fake::leak(behaviour), ordered, Duration::ZERO);
            let outcomes: Vec<bool> = (0..6).map(|_| rounds.run().is_ok()).collect();
            assert_eq!(outcomes, [true, true, true, false, true, true], "ordered: {ordered}");
            let mut equality = Equality::default();
            rounds.compare(&alone, &mut equality);
            assert!(equality.ok(), "{}", equality.summary());
        }
    });
}

fn stream(period_ms: f64) -> Arrivals {
    Arrivals { period_ms, offset_ms: 0.0, deadline_ms: Some(1000.0), priority: 0 }
}

fn serve(server: &mut Server, alone: &Outputs, streams: &[Arrivals], ms: u64, limit: usize) -> ServeReport {
    let options =
        ServeOptions { duration: Duration::from_millis(ms), limit, grace: Duration::from_secs(20), stop: &NEVER };
    let report = server.serve(streams, Some(alone), &options).unwrap();
    for stream in &report.streams {
        let ended = stream.completed + stream.failed + stream.turned_away + stream.unfinished;
        assert_eq!(stream.arrived, ended, "nothing is lost: {stream:#?}");
        assert_eq!(stream.response.count, stream.completed);
    }
    report
}

#[test]
fn requests_at_fixed_rates_are_all_answered_alike() {
    within_a_minute(|| {
        let pair = Pair::new([12, 5]);
        let (mut server, alone) = pair.server(Behaviour::default());
        server.warm_up().unwrap();
        let report = serve(&mut server, &alone, &[stream(1.0), stream(2.5)], 200, 1000);
        assert_eq!(report.streams.iter().map(|stream| stream.arrived).collect::<Vec<_>>(), [200, 80]);
        assert_eq!(report.streams.iter().map(|stream| stream.completed).sum::<u64>(), 280);
        assert_eq!(report.equality.different, 0, "{}", report.equality.summary());
        let outputs: usize = alone.values().map(Vec::len).sum();
        assert!(report.equality.compared >= 80 * outputs as u64 && !report.stopped);
        // It serves again, and Ctrl-C ends it at once.
        let stop = AtomicBool::new(true);
        let options =
            ServeOptions { duration: Duration::from_mins(10), limit: 10, grace: Duration::from_mins(10), stop: &stop };
        let report = server.serve(&[stream(1.0), stream(1.0)], None, &options).unwrap();
        assert!(report.stopped && report.streams.iter().all(|stream| stream.completed == 0));
        stop.store(false, Ordering::Relaxed);
    });
}

#[test]
fn a_unit_that_fails_costs_its_request_only() {
    within_a_minute(|| {
        let pair = Pair::new([4, 4]);
        let behaviour = Behaviour { mishaps: BTreeMap::from([(1, (10, Mishap::Error))]), ..Behaviour::default() };
        let (mut server, alone) = pair.server(behaviour);
        let report = serve(&mut server, &alone, &[stream(1.0), stream(1.0)], 50, 1000);
        assert_eq!((report.streams[0].failed, report.streams[0].missed), (1, 1));
        assert_eq!((report.streams[0].completed, report.streams[1].completed), (49, 50));
        let error = report.streams[0].first_error.as_ref().unwrap();
        assert!(error.contains("segment 1") && error.contains("boom"), "{error}");
        assert_eq!((report.streams[1].first_error.as_ref(), report.equality.different), (None, 0));
    });
}

#[test]
fn a_unit_that_panics_stops_its_model_and_no_other() {
    within_a_minute(|| {
        let pair = Pair::new([4, 4]);
        let behaviour = Behaviour { mishaps: BTreeMap::from([(5, (10, Mishap::Panic))]), ..Behaviour::default() };
        let (mut server, alone) = pair.server(behaviour);
        let report = serve(&mut server, &alone, &[stream(1.0), stream(1.0)], 50, 1000);
        assert_eq!(report.streams[0].completed, 50);
        assert_eq!((report.streams[1].completed, report.streams[1].failed, report.streams[1].missed), (9, 41, 41));
        assert!(report.streams[1].first_error.as_ref().unwrap().contains("panic"));
    });
}

#[test]
fn an_overloaded_server_turns_requests_away() {
    within_a_minute(|| {
        let pair = Pair::new([200, 2]);
        let (mut server, alone) = pair.server(Behaviour::default());
        // 200 segments take longer than 5 µs whatever the machine.
        let report = serve(&mut server, &alone, &[stream(0.005), stream(10.0)], 100, 8);
        assert!(report.streams[0].turned_away > 0, "{report:#?}");
        assert!(report.streams[0].missed >= report.streams[0].turned_away);
        assert_eq!(report.streams[1].completed, 10);
    });
}

#[test]
fn arrivals_are_checked() {
    let pair = Pair::new([2, 2]);
    let (mut server, _) = pair.server(Behaviour::default());
    let options = ServeOptions { duration: Duration::ZERO, limit: 1, grace: Duration::ZERO, stop: &NEVER };
    for (streams, wanted) in [(vec![stream(1.0)], "2 models"), (vec![stream(1.0), stream(0.0)], "not above 0")] {
        let error = server.serve(&streams, None, &options).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
    }
}

#[test]
fn a_lost_unit_is_left_and_no_round_is_lost() {
    within_a_minute(|| {
        let pair = Pair::new([6, 4]);
        let graphs: Vec<&OperatorGraph> = pair.graphs.iter().collect();
        let on = |plan: &Plan, unit: &Unit| {
            let mut plan = plan.clone();
            plan.units = vec![unit.clone()];
            plan.segments.iter_mut().for_each(|segment| segment.unit = unit.address.clone());
            plan.tasks.iter_mut().for_each(|task| task.unit = unit.address.clone());
            plan.order = std::iter::once((
                unit.resources.first().unwrap().to_string(),
                (0..plan.tasks.len() as u32).map(TaskId).collect(),
            ))
            .collect();
            Arrangement { plan, ordered: true }
        };
        let [first, second] = two_lanes();
        // Solo outputs and warm-up come before, each on segments of its own.
        let behaviour = Behaviour { mishaps: BTreeMap::from([(3, (30, Mishap::Error))]), ..Behaviour::default() };
        let fake = Fake::leak(behaviour);
        let find = fake.find(&pair.plan);
        let (source, options) = (FakeSources(graphs.clone()), ExecutorOptions::default());
        let inputs: Vec<Vec<&HostTensor>> = pair.inputs.iter().map(|input| vec![input]).collect();
        let compiling = Compiling { graphs: &graphs, source: &source, find: &find, options: &options, inputs: &inputs };
        let limit = LoopLimit { warmup: 1, rounds: 50, time: Duration::from_mins(1), stop: &NEVER };
        let rule = AdaptRule { watch: WatchRule { window: 1000, factor: 1e9 }, ..AdaptRule::default() };
        let mut asked = Vec::new();
        let report = adapting_loop(on(&pair.plan, &first), &compiling, &limit, rule, &mut |situation| {
            asked.push(situation.clone());
            situation.lost.iter().any(|unit| *unit == first.address).then(|| on(&pair.plan, &second))
        });
        let report = report.unwrap();
        assert_eq!((report.run.rounds, report.repeated, asked.len()), (50, 1, 1));
        assert_eq!(report.adaptations[0].lost, ["fake:a"]);
        assert!(report.adaptations[0].error.as_ref().unwrap().contains("boom"));
        assert_eq!(report.run.equality.different, 0, "{}", report.run.equality.summary());
        assert_eq!(report.last.plan.units[0].address, second.address);

        // Without help the error comes out.
        let mut helpless = |_: &Situation| None;
        let error = adapting_loop(on(&pair.plan, &first), &compiling, &limit, rule, &mut helpless).unwrap_err();
        assert!(error.to_string().contains("boom"), "{error}");
    });
}

/// A real CPU hog on the core in use: the loop notices, moves, and is fast again. Takes seconds, so only among the long tests.
#[test]
fn a_hog_drives_the_loop_to_another_core() {
    if !long_tests() {
        eprintln!("skipped: a real CPU hog takes seconds; set TREFOIL_LONG_TESTS=1");
        return;
    }
    let [first_core, .., last_core] = trefoil_units::allowed_cores() else {
        eprintln!("skipped: there is one core only");
        return;
    };
    let (first_core, last_core) = (*first_core, *last_core);
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 256);
    let [first, second] = [first_core, last_core].map(|core| real_unit(&format!("rten:CPU@{core}")).unwrap());
    let source = PreparedSource::new(&model.prepared, &model.graph, folder.path().join("segments"));
    let (graphs, options, inputs) = ([&model.graph], ExecutorOptions::default(), [model.inputs()]);
    let compiling =
        Compiling { graphs: &graphs, source: &source, find: &registry_units, options: &options, inputs: &inputs };
    let limit = LoopLimit { warmup: 20, rounds: u64::MAX, time: Duration::from_secs(6), stop: &NEVER };
    let hogged = || {
        let over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(2));
                let mut cores = rustix::thread::CpuSet::new();
                cores.set(first_core as usize);
                rustix::thread::sched_setaffinity(None, &cores).unwrap();
                while !over.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            let arrangement = |unit: &Unit| Arrangement { plan: whole_plan(&model.graph, unit), ordered: true };
            let mut replan =
                |situation: &Situation| situation.slow.contains_key(&first.address).then(|| arrangement(&second));
            // Not tried again while the test lasts.
            let rule = AdaptRule { patience: Duration::from_hours(1), ..AdaptRule::default() };
            let report = adapting_loop(arrangement(&first), &compiling, &limit, rule, &mut replan);
            over.store(true, Ordering::Relaxed);
            report.unwrap()
        })
    };
    let left = |report: &AdaptReport| report.adaptations.iter().find(|one| one.switch_ms.is_some()).cloned();
    // Something else on this machine may drive it away before the hog does; that attempt shows nothing.
    let mut report = hogged();
    for _ in 0..2 {
        if left(&report).is_none_or(|moved| moved.at_seconds >= 1.5) {
            break;
        }
        report = hogged();
    }
    let moved = left(&report).expect("it moved");
    assert!(moved.at_seconds >= 1.5 && moved.at_seconds < 5.0, "{moved:#?}");
    assert!(moved.slow.values().all(|factor| *factor >= WatchRule::default().factor), "{moved:#?}");
    assert_eq!(report.last.plan.units[0].address, second.address);
    assert_eq!(report.run.equality.different, 0);
    println!("{:#?}\n{:#?}", report.adaptations, report.run.round);
}

fn store(model: &SmallModel, folder: &Path) -> PathBuf {
    let mut writer = StoreWriter::create(folder).unwrap();
    model.inputs().into_iter().for_each(|input| writer.push(input).unwrap());
    writer.finish().unwrap();
    folder.to_owned()
}

#[test]
fn arrangements_are_compared_in_fresh_processes() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let models = [two_branches(folders[0].path(), 16), relu_chain(folders[1].path(), 5, 64)];
    let Some(unit) = real_unit("rten:CPU@0") else { return };
    let graphs: Vec<&OperatorGraph> = models.iter().map(|model| &model.graph).collect();
    let source = PreparedSource(
        models
            .iter()
            .zip(&folders)
            .map(|(model, folder)| PreparedModelSource {
                prepared: &model.prepared,
                graph: &model.graph,
                folder: folder.path().join("segments"),
            })
            .collect(),
    );
    let plan = merged(&[whole_plan(graphs[0], &unit), whole_plan(graphs[1], &unit)]);
    let segments = ExtractedSegments::of(&plan, &source).unwrap().0;
    let stores: Vec<PathBuf> =
        models.iter().zip(&folders).map(|(model, folder)| store(model, &folder.path().join("inputs"))).collect();
    let entrant = |name: &str, ordered: bool, baseline: bool| Entrant {
        name: name.to_owned(),
        arrangement: Arrangement { plan: plan.clone(), ordered },
        segments: segments.clone(),
        baseline,
    };
    let mut broken = entrant("broken", true, false);
    broken.segments[0].path = folders[0].path().join("absent.onnx");
    let entrants = [entrant("serial", true, true), entrant("free", false, true), entrant("plan", true, false), broken];
    let program = env!("CARGO_BIN_EXE_trefoil-together-worker").into();
    let options = ContestOptions {
        rounds: 2,
        cache: None,
        spin: Duration::from_micros(20),
        timeout: Duration::from_mins(1),
        command: WorkerCommand { program, arguments: Vec::new() },
        stop: &NEVER,
        give_up: None,
    };
    let sampling = RunSampling { warmup: 2, runs: 20, span_ms: 0.0, cap_ms: 2000.0 };
    let mut told = Vec::new();
    let found = contest(&entrants, &graphs, &stores, &Activity::Rounds { sampling }, &options, &mut |progress| {
        told.push(format!("{} {}", progress.round, progress.contender));
    })
    .unwrap();
    assert_eq!(told, ["0 serial", "0 free", "0 plan", "0 broken", "1 plan", "1 free", "1 serial"]);
    for (result, entrant) in found.comparison.contenders.iter().zip(&found.entrants).take(3) {
        assert!(result.failure.is_none() && result.round_medians.len() == 2, "{result:#?}");
        assert!(entrant.equality.ok() && entrant.models.len() == 2 && entrant.per_second > 0.0, "{entrant:#?}");
    }
    assert!(found.comparison.contenders[3].failure.as_ref().unwrap().contains("absent"));
    // Two rounds decide nothing, so the plan is not used.
    let verdict = found.verdict();
    assert!(!verdict.uses_plan && verdict.reason == Reason::Tie, "{verdict:?}");
    assert_eq!(found.comparison.ratios.len(), 1);

    // What cannot win is left out of the third round, and without a plan there is nothing left to find out.
    let long = ContestOptions { rounds: 4, give_up: Some(-1.0), ..options.clone() };
    told.clear();
    let found = contest(&entrants, &graphs, &stores, &Activity::Rounds { sampling }, &long, &mut |progress| {
        told.push(format!("{} {}", progress.round, progress.contender));
    })
    .unwrap();
    assert!(told.len() == 7 && found.comparison.rounds == 2, "{told:?}");

    let arrivals = vec![stream(5.0), stream(10.0)];
    let serving = Activity::Serve { arrivals, duration_ms: 200.0, limit: 100, grace_ms: 5000.0 };
    let found = contest(&entrants[..3], &graphs, &stores, &serving, &options, &mut |_| {}).unwrap();
    for entrant in &found.entrants {
        assert_eq!(entrant.models.iter().map(|model| model.count).collect::<Vec<_>>(), [80, 40], "{entrant:#?}");
        assert!(entrant.equality.ok() && entrant.miss_rates.len() == 2, "{entrant:#?}");
    }

    // On one core the two cannot run beside each other, but a worker measures what it is told to.
    let slowed = slowdown(&entrants[0], &graphs, &stores, 20.0, &options).unwrap();
    assert!(slowed.alone_ms.len() == 2 && slowed.beside_ms.iter().all(|&ms| ms > 0.0), "{slowed:?}");
    assert!(slowed.factors.len() == 2 && slowed.factors.iter().all(|factor| factor.count == 6), "{slowed:?}");
    // On one core both take at least as long as the longer one alone.
    assert!(slowed.together_ms.max > slowed.alone_ms[0].min(slowed.alone_ms[1]), "{slowed:?}");
    let error = slowdown(&entrants[3], &graphs, &stores, 20.0, &options).unwrap_err().to_string();
    assert!(error.contains("broken") && error.contains("absent"), "{error}");

    let never_run = contest(&[], &graphs, &stores, &serving, &options, &mut |_| {}).unwrap_err();
    assert!(never_run.to_string().contains("nothing to compare"));
}
