//! `trefoil run PIPELINE.json`: linked stages, planned as one and run as one.

use crate::cli::RunArgs;
use crate::commands::run_pipeline_output::{Shown, describe, to_json};
use crate::context::{self, ProgressLine, print, print_json};
use crate::error::CliError;
use crate::several::{self, Candidate, Found, GRACE, Question, Reading, WAITING, candidate_units, entrant, graphs};
use crate::stages::{PipelineFile, Stages, make_stages};
use std::collections::BTreeMap;
use std::path::Path;
use trefoil_core::{HostTensor, Plan, Timeline};
use trefoil_onnx::npz;
use trefoil_plan::together::{LinkedRequest, linked_on_one_unit, linked_serial, linked_staged};
use trefoil_plan::{Application, ConcurrentRequest, Stage};
use trefoil_report::{TraceMeta, chrome_trace, task_details};
use trefoil_run::together::{
    Arrivals, LoopLimit, LoopReport, Outputs, Rounds, ServeOptions, ServeReport, Server, closed_loop,
    sequential_outputs,
};
use trefoil_run::{ExecutorOptions, registry_units};

/// A unit on which all stages take this much longer than on the best one is no baseline worth timing.
const HOPELESS: f64 = 1.5;
/// Operator executions beyond which operators are not planned one by one.
const MOST_EXECUTIONS: u64 = 100_000;

/// How the arrangement of choice was run.
pub enum Ran {
    /// One inference after the other.
    Loop(LoopReport),
    /// At a fixed rate.
    Served(ServeReport),
}

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    check(args)?;
    let file = PipelineFile::read(&args.model.model)?;
    let (units, baseline_units) = candidate_units(&args.units)?;
    let reading = Reading {
        granularity: args.model.granularity,
        cache: args.model.cache.as_deref(),
        measure: &args.measure,
        strict: args.show.strict,
        quiet: args.show.json,
        log: false,
    };
    let mut stages = make_stages(&file, &args.units, &reading)?;
    let arrivals = file.rate_hz.map(|rate| Arrivals {
        period_ms: 1e3 / rate,
        offset_ms: file.offset_ms,
        deadline_ms: file.deadline_ms,
        priority: 0,
    });
    let question = Question {
        method: args.planning.method.clone(),
        options: args.planning.options(),
        given: None,
        asked: args.units.clone(),
        units,
        baseline_units,
        items: 1,
        energy: false,
        arrivals: arrivals.map(|one| vec![one]),
        duration: args.together.duration.0,
        rounds: args.show.rounds,
        sampling: context::run_sampling(&args.measure),
        give_up: None,
        measure: args.measure.clone(),
        cache: context::cache_dir(args.model.cache.as_deref()),
        strict: args.show.strict,
        quiet: args.show.json,
    };
    let which: Vec<usize> = (0..stages.ready.len()).collect();
    let found = decide(&mut stages, &which, &question, &file.name)?;
    let chosen = found.chosen()?;
    let (ran, trace, outputs) = execute(&stages, &which, chosen, &question)?;
    if let Some(path) = &args.output {
        write_outputs(&stages, &outputs, path)?;
    }
    if let Some(path) = &args.trace {
        let plan = &chosen.entrant.arrangement.plan;
        let meta = TraceMeta {
            title: file.name.clone(),
            facts: BTreeMap::from([("cpu".to_owned(), trefoil_units::machine().cpu)]),
            tasks: task_details(plan, &graphs(&stages.ready, &which)),
        };
        context::write_text(path, &chrome_trace(Some(&plan.timeline), trace.as_ref(), &meta))?;
    }
    let shown = Shown { file: &file, stages: &stages, question: &question, found: &found, ran: &ran };
    if args.show.json {
        print_json(&to_json(&shown)?)?;
    } else {
        print(&describe(&shown)?)?;
    }
    let equality = shown.equality();
    if equality.compared > 0 && !equality.ok() {
        return Err(CliError::Differs(format!("{}: {}", file.name, equality.summary())));
    }
    Ok(())
}

