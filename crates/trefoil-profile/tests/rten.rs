//! A small model profiled from end to end on the embedded backend: prepared, measured, interrupted, resumed, cut.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use trefoil_core::{
    CostTable, HostTensor, OperatorId, Origin, Outcome, Plan, Profile, Samples, Subject, TensorInfo, Unit, UnitAddress,
};
use trefoil_onnx::Values;
use trefoil_onnx::builder::{ModelBuilder, sample_model};
use trefoil_profile::{
    Launcher, Lineup, LineupTimer, LineupTimes, PrepareOptions, PreparedModel, ProfileError, ProfileOptions,
    load_profile, measure_segments, prepare_model, profile, refine, save_profile, settle_whole,
};

fn launcher() -> Launcher {
    Launcher::new(env!("CARGO_BIN_EXE_trefoil-worker").into(), Vec::new())
}

fn never() -> AtomicBool {
    AtomicBool::new(false)
}

struct Bench {
    folder: tempfile::TempDir,
    model: PathBuf,
}

impl Bench {
    fn new(builder: &ModelBuilder) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let model = folder.path().join("model.onnx");
        builder.save(&model).unwrap();
        Self { folder, model }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn prepare_options(&self) -> PrepareOptions {
        let mut options = PrepareOptions::new(launcher(), self.cache());
        options.references = vec!["rten:CPU".parse().unwrap()];
        options
    }

    fn prepare(&self) -> PreparedModel {
        prepare_model(&self.model, &self.prepare_options(), &never()).unwrap()
    }

    fn options(&self) -> ProfileOptions {
        let mut options = ProfileOptions::quick(launcher(), self.cache());
        options.baselines = false;
        options
    }
}

fn rten() -> Unit {
    let core = trefoil_units::allowed_cores()[0];
    trefoil_units::resolve(&UnitAddress::new("rten", "CPU").with_cores([core])).unwrap()
}

fn run(bench: &Bench, model: &PreparedModel) -> Profile {
    profile(model, &[rten()], &bench.options(), &mut |_| {}, &never()).unwrap()
}

#[test]
fn the_trace_holds_every_boundary_value() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let graph = model.graph(trefoil_core::Granularity::Node, &[]).unwrap();
    for tensor in &graph.tensors {
        let info = Values::info(&model.trace, &tensor.name).unwrap();
        assert_eq!((info.dtype, &info.shape), (tensor.dtype, &tensor.shape), "{}", tensor.name);
    }
    let scores = model.trace.load("scores").unwrap().to_f64();
    assert!((scores.iter().sum::<f64>() - 1.0).abs() < 1e-4, "a softmax sums to 1: {scores:?}");
    assert!(model.reference.is_self_check("rten") && !model.reference.is_self_check("ort"));
    assert!(model.reference.description.contains("rten:CPU"));
    // Relu's trace follows from its input's.
    let (before, after) = (model.trace.load("stem").unwrap().to_f64(), model.trace.load("stem_act").unwrap().to_f64());
    assert!(before.iter().zip(&after).all(|(x, y)| (x.max(0.0) - y).abs() < 1e-6));
}

#[test]
fn a_second_preparation_comes_from_the_cache() {
    let bench = Bench::new(&sample_model());
    let first = bench.prepare();
    let mut options = bench.prepare_options();
    // A launcher that cannot work shows that nothing was run.
    options.launcher = Launcher::new("/nonexistent".into(), Vec::new());
    let second = prepare_model(&bench.model, &options, &never()).unwrap();
    assert_eq!(first.prepared.fingerprint(), second.prepared.fingerprint());
    assert_eq!(first.directory(), second.directory());
    options.seed = 1;
    assert!(matches!(prepare_model(&bench.model, &options, &never()), Err(ProfileError::Worker { .. })));
    // A damaged cache entry is made again.
    std::fs::write(first.directory().join("trace/index.json"), "{").unwrap();
    assert!(bench.prepare().trace.load("scores").is_some());
}

