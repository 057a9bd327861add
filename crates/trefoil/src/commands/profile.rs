//! `trefoil profile`: measurements of a model on units, refined.

use crate::cli::{ProfileArgs, ShowArgs};
use crate::commands::plan_output::describe;
use crate::context::{self, print, print_json, width};
use crate::error::CliError;
use crate::pipeline::{self, Settings};
use serde_json::json;
use std::fmt::Write as _;
use trefoil_report::{HeatTable, TableFormat, profile_table, unit_totals, unit_totals_table};

/// Rows of the operator table that fit a first look; `--json` has all.
const ROWS: usize = 40;

/// Runs the command.
pub fn run(args: &ProfileArgs) -> Result<(), CliError> {
    context::check_writable(Some(&args.output))?;
    let settings = Settings {
        name: model_name(&args.model.model),
        model: args.model.clone(),
        units: args.units.clone(),
        measure: args.measure.clone(),
        planning: crate::cli::PlanningArgs {
            asked_objective: None,
            method: "auto".to_owned(),
            pins: Vec::new(),
            budget: None,
            seed: 1,
        },
        show: ShowArgs { rounds: 0, verify: false, strict: false, report: None, json: args.json },
        profile: None,
        plan: None,
    };
    let options = context::prepare_options(&settings.model)?;
    let prepared = trefoil_profile::prepare_model(&settings.model.model, &options, context::stop_flag())?;
    let measured = pipeline::measure(&settings, &prepared, args.json)?;
    trefoil_profile::save_profile(&measured.profile, &args.output)?;
    let (profile, graph) = (&measured.profile, &measured.graph);
    let noisy = profile.measurements.iter().filter(|measurement| measurement.is_noisy()).count();
    if args.json {
        return print_json(&json!({
            "profile": context::shown(&args.output),
            "model": graph.model,
            "fingerprint": graph.fingerprint,
            "operators": graph.len(),
            "distinct": graph.distinct(),
            "units": profile.units.iter().map(|unit| unit.address.to_string()).collect::<Vec<_>>(),
            "measurements": profile.measurements.len(),
            "noisy": noisy,
            "refined": measured.refined,
            "notes": profile.notes,
        }));
    }
    let mut text = profile_table(&HeatTable::from_profile(profile, graph, &[], measured.plan.as_ref()), Some(ROWS))
        .render(TableFormat::Text, width());
    text += "\n";
    text += &unit_totals_table(&unit_totals(profile, graph, &[])).render(TableFormat::Text, width());
    if let Some(plan) = &measured.plan {
        text += "\n";
        text += &describe(plan, &[graph]);
    }
    for note in &profile.notes {
        let _ = writeln!(text, "note: {note}");
    }
    let _ = writeln!(text, "{} measurements ({noisy} noisy) in {}", profile.measurements.len(), args.output.display());
    print(&text)
}

/// File stem of a model.
pub fn model_name(path: &std::path::Path) -> String {
    path.file_stem().map_or_else(|| path.display().to_string(), |stem| stem.to_string_lossy().into_owned())
}
