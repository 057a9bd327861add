//! `trefoil run A.onnx B.onnx …`: several models on one machine.

use crate::cli::{RunArgs, TogetherArgs};
use crate::commands::run_several_output::{describe, to_json, write_report};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use crate::question;
use crate::several::{self, Candidate, GRACE, Question, Ready, WAITING, candidate_units, make_ready};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use trefoil_core::{HostTensor, Plan, Timeline, Work};
use trefoil_onnx::npz;
use trefoil_report::{TraceMeta, chrome_trace, task_details};
use trefoil_run::together::{
    AdaptRule, Adaptation, Arrivals, Compiling, Equality, LoopLimit, LoopReport, Outputs, Rounds, ServeOptions,
    ServeReport, Server, Situation, adapting_loop, closed_loop, solo_outputs,
};
use trefoil_run::{ExecutorOptions, registry_units};

/// How the arrangement of choice was run.
pub enum Ran {
    /// Round after round.
    Rounds(LoopReport),
    /// At fixed rates.
    Served(ServeReport),
}

/// What came of running the arrangement of choice.
pub struct Run {
    /// How, and what it gave.
    pub ran: Ran,
    /// What happened in the last round.
    pub trace: Option<Timeline>,
    /// Re-plannings, with `--adapt`.
    pub adaptations: Option<Vec<Adaptation>>,
    /// Rounds that failed and were run again.
    pub repeated: u64,
    outputs: Outputs,
}

impl Run {
    /// Comparison of outputs with each model alone.
    pub fn equality(&self) -> &Equality {
        match &self.ran {
            Ran::Rounds(rounds) => &rounds.equality,
            Ran::Served(served) => &served.equality,
        }
    }
}

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    check(args)?;
    let paths: Vec<PathBuf> = std::iter::once(&args.model.model).chain(&args.more).cloned().collect();
    let given = args.plan.as_deref().map(crate::commands::plan::load_plan).transpose()?;
    let arrivals = arrivals(&args.together, paths.len())?;
    let items = given.as_ref().map_or(Ok(args.together.items), planned_items)?;
    if given.is_none() {
        question::check_several(&args.planning, (paths.len(), items), &args.units, &args.measure)?;
    }
    if items != 1 && arrivals.is_some() {
        return Err(CliError::Usage(format!("--rate needs one inference of each model, and the plan has {items}")));
    }
    let (units, baseline_units) = candidate_units(&args.units)?;
    let shapes = crate::shapes::of_models(&paths, &args.model.shapes)?;
    let reading = several::Reading {
        granularity: args.model.granularity,
        cache: args.model.cache.as_deref(),
        measure: &args.measure,
        strict: args.show.strict,
        quiet: args.show.json,
        log: false,
    };
    let mut ready = make_ready(&paths, &shapes, &args.units, &reading)?;
    let question = Question {
        method: args.planning.method.clone(),
        options: args.planning.options(),
        given,
        asked: args.units.clone(),
        units,
        baseline_units,
        items,
        energy: args.planning.objective() == crate::cli::ObjectiveArg::Energy,
        arrivals,
        duration: args.together.duration.0,
        rounds: args.show.rounds,
        sampling: context::run_sampling(&args.measure),
        give_up: None,
        measure: args.measure.clone(),
        cache: context::cache_dir(args.model.cache.as_deref()),
        strict: args.show.strict,
        quiet: args.show.json,
    };
    let which: Vec<usize> = (0..ready.len()).collect();
    let title = ready.iter().map(|model| model.name.as_str()).collect::<Vec<_>>().join(" + ");
    let found = several::decide(&mut ready, &which, &question, &title)?;
    let chosen = found.chosen()?;
    let run = execute(&ready, &which, chosen, &question, args.together.adapt)?;
    if let Some(path) = &args.output {
        write_outputs(&ready, &run.outputs, path)?;
    }
    if let Some(path) = &args.trace {
        let plan = &chosen.entrant.arrangement.plan;
        let meta = TraceMeta {
            title: title.clone(),
            facts: BTreeMap::from([("cpu".to_owned(), trefoil_units::machine().cpu)]),
            tasks: task_details(plan, &several::graphs(&ready, &which)),
        };
        context::write_text(path, &chrome_trace(Some(&plan.timeline), run.trace.as_ref(), &meta))?;
    }
    if let Some(path) = &args.show.report {
        write_report(path, &title, &ready, &which, &found, &run)?;
    }
    if args.show.json {
        print_json(&to_json(&ready, &question, &found, &run))?;
    } else {
        print(&describe(&ready, &question, &found, &run))?;
    }
    let equality = run.equality();
    if equality.compared > 0 && !equality.ok() {
        return Err(CliError::Differs(format!("{title}: {}", equality.summary())));
    }
    Ok(())
}

