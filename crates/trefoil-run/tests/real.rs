//! Real backends: mixed plans compute what the oracle computes, verification names what differs, comparison times it.

#[path = "support/models.rs"]
mod models;
mod support;

use models::{SmallModel, cancelling, plan_of, real_unit, relu_chain, two_branches, whole_plan};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use trefoil_core::{OperatorGraph, Plan, Unit, UnitAddress};
use trefoil_onnx::Values;
use trefoil_run::{
    CompareOptions, Contender, Executor, ExecutorOptions, ExtractedSegments, FindUnit, PreparedSource, Reason,
    Reference, RunError, RunSampling, Verification, Verify, WorkerCommand, compare, guard, registry_units, verify,
};
use trefoil_units::{Availability, Backend, Buffer, CompileOptions, Compiled, Ports, RunTiming, SubModel, UnitError};

fn real_units() -> Vec<Unit> {
    ["rten:CPU@0", "ort:CPU@0", "openvino:CPU@0"].into_iter().filter_map(real_unit).collect()
}

fn source<'a>(model: &'a SmallModel, folder: &Path) -> PreparedSource<'a> {
    PreparedSource::new(&model.prepared, &model.graph, folder.join("segments"))
}

#[test]
fn mixed_plans_agree_with_the_oracle_on_one_and_two_lanes() {
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 48);
    let mut layouts = vec![real_units()];
    if let [first, .., last] = trefoil_units::allowed_cores() {
        layouts.push(
            [format!("ort:CPU@{first}"), format!("openvino:CPU@{last}"), format!("rten:CPU@{first}-{last}")]
                .iter()
                .filter_map(|address| real_unit(address))
                .collect(),
        );
    }
    for units in layouts.iter().filter(|units| !units.is_empty()) {
        let plan = plan_of(&model.graph, units, |operator| operator % units.len());
        let source = source(&model, folder.path());
        let mut executor =
            Executor::new(plan, &[&model.graph], &source, &registry_units, &ExecutorOptions::default()).unwrap();
        for _ in 0..50 {
            let made = executor.run(&model.inputs()).unwrap();
            let error = made[0].error_to_peak(&model.values["last"]);
            assert!(error < 1e-4, "{error}");
        }
        let trace = executor.trace();
        assert_eq!(trace.lanes.len(), units.len());
        assert!(trace.end_ms() > 0.0);
    }
}

fn check(
    model: &SmallModel,
    plan: &Plan,
    folder: &Path,
    find: &FindUnit<'_>,
    reference: Reference<'_>,
) -> Result<Verification, RunError> {
    let graphs: [&OperatorGraph; 1] = [&model.graph];
    let source = source(model, folder);
    let inputs = model.inputs();
    verify(&Verify { plan, graphs: &graphs, source: &source, find, inputs: &inputs, reference, cache: None })
}

#[test]
fn verification_passes_a_right_plan() {
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 16);
    let units = real_units();
    let Some(first) = units.first() else { return };
    let plan = plan_of(&model.graph, &units, |operator| operator % units.len());
    let values: [&dyn Values; 1] = [&model.values];
    for reference in [Reference::Values(&values), Reference::Unit(&first.address)] {
        let found = check(&model, &plan, folder.path(), &registry_units, reference).unwrap();
        assert!(found.ok && found.first_difference.is_none(), "{}", found.summary());
        assert_eq!(found.boundaries.len(), model.graph.len());
        assert!(found.worst_error.unwrap() < 1e-4);
    }
}

#[test]
fn verification_without_reference_values_is_not_ok() {
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 16);
    let Some(unit) = real_unit("rten:CPU@0") else { return };
    let nothing: BTreeMap<String, trefoil_core::HostTensor> = BTreeMap::new();
    let values: [&dyn Values; 1] = [&nothing];
    let found =
        check(&model, &whole_plan(&model.graph, &unit), folder.path(), &registry_units, Reference::Values(&values));
    let found = found.unwrap();
    assert!(!found.ok && found.not_compared == ["last"], "{}", found.summary());
}

/// A backend that computes like `rten`, except for sub-models that `spoils` picks: their first output is off.
struct Skewed {
    spoils: fn(&SubModel) -> bool,
}

