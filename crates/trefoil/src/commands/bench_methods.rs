//! `trefoil bench methods`: one model on several units by each planner, against every backend with all cores, in one
//! invocation, interleaved, in fresh processes.

use crate::cli::BenchMethodsArgs;
use crate::commands::run_several_output::speed_up;
use crate::context::{self, ProgressLine, print, print_json, width};
use crate::error::CliError;
use crate::pipeline::{process_options, time_lineup};
use crate::several::{
    self, Reading, Ready, candidate_units, entrant, graphs, make_ready, request, segment_options, stores,
};
use serde::Serialize;
use serde_json::json;
use std::fmt::Write as _;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use trefoil_core::{Objective, Plan, Profile, Unit, UnitKind};
use trefoil_plan::{PlanOptions, PlanRequest, together};
use trefoil_profile::Lineup;
use trefoil_report::{Ratio, TableFormat, format, geometric_mean};
use trefoil_run::together::{Activity, Contest, Entrant, contest};

/// One arrangement of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Row {
    name: String,
    baseline: bool,
    /// How many segments on how many units.
    segments: usize,
    units: Vec<String>,
    predicted_ms: Option<f64>,
    measured_ms: Option<f64>,
    /// Predicted over measured, less 1.
    error: Option<f64>,
    /// Time of the best baseline over its own, from paired rounds.
    speed_up: Option<Ratio>,
    /// Whether every output equals that of the same segments run one after another.
    equal: bool,
    /// Why there is no time.
    failure: Option<String>,
}

/// What came of one model.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct ModelRows {
    model: String,
    operators: usize,
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl ModelRows {
    fn best_baseline(&self) -> Option<&Row> {
        let baselines = self.rows.iter().filter(|row| row.baseline && row.measured_ms.is_some());
        baselines
            .min_by(|one, other| one.measured_ms.unwrap_or(f64::MAX).total_cmp(&other.measured_ms.unwrap_or(f64::MAX)))
    }
}

/// Runs the command.
pub fn run(args: &BenchMethodsArgs) -> Result<(), CliError> {
    let (_, baseline_units) = candidate_units(&args.units)?;
    several::measurable(&args.units)?;
    let reading = Reading {
        granularity: args.granularity,
        cache: args.cache.as_deref(),
        measure: &args.measure,
        strict: false,
        quiet: args.json,
        log: false,
    };
    for method in &args.methods {
        let known = trefoil_plan::METHODS.iter().map(|known| known.name).collect::<Vec<_>>();
        if !known.contains(&method.as_str()) {
            return Err(CliError::Usage(format!("there is no method `{method}`; there are {}", known.join(", "))));
        }
    }
    let shapes = crate::shapes::of_models(&args.models, &args.shapes)?;
    let mut found: Vec<ModelRows> = Vec::new();
    let count = args.models.len();
    for (at, path) in args.models.iter().enumerate() {
        let began = Instant::now();
        let title = crate::commands::profile::model_name(path);
        let outcome = make_ready(std::slice::from_ref(path), &shapes[at..=at], &args.units, &reading)
            .and_then(|mut ready| measure(&mut ready[0], &baseline_units, args));
        if context::stop_flag().load(Ordering::SeqCst) {
            break;
        }
        let rows = outcome.unwrap_or_else(|error| ModelRows {
            model: title.clone(),
            operators: 0,
            rows: Vec::new(),
            notes: vec![format!("{title} could not be measured: {error}")],
        });
        eprintln!("[{}/{count}] {title}: {}, {:.1} s", at + 1, told(&rows), began.elapsed().as_secs_f64());
        found.push(rows);
    }
    if args.json {
        print_json(&json!({
            "units": args.units,
            "models": found,
            "complete": found.len() == count,
            "geometric_means": means(&found, args),
            "machine": trefoil_units::machine(),
        }))?;
    } else {
        print(&describe(&found, args))?;
    }
    if !found.is_empty() && found.iter().all(|model| model.rows.is_empty()) {
        return Err(CliError::Failed("no model could be measured".to_owned()));
    }
    Ok(())
}

/// `dag 1.08× over openvino:CPU`.
fn told(rows: &ModelRows) -> String {
    let Some(best) = rows.best_baseline() else {
        return rows.notes.first().cloned().unwrap_or_else(|| "nothing ran".to_owned());
    };
    let plans = rows.rows.iter().filter(|row| !row.baseline);
    let parts: Vec<_> =
        plans.filter_map(|row| Some(format!("{} {}", row.name, format::ratio(row.speed_up?.median)))).collect();
    format!("{} over {}", if parts.is_empty() { "no plan".to_owned() } else { parts.join(", ") }, best.name)
}