#[test]
fn given_inputs_are_checked_and_used() {
    let bench = Bench::new(&sample_model());
    let mut options = bench.prepare_options();
    let image = || HostTensor::from_f32("image", [1u64, 3, 64, 64], &vec![0.5; 3 * 64 * 64]);
    options.inputs = Some(vec![image()]);
    let model = prepare_model(&bench.model, &options, &never()).unwrap();
    assert_eq!(model.trace.load("image").unwrap().bytes(), image().bytes());
    let fails = |inputs: Vec<HostTensor>| {
        let options = PrepareOptions { inputs: Some(inputs), ..bench.prepare_options() };
        prepare_model(&bench.model, &options, &never()).unwrap_err().to_string()
    };
    assert!(fails(vec![]).contains("`image`"));
    let small = fails(vec![HostTensor::from_f32("image", [1u64], &[0.5])]);
    assert!(small.contains("image") && !small.contains('\n'), "{small}");
    let mut stranger = image();
    stranger.set_name("picture");
    let message = fails(vec![image(), stranger]);
    assert!(message.contains("picture") && message.contains("it has image"), "{message}");
}

#[test]
fn every_operator_has_a_record_and_a_table_can_be_made() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let profile = run(&bench, &model);
    let graph = profile.model(None).unwrap();
    let table = CostTable::from_profile(&profile, graph, &[]).unwrap();
    for id in graph.ids() {
        let cost = table.cost(id, 0).unwrap_or_else(|| panic!("{}", graph.operator(id).name));
        assert!(cost.ms > 0.0 && cost.origin == Origin::Measured);
    }
    let whole = Subject::WholeModel { model: graph.fingerprint.clone() };
    let index = profile.index();
    let record = index.newest(&whole, &[rten().address]).unwrap();
    assert!(record.total().unwrap().median > 0.0, "{:?}", record.outcome);
    assert!(matches!(record.outcome, Outcome::Ok { error_to_peak: Some(error), .. } if error < 1e-3));
    assert_eq!(record.versions.keys().collect::<Vec<_>>(), ["rten"]);
    assert!(record.conditions.denormals_flushed && record.taken_at.ends_with('Z'));
    let path = bench.folder.path().join("p.json");
    save_profile(&profile, &path).unwrap();
    assert_eq!(load_profile(&path).unwrap(), profile);
}

#[test]
fn what_differs_from_the_trace_gets_a_second_opinion() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    // As if the traced run had computed this value from something else than the traced input.
    let address = model.trace.bytes("gate_act").unwrap().as_ptr() as usize;
    let start = model.trace.names().map(|name| model.trace.bytes(name).unwrap().as_ptr() as usize).min().unwrap();
    let data = model.directory().join("trace/data.bin");
    let mut bytes = std::fs::read(&data).unwrap();
    bytes[address - start..][..4].copy_from_slice(&0.001f32.to_le_bytes());
    drop(model);
    std::fs::write(&data, bytes).unwrap();
    let model = bench.prepare();
    assert!((model.trace.load("gate_act").unwrap().to_f64()[0] - 0.001).abs() < 1e-6);
    let mut options = bench.options();
    options.granularity = trefoil_core::Granularity::Node;
    let profile = profile(&model, &[rten()], &options, &mut |_| {}, &never()).unwrap();
    // The operator that writes it and the one that reads it.
    assert!(profile.notes.iter().any(|note| note.starts_with("2 results differ")), "{:?}", profile.notes);
    let graph = profile.model(None).unwrap();
    CostTable::from_profile(&profile, graph, &[]).expect("no operator is wrong");
    assert!(graph.operators.iter().all(|operator| {
        let subject = Subject::Operator { signature: operator.signature.clone() };
        profile.index().newest(&subject, &[rten().address]).unwrap().total().is_some()
    }));
}

