//! `trefoil survey`: several models, one table, one report.

use crate::cli::{ModelArgs, Shape, SurveyArgs, from_zero};
use crate::commands::profile::model_name;
use crate::commands::run::{check, describe, write_outputs, write_report};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use crate::outcome::{SummaryRow, summary};
use crate::pipeline::{self, Job, PLAN, Settings};
use crate::question;
use crate::shapes;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use trefoil_core::{DataType, HostTensor};
use trefoil_onnx::npz;
use trefoil_report::TableFormat;

/// One model and its settings.
#[derive(Debug)]
struct Entry {
    name: String,
    model: ModelArgs,
    output: Option<PathBuf>,
    expect: Option<PathBuf>,
    tolerance: f64,
}

/// Runs the command.
pub fn run(args: &SurveyArgs) -> Result<(), CliError> {
    let mut entries = Vec::new();
    for text in &args.models {
        entries.push(parse(text, args)?);
    }
    for path in &args.paths {
        entries.push(plain(path, args));
    }
    if entries.is_empty() {
        return Err(CliError::Usage("no model given; name at least one .onnx file".to_owned()));
    }
    context::resolve_units(&args.units)?;
    question::check(&args.planning, &args.units, &args.measure)?;
    check_files(&entries, args)?;
    fix_shapes(&mut entries, args)?;
    let limit = context::cache_limit()?;
    let (mut rows, mut reports, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let mut failures: Vec<CliError> = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        eprintln!("[{}/{}] {}", index + 1, entries.len(), entry.name);
        let (value, failure) = match one(entry, args) {
            Ok((job, outcome)) => {
                rows.push(SummaryRow::of(&job));
                reports.push(job.report());
                if !args.show.json {
                    print(&(describe(&job) + "\n"))?;
                }
                let mut value = job.json();
                value["name"] = json!(entry.name);
                value["prediction_error"] = json!(job.plan_result().and_then(Job::prediction_error));
                value["paired_error"] = json!(job.plan_result().and_then(|result| result.paired_error));
                value["mixed_wins"] =
                    json!(job.verdict.uses_plan && job.verdict.reason == trefoil_run::Reason::PlanFaster);
                value["speed_up"] = value["plan"]["speed_up"].clone();
                match outcome {
                    Ok(error) => {
                        value["expected_error"] = json!(error);
                        (value, None)
                    }
                    Err(error) => (value, Some(error)),
                }
            }
            // One model that fails does not keep the others from running; Ctrl-C does.
            Err(error) => (json!({ "name": entry.name }), Some(error)),
        };
        values.push(with_outcome(value, failure.as_ref()));
        // Not only at the end: a survey of large models may pass any limit on its way.
        context::trim_caches(limit);
        if let Some(error) = failure {
            eprintln!("{}", context::harmless(&format!("failed: {}: {error}", entry.name)));
            failures.push(error);
        }
        if context::stop_flag().load(Ordering::SeqCst) {
            break;
        }
    }
    if let Some(path) = &args.show.report {
        write_report(path, "Trefoil survey", reports)?;
    }
    let table = summary(&rows);
    if args.show.json {
        print_json(&json!({
            "machine": trefoil_units::machine(),
            "models": values,
            "markdown": table.render(TableFormat::Markdown, None),
        }))?;
    } else {
        let format = if args.markdown { TableFormat::Markdown } else { TableFormat::Text };
        print(&table.render(format, context::width()))?;
    }
    match failures.len() {
        0 => Ok(()),
        1 => Err(failures.remove(0)),
        count => {
            Err(CliError::Failed(format!("{count} of {} models failed; the first: {}", entries.len(), failures[0])))
        }
    }
}

/// What is read besides the models is there, and what is written can be, before the first model is measured.
fn check_files(entries: &[Entry], args: &SurveyArgs) -> Result<(), CliError> {
    let mut read: Vec<PathBuf> = Vec::new();
    let mut written = vec![args.show.report.as_deref()];
    for entry in entries {
        let input = Some(Path::new(&entry.model.input)).filter(|input| *input != Path::new("random"));
        for path in [input, entry.expect.as_deref()].into_iter().flatten() {
            context::check_readable(path)?;
            read.push(path.to_owned());
        }
        read.push(entry.model.model.clone());
        written.push(entry.output.as_deref());
        context::check_replaceable(entry.output.as_deref())?;
    }
    context::check_outputs(&written, &read)
}

/// Gives every entry the shapes of the command line that are meant for it; those of its own settings win.
fn fix_shapes(entries: &mut [Entry], args: &SurveyArgs) -> Result<(), CliError> {
    let paths: Vec<PathBuf> = entries.iter().map(|entry| entry.model.model.clone()).collect();
    let own: Vec<&[Shape]> = entries.iter().map(|entry| entry.model.shapes.as_slice()).collect();
    let meant = shapes::beside_settings(&paths, &own, &args.shapes)?;
    for (entry, meant) in entries.iter_mut().zip(meant) {
        entry.model.shapes.extend(meant.into_iter().map(|(input, extents)| Shape { input, extents }));
    }
    Ok(())
}

fn with_outcome(mut value: Value, failure: Option<&CliError>) -> Value {
    value["ok"] = json!(failure.is_none());
    value["error"] = json!(failure.map(ToString::to_string));
    value
}