impl Backend for Skewed {
    fn name(&self) -> &'static str {
        "skewed"
    }
    fn check(&self) -> Availability {
        Availability::Available { version: "1".into(), library: None }
    }
    fn units(&self) -> Vec<(Unit, Availability)> {
        Vec::new()
    }
    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        let (backend, _) = registry_units(&"rten:CPU@0".parse().unwrap())?;
        let unit = backend.unit(&"rten:CPU@0".parse().unwrap())?;
        Ok(Unit { address: address.clone(), ..unit })
    }
    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        let (backend, _) = registry_units(&"rten:CPU@0".parse().unwrap())?;
        let unit = Unit { address: "rten:CPU@0".parse().unwrap(), ..unit.clone() };
        let inner = backend.compile(model, &unit, options)?;
        Ok(Box::new(SkewedCompiled { inner, spoil: (self.spoils)(model), output: None }))
    }
    fn versions(&self) -> BTreeMap<String, String> {
        BTreeMap::new()
    }
}

struct SkewedCompiled {
    inner: Box<dyn Compiled>,
    spoil: bool,
    output: Option<Buffer>,
}

impl Compiled for SkewedCompiled {
    fn ports(&self) -> &Ports {
        self.inner.ports()
    }
    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        self.output = outputs.first().copied();
        // SAFETY: the caller's contract is passed on.
        unsafe { self.inner.bind(inputs, outputs) }
    }
    fn submit(&mut self) -> Result<(), UnitError> {
        self.inner.submit()
    }
    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        let timing = self.inner.wait()?;
        if let (true, Some(buffer)) = (self.spoil, self.output) {
            // SAFETY: a bound output of at least four bytes; this execution is its only user.
            let bytes: &mut [u8] = unsafe { std::slice::from_raw_parts_mut(buffer.pointer, 4) };
            let spoiled = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) + 1.0;
            bytes.copy_from_slice(&spoiled.to_le_bytes());
        }
        Ok(timing)
    }
}

fn skewed(spoils: fn(&SubModel) -> bool) -> impl Fn(&UnitAddress) -> Result<(&'static dyn Backend, Unit), UnitError> {
    let backend: &'static Skewed = Box::leak(Box::new(Skewed { spoils }));
    move |address| {
        if address.backend == "skewed" {
            Ok((backend as &'static dyn Backend, backend.unit(address)?))
        } else {
            registry_units(address)
        }
    }
}

/// Segments {a0 a1 b0 b1} on the skewed unit and {join last} on rten.
fn half_skewed(model: &SmallModel, find: &FindUnit<'_>) -> Plan {
    let units = ["skewed:CPU@0", "rten:CPU@0"].map(|address| find(&address.parse().unwrap()).unwrap().1);
    let of = |names: &[&str]| -> Vec<u32> {
        model.graph.ids().filter(|&id| names.contains(&model.graph.operator(id).name.as_str())).map(|id| id.0).collect()
    };
    let cuts = [(of(&["a0", "a1", "b0", "b1"]), 0), (of(&["join", "last"]), 1)];
    support::plan(&model.graph, &units, &cuts, &[(0, 0), (1, 0)], true)
}

#[test]
fn verification_names_an_operator_that_is_wrong_by_itself() {
    if real_unit("rten:CPU@0").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 16);
    // Whatever hands out b0 alone, and the whole segment, whose outputs are a1 and b1.
    let find = skewed(|model| model.outputs.iter().any(|port| port.name == "b0") || model.outputs.len() == 2);
    let plan = half_skewed(&model, &find);
    let values: [&dyn Values; 1] = [&model.values];
    let rten = "rten:CPU@0".parse().unwrap();
    for reference in [Reference::Values(&values), Reference::Unit(&rten)] {
        let found = check(&model, &plan, folder.path(), &find, reference).unwrap();
        assert!(!found.ok);
        let difference = found.first_difference.as_ref().unwrap();
        assert_eq!((difference.name.as_str(), difference.kind.as_str(), difference.segment), ("b0", "MatMul", 0));
        assert!(
            difference.finding.starts_with("alone, on the reference's inputs: output `b0`"),
            "{}",
            difference.finding
        );
        assert!(found.summary().contains("first at `b0` (MatMul) in segment 0 on skewed:CPU@0"), "{}", found.summary());
    }
}

#[test]
fn rounding_that_grows_between_right_segments_passes_unless_it_reaches_an_output() {
    if real_unit("rten:CPU@0").is_none() {
        return;
    }
    for hand_out_difference in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let model = cancelling(folder.path(), hand_out_difference);
        // One unit in 10⁵ is well within what f32 allows of `r`, and three times `d`.
        let find = skewed(|model| model.outputs.iter().any(|port| port.name == "r"));
        let units = ["skewed:CPU@0", "rten:CPU@0"].map(|address| find(&address.parse().unwrap()).unwrap().1);
        let plan = plan_of(&model.graph, &units, |operator| usize::from(operator > 0));
        let values: [&dyn Values; 1] = [&model.values];
        let found = check(&model, &plan, folder.path(), &find, Reference::Values(&values)).unwrap();
        assert_eq!(found.boundaries.iter().filter(|check| check.wrong.is_some()).count(), 1, "{}", found.summary());
        if hand_out_difference {
            assert!(!found.ok && found.first_difference.unwrap().name == "d");
        } else {
            assert!(found.ok && found.first_difference.is_none() && found.grown[0].name == "d", "{}", found.summary());
            assert!(found.summary().contains("rounding grows in between, first at `d`"), "{}", found.summary());
        }
    }
}