#[test]
fn an_interrupted_profile_resumes_from_the_journal() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let stop = never();
    let mut seen = 0;
    let error = profile(
        &model,
        &[rten()],
        &bench.options(),
        &mut |progress| {
            seen = seen.max(progress.done);
            assert!(progress.done <= progress.total && progress.current.contains("rten:CPU"));
            if progress.done == 4 {
                stop.store(true, Ordering::Relaxed);
            }
        },
        &stop,
    )
    .unwrap_err();
    assert!(matches!(error, ProfileError::Interrupted { done: 4, .. }), "{error}");
    assert_eq!(seen, 4);
    let from_journal = Cell::new(0);
    let watch =
        &mut |progress: trefoil_profile::Progress| from_journal.set(from_journal.get().max(progress.from_journal));
    profile(&model, &[rten()], &bench.options(), watch, &never()).unwrap();
    assert_eq!(from_journal.get(), 4, "what was measured before the interruption is not measured again");
    let first = run(&bench, &model);
    let second = run(&bench, &model);
    let times = |profile: &Profile| profile.measurements.iter().map(|m| m.outcome.clone()).collect::<Vec<_>>();
    assert_eq!(times(&first), times(&second), "a complete journal gives the same profile");
}

#[test]
fn segments_are_measured_and_failures_are_records() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let mut profile = run(&bench, &model);
    let graph = profile.model(None).unwrap().clone();
    let half: BTreeSet<_> = graph.ids().take(graph.len() / 2).collect();
    let rest: BTreeSet<_> = graph.ids().skip(graph.len() / 2).collect();
    let segments = [(half.clone(), rten()), (rest, rten())];
    let before = profile.measurements.len();
    let ids =
        measure_segments(&model, &graph, &segments, &mut profile, &bench.options(), &mut |_| {}, &never()).unwrap();
    assert_eq!((ids.len(), profile.measurements.len()), (2, before + 2));
    let index = profile.index();
    for id in &ids {
        let record = index.by_id(id).unwrap();
        assert!(record.total().is_some(), "{id}: {:?}", record.failure());
    }
    drop(index);
    // First and last operator without what lies between: not convex, so it cannot be extracted.
    let gap = BTreeSet::from([OperatorId(0), OperatorId(graph.len() as u32 - 1)]);
    let ids = measure_segments(&model, &graph, &[(gap, rten())], &mut profile, &bench.options(), &mut |_| {}, &never())
        .unwrap();
    let index = profile.index();
    let record = index.by_id(&ids[0]).unwrap();
    assert!(matches!(&record.outcome, Outcome::Failed { stage, .. } if stage == "extract"), "{:?}", record.outcome);
}

/// A planner for tests: everything on one unit in two segments, with measured costs where there are any.
fn halves(profile: &Profile) -> Result<Plan, String> {
    let graph = profile.model(None).map_err(|error| error.to_string())?;
    let unit = profile.units[0].clone();
    let mut plan = Plan::whole(graph, &unit, 0.0, Vec::new(), Origin::Predicted);
    let whole = plan.segments.remove(0);
    let index = profile.index();
    for part in 0..2usize {
        let half = graph.len() / 2;
        let operators: Vec<_> =
            if part == 0 { graph.ids().take(half).collect() } else { graph.ids().skip(half).collect() };
        let (inputs, outputs) = graph.boundary(&operators.iter().copied().collect());
        let subject = Subject::Segment {
            model: graph.fingerprint.clone(),
            granularity: graph.granularity,
            operators: operators.clone(),
        };
        let mut segment = trefoil_core::Segment { operators, inputs, outputs, ..whole.clone() };
        if let Some(record) = index.newest(&subject, std::slice::from_ref(&unit.address)) {
            segment.cost.origin = Origin::Measured;
            segment.cost.ms = record.total().map_or(f64::MAX, |total| total.median);
            segment.cost.measurements = vec![record.id.clone()];
        }
        plan.segments.push(segment);
    }
    Ok(plan)
}