/// What a pipeline cannot have.
fn check(args: &RunArgs) -> Result<(), CliError> {
    let refuse = |what: &str| Err(CliError::Usage(what.to_owned()));
    if args.units.is_empty() {
        return refuse("a pipeline needs units: name at least one with -u");
    }
    if !args.more.is_empty() {
        return refuse("a pipeline file is run by itself; name its models in the file");
    }
    if args.model.input != "random" || !args.model.shapes.is_empty() {
        return refuse("inputs and shapes of a pipeline stand in its file; leave --input and --shape out");
    }
    if !args.together.rates.is_empty() || args.together.items != 1 || args.together.adapt {
        return refuse("rate and deadline of a pipeline stand in its file; leave --rate, --items and --adapt out");
    }
    if args.profile.is_some() || args.plan.is_some() {
        return refuse("a pipeline is measured and planned here; leave --profile and --plan out");
    }
    if args.planning.objective() != crate::cli::ObjectiveArg::Latency {
        return refuse("a pipeline is run for latency; `trefoil plan --workload` plans linked stages for energy");
    }
    if !matches!(args.planning.method.as_str(), "auto" | "staged" | "concurrent") {
        return refuse("methods of a pipeline are auto, staged (whole stages) and concurrent (operators)");
    }
    if args.show.report.is_some() {
        return refuse("--report is for models; a pipeline has --trace and --json");
    }
    if args.together.duration.0.is_zero() {
        return refuse("--duration is 0; give it some time");
    }
    Ok(())
}

/// Plans, and times the plans against all stages on one unit and each on its best one.
fn decide(stages: &mut Stages, which: &[usize], question: &Question, title: &str) -> Result<Found, CliError> {
    let line = ProgressLine::new(title, question.quiet);
    for stage in &mut stages.ready {
        several::settle(stage, question, &line)?;
    }
    let stages = &*stages;
    let mut notes = Vec::new();
    let mut candidates: Vec<Candidate> = Vec::new();
    let add = |candidates: &mut Vec<Candidate>, notes: &mut Vec<String>, name: &str, plan: Plan, baseline: bool| {
        if let Some(same) =
            candidates.iter().find(|known| several::same_arrangement(&known.entrant.arrangement.plan, &plan))
        {
            notes.push(format!("`{name}` arranges the stages as `{}` does", same.entrant.name));
            return Ok(());
        }
        let entrant = entrant(&stages.ready, which, name, plan, true, baseline)?;
        candidates.push(Candidate { entrant, served: None });
        Ok::<_, CliError>(())
    };
    let baselines = linked_request(stages, which, question, true);
    let mut best = f64::INFINITY;
    for plan in distinct(linked_on_one_unit(&baselines)?) {
        best = best.min(plan.claimed);
        if plan.claimed <= best * HOPELESS {
            let name = plan.method.trim_start_matches("single:").to_owned();
            add(&mut candidates, &mut notes, &name, plan, true)?;
        }
    }
    add(&mut candidates, &mut notes, "serial", linked_serial(&baselines)?, true)?;
    if question.method != "concurrent" {
        add(
            &mut candidates,
            &mut notes,
            "staged",
            linked_staged(&linked_request(stages, which, question, false))?,
            false,
        )?;
    }
    if question.method != "staged" {
        match concurrent(stages, question) {
            // Isolated costs overstate what is fused, so a plan that claims nothing will give nothing.
            Ok(plan) if question.method == "concurrent" || plan.claimed < best => {
                add(&mut candidates, &mut notes, "concurrent", plan, false)?;
            }
            Ok(plan) => notes.push(format!("method `concurrent` claims {:.3} ms, which is no gain", plan.claimed)),
            Err(error) if question.method == "auto" => {
                notes.push(format!("method `concurrent` has no plan: {error}"));
            }
            Err(error) => return Err(error),
        }
    }
    let measure = several::activity(question);
    let entrants: Vec<_> = candidates.iter().map(|candidate| candidate.entrant.clone()).collect();
    let options = several::contest_options(question)?;
    let mut show = |progress: trefoil_run::CompareProgress<'_>| {
        let (round, rounds) = (progress.round + 1, progress.rounds);
        line.step(&format!("fresh process, round {round} of {rounds}: {}", progress.contender));
    };
    let (graphs, stores) = (graphs(&stages.ready, which), several::stores(&stages.ready, which));
    let contest = trefoil_run::together::contest(&entrants, &graphs, &stores, &measure, &options, &mut show)?;
    let verdict = contest.verdict();
    Ok(Found { candidates, contest, verdict, slowdown: None, energy: None, notes })
}

fn linked_request<'a>(stages: &'a Stages, which: &[usize], question: &Question, baseline: bool) -> LinkedRequest<'a> {
    let units = if baseline { &question.baseline_units } else { &question.units };
    LinkedRequest {
        stages: several::request(&stages.ready, which, units, 1),
        repeats: stages.repeats.clone(),
        links: stages.links.clone(),
    }
}

