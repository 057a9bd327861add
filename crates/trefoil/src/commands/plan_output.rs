//! Plans as text and as the JSON of the command contract.

use crate::context::width;
use crate::error::CliError;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use trefoil_core::{Objective, OperatorGraph, Plan};
use trefoil_plan::PlanFront;
use trefoil_report::{TableFormat, format, plan_table, segment_rows};

/// JSON of one plan.
pub type Printed = Value;

/// The plan file's fields, and those of the command contract: `makespan_ms` (or `period_ms`), `model_bound_ms` (or
/// `model_bound_j`), `assignments`. Bound, `gap` and `exact` speak of what the simulator says (`bound_of` names it) and mean the
/// same for every method; what the planner proves under its own model is `own`.
pub fn json(plan: &Plan, graphs: &[&OperatorGraph]) -> Result<Printed, CliError> {
    let mut value =
        serde_json::to_value(plan).map_err(|error| CliError::Usage(format!("cannot print the plan: {error}")))?;
    let Some(object) = value.as_object_mut() else { return Ok(value) };
    let mut add = |key: &str, value: Value| object.insert(key.to_owned(), value);
    if plan.objective == Objective::Throughput {
        add("period_ms", json!(plan.claimed));
    }
    add("makespan_ms", json!(plan.simulated_ms));
    add("bound_of", json!(scored(plan)));
    match plan.objective {
        Objective::Energy => {
            add("energy_j", json!(plan.simulated()));
            add("model_bound_j", json!(plan.model_bound));
            add("model_bound_ms", Value::Null)
        }
        Objective::Latency | Objective::Throughput => add("model_bound_ms", json!(plan.model_bound)),
    };
    add("origin", json!(plan.timeline.origin));
    add("assignments", assignments(plan, graphs));
    Ok(value)
}

/// What of the simulation the plan is judged by.
fn scored(plan: &Plan) -> &'static str {
    match plan.objective {
        Objective::Energy => "energy",
        Objective::Throughput => "period",
        Objective::Latency if plan.weighted => "weighted-completion",
        Objective::Latency => "makespan",
    }
}

/// Where every operator runs: one entry for each unit that runs it.
fn assignments(plan: &Plan, graphs: &[&OperatorGraph]) -> Value {
    let places: BTreeSet<_> = plan
        .segments
        .iter()
        .flat_map(|segment| segment.operators.iter().map(move |&id| (segment.model, id, &segment.unit)))
        .collect();
    let entries: Vec<Value> = places
        .into_iter()
        .map(|(model, id, unit)| {
            let graph = graphs.get(model as usize);
            let operator = graph.map(|graph| graph.operator(id));
            json!({
                "model": graph.map(|graph| &graph.model),
                "operator": id,
                "name": operator.map(|operator| &operator.name),
                "kind": operator.map(|operator| &operator.kind),
                "unit": unit,
            })
        })
        .collect();
    json!(entries)
}

/// The plan in words and a table for each model.
pub fn describe(plan: &Plan, graphs: &[&OperatorGraph]) -> String {
    let unit = match plan.objective {
        Objective::Energy => "J",
        Objective::Latency | Objective::Throughput => "ms",
    };
    let origin = plan.timeline.origin;
    let names: Vec<&str> = graphs.iter().map(|graph| graph.model.as_str()).collect();
    let objective = format!("{:?}", plan.objective).to_lowercase();
    let mut text = format!("{}: method {}, objective {objective}\n", names.join(" + "), plan.method);
    let what = match plan.objective {
        Objective::Throughput => "period",
        Objective::Energy => "energy",
        Objective::Latency if plan.weighted => "weighted mean completion",
        Objective::Latency => "time",
    };
    let _ = write!(text, "{what} {:.4} {unit} ({origin})", plan.simulated());
    if plan.objective != Objective::Latency || plan.weighted {
        let _ = write!(text, ", simulated makespan {:.4} ms", plan.simulated_ms);
    }
    if let Some(bound) = plan.model_bound {
        let _ = write!(text, "; no plan at all costs less than {bound:.4} {unit} under these costs");
    }
    match plan.gap {
        Some(_) if plan.exact => text += ": optimal\n",
        Some(gap) => {
            let _ = writeln!(text, ", gap {:.1}%", gap * 100.0);
        }
        None => text += "\n",
    }
    if let Some(own) = plan.own.as_ref().filter(|_| !plan.exact) {
        let proven = match (own.exact, own.gap) {
            (true, _) => "optimal".to_owned(),
            (false, Some(gap)) => format!("gap {:.1}%", gap * 100.0),
            (false, None) => "nothing proven".to_owned(),
        };
        let _ = writeln!(text, "the planner's own claim: {:.4} {unit}, {proven} among: {}", own.value, own.over);
    }
    let _ = writeln!(
        text,
        "{}, {} crossing(s)",
        if plan.all_measured { "every segment measured whole" } else { "with segments that were not measured whole" },
        plan.crossings()
    );
    for (model, graph) in graphs.iter().enumerate() {
        if graphs.len() > 1 {
            let _ = writeln!(text, "\n{}", graph.model);
        }
        text += &plan_table(&segment_rows(plan, model as u32, graph, None)).render(TableFormat::Text, width());
    }
    for note in &plan.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

/// A front as a table.
pub fn front(front: &PlanFront, graph: &OperatorGraph) -> String {
    let headings = [">#", ">latency", ">energy", ">weights held", ">crossings", "operators"].map(str::to_owned);
    let rows = front
        .points
        .iter()
        .enumerate()
        .map(|(index, (cost, plan))| {
            let spread: Vec<String> = trefoil_plan::PlanSummary::of(plan)
                .operators
                .iter()
                .map(|(unit, count)| format!("{count} on {unit}"))
                .collect();
            let cells = [
                index.to_string(),
                format::time(cost.latency_ms),
                cost.energy_j.map_or_else(|| format::ABSENT.to_owned(), |joules| format!("{joules:.4} J")),
                format::bytes(cost.memory_bytes),
                plan.crossings().to_string(),
                spread.join(", "),
            ];
            cells.into_iter().map(|cell| (cell, false)).collect()
        })
        .collect();
    let origin = front.points.first().map_or_else(String::new, |point| format!(" ({})", point.1.timeline.origin));
    let title = format!("{}: plans that no other beats in time, energy and memory{origin}", graph.model);
    let mut text = trefoil_report::text_table(&title, &headings, rows).render(TableFormat::Text, width());
    text += if front.exact { "the whole front\n" } else { "a heuristic front: better plans may exist\n" };
    text
}
