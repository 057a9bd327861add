//! `trefoil run`: the whole job for one model.

use crate::cli::RunArgs;
use crate::commands::profile::model_name;
use crate::commands::units::unit_rows;
use crate::context::{self, print, print_json, width};
use crate::error::CliError;
use crate::pipeline::{self, Job, Settings};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use trefoil_onnx::npz;
use trefoil_report::{
    ModelReport, ReportInput, TableFormat, TraceMeta, chrome_trace, model_table, plan_table, task_details,
};

/// Runs the command.
pub fn run(args: &RunArgs) -> Result<(), CliError> {
    let read = std::iter::once(&args.model.model).chain(&args.more).chain(&args.profile).chain(&args.plan);
    let mut read: Vec<PathBuf> = read.cloned().collect();
    if args.model.input != "random" {
        read.push(PathBuf::from(&args.model.input));
    }
    let written = [&args.output, &args.trace, &args.show.report].map(|path| path.as_deref());
    context::check_outputs(&written, &read)?;
    context::check_replaceable(args.output.as_deref())?;
    if crate::stages::PipelineFile::is_meant(&args.model.model) {
        return super::run_pipeline::run(args);
    }
    if !args.more.is_empty() || args.together.adapt {
        return super::run_several::run(args);
    }
    if !args.together.rates.is_empty() {
        return Err(CliError::Usage("--rate is for several models; name a second one".to_owned()));
    }
    context::resolve_units(&args.units)?;
    if args.plan.is_none() && args.profile.is_none() {
        crate::question::check(&args.planning, &args.units, &args.measure)?;
    }
    let settings = Settings {
        name: model_name(&args.model.model),
        model: args.model.clone(),
        units: args.units.clone(),
        measure: args.measure.clone(),
        planning: args.planning.clone(),
        show: args.show.clone(),
        profile: args.profile.clone(),
        plan: args.plan.clone(),
    };
    let job = pipeline::run(&settings, args.show.json)?;
    if let Some(path) = &args.output {
        write_outputs(&job, path)?;
    }
    if let Some(path) = &args.trace {
        let meta = TraceMeta {
            title: job.name.clone(),
            facts: BTreeMap::from([("cpu".to_owned(), job.profile.machine.cpu.clone())]),
            tasks: task_details(&job.executed, &[&job.graph]),
        };
        context::write_text(path, &chrome_trace(Some(&job.executed.timeline), Some(&job.trace), &meta))?;
    }
    if let Some(path) = &args.show.report {
        write_report(path, &job.name, vec![job.report()])?;
    }
    if args.show.json {
        print_json(&job.json())?;
    } else {
        print(&describe(&job))?;
    }
    check(&job)
}

/// Fails when verification did.
pub fn check(job: &Job) -> Result<(), CliError> {
    match &job.verification {
        Some(verification) if !verification.ok => {
            Err(CliError::Differs(format!("{}: {}", job.name, verification.summary())))
        }
        _ => Ok(()),
    }
}

/// Writes the outputs keyed by their names.
pub fn write_outputs(job: &Job, path: &Path) -> Result<(), CliError> {
    let mut seen = std::collections::BTreeSet::new();
    // A model may output one value twice; a key can stand once.
    let tensors: Vec<_> = job.outputs.iter().filter(|tensor| seen.insert(tensor.info().name.clone())).collect();
    Ok(npz::write_npz(path, &tensors)?)
}

/// Writes a report of several models.
pub fn write_report(path: &Path, title: &str, models: Vec<ModelReport>) -> Result<(), CliError> {
    let input = ReportInput {
        title: title.to_owned(),
        command: Some(context::command_line()),
        generated_at: Some(trefoil_profile::now_utc()),
        banner: None,
        machine: Some(trefoil_units::machine()),
        units: unit_rows(),
        models,
        notes: Vec::new(),
    };
    context::write_text(path, &trefoil_report::html(&input))
}

/// The job in tables and sentences.
pub fn describe(job: &Job) -> String {
    let mut text = model_table(&job.row()).render(TableFormat::Text, width());
    if job.executed.segments.len() > 1 {
        let rows = trefoil_report::segment_rows(&job.executed, 0, &job.graph, Some(&job.trace));
        text += "\n";
        text += &plan_table(&rows).render(TableFormat::Text, width());
    }
    if let Some(table) = job.energy_table() {
        text += "\n";
        text += &table.render(TableFormat::Text, width());
    }
    let _ = writeln!(text, "\n{}", job.verdict.message);
    if job.refined == Some(false) {
        text += "note: refinement ran out of its time budget; the plan has segments that were not measured whole\n";
    }
    if !job.lower_bounds {
        text += "note: some estimates turned out above the measured time, so a better plan may have been passed over\n";
    }
    if let Some(verification) = &job.verification {
        let _ = writeln!(text, "verify: {}", verification.summary());
    }
    for note in &job.notes {
        let _ = writeln!(text, "note: {note}");
    }
    for port in &job.memory.copied {
        let _ = writeln!(text, "note: copied, not shared: {port}");
    }
    text
}
