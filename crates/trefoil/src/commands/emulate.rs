//! `trefoil emulate`: plans for a described machine, executed here with real bytes by real backends slowed to its rates.

use super::simulated;
use crate::cli::{EmulateArgs, ModelArgs};
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use serde_json::json;
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use trefoil_core::{HostTensor, Objective, OperatorClass, OperatorGraph, Origin, Plan, Profile, UnitAddress, Work};
use trefoil_plan::{PlanOptions, PlanRequest, SimulationModel};
use trefoil_profile::PreparedModel;
use trefoil_profile::tolerance::{Leniency, compare};
use trefoil_report::format;
use trefoil_run::stats::median_interval;
use trefoil_run::{Emulated, Emulation, PreparedModelSource, PreparedSource};

/// Carriers may overrun their described work by this fraction of the run before the scale is doubled.
const LATE: f64 = 0.01;
/// Times the scale is doubled at most.
const DOUBLINGS: u32 = 8;
/// What waking a thread adds to a task here, in milliseconds; the scale makes it small beside the tasks.
const WAKE_MS: f64 = 0.1;

/// A model, its operators, and what its description says they cost.
struct Subject {
    prepared: PreparedModel,
    profile: Profile,
}

/// Plans that are executed one after another (mostly one), and what came of it.
struct Row {
    name: String,
    /// A plan, and the subjects it is for.
    parts: Vec<(Plan, Vec<usize>)>,
    /// Whether it is what users do today: models one after another, each on one unit.
    baseline: bool,
    emulated: Vec<Emulated>,
    /// Described milliseconds per round.
    times_ms: Vec<f64>,
    /// What is wrong with the results.
    wrong: Option<String>,
}

impl Row {
    fn simulated_ms(&self) -> f64 {
        self.parts.iter().map(|(plan, _)| plan.simulated_ms).sum()
    }

    fn emulated_ms(&self) -> Option<f64> {
        median_interval(&mut self.times_ms.clone()).map(|interval| interval.median)
    }

    fn late_ms(&self) -> f64 {
        self.emulated.iter().map(Emulated::late_ms).sum::<f64>() / self.times_ms.len().max(1) as f64
    }
}

/// Runs the command.
pub fn run(args: &EmulateArgs) -> Result<(), CliError> {
    let line = ProgressLine::new("emulate", args.json);
    let mut subjects = Vec::new();
    for (path, shapes) in args.models.iter().zip(crate::shapes::of_models(&args.models, &args.shapes)?) {
        line.step(&format!("reading {}", path.display()));
        let (prepared, profile) = simulated::prepare(&model_args(args, path), shapes, &args.on)?;
        subjects.push(Subject { prepared, profile });
    }
    let graphs: Vec<&OperatorGraph> =
        subjects.iter().map(|subject| Ok(subject.profile.model(None)?)).collect::<Result<_, CliError>>()?;
    let requests: Vec<PlanRequest<'_>> = subjects
        .iter()
        .zip(&graphs)
        .map(|(subject, graph)| PlanRequest {
            profile: &subject.profile,
            graph,
            units: args.units.clone(),
            objective: Objective::Latency,
            pins: Vec::new(),
        })
        .collect();
    let (mut rows, mut notes) = rows(args, &requests)?;
    let carriers = carriers(args)?;
    let mut scale = args.scale.unwrap_or_else(|| first_scale(&rows));
    let mut doublings = 0;
    loop {
        execute(args, &subjects, &graphs, &mut rows, &carriers, scale, &line)?;
        let late = rows.iter().any(|row| row.late_ms() > LATE * row.emulated_ms().unwrap_or(f64::INFINITY));
        if !late {
            break;
        }
        if args.scale.is_some() || doublings == DOUBLINGS {
            notes.push(format!(
                "the carriers are too slow for a scale of {scale}: times are upper bounds; raise --scale"
            ));
            break;
        }
        doublings += 1;
        scale *= 2.0;
        for row in &mut rows {
            row.times_ms.clear();
        }
    }
    drop(line);
    show(args, &rows, &carriers, scale, &notes)
}

fn model_args(args: &EmulateArgs, path: &Path) -> ModelArgs {
    ModelArgs {
        model: path.to_owned(),
        shapes: Vec::new(),
        granularity: args.granularity,
        input: "random".to_owned(),
        cache: args.cache.clone(),
    }
}

