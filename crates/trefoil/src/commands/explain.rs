//! `trefoil explain`: why an operator is where it is.

use crate::cli::ExplainArgs;
use crate::commands::plan::load_plan;
use crate::context::{print, print_json};
use crate::error::CliError;
use trefoil_core::{OperatorGraph, OperatorId};
use trefoil_plan::{Explanation, Pin, PlanOptions, PlanRequest, explain};

/// Without an operator named, this many are shown: those where the placement matters most.
const MOST: usize = 10;

/// Runs the command.
pub fn run(args: &ExplainArgs) -> Result<(), CliError> {
    args.planning.check(&[])?;
    if args.planning.method == "pareto" {
        return Err(CliError::Usage("method `pareto` makes several plans; explain one of another method".to_owned()));
    }
    let profile = trefoil_profile::load_profile(&args.profile)?;
    let graph = profile.model(None)?;
    let mut request = PlanRequest {
        profile: &profile,
        graph,
        units: Vec::new(),
        objective: args.planning.objective().into(),
        pins: args.planning.pins.clone(),
    };
    if args.ports {
        return ports(args, &request);
    }
    let plan = if let Some(path) = &args.plan {
        let plan = load_plan(path)?;
        plan.check(&[graph])?;
        // Prices are in what the plan minimises.
        request.objective = plan.objective;
        plan
    } else {
        trefoil_plan::plan_with(&args.planning.method, &request, &args.planning.options())?
    };
    let wanted = args.operator.as_ref().map_or_else(|| Ok(graph.ids().collect()), |wanted| find(graph, wanted))?;
    let explained = wanted.into_iter().map(|id| explain(&request, &plan, id));
    let mut explanations: Vec<Explanation> = explained.collect::<Result<_, _>>()?;
    if args.operator.is_none() {
        explanations.sort_by(|a, b| stake(b).total_cmp(&stake(a)));
        explanations.truncate(MOST);
    }
    if args.json {
        return print_json(&explanations);
    }
    let texts: Vec<_> = explanations.iter().map(ToString::to_string).collect();
    print(&(elsewhere(args, &request)? + &texts.join("\n") + "\n"))
}

/// Where `plan` would choose a mode of a unit, of which only the whole model is known: a line that says so, else nothing.
fn elsewhere(args: &ExplainArgs, request: &PlanRequest<'_>) -> Result<String, CliError> {
    if args.plan.is_some() || args.planning.method != "auto" || request.profile.modes.is_empty() {
        return Ok(String::new());
    }
    let options = PlanOptions { modes: true, ..args.planning.options() };
    let plan = trefoil_plan::plan_with("auto", request, &options)?;
    let mode = plan.units.iter().find(|unit| request.profile.units.iter().all(|own| own.address != unit.address));
    Ok(mode.map_or_else(String::new, |mode| {
        format!(
            "`trefoil plan` runs the whole model on {} ({:.4} ms), of which nothing else was measured; this is the best plan on the profile's units\n\n",
            mode.address, plan.simulated_ms
        )
    }))
}

/// `--ports`.
fn ports(args: &ExplainArgs, request: &PlanRequest<'_>) -> Result<(), CliError> {
    let ports = trefoil_plan::ports(&args.planning.method, request, &args.planning.options())?;
    if args.json {
        return print_json(&ports);
    }
    let mut text: String = ports.iter().fold(String::new(), |text, port| text + &port.to_string() + "\n");
    if ports.is_empty() {
        text = format!("every unit runs every operator of {} that another one runs\n", request.graph.model);
    }
    print(&text)
}

/// What is at stake in an operator's placement: how far its costs on the units that run it lie apart.
fn stake(explanation: &Explanation) -> f64 {
    let costs = explanation.alternatives.iter().map(|alternative| alternative.isolated_ms);
    let costs = costs.chain([explanation.isolated_ms]).flatten();
    let (low, high) = costs.fold((f64::MAX, 0.0f64), |(low, high), ms| (low.min(ms), high.max(ms)));
    (high - low).max(0.0)
}

fn find(graph: &OperatorGraph, wanted: &str) -> Result<Vec<OperatorId>, CliError> {
    if let Some(id) = wanted.parse().ok().filter(|&index: &u32| (index as usize) < graph.len()) {
        return Ok(vec![OperatorId(id)]);
    }
    // A pin's pattern is the same pattern; the unit does not matter here.
    let pattern: Option<Pin> = format!("{wanted}=rten:CPU").parse().ok();
    let found: Vec<_> =
        graph.ids().filter(|&id| pattern.as_ref().is_some_and(|pin| pin.matches(graph.operator(id)))).collect();
    if found.is_empty() {
        let message = format!(
            "{} has no operator `{wanted}`; `trefoil inspect` lists its {} operators",
            graph.model,
            graph.len()
        );
        return Err(CliError::Usage(message));
    }
    Ok(found)
}