/// One plan for each set of alike units: `ort:CPU@0` stands for every core.
fn distinct(plans: Vec<Plan>) -> Vec<Plan> {
    let mut kept: Vec<Plan> = Vec::new();
    for plan in plans {
        let alike = |known: &Plan| match (known.units.first(), plan.units.first()) {
            (Some(one), Some(other)) => {
                (&one.address.backend, &one.address.device, one.address.precision, one.resources.len())
                    == (&other.address.backend, &other.address.device, other.address.precision, other.resources.len())
            }
            _ => false,
        };
        if !kept.iter().any(alike) {
            kept.push(plan);
        }
    }
    kept
}

fn concurrent(stages: &Stages, question: &Question) -> Result<Plan, CliError> {
    let executions = stages.ready.iter().zip(&stages.repeats);
    let executions: u64 = executions.map(|(ready, &repeat)| ready.graph.len() as u64 * u64::from(repeat)).sum();
    if executions > MOST_EXECUTIONS {
        return Err(CliError::Usage(format!(
            "{executions} operator executions are more than {MOST_EXECUTIONS}; use method staged"
        )));
    }
    let all: Vec<Stage<'_>> = stages
        .ready
        .iter()
        .zip(&stages.repeats)
        .map(|(ready, &repeat)| Stage { profile: &ready.profile, graph: &ready.graph, repeat })
        .collect();
    let Some(first) = all.first() else { return Err(CliError::Usage("the pipeline has no stage".to_owned())) };
    let application = Application {
        links: stages.links.clone(),
        stages: all.clone(),
        ..Application::new(first.profile, first.graph)
    };
    let asked = ConcurrentRequest { units: question.asked.clone(), ..ConcurrentRequest::new(vec![application]) };
    Ok(trefoil_plan::concurrent(&asked, &question.options)?)
}

/// Runs the arrangement of choice in this process, its outputs compared with those of the stages run plainly one by one.
fn execute(
    stages: &Stages,
    which: &[usize],
    chosen: &Candidate,
    question: &Question,
) -> Result<(Ran, Option<Timeline>, Outputs), CliError> {
    let graphs = graphs(&stages.ready, which);
    let source = several::source(&stages.ready, which);
    let options = ExecutorOptions {
        cache: Some(trefoil_profile::cache::compiled_path(&question.cache)),
        strict: question.strict,
        ..ExecutorOptions::default()
    };
    let tensors: Vec<Vec<HostTensor>> = which.iter().map(|&model| stages.ready[model].inputs()).collect();
    let inputs: Vec<Vec<&HostTensor>> = tensors.iter().map(|all| all.iter().collect()).collect();
    let arrangement = &chosen.entrant.arrangement;
    let (plan, stop, find) = (&arrangement.plan, context::stop_flag(), &registry_units);
    let expected = sequential_outputs(plan, &graphs, &source, find, &options, &inputs)?;
    if let Some(arrivals) = &question.arrivals {
        let mut server = Server::linked(plan, &graphs, &source, find, &options, &inputs)?;
        server.warm_up()?;
        let options = ServeOptions { duration: question.duration, limit: WAITING, grace: GRACE, stop };
        let report = server.serve(arrivals, Some(&expected), &options)?;
        return Ok((Ran::Served(report), None, expected));
    }
    let limit = LoopLimit { warmup: 3, rounds: u64::MAX, time: question.duration, stop };
    let mut rounds = Rounds::new(arrangement, &graphs, &source, find, &options, &inputs)?;
    let report = closed_loop(&mut rounds, graphs.len(), Some(&expected), &limit, &mut |_| {})?;
    let (trace, outputs) = (rounds.trace(), rounds.outputs()?);
    Ok((Ran::Loop(report), Some(trace), outputs))
}

/// Outputs of every stage's last execution, keyed `stage/output`.
fn write_outputs(stages: &Stages, outputs: &Outputs, path: &Path) -> Result<(), CliError> {
    let mut tensors: BTreeMap<String, HostTensor> = BTreeMap::new();
    for (&(model, _), all) in outputs {
        let several::Ready { name, graph, .. } = &stages.ready[model as usize];
        for (tensor, &id) in all.iter().zip(&graph.outputs) {
            let key = format!("{name}/{}", graph.tensor(id).name);
            let mut tensor = tensor.duplicate();
            tensor.set_name(key.clone());
            tensors.insert(key, tensor);
        }
    }
    Ok(npz::write_npz(path, &tensors.values().collect::<Vec<_>>())?)
}