#[test]
fn refinement_ends_with_a_measured_plan() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let mut profile = run(&bench, &model);
    let graph = profile.model(None).unwrap().clone();
    let hour = Duration::from_hours(1);
    let mut propose = halves;
    let mut asked = Vec::new();
    let mut timer = |lineup: &Lineup, process: u32| {
        asked.push((lineup.segments.len(), lineup.units.len(), process));
        let time = |ms: f64| Samples::from_values(&mut [ms + f64::from(process)]);
        let segments = lineup.segments.iter().map(|_| time(7.0)).collect();
        // One unit's process died once: the others stand for it.
        let whole = lineup.units.iter().map(|_| if process == 0 { None } else { time(20.0) }).collect();
        let notes = if process == 0 { vec!["the process died".to_owned()] } else { Vec::new() };
        Ok(LineupTimes { segments, whole, notes, sampling: (3, 4, 5.0) })
    };
    let timer: Option<&mut LineupTimer<'_>> = Some(&mut timer);
    let refinement =
        refine(&model, &graph, &mut profile, &bench.options(), hour, &mut propose, timer, &mut |_| {}, &never())
            .unwrap();
    assert!(refinement.finished && refinement.plan.all_measured);
    assert_eq!((refinement.measured, refinement.rounds[0].measured.len()), (2, 2));
    assert!(refinement.estimates_were_lower_bounds, "0 ms is below everything");
    assert!(refinement.plan.segments.iter().all(|segment| segment.cost.ms > 0.0));
    refinement.plan.check_costs(&profile.index()).unwrap();
    // The plan's segments and the whole model were timed in three fresh processes, and in five more to confirm the choice.
    let units = asked[0].1;
    assert!(units >= 1);
    assert_eq!(asked, [0, 1, 2, 0, 1, 2, 3, 4].map(|process| (2, units, process)));
    assert!(refinement.plan.segments.iter().all(|segment| segment.cost.ms.to_bits() == 9.0f64.to_bits()));
    let whole = Subject::WholeModel { model: graph.fingerprint.clone() };
    let newest = profile.index().newest(&whole, &[rten().address]).unwrap().clone();
    assert_eq!(newest.total().map(|total| (total.median, total.count)), Some((22.0, 4)));
    assert!(newest.conditions.fresh_process && (newest.conditions.warmup, newest.conditions.runs) == (3, 4));
    assert!(profile.notes.iter().any(|note| note.contains("the process died")), "{:?}", profile.notes);

    let mut profile = run(&bench, &model);
    let mut fails = |_: &Profile| Err::<Plan, _>("no idea");
    let error = refine(&model, &graph, &mut profile, &bench.options(), hour, &mut fails, None, &mut |_| {}, &never())
        .unwrap_err();
    assert!(error.to_string().contains("no idea"));
    let spent = refine(
        &model,
        &graph,
        &mut profile,
        &bench.options(),
        Duration::ZERO,
        &mut propose,
        None,
        &mut |_| {},
        &never(),
    )
    .unwrap();
    assert!(!spent.finished && spent.measured == 0 && !spent.plan.all_measured);
}

#[test]
fn a_whole_model_is_settled_where_it_may_be_placed() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let mut profile = run(&bench, &model);
    let graph = profile.model(None).unwrap().clone();
    let (before, mut asked) = (profile.measurements.len(), Vec::new());
    let mut timer = |lineup: &Lineup, process: u32| {
        assert!(lineup.segments.is_empty());
        asked.push((process, lineup.units.iter().map(|unit| unit.address.clone()).collect::<Vec<_>>()));
        let time = |_: &Unit| Samples::from_values(&mut [20.0 + f64::from(process)]);
        let whole = lineup.units.iter().map(time).collect();
        Ok(LineupTimes { segments: Vec::new(), whole, notes: Vec::new(), sampling: (3, 4, 5.0) })
    };
    settle_whole(&model, &graph, &mut profile, &bench.options(), &mut timer, &mut |_| {}, &never()).unwrap();
    // Three fresh processes, each with the same units: all cores, and the modes of one core that were measured.
    assert_eq!(asked.iter().map(|(process, _)| *process).collect::<Vec<_>>(), [0, 1, 2]);
    let units = &asked[0].1;
    assert!(units.contains(&rten().address) && asked.iter().all(|(_, same)| same == units), "{asked:?}");
    assert_eq!(profile.measurements.len(), before + units.len());
    let (index, whole) = (profile.index(), Subject::WholeModel { model: graph.fingerprint.clone() });
    for unit in units {
        let newest = index.newest(&whole, std::slice::from_ref(unit)).unwrap();
        assert_eq!(newest.total().map(|total| total.median), Some(21.0), "the typical process counts");
        assert!(newest.conditions.fresh_process);
    }
}