/// What to compare; methods that cannot plan these models are noted.
fn rows(args: &EmulateArgs, requests: &[PlanRequest<'_>]) -> Result<(Vec<Row>, Vec<String>), CliError> {
    let options = PlanOptions::default();
    let row = |name: &str, parts: Vec<(Plan, Vec<usize>)>, baseline: bool| Row {
        name: name.to_owned(),
        parts,
        baseline,
        emulated: Vec::new(),
        times_ms: Vec::new(),
        wrong: None,
    };
    let (mut rows, mut notes) = (Vec::new(), Vec::new());
    let default: &[&str] = match requests.len() {
        1 => &["sequential", "phases", "dag"],
        2 => &["joint", "concurrent"],
        _ => &["concurrent"],
    };
    let methods: Vec<&str> =
        if args.methods.is_empty() { default.to_vec() } else { args.methods.iter().map(String::as_str).collect() };
    if let [request] = requests {
        for unit in &request.profile.units {
            if !args.units.is_empty() && !args.units.contains(&unit.address) {
                continue;
            }
            match trefoil_plan::plan_with(&format!("single:{}", unit.address), request, &options) {
                Ok(plan) => rows.push(row(&format!("{} alone", unit.address), vec![(plan, vec![0])], true)),
                Err(error) => notes.push(format!("{} alone: {error}", unit.address)),
            }
        }
        for method in methods {
            let plan = trefoil_plan::plan_with(method, request, &options);
            match plan {
                Ok(plan) => rows.push(row(method, vec![(plan, vec![0])], false)),
                Err(error) if args.methods.is_empty() => notes.push(format!("{method}: {error}")),
                Err(error) => return Err(error.into()),
            }
        }
    } else {
        let mut one_after_another = Vec::new();
        let mut planned = Vec::new();
        for (number, request) in requests.iter().enumerate() {
            let singles =
                request.profile.units.iter().filter(|unit| args.units.is_empty() || args.units.contains(&unit.address));
            let best = singles
                .filter_map(|unit| trefoil_plan::plan_with(&format!("single:{}", unit.address), request, &options).ok())
                .min_by(|one, other| one.simulated_ms.total_cmp(&other.simulated_ms));
            one_after_another.extend(best.map(|plan| (plan, vec![number])));
            planned.push((trefoil_plan::plan_with("sequential", request, &options)?, vec![number]));
        }
        if one_after_another.len() == requests.len() {
            rows.push(row("one after another, each on its best unit", one_after_another, true));
        } else {
            notes.push("not every model runs on one unit alone".to_owned());
        }
        rows.push(row("one after another, each planned (sequential)", planned, false));
        let all: Vec<usize> = (0..requests.len()).collect();
        for method in methods {
            let plan = trefoil_plan::plan_several(method, requests, &options)?;
            rows.push(row(&format!("at once ({method})"), vec![(plan, all.clone())], false));
        }
    }
    if rows.is_empty() {
        return Err(CliError::Failed(format!("nothing to emulate: {}", notes.join("; "))));
    }
    Ok((rows, notes))
}

fn carriers(args: &EmulateArgs) -> Result<Vec<UnitAddress>, CliError> {
    if let Some(unit) = args.carriers.iter().find(|unit| unit.backend == "sim") {
        return Err(CliError::Usage(format!(
            "{unit} is simulated and computes nothing; a carrier must be a real unit"
        )));
    }
    if !args.carriers.is_empty() {
        return Ok(args.carriers.clone());
    }
    // Whichever is here and runs most models; the embedded one always is.
    let backends = ["ort", "openvino", "rten"];
    let here = |backend: &str| trefoil_units::resolve(&UnitAddress::new(backend, "CPU")).is_ok();
    let backend = backends.iter().copied().find(|backend| here(backend)).unwrap_or("rten");
    let on_core = |&core: &u32| UnitAddress { cores: vec![core], ..UnitAddress::new(backend, "CPU") };
    Ok(trefoil_units::allowed_cores().iter().map(on_core).collect())
}

/// Large enough that waking threads is 2 % of the shortest plan.
fn first_scale(rows: &[Row]) -> f64 {
    let needed = rows.iter().map(|row| {
        let segments: usize = row.parts.iter().map(|(plan, _)| plan.segments.len()).sum();
        50.0 * WAKE_MS * segments as f64 / row.simulated_ms().max(1e-6)
    });
    needed.fold(1.0, f64::max).ceil()
}

fn execute(
    args: &EmulateArgs,
    subjects: &[Subject],
    graphs: &[&OperatorGraph],
    rows: &mut [Row],
    carriers: &[UnitAddress],
    scale: f64,
    line: &ProgressLine,
) -> Result<(), CliError> {
    for row in &mut *rows {
        line.step(&format!("compiling `{}` at scale {scale}", row.name));
        row.emulated.clear();
        for (plan, of) in &row.parts {
            let graphs: Vec<&OperatorGraph> = of.iter().map(|&number| graphs[number]).collect();
            let source = PreparedSource(
                of.iter()
                    .zip(&graphs)
                    .map(|(&number, graph)| {
                        let prepared = &subjects[number].prepared;
                        let folder = prepared.segments_dir(graph.granularity);
                        PreparedModelSource { prepared: &prepared.prepared, graph, folder }
                    })
                    .collect(),
            );
            let profiles: Vec<&Profile> = of.iter().map(|&number| &subjects[number].profile).collect();
            let emulation = Emulation {
                carriers,
                find: &trefoil_run::registry_units,
                scale,
                slowdown: slowdown(plan, &graphs, &profiles)?,
            };
            let mut emulated = Emulated::new(plan.clone(), &graphs, &source, &emulation)?;
            load(&mut emulated, subjects, of);
            row.emulated.push(emulated);
        }
    }
    for round in 0..args.rounds.max(1) {
        for row in &mut *rows {
            line.step(&format!("round {} of {}: {}", round + 1, args.rounds.max(1), row.name));
            let mut total = 0.0;
            for emulated in &mut row.emulated {
                if context::stop_flag().load(std::sync::atomic::Ordering::Relaxed) {
                    return Err(CliError::Failed("interrupted; nothing was written".to_owned()));
                }
                total += emulated.run()?;
            }
            row.times_ms.push(total);
        }
    }
    for row in rows {
        for (emulated, (_, of)) in row.emulated.iter_mut().zip(&row.parts) {
            row.wrong = row.wrong.take().or_else(|| wrong_output(emulated, subjects, graphs, of));
        }
    }
    Ok(())
}

/// What the description says segments do to each other.
fn slowdown(
    plan: &Plan,
    graphs: &[&OperatorGraph],
    profiles: &[&Profile],
) -> Result<Arc<trefoil_run::SlowdownOf>, CliError> {
    let indices: Vec<_> = profiles.iter().map(|profile| profile.index()).collect();
    let model = SimulationModel::from_profiles(&indices.iter().collect::<Vec<_>>(), graphs, plan)?;
    let mut classes = vec![OperatorClass::Memory; plan.segments.len()];
    for (task, class) in plan.tasks.iter().zip(&model.classes) {
        if let Work::Segment { segment } = task.work {
            classes[segment.0 as usize] = *class;
        }
    }
    let units: Vec<UnitAddress> = plan.segments.iter().map(|segment| segment.unit.clone()).collect();
    Ok(Arc::new(move |segment, others| {
        let others: Vec<_> = others.iter().map(|&other| (&units[other], classes[other])).collect();
        model.factor(&units[segment], classes[segment], &others)
    }))
}

/// Copies each model's sample inputs in.
fn load(emulated: &mut Emulated, subjects: &[Subject], of: &[usize]) {
    let ports = emulated.executor().schedule().inputs.clone();
    for (index, port) in ports.iter().enumerate() {
        let name = port.info.name.clone();
        let subject = &subjects[of[port.model as usize]];
        let tensors = subject.prepared.prepared.inputs();
        // With several models a port is called `model/tensor#item`.
        let tensor = tensors.iter().find(|info| name == info.name || named(&name, &info.name));
        if let Some(value) = tensor.and_then(|info| subject.prepared.trace.load(&info.name)) {
            emulated.executor().input_mut(index).copy_from_slice(value.bytes());
        }
    }
}

/// Whether `port` is `…/tensor` or `…/tensor#item`.
fn named(port: &str, tensor: &str) -> bool {
    let plain = port.rsplit_once('#').map_or(port, |(plain, _)| plain);
    plain.strip_suffix(tensor).is_some_and(|rest| rest.ends_with('/'))
}

/// The first output that is not what the traced run computed.
fn wrong_output(
    emulated: &mut Emulated,
    subjects: &[Subject],
    graphs: &[&OperatorGraph],
    of: &[usize],
) -> Option<String> {
    let ports = emulated.executor().schedule().outputs.clone();
    for (index, port) in ports.iter().enumerate() {
        let (subject, graph) = (&subjects[of[port.model as usize]], graphs[of[port.model as usize]]);
        let info = graph.tensor(port.tensor).info();
        let Some(reference) = subject.prepared.trace.load(&info.name) else { continue };
        let Ok(mine) = HostTensor::from_bytes(info, emulated.executor().output(index)) else { continue };
        let kinds: BTreeSet<&str> = graph.operators.iter().map(|operator| operator.kind.as_str()).collect();
        let half = graph.ids().any(|id| {
            let operator = graph.operator(id);
            operator.outputs.iter().any(|&tensor| graph.tensor(tensor).dtype == trefoil_core::DataType::F16)
        });
        let deviation = compare(&mine, &reference, &Leniency::of_kinds(kinds, None).with_half(half));
        if deviation.wrong.is_some() {
            return deviation.wrong;
        }
    }
    None
}

fn show(
    args: &EmulateArgs,
    rows: &[Row],
    carriers: &[UnitAddress],
    scale: f64,
    notes: &[String],
) -> Result<(), CliError> {
    let best = |time: &dyn Fn(&Row) -> Option<f64>| {
        rows.iter().filter(|row| row.baseline).filter_map(time).min_by(f64::total_cmp)
    };
    let (best_simulated, best_emulated) = (best(&|row| Some(row.simulated_ms())), best(&Row::emulated_ms));
    let failure = rows.iter().find_map(|row| Some(format!("`{}`: {}", row.name, row.wrong.as_ref()?)));
    if args.json {
        let rows: Vec<_> = rows
            .iter()
            .map(|row| {
                let emulated = row.emulated_ms();
                json!({
                    "plan": row.name,
                    "baseline": row.baseline,
                    "simulated_ms": row.simulated_ms(),
                    "emulated_ms": emulated,
                    "rounds_ms": row.times_ms,
                    "late_ms": row.late_ms(),
                    "simulated_speed_up": best_simulated.map(|best| best / row.simulated_ms()),
                    "emulated_speed_up": best_emulated.zip(emulated).map(|(best, own)| best / own),
                    "right": row.wrong.is_none(),
                })
            })
            .collect();
        print_json(&json!({
            "machine": trefoil_units::machine(),
            "stands_in_for": args.on,
            "origin": Origin::Emulated,
            "models": args.models.iter().map(|path| context::shown(path)).collect::<Vec<_>>(),
            "carriers": carriers,
            "scale": scale,
            "plans": rows,
            "notes": notes,
        }))?;
    } else {
        let headings =
            ["plan", ">simulated", ">emulated", ">difference", ">× best baseline, simulated", ">emulated", "results"];
        let headings: Vec<String> = headings.iter().map(|&heading| heading.to_owned()).collect();
        let cells = rows.iter().map(|row| {
            let emulated = row.emulated_ms();
            let text = |value: Option<String>| (value.unwrap_or_else(|| format::ABSENT.to_owned()), false);
            vec![
                (row.name.clone(), false),
                (format::time(row.simulated_ms()), false),
                text(emulated.map(format::time)),
                text(emulated.map(|own| format::signed_percent(own / row.simulated_ms() - 1.0))),
                text(best_simulated.map(|best| format::ratio(best / row.simulated_ms()))),
                text(best_emulated.zip(emulated).map(|(best, own)| format::ratio(best / own))),
                (if row.wrong.is_none() { "right" } else { "WRONG" }.to_owned(), false),
            ]
        });
        let stem = |path: &PathBuf| path.file_stem().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        let names: Vec<String> = args.models.iter().map(stem).collect();
        let title = format!("{} on {}, emulated (not measured on such a machine)", names.join(" and "), args.on);
        let mut text = trefoil_report::text_table(&title, &headings, cells.collect())
            .render(trefoil_report::TableFormat::Text, context::width());
        let carriers: Vec<String> = carriers.iter().map(ToString::to_string).collect();
        let _ = writeln!(
            text,
            "real bytes and results on {}, held to the described rates × {scale}; medians of {} rounds",
            carriers.join(", "),
            args.rounds.max(1)
        );
        for note in notes {
            let _ = writeln!(text, "note: {note}");
        }
        print(&text)?;
    }
    match failure {
        Some(failure) => Err(CliError::Differs(failure)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn ports_of_several_models_are_told_by_their_tensor() {
        assert!(named("mamba/hidden", "hidden") && named("mamba/hidden#0", "hidden"));
        assert!(!named("mamba/prehidden", "hidden") && !named("hidden", "hidden"));
        assert!(named("m/a/b#1", "a/b"));
    }
}