fn measure(ready: &mut Ready, baseline_units: &[Unit], args: &BenchMethodsArgs) -> Result<ModelRows, CliError> {
    let mut notes = Vec::new();
    let mut plans: Vec<(String, Plan)> = Vec::new();
    for method in &args.methods {
        match refined(ready, method, args) {
            Ok((plan, finished)) => {
                if !finished {
                    notes.push(format!("{}: {method} has segments that were not measured whole", ready.name));
                }
                plans.push((method.clone(), plan));
            }
            // Interrupted is not a method's fault.
            Err(CliError::Profile(error @ trefoil_profile::ProfileError::Interrupted { .. })) => {
                return Err(error.into());
            }
            Err(error) => notes.push(format!("{}: {method} has no plan: {error}", ready.name)),
        }
    }
    let all = std::slice::from_ref(&*ready);
    let mut entrants: Vec<Entrant> = Vec::new();
    for unit in baselines(baseline_units) {
        let asked = request(all, &[0], std::slice::from_ref(&unit), 1);
        match together::serial(&asked) {
            Ok(plan) => entrants.push(entrant(all, &[0], &unit.address.to_string(), plan, true, true)?),
            Err(error) => notes.push(format!("{} is no baseline: {error}", unit.address)),
        }
    }
    for (name, plan) in plans {
        entrants.push(entrant(all, &[0], &name, plan, true, false)?);
    }
    let options = trefoil_run::together::ContestOptions {
        rounds: args.rounds.max(1),
        cache: Some(trefoil_profile::cache::compiled_path(&context::cache_dir(args.cache.as_deref()))),
        spin: trefoil_run::ExecutorOptions::default().spin,
        timeout: Duration::from_mins(10),
        command: trefoil_run::WorkerCommand::this_program(["worker-together"])?,
        stop: context::stop_flag(),
        give_up: None,
    };
    let line = ProgressLine::new(&ready.name, args.json);
    let mut show = |progress: trefoil_run::CompareProgress<'_>| {
        let (round, rounds) = (progress.round + 1, progress.rounds);
        line.step(&format!("fresh process, round {round} of {rounds}: {}", progress.contender));
    };
    let activity = Activity::Rounds { sampling: context::run_sampling(&args.measure) };
    let all = std::slice::from_ref(&*ready);
    let contest = contest(&entrants, &graphs(all, &[0]), &stores(all, &[0]), &activity, &options, &mut show)?;
    Ok(ModelRows { model: ready.name.clone(), operators: ready.graph.len(), rows: rows(&entrants, contest), notes })
}

/// The method's plan, its segments measured whole as far as the budget goes.
fn refined(ready: &mut Ready, method: &str, args: &BenchMethodsArgs) -> Result<(Plan, bool), CliError> {
    let inputs = ready.inputs();
    let Ready { prepared, profile, graph, .. } = ready;
    let mut propose = |profile: &Profile| {
        let request =
            PlanRequest { profile, graph, units: args.units.clone(), objective: Objective::Latency, pins: Vec::new() };
        trefoil_plan::plan_with(method, &request, &PlanOptions::default())
    };
    let proposal = propose(profile)?;
    if args.measure.no_refine {
        return Ok((proposal, false));
    }
    let cache = context::cache_dir(args.cache.as_deref());
    let options = segment_options(&args.measure, &cache, false, graph.granularity)?;
    let line = ProgressLine::new(method, args.json);
    let budget = args.measure.refine_budget.clamp(0.0, 1e6) / args.methods.len().max(1) as f64;
    let compiled = trefoil_profile::cache::compiled_path(&cache);
    let processes = process_options(&args.measure, 1, compiled)?;
    let graph = graph.clone();
    let mut timer = |lineup: &Lineup, turn: u32| time_lineup(lineup, &graph, &inputs, &processes, turn);
    let refinement = trefoil_profile::refine(
        prepared,
        &graph,
        profile,
        &options,
        Duration::from_secs_f64(budget),
        &mut propose,
        Some(&mut timer),
        &mut |progress| line.show(&progress),
        context::stop_flag(),
    )?;
    Ok((refinement.plan, refinement.finished))
}