/// The job, and whether its outputs are what was expected (error relative to the peak).
fn one(entry: &Entry, args: &SurveyArgs) -> Result<(Job, Result<Option<f64>, CliError>), CliError> {
    let settings = Settings {
        name: entry.name.clone(),
        model: entry.model.clone(),
        units: args.units.clone(),
        measure: args.measure.clone(),
        planning: args.planning.clone(),
        show: args.show.clone(),
        profile: None,
        plan: None,
    };
    let job = pipeline::run(&settings, false)?;
    if let Some(path) = &entry.output {
        write_outputs(&job, path)?;
    }
    let outcome = check(&job).and_then(|()| expected(entry, &job));
    Ok((job, outcome))
}

/// Largest error of any output against the file of expected outputs.
fn expected(entry: &Entry, job: &Job) -> Result<Option<f64>, CliError> {
    let Some(path) = &entry.expect else { return Ok(None) };
    let wanted: Vec<HostTensor> = npz::read_npz(path)?;
    let mut worst = 0.0f64;
    for output in &job.outputs {
        let name = &output.info().name;
        let reference = wanted
            .iter()
            .find(|tensor| tensor.info().name == format!("out_{name}"))
            .or_else(|| wanted.iter().find(|tensor| tensor.info().name == *name));
        let Some(reference) = reference else {
            return Err(CliError::Usage(format!("{} does not hold output `{name}`", path.display())));
        };
        let error = output.error_to_peak(reference);
        // An 8-bit output cannot be closer than one code, and backends differ in how they round halves.
        let one_code =
            matches!(output.info().dtype, DataType::U8 | DataType::I8) && differs_by_one_code(output, reference);
        worst = worst.max(if one_code { error.min(entry.tolerance) } else { error });
    }
    if worst <= entry.tolerance {
        return Ok(Some(worst));
    }
    Err(CliError::Differs(format!(
        "{}: outputs of {} differ from {} by {worst:.1e} of peak, allowed {:.0e}",
        entry.name,
        job.verdict.choice.as_deref().unwrap_or(PLAN),
        path.display(),
        entry.tolerance
    )))
}

fn differs_by_one_code(output: &HostTensor, reference: &HostTensor) -> bool {
    output.info().shape == reference.info().shape
        && output.to_f64().iter().zip(reference.to_f64()).all(|(one, other)| (one - other).abs() <= 1.0)
}

/// A model without settings.
fn plain(path: &Path, args: &SurveyArgs) -> Entry {
    Entry {
        name: model_name(path),
        model: ModelArgs {
            model: path.to_owned(),
            shapes: Vec::new(),
            granularity: args.granularity,
            input: "random".to_owned(),
            cache: args.cache.clone(),
        },
        output: None,
        expect: None,
        tolerance: 1e-3,
    }
}

fn parse(text: &str, args: &SurveyArgs) -> Result<Entry, CliError> {
    let fail = |reason: &str| CliError::Usage(format!("--model `{text}`: {reason}"));
    let mut path = None;
    let mut entry = plain(Path::new(""), args);
    let mut name = None;
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        let (key, value) = part.split_once('=').ok_or_else(|| fail(&format!("`{part}` is no KEY=VALUE")))?;
        match key {
            "name" => name = Some(value.to_owned()),
            "path" => path = Some(PathBuf::from(value)),
            "input" if Path::new(value).extension().is_some() || value == "random" => {
                value.clone_into(&mut entry.model.input);
            }
            "output" => entry.output = Some(PathBuf::from(value)),
            "expect" => entry.expect = Some(PathBuf::from(value)),
            "tolerance" => {
                entry.tolerance = from_zero(value).map_err(|reason| fail(&format!("tolerance: {reason}")))?;
            }
            // Anything else is an input's shape; an input may be called `input`.
            _ => entry.model.shapes.push(part.parse().map_err(|reason: String| fail(&reason))?),
        }
    }
    let path = path.ok_or_else(|| fail("no path=MODEL.onnx"))?;
    entry.name = name.unwrap_or_else(|| model_name(&path));
    entry.model.model = path;
    Ok(entry)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn arguments() -> SurveyArgs {
        let cli = crate::cli::Cli::parse_from(["trefoil", "survey", "-u", "rten:CPU", "m.onnx"]);
        match cli.command {
            crate::cli::Command::Survey(args) => args,
            _ => unreachable!("parsed as survey"),
        }
    }

    #[test]
    fn settings_of_a_model_parse() {
        let entry =
            parse("name=voice;path=v.onnx;input=v.npz;input=1,576;state=2,1,128;tolerance=1e-4", &arguments()).unwrap();
        assert_eq!((entry.name.as_str(), entry.model.input.as_str(), entry.tolerance), ("voice", "v.npz", 1e-4));
        let names: Vec<_> = entry.model.shapes.iter().map(|shape| shape.input.as_str()).collect();
        assert_eq!(names, ["input", "state"]);
        assert!(parse("name=x", &arguments()).is_err());
        assert!(parse("path=m.onnx;tolerance=low", &arguments()).is_err());
        assert!(parse("path=m.onnx;tolerance=nan", &arguments()).is_err());
        // What stands alone is a path, whatever it looks like.
        assert_eq!(plain(Path::new("d;x=1/m.onnx"), &arguments()).model.model, Path::new("d;x=1/m.onnx"));
    }
}