#[test]
fn an_operator_that_rten_lacks_is_told_by_name() {
    let info = |name: &str| TensorInfo::new(name, trefoil_core::DataType::F32, [4u64]);
    let builder = ModelBuilder::new("odd", 17)
        .input(&info("x"))
        .node("Relu", &["x"], &["r"], &[])
        .node("NoSuchOperator", &["r"], &["y"], &[])
        .output(&info("y"));
    let bench = Bench::new(&builder);
    let error = prepare_model(&bench.model, &bench.prepare_options(), &never()).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, ProfileError::Untraceable { .. }), "{message}");
    assert!(message.contains("NoSuchOperator") && message.contains("rten:CPU") && !message.contains('\n'), "{message}");
}

#[test]
fn random_indices_that_are_out_of_range_become_zero() {
    let builder = ModelBuilder::new("gather", 17)
        .input(&TensorInfo::new("ids", trefoil_core::DataType::I64, [6u64]))
        .constant(&HostTensor::from_f32("table", [1u64, 2], &[3.0, 4.0]))
        .node("Gather", &["table", "ids"], &["y"], &[])
        .output(&TensorInfo::new("y", trefoil_core::DataType::F32, [6u64, 2]));
    let bench = Bench::new(&builder);
    let model = bench.prepare();
    assert!(model.reference.notes.iter().any(|note| note.contains("zero")), "{:?}", model.reference);
    assert_eq!(model.trace.load("y").unwrap().to_f64(), [3.0, 4.0].repeat(6));
}

#[test]
fn odd_unit_lists_are_refused() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let fails =
        |units: &[Unit]| profile(&model, units, &bench.options(), &mut |_| {}, &never()).unwrap_err().to_string();
    assert!(fails(&[]).contains("no unit"));
    assert!(fails(&[rten(), rten()]).contains("named twice"));
    let simulated = Unit { simulated: true, address: "sim:soc/NPU".parse().unwrap(), ..rten() };
    assert!(fails(&[rten(), simulated]).contains("together"));
}

#[test]
fn transfers_between_two_units_are_measured_both_ways() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let all = trefoil_units::resolve(&"rten:CPU".parse().unwrap()).unwrap();
    let units = if all.resources == rten().resources {
        eprintln!("skipped: one core only, so there are no two rten units");
        return;
    } else {
        [rten(), all]
    };
    let profile = profile(&model, &units, &bench.options(), &mut |_| {}, &never()).unwrap();
    for pair in [[&units[0], &units[1]], [&units[1], &units[0]]] {
        let addresses = pair.map(|unit| unit.address.clone());
        let sizes: BTreeMap<u64, f64> = profile
            .measurements
            .iter()
            .filter(|m| m.units == addresses)
            .filter_map(|m| match m.subject {
                Subject::Transfer { bytes } => Some((bytes, m.total()?.median)),
                _ => None,
            })
            .collect();
        assert_eq!(sizes.keys().copied().collect::<Vec<_>>(), [256, 1 << 20], "{addresses:?}");
        assert!(sizes.values().all(|ms| ms.is_finite() && *ms >= 0.0));
    }
    let graph = profile.model(None).unwrap();
    CostTable::from_profile(&profile, graph, &[]).unwrap();
}

#[test]
fn models_of_the_shared_collection_are_prepared_alike_by_every_reference() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/zoo_tiny");
    if !root.is_dir() {
        eprintln!("skipped: no shared models at {}", root.display());
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut options = PrepareOptions::new(launcher(), cache.path().to_owned());
    options.references = vec!["rten:CPU".parse().unwrap()];
    let mut first = None;
    for reference in ["rten:CPU", "ort:CPU", "openvino:CPU"] {
        options.references = vec![reference.parse().unwrap()];
        match prepare_model(&root.join("kan_tiny_fp32.onnx"), &options, &never()) {
            Ok(model) => {
                let graph = model.graph(trefoil_core::Granularity::Fused, &[]).unwrap();
                let signatures: Vec<_> = graph.operators.iter().map(|operator| operator.signature.clone()).collect();
                let known = first.get_or_insert(signatures.clone());
                assert_eq!(*known, signatures, "{reference} gives other operators");
            }
            Err(ProfileError::NoReference { reasons }) => {
                assert!(std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_none(), "{reasons}");
                eprintln!("skipped: {reasons}");
            }
            Err(error) => panic!("{reference}: {error}"),
        }
    }
}