/// What several models cannot have.
fn check(args: &RunArgs) -> Result<(), CliError> {
    let refuse = |what: &str| Err(CliError::Usage(what.to_owned()));
    if args.model.input != "random" {
        return refuse("--input is for one model; several models run on their sample inputs");
    }
    if args.profile.is_some() {
        return refuse("--profile is for one model; several models are measured, from the cache where possible");
    }
    if args.units.is_empty() {
        return refuse("several models need units: name at least one with -u");
    }
    match args.planning.objective() {
        crate::cli::ObjectiveArg::Latency => {}
        crate::cli::ObjectiveArg::Energy => {
            if !args.together.rates.is_empty() || args.together.adapt {
                return refuse("--objective energy is for rounds; leave --rate and --adapt out");
            }
            if args.planning.method != "auto" || args.plan.is_some() {
                return refuse("--objective energy compares all arrangements; leave --method and --plan out");
            }
        }
        crate::cli::ObjectiveArg::Throughput => {
            return refuse(
                "several models are run for latency or energy; `trefoil plan A.json B.json --objective throughput` plans rounds",
            );
        }
    }
    if !args.planning.pins.is_empty() {
        return refuse("--pin is for one model; give `trefoil plan --workload` pins and run its plan with --plan");
    }
    if !args.together.rates.is_empty() && args.planning.method != "auto" {
        return refuse("--rate places whole models; leave --method out");
    }
    if !args.together.rates.is_empty() && args.together.items != 1 {
        return refuse("--items is for rounds; leave it or --rate out");
    }
    if args.together.duration.0.is_zero() {
        return refuse("--duration is 0; give it some time");
    }
    Ok(())
}

/// How many inferences of each model a plan has; baselines must do the same work.
fn planned_items(plan: &Plan) -> Result<u32, CliError> {
    let mut items: Vec<BTreeSet<u32>> = vec![BTreeSet::new(); plan.models.len()];
    for task in &plan.tasks {
        if let Work::Segment { segment } = task.work
            && let Some(segment) = plan.segments.get(segment.0 as usize)
            && let Some(items) = items.get_mut(segment.model as usize)
        {
            items.insert(task.item);
        }
    }
    let counts: BTreeSet<usize> = items.iter().map(BTreeSet::len).collect();
    match counts.first() {
        Some(&count) if counts.len() == 1 && count > 0 => Ok(count as u32),
        _ => Err(CliError::Usage(
            "the plan has unequal numbers of inferences of its models, so that nothing can be compared with it; plan equal ones"
                .to_owned(),
        )),
    }
}

/// One entry for each model.
fn arrivals(together: &TogetherArgs, models: usize) -> Result<Option<Vec<Arrivals>>, CliError> {
    if together.rates.is_empty() {
        return Ok(None);
    }
    let wrong = |what: &str, count: usize| {
        Err(CliError::Usage(format!("{what} has {count} entries for {models} models; give one for each")))
    };
    if together.rates.len() != models {
        return wrong("--rate", together.rates.len());
    }
    if !together.priorities.is_empty() && together.priorities.len() != models {
        return wrong("--priority", together.priorities.len());
    }
    if !matches!(together.deadlines_ms.len(), 0 | 1) && together.deadlines_ms.len() != models {
        return wrong("--deadline-ms", together.deadlines_ms.len());
    }
    // A year between requests is not serving, and a million a second is no machine's.
    if let Some(bad) = together.rates.iter().find(|rate| !(1e-4..=1e6).contains(*rate)) {
        return Err(CliError::Usage(format!(
            "--rate {bad} is no number of requests a second between 0.0001 and 1000000"
        )));
    }
    if let Some(bad) = together.deadlines_ms.iter().find(|ms| !(ms.is_finite() && **ms > 0.0)) {
        return Err(CliError::Usage(format!("--deadline-ms {bad} is no number of milliseconds above 0")));
    }
    let stream = |(model, rate): (usize, &f64)| Arrivals {
        period_ms: 1e3 / rate,
        offset_ms: 0.0,
        deadline_ms: together.deadlines_ms.get(model).or(together.deadlines_ms.first()).copied(),
        priority: together.priorities.get(model).copied().unwrap_or(0),
    };
    Ok(Some(together.rates.iter().enumerate().map(stream).collect()))
}