#[test]
fn verification_finds_what_only_fusion_gets_wrong() {
    if real_unit("rten:CPU@0").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let model = two_branches(folder.path(), 16);
    // Wrong only when compiled together: anything with two outputs that include a1.
    let find = skewed(|model| model.outputs.len() == 2 && model.outputs.iter().any(|port| port.name == "a1"));
    let plan = half_skewed(&model, &find);
    let values: [&dyn Values; 1] = [&model.values];
    let found = check(&model, &plan, folder.path(), &find, Reference::Values(&values)).unwrap();
    let difference = found.first_difference.unwrap();
    assert!(difference.finding.contains("no operator differs alone"), "{}", difference.finding);
    // The shortest such prefix ends with the first operator of the second branch.
    let segment = &plan.segments[0];
    let position = segment.operators.iter().position(|&id| Some(id) == difference.operator).unwrap();
    assert_eq!(position, 2, "{}", difference.name);
}

fn options(rounds: u32, command: WorkerCommand) -> CompareOptions {
    CompareOptions {
        rounds,
        most_rounds: rounds,
        sampling: RunSampling { warmup: 2, runs: 20, span_ms: 0.0, cap_ms: 500.0 },
        cache: None,
        spin: Duration::from_micros(50),
        timeout: Duration::from_mins(2),
        command,
    }
}

fn worker() -> WorkerCommand {
    WorkerCommand { program: env!("CARGO_BIN_EXE_trefoil-run-worker").into(), arguments: Vec::new() }
}

fn contender(name: &str, model: &SmallModel, plan: &Plan, folder: &Path, baseline: bool) -> Contender {
    let segments = ExtractedSegments::of(plan, &source(model, folder)).unwrap().0;
    Contender { name: name.to_owned(), plan: plan.clone(), segments, baseline }
}

/// Tests whose contenders are timed on the same core, one after the other.
static TIMED: std::sync::Mutex<()> = std::sync::Mutex::new(());

#[test]
fn a_chain_cut_in_pieces_loses_against_the_whole_in_fresh_processes() {
    let _alone = TIMED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(unit) = real_unit("rten:CPU@0") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = relu_chain(folder.path(), 60, 64);
    let mut plan = plan_of(&model.graph, std::slice::from_ref(&unit), |_| 0);
    plan.simulated_ms = 1e6;
    let contenders = [
        contender("cut", &model, &plan, folder.path(), false),
        contender("rten:CPU@0", &model, &whole_plan(&model.graph, &unit), folder.path(), true),
    ];
    let mut order = Vec::new();
    let found = compare(&contenders, &[&model.graph], &model.inputs(), &options(5, worker()), &mut |progress| {
        order.push((progress.round, progress.contender.to_owned()));
    })
    .unwrap();
    let names: Vec<_> = order.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(&names[..4], ["cut", "rten:CPU@0", "rten:CPU@0", "cut"], "rounds alternate");
    for contender in &found.contenders {
        assert_eq!(contender.failure, None);
        assert_eq!(contender.round_medians.len(), 5);
        assert!(contender.samples >= 15 && contender.measured.unwrap().median > 0.0);
        assert!(contender.trace.as_ref().unwrap().end_ms() > 0.0);
    }
    // Predicted 10⁶ ms: the error is almost exactly predicted / measured.
    let cut = &found.contenders[0];
    assert!((cut.prediction_error.unwrap() * cut.measured.unwrap().median / 1e6 - 1.0).abs() < 1e-3);
    let ratio = found.ratio("cut").unwrap();
    assert_eq!((ratio.to.as_str(), ratio.per_round.len()), ("rten:CPU@0", 5));
    // 60 calls of a tiny operator against one call of 60: slower wherever this runs, though by how much varies.
    let verdict = guard(&found);
    assert!(!verdict.uses_plan, "{}", verdict.message);
    assert!(verdict.message.starts_with("rten:CPU@0 alone is best here"), "{}", verdict.message);
}