#[test]
fn simulated_units_give_simulated_numbers_only() {
    let bench = Bench::new(&sample_model());
    let model = bench.prepare();
    let soc = trefoil_units::list().into_iter().filter(|report| report.unit.simulated);
    let name = |unit: &Unit| unit.address.device.split('/').next().unwrap_or_default().to_owned();
    let units: Vec<Unit> = soc.map(|report| report.unit).collect();
    let first = name(&units[0]);
    let units: Vec<Unit> = units.into_iter().filter(|unit| name(unit) == first).collect();
    let profile = profile(&model, &units, &bench.options(), &mut |_| {}, &never()).unwrap();
    assert!(!profile.measurements.is_empty());
    assert!(profile.measurements.iter().all(|measurement| measurement.origin == Origin::Simulated));
    assert!(profile.machine.cpu.contains("simulated"), "{}", profile.machine.cpu);
    CostTable::from_profile(&profile, profile.model(None).unwrap(), &[]).unwrap();
    assert!(trefoil_profile::check_machine(&profile, &trefoil_units::machine()).is_ok());
}

#[test]
fn what_the_first_reference_lacks_is_traced_by_the_second() {
    // OpenVINO gives one-sided DFTs another rank, so it does not run this model, but most of its nodes.
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/models/zoo_tiny/hyena_rfft_tiny_fp32.onnx");
    if !model.is_file() {
        eprintln!("skipped: no shared model at {}", model.display());
        return;
    }
    let cache = tempfile::tempdir().unwrap();
    let mut options = PrepareOptions::new(launcher(), cache.path().to_owned());
    options.references = vec!["openvino:CPU".parse().unwrap()];
    match prepare_model(&model, &options, &never()) {
        Err(ProfileError::NoReference { reasons }) => {
            assert!(std::env::var_os("TREFOIL_REQUIRE_BACKENDS").is_none(), "{reasons}");
            eprintln!("skipped: {reasons}");
            return;
        }
        Err(ProfileError::Untraceable { kind, .. }) => assert_eq!(kind, "DFT"),
        other => panic!("{:?}", other.map(|model| model.reference)),
    }
    options.references.push("rten:CPU".parse().unwrap());
    let mixed = prepare_model(&model, &options, &never()).unwrap();
    assert!(mixed.reference.exceptions.values().all(|unit| unit == "rten:CPU"), "{:?}", mixed.reference);
    assert!(mixed.reference.exceptions.keys().any(|node| node.contains("DFT") || node.contains("fft")));
    assert_eq!(mixed.reference.units.len(), 2);
    assert!(!mixed.reference.is_self_check("openvino") && !mixed.reference.is_self_check("rten"));
    options.references = vec!["rten:CPU".parse().unwrap()];
    let alone = prepare_model(&model, &options, &never()).unwrap();
    for output in mixed.prepared.outputs() {
        let (one, other) = (mixed.trace.load(&output.name).unwrap(), alone.trace.load(&output.name).unwrap());
        assert!(one.error_to_peak(&other) < 1e-4, "{}", output.name);
    }
}

#[test]
fn a_wrong_declaration_does_not_stop_the_only_backend() {
    let info = |name: &str, extent: u64| TensorInfo::new(name, trefoil_core::DataType::F32, [extent]);
    let builder =
        ModelBuilder::new("stale", 17).input(&info("x", 4)).node("Relu", &["x"], &["y"], &[]).output(&info("y", 5));
    let bench = Bench::new(&builder);
    match prepare_model(&bench.model, &bench.prepare_options(), &never()) {
        Ok(model) => {
            assert!(model.reference.notes.iter().any(|note| note.contains("declares shapes")), "{:?}", model.reference);
            assert_eq!(model.trace.describe("y").unwrap().shape, [4]);
        }
        // A backend may refuse the file for it, in words that name the value.
        Err(error) => assert!(error.to_string().contains('y'), "{error}"),
    }
}