/// Runs the arrangement of choice in this process, its outputs compared with those of each model alone.
fn execute(
    ready: &[Ready],
    which: &[usize],
    chosen: &Candidate,
    question: &Question,
    adapt: bool,
) -> Result<Run, CliError> {
    let graphs = several::graphs(ready, which);
    let source = several::source(ready, which);
    let options = ExecutorOptions {
        cache: Some(trefoil_profile::cache::compiled_path(&question.cache)),
        strict: question.strict,
        ..ExecutorOptions::default()
    };
    let tensors: Vec<Vec<HostTensor>> = which.iter().map(|&model| ready[model].inputs()).collect();
    let inputs: Vec<Vec<&HostTensor>> = tensors.iter().map(|all| all.iter().collect()).collect();
    let arrangement = &chosen.entrant.arrangement;
    let stop = context::stop_flag();
    let limit = LoopLimit { warmup: 3, rounds: u64::MAX, time: question.duration, stop };
    if adapt {
        let find = &registry_units;
        let compiling = Compiling { graphs: &graphs, source: &source, find, options: &options, inputs: &inputs };
        let mut replan = |situation: &Situation| several::propose(ready, which, question, situation);
        let found = adapting_loop(arrangement.clone(), &compiling, &limit, AdaptRule::default(), &mut replan)?;
        return Ok(Run {
            trace: Some(found.trace),
            outputs: found.outputs,
            ran: Ran::Rounds(found.run),
            adaptations: Some(found.adaptations),
            repeated: found.repeated,
        });
    }
    let alone = solo_outputs(&arrangement.plan, &graphs, &source, &registry_units, &options, &inputs)?;
    if let Some(arrivals) = &question.arrivals {
        let (plan, exclusive) = (&arrangement.plan, arrangement.ordered);
        let mut server = Server::new(plan, exclusive, &graphs, &source, &registry_units, &options, &inputs)?;
        server.warm_up()?;
        let options = ServeOptions { duration: question.duration, limit: WAITING, grace: GRACE, stop };
        let serve = server.serve(arrivals, Some(&alone), &options)?;
        return Ok(Run { ran: Ran::Served(serve), trace: None, outputs: alone, adaptations: None, repeated: 0 });
    }
    let mut rounds = Rounds::new(arrangement, &graphs, &source, &registry_units, &options, &inputs)?;
    let report = closed_loop(&mut rounds, graphs.len(), Some(&alone), &limit, &mut |_| {})?;
    let (trace, outputs) = (Some(rounds.trace()), rounds.outputs()?);
    Ok(Run { trace, outputs, ran: Ran::Rounds(report), adaptations: None, repeated: 0 })
}

/// Outputs of each model's first inference, keyed `model/output`.
fn write_outputs(ready: &[Ready], outputs: &Outputs, path: &Path) -> Result<(), CliError> {
    let mut tensors: BTreeMap<String, HostTensor> = BTreeMap::new();
    for (&(model, item), all) in outputs.iter().filter(|((_, item), _)| *item == 0) {
        let Ready { name, graph, .. } = &ready[model as usize];
        for (tensor, &id) in all.iter().zip(&graph.outputs) {
            let key = format!("{name}/{}", graph.tensor(id).name);
            let mut tensor = tensor.duplicate();
            tensor.set_name(key.clone());
            tensors.insert(key, tensor);
        }
        debug_assert_eq!(item, 0);
    }
    Ok(npz::write_npz(path, &tensors.values().collect::<Vec<_>>())?)
}