/// Every backend with all cores, and on one core, whatever was asked for.
fn baselines(units: &[Unit]) -> Vec<Unit> {
    let mut kept: Vec<Unit> = Vec::new();
    for unit in units {
        let alike = |known: &Unit| {
            unit.kind == UnitKind::Cpu
                && known.address.backend == unit.address.backend
                && known.address.device == unit.address.device
                && known.address.precision == unit.address.precision
                && known.resources.len() == unit.resources.len()
        };
        if !kept.iter().any(alike) {
            kept.push(unit.clone());
        }
    }
    kept
}

fn rows(entrants: &[Entrant], contest: Contest) -> Vec<Row> {
    let found = several::Found {
        candidates: Vec::new(),
        verdict: contest.verdict(),
        contest,
        slowdown: None,
        energy: None,
        notes: Vec::new(),
    };
    let of = |entrant: &Entrant| {
        let at = found.contest.comparison.contenders.iter().position(|contender| contender.name == entrant.name);
        let contender = at.map(|at| &found.contest.comparison.contenders[at]);
        let plan = &entrant.arrangement.plan;
        let predicted_ms = Some(plan.simulated_ms).filter(|&ms| ms > 0.0);
        let measured_ms = contender.and_then(|contender| contender.measured.as_ref()).map(|samples| samples.median);
        Row {
            name: entrant.name.clone(),
            baseline: entrant.baseline,
            segments: plan.segments.len(),
            units: plan.units_used().into_iter().map(ToString::to_string).collect(),
            predicted_ms,
            measured_ms,
            error: predicted_ms.zip(measured_ms).map(|(predicted, measured)| predicted / measured - 1.0),
            speed_up: if entrant.baseline { None } else { speed_up(&found, &entrant.name) },
            equal: at.is_some_and(|at| found.contest.entrants[at].equality.ok()),
            failure: contender.and_then(|contender| contender.failure.clone()),
        }
    };
    entrants.iter().map(of).collect()
}

/// Per method, the geometric mean of its speed-ups.
fn means(found: &[ModelRows], args: &BenchMethodsArgs) -> serde_json::Map<String, serde_json::Value> {
    let of = |method: &String| {
        let rows = found.iter().flat_map(|model| &model.rows).filter(|row| !row.baseline && row.name == *method);
        geometric_mean(rows.filter_map(|row| row.speed_up.map(|ratio| ratio.median)))
    };
    args.methods.iter().map(|method| (method.clone(), json!(of(method)))).collect()
}

fn describe(found: &[ModelRows], args: &BenchMethodsArgs) -> String {
    let headings =
        ["model", "arrangement", "segments", ">time (measured)", ">predicted", ">error", "× best baseline, interval"];
    let headings: Vec<String> = headings.map(str::to_owned).to_vec();
    let absent = || format::ABSENT.to_owned();
    let mut cells = Vec::new();
    for model in found {
        let best = model.best_baseline().map(|row| row.name.clone());
        for row in &model.rows {
            let where_ = format!("{} on {}", format::plural(row.segments, "segment"), row.units.join(", "));
            let line = [
                model.model.clone(),
                row.name.clone(),
                if row.baseline { "whole".to_owned() } else { where_ },
                row.measured_ms.map_or_else(|| row.failure.clone().unwrap_or_else(absent), format::time),
                row.predicted_ms.map_or_else(absent, format::time),
                row.error.map_or_else(absent, format::signed_percent),
                row.speed_up.map_or_else(absent, |ratio| {
                    format!("{} ({})", format::ratio(ratio.median), format::interval(ratio.low, ratio.high))
                }),
            ];
            let strong = best.as_ref() == Some(&row.name);
            cells.push(line.into_iter().map(|cell| (cell, strong)).collect());
        }
    }
    let title = "Methods, and every backend with all cores and on one (measured in fresh processes, interleaved)";
    let mut text = trefoil_report::text_table(title, &headings, cells).render(TableFormat::Text, width());
    for (method, mean) in means(found, args) {
        if let Some(mean) = mean.as_f64() {
            let _ =
                writeln!(text, "{method}: geometric mean {} over the best baseline of each model", format::ratio(mean));
        }
    }
    let unequal = found.iter().flat_map(|model| model.rows.iter().map(move |row| (model, row)));
    for (model, row) in unequal.filter(|(_, row)| !row.equal && row.measured_ms.is_some()) {
        let _ = writeln!(text, "differs: {} by {} from its segments run one after another", model.model, row.name);
    }
    for note in found.iter().flat_map(|model| &model.notes) {
        let _ = writeln!(text, "note: {note}");
    }
    if found.len() < args.models.len() {
        let _ = writeln!(text, "interrupted after {} of {}", found.len(), format::plural(args.models.len(), "model"));
    }
    text
}