#[test]
fn a_plan_that_leads_after_too_few_rounds_gets_more_of_them() {
    let _alone = TIMED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let Some(unit) = real_unit("rten:CPU@0") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = relu_chain(folder.path(), 60, 64);
    let pieces = plan_of(&model.graph, std::slice::from_ref(&unit), |_| 0);
    // One call of 60 operators against 60 calls: it wins in every round, wherever this runs.
    let contenders = [
        contender("whole", &model, &whole_plan(&model.graph, &unit), folder.path(), false),
        contender("pieces", &model, &pieces, folder.path(), true),
    ];
    let count = |comparison: &trefoil_run::Comparison| -> Vec<usize> {
        comparison.contenders.iter().map(|contender| contender.round_medians.len()).collect()
    };
    let few = CompareOptions { most_rounds: 6, ..options(2, worker()) };
    let mut last = 0;
    // Where neighbours slow just its rounds the plan does not lead, and the comparison ends as it should: then once more.
    let found = (0..10)
        .map(|_| {
            let mut show = |progress: trefoil_run::CompareProgress<'_>| last = progress.rounds;
            compare(&contenders, &[&model.graph], &model.inputs(), &few, &mut show).unwrap()
        })
        .find(|found| found.rounds == 6)
        .expect("a plan of one call leads one of sixty in some comparison");
    // Two and four rounds are too few for any interval to count.
    assert_eq!((count(&found), last), (vec![6, 6], 6));
    // Whether six are enough to be sure is the machine's business (a neighbour may slow any round); that all six count is not.
    assert_eq!(found.ratio("whole").unwrap().per_round.len(), 6);
    assert!(guard(&found).message.contains("over 6 rounds"), "{}", guard(&found).message);
    let exact = compare(&contenders, &[&model.graph], &model.inputs(), &options(2, worker()), &mut |_| {}).unwrap();
    assert_eq!(count(&exact), [2, 2]);
}

#[cfg(unix)]
#[test]
fn processes_that_crash_hang_or_fail_are_results_with_a_reason() {
    let Some(unit) = real_unit("rten:CPU@0") else { return };
    let folder = tempfile::tempdir().unwrap();
    let model = relu_chain(folder.path(), 2, 8);
    let plan = whole_plan(&model.graph, &unit);
    let contenders = [contender("whole", &model, &plan, folder.path(), true)];
    let with = |script: &str, timeout: Duration| {
        let command = WorkerCommand { program: "/bin/sh".into(), arguments: vec!["-c".into(), script.into()] };
        let options = CompareOptions { timeout, ..options(2, command) };
        let found = compare(&contenders, &[&model.graph], &model.inputs(), &options, &mut |_| {}).unwrap();
        assert_eq!(guard(&found).reason, Reason::NothingRan);
        found.contenders[0].failure.clone().unwrap()
    };
    let minute = Duration::from_mins(1);
    assert!(with("kill -SEGV $$", minute).contains("died of signal 11"));
    assert!(with("echo oh no >&2; exit 3", minute).ends_with("exit code 3; its last words: oh no"));
    assert!(with("exit 0", minute).contains("ended without a result"));
    assert!(with("exec sleep 60", Duration::from_millis(200)).contains("gave up after 0 s"));

    let missing = options(1, WorkerCommand { program: "/no/such/program".into(), arguments: Vec::new() });
    let error = compare(&contenders, &[&model.graph], &model.inputs(), &missing, &mut |_| {}).unwrap_err();
    assert!(error.to_string().starts_with("cannot start /no/such/program"), "{error}");

    // A plan that fails inside the worker says so in its own words.
    let mut absent = contenders[0].clone();
    absent.segments[0].path = folder.path().join("absent.onnx");
    let found = compare(&[absent], &[&model.graph], &model.inputs(), &options(2, worker()), &mut |_| {}).unwrap();
    let failure = found.contenders[0].failure.clone().unwrap();
    assert!(failure.starts_with("segment 0 on rten:CPU@0") && failure.contains("absent.onnx"), "{failure}");
}
