//! `trefoil plan`: a placement from a profile.

use super::simulated;
use crate::cli::PlanArgs;
use crate::context::{self, print, print_json, width};
use crate::error::CliError;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;
use trefoil_core::{Objective, OperatorGraph, OperatorId, Plan, UnitAddress};
use trefoil_plan::{METHODS, PlanRequest};
use trefoil_report::{TableFormat, plan_table, segment_rows};

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    if args.list_methods {
        let lines: String = METHODS.iter().fold(String::new(), |mut text, method| {
            let _ = writeln!(text, "{:<12} {}", method.name, method.summary);
            text
        });
        return print(&lines);
    }
    context::check_writable(args.output.as_deref())?;
    let profile = match &args.on {
        Some(machine) => simulated::profile(args, machine)?,
        None => trefoil_profile::load_profile(&args.profile)?,
    };
    let graph = profile.model(None)?;
    let request = PlanRequest {
        profile: &profile,
        graph,
        units: args.units.clone(),
        objective: args.planning.objective.into(),
        pins: args.planning.pins.clone(),
    };
    let mut plan = match &args.import {
        Some(path) => trefoil_plan::import(&request, &read_split(path, graph)?)?,
        None => trefoil_plan::plan(&args.planning.method, &request)?,
    };
    if args.on.is_some() {
        plan.notes.extend(profile.notes.iter().cloned());
    }
    if let Some(path) = &args.output {
        save_plan(&plan, path)?;
    }
    if args.json {
        return print_json(&plan);
    }
    print(&describe(&plan, graph))
}

/// Writes a plan file.
pub fn save_plan(plan: &Plan, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(plan)
        .map_err(|error| CliError::Usage(format!("cannot write the plan: {error}")))?;
    context::write_text(path, &(text + "\n"))
}

/// Reads a plan file.
pub fn load_plan(path: &Path) -> Result<Plan, CliError> {
    let text =
        std::fs::read(path).map_err(|source| CliError::File { action: "read", path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|error| {
        CliError::Usage(format!("{} is no plan file: {error}; write one with `trefoil plan -o`", path.display()))
    })
}

/// A hand-made split: JSON object from operator name or index to unit; every operator must be named.
fn read_split(path: &Path, graph: &OperatorGraph) -> Result<Vec<(OperatorId, UnitAddress)>, CliError> {
    let text =
        std::fs::read(path).map_err(|source| CliError::File { action: "read", path: path.to_owned(), source })?;
    let split: BTreeMap<String, UnitAddress> = serde_json::from_slice(&text).map_err(|error| {
        CliError::Usage(format!("{} is no split (JSON object, operator → unit): {error}", path.display()))
    })?;
    split
        .into_iter()
        .map(|(key, unit)| {
            let by_index = key.parse::<u32>().ok().filter(|&index| (index as usize) < graph.len()).map(OperatorId);
            let by_name = || graph.ids().find(|&id| graph.operator(id).name == key);
            let id = by_index.or_else(by_name).ok_or_else(|| {
                CliError::Usage(format!(
                    "{} names operator `{key}`, which {} does not have",
                    path.display(),
                    graph.model
                ))
            })?;
            Ok((id, unit))
        })
        .collect()
}

/// The plan in words and a table.
pub fn describe(plan: &Plan, graph: &OperatorGraph) -> String {
    let unit = match plan.objective {
        Objective::Energy => "J",
        Objective::Latency | Objective::Throughput => "ms",
    };
    let origin = plan.timeline.origin;
    let mut text = format!("{}: method {}, objective {:?}\n", graph.model, plan.method, plan.objective).to_lowercase();
    let _ =
        write!(text, "claimed {:.4} {unit} ({origin}), simulated makespan {:.4} ms", plan.claimed, plan.simulated_ms);
    if let Some(bound) = plan.model_bound {
        let _ = write!(text, ", model bound {bound:.4} {unit}");
    }
    if let Some(gap) = plan.gap {
        let _ = write!(text, ", gap {:.1}%", gap * 100.0);
    }
    let _ = writeln!(
        text,
        "\n{}, {}, {} crossing(s)",
        if plan.exact { "optimal under these costs" } else { "not proven optimal" },
        if plan.all_measured { "every segment measured whole" } else { "with segments that were not measured whole" },
        plan.crossings()
    );
    text += &plan_table(&segment_rows(plan, 0, graph, None)).render(TableFormat::Text, width());
    for note in &plan.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}
