//! `trefoil plan --workload`: what runs when, for `concurrent`.

use crate::cli::PlanArgs;
use crate::context;
use crate::error::CliError;
use serde::Deserialize;
use std::path::Path;
use trefoil_core::quantity::short;
use trefoil_core::{OperatorGraph, Plan, Profile, Quantity, TensorId};
use trefoil_plan::{Application, ConcurrentRequest, PlanOptions, PlanRequest, Stage, StageLink};

/// Operator executions of one workload at most: a plan lists each, and the search looks at all of them again and again.
const MOST_EXECUTIONS: u64 = 100_000;

/// The file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Workload {
    applications: Vec<App>,
    /// Weighted mean completion of the items instead of the end of the last.
    #[serde(default)]
    weighted: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct App {
    stages: Vec<StageEntry>,
    #[serde(default)]
    links: Vec<LinkEntry>,
    /// Number of items, the first at `offset_ms`, one every `period_ms`.
    #[serde(default = "one")]
    items: u32,
    #[serde(default)]
    offset_ms: f64,
    #[serde(default)]
    period_ms: f64,
    /// Milliseconds from arrival.
    deadline_ms: Option<f64>,
    #[serde(default = "unit_weight")]
    weight: f64,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct StageEntry {
    /// Index among the profiles on the command line.
    profile: usize,
    #[serde(default = "one")]
    repeat: u32,
}

/// `[stage, tensor name]` each.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LinkEntry {
    from: (usize, String),
    to: (usize, String),
}

fn one() -> u32 {
    1
}

fn unit_weight() -> f64 {
    1.0
}

/// A plan of a workload, and the requests of its models in the plan's order.
pub fn plan<'a>(
    path: &Path,
    args: &PlanArgs,
    profiles: &'a [Profile],
) -> Result<(Plan, Vec<PlanRequest<'a>>), CliError> {
    if !matches!(args.planning.method.as_str(), "auto" | "concurrent") {
        return Err(CliError::Usage(format!("--workload is for method `concurrent`, not `{}`", args.planning.method)));
    }
    let text = context::read_file(path)?;
    let workload: Workload = serde_json::from_slice(&text)
        .map_err(|error| CliError::Usage(format!("{} is no workload: {error}", path.display())))?;
    let fail = |reason: String| CliError::Usage(format!("{}: {reason}", path.display()));
    let mut applications = Vec::new();
    let mut order: Vec<usize> = Vec::new();
    if workload.applications.is_empty() {
        return Err(fail("there is no application".to_owned()));
    }
    let mut executions = 0u64;
    for (number, app) in workload.applications.iter().enumerate() {
        if app.stages.is_empty() || app.items == 0 || app.stages.iter().any(|stage| stage.repeat == 0) {
            return Err(fail(format!("application {number} has no stages, no items or a stage repeated 0 times")));
        }
        let odd = |what: &str, value: f64, quantity: Quantity| {
            fail(format!("application {number} has {what} of {}, which is no {quantity}", short(value)))
        };
        let last = f64::from(app.items - 1) * app.period_ms;
        let times = [
            ("an offset_ms", app.offset_ms),
            ("a period_ms", app.period_ms),
            ("a last item after a time", app.offset_ms + last),
            ("a deadline_ms", app.deadline_ms.unwrap_or(0.0)),
        ];
        if let Some(&(what, ms)) = times.iter().find(|(_, ms)| !Quantity::Time.holds(*ms)) {
            return Err(odd(what, ms, Quantity::Time));
        }
        if !Quantity::Weight.holds(app.weight) {
            return Err(odd("a weight", app.weight, Quantity::Weight));
        }
        let mut stages = Vec::new();
        for entry in &app.stages {
            let profile = profiles.get(entry.profile).ok_or_else(|| {
                fail(format!("profile {} of {} given (counted from 0)", entry.profile, profiles.len()))
            })?;
            let graph = profile.model(None)?;
            let repeated = u64::from(entry.repeat) * u64::from(app.items);
            executions = executions.saturating_add((graph.len() as u64).saturating_mul(repeated));
            if executions > MOST_EXECUTIONS {
                return Err(fail(format!(
                    "more than {MOST_EXECUTIONS} operator executions; plan fewer items and repeat the plan"
                )));
            }
            stages.push(Stage { profile, graph, repeat: entry.repeat });
            if !order.contains(&entry.profile) {
                order.push(entry.profile);
            }
        }
        let find = |(stage, name): &(usize, String)| -> Result<(usize, TensorId), CliError> {
            let graph = stages.get(*stage).ok_or_else(|| fail(format!("a link names stage {stage}")))?.graph;
            let at = tensor(graph, name)
                .ok_or_else(|| fail(format!("model `{}` has no tensor `{name}` between operators", graph.model)))?;
            Ok((*stage, at))
        };
        let links = app
            .links
            .iter()
            .map(|link| Ok(StageLink { from: find(&link.from)?, to: find(&link.to)? }))
            .collect::<Result<_, CliError>>()?;
        let mut application = Application { stages, links, ..first(profiles)? }
            .every(app.items, app.offset_ms, app.period_ms)
            .weighing(app.weight);
        application.deadline_ms = app.deadline_ms;
        applications.push(application);
    }
    let asked = ConcurrentRequest {
        units: args.units.clone(),
        objective: args.planning.objective().into(),
        weighted: workload.weighted,
        pins: args.planning.pins.clone(),
        ..ConcurrentRequest::new(applications)
    };
    // As without a workload: only `auto` chooses modes of units, and no certificate knows them in plans of several models.
    let modes = args.planning.method == "auto" && args.certificate.is_none();
    let plan = trefoil_plan::concurrent(&asked, &PlanOptions { modes, ..args.planning.options() })?;
    let requests = order
        .into_iter()
        .map(|at| {
            Ok(PlanRequest {
                profile: &profiles[at],
                graph: profiles[at].model(None)?,
                units: args.units.clone(),
                objective: args.planning.objective().into(),
                pins: args.planning.pins.clone(),
            })
        })
        .collect::<Result<_, CliError>>()?;
    Ok((plan, requests))
}

fn first(profiles: &[Profile]) -> Result<Application<'_>, CliError> {
    let profile = profiles.first().ok_or_else(|| CliError::Usage("no profile was given".to_owned()))?;
    Ok(Application::new(profile, profile.model(None)?))
}

fn tensor(graph: &OperatorGraph, name: &str) -> Option<TensorId> {
    graph.tensors.iter().position(|tensor| tensor.name == name).map(|at| TensorId(at as u32))
}
