//! `trefoil plan`: a placement from a profile, or of several models from several profiles.

use super::{simulated, workload};
use crate::cli::{ObjectiveArg, PlanArgs};
use crate::commands::plan_output::{self, Printed};
use crate::context::{self, print, print_json};
use crate::error::CliError;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use trefoil_core::{OperatorGraph, OperatorId, Plan, Profile, UnitAddress};
use trefoil_plan::{METHODS, PlanOptions, PlanRequest};

/// Runs the command.
pub fn run(args: &PlanArgs) -> Result<(), CliError> {
    if args.list_methods {
        return print(&list_methods());
    }
    check_flags(args)?;
    context::check_writable(args.output.as_deref())?;
    context::check_writable(args.certificate.as_deref())?;
    context::check_distinct(&[args.output.as_deref(), args.certificate.as_deref()], &args.profiles)?;
    let other = args.diff.as_deref().map(load_plan).transpose()?;
    let profiles = profiles(args)?;
    let (given, requests) = match &args.workload {
        Some(path) => {
            let (plan, requests) = workload::plan(path, args, &profiles)?;
            (Some(plan), requests)
        }
        None => (None, requests(args, &profiles)?),
    };
    let graphs: Vec<&OperatorGraph> = requests.iter().map(|request| request.graph).collect();
    if !args.what_if.is_empty() {
        return what_if(args, &requests);
    }
    if args.planning.method == "pareto" {
        return front(args, &requests);
    }
    let mut plan = match (given, &args.import) {
        (Some(plan), _) => plan,
        (None, Some(path)) => trefoil_plan::import(single(&requests, "--import")?, &read_split(path, graphs[0])?)?,
        (None, None) => make(args, &requests)?,
    };
    if args.on.is_some() {
        plan.notes.extend(profiles.iter().flat_map(|profile| profile.notes.iter().cloned()));
        plan.notes.dedup();
    }
    if let Some(other) = &other {
        other.check(&graphs)?;
    }
    let certificate = args.certificate.as_ref().map(|_| trefoil_plan::certificate(&requests, &plan)).transpose()?;
    if let Some(path) = &args.output {
        save_plan(&plan, path)?;
    }
    if let (Some(path), Some(certificate)) = (&args.certificate, certificate) {
        let text = serde_json::to_string(&certificate)
            .map_err(|error| CliError::Usage(format!("cannot write the certificate: {error}")))?;
        context::write_text(path, &(text + "\n"))?;
    }
    let changes = other.map(|other| trefoil_plan::diff(&other, &plan, &graphs)).transpose()?;
    if args.json {
        let mut value = plan_output::json(&plan, &graphs)?;
        if let (Some(changes), Some(object)) = (&changes, value.as_object_mut()) {
            object.insert("diff".to_owned(), serde_json::json!(changes));
        }
        return print_json(&value);
    }
    let mut text = plan_output::describe(&plan, &graphs);
    if let Some(path) = &args.certificate {
        let _ = writeln!(text, "certificate: {} (verify it with trefoil-check and the profile)", path.display());
    }
    if let Some(changes) = changes {
        text += "\n";
        text += &changes.to_string();
    }
    print(&text)
}

/// Refuses flags that contradict each other, before anything is read.
fn check_flags(args: &PlanArgs) -> Result<(), CliError> {
    args.planning.check(&args.units)?;
    let method = args.planning.method.as_str();
    let wrong = |reason: String| Err(CliError::Usage(reason));
    if method == "pareto" && !args.what_if.is_empty() {
        return wrong("--what-if replays one plan, and method `pareto` makes several: name another method".to_owned());
    }
    if let (Some(_), Some(objective)) = (&args.workload, args.planning.asked_objective)
        && objective == ObjectiveArg::Throughput
    {
        return wrong(
            "--workload states when items arrive; --objective throughput is for a stream of one model, or for rounds of several without --workload".to_owned(),
        );
    }
    let several = ["aligned", "joint", "joint-units"].contains(&method);
    if several && !args.profiles.is_empty() && args.profiles.len() != 2 && args.workload.is_none() {
        return wrong(format!(
            "method `{method}` plans two requests, but {} profile(s) were given",
            args.profiles.len()
        ));
    }
    if args.import.is_some() && args.planning.budget.is_some() {
        return wrong("--import takes the placement as it is; there is nothing to search with --budget".to_owned());
    }
    Ok(())
}

fn list_methods() -> String {
    let mut text = String::new();
    let mut line = |name: &str, summary: &str| {
        let _ = writeln!(text, "{name:<17} {summary}");
    };
    let known = |name: &str| METHODS.iter().any(|method| method.name == name);
    for method in METHODS {
        line(method.name, method.summary);
    }
    line("pareto", "the plans of which none is beaten in latency, energy and memory at once");
    let several = trefoil_plan::SEVERAL_METHODS.iter().filter(|method| !known(method.name));
    for method in several {
        line(method.name, &format!("{} (two profiles)", method.summary));
    }
    text
}

/// The profiles given, or made for a simulated machine.
fn profiles(args: &PlanArgs) -> Result<Vec<Profile>, CliError> {
    let of = |path: &PathBuf| match &args.on {
        Some(machine) => simulated::profile(args, path, machine),
        None => Ok(trefoil_profile::load_profile(path)?),
    };
    args.profiles.iter().map(of).collect()
}

/// One request for each profile, all for the same units.
fn requests<'a>(args: &PlanArgs, profiles: &'a [Profile]) -> Result<Vec<PlanRequest<'a>>, CliError> {
    profiles
        .iter()
        .map(|profile| {
            Ok(PlanRequest {
                profile,
                graph: profile.model(None)?,
                units: args.units.clone(),
                objective: args.planning.objective().into(),
                pins: args.planning.pins.clone(),
            })
        })
        .collect()
}

fn single<'r, 'a>(requests: &'r [PlanRequest<'a>], what: &str) -> Result<&'r PlanRequest<'a>, CliError> {
    match requests {
        [request] => Ok(request),
        _ => Err(CliError::Usage(format!("{what} is for one profile, but {} were given", requests.len()))),
    }
}

fn make(args: &PlanArgs, requests: &[PlanRequest<'_>]) -> Result<Plan, CliError> {
    // What `trefoil profile` and `run` say, the profile's file must say too: `auto` may choose a mode of a unit.
    // Where a certificate is asked for, it has to be a plan that one can be made of.
    let one_inference = requests.len() == 1 && args.planning.objective() != ObjectiveArg::Throughput;
    let modes = one_inference || args.certificate.is_none();
    let options = PlanOptions { modes, ..args.planning.options() };
    Ok(match requests {
        [request] if !trefoil_plan::SEVERAL_METHODS.iter().any(|method| method.name == args.planning.method) => {
            trefoil_plan::plan_with(&args.planning.method, request, &options)?
        }
        _ => trefoil_plan::plan_several(&args.planning.method, requests, &options)?,
    })
}

/// `--what-if`.
fn what_if(args: &PlanArgs, requests: &[PlanRequest<'_>]) -> Result<(), CliError> {
    let request = single(requests, "--what-if")?;
    if args.planning.objective() == ObjectiveArg::Throughput {
        return Err(CliError::Usage("--what-if replays one inference; ask for latency or energy".to_owned()));
    }
    let replay = trefoil_plan::what_if(&args.planning.method, request, &args.planning.options(), &args.what_if)?;
    if let Some(path) = &args.output {
        save_plan(&replay.plan, path)?;
    }
    if args.json {
        let mut value = serde_json::json!(replay);
        value["plan"] = plan_output::json(&replay.plan, &[request.graph])?;
        return print_json(&value);
    }
    print(&format!("{replay}\n{}", plan_output::describe(&replay.plan, &[request.graph])))
}

/// `--method pareto`.
fn front(args: &PlanArgs, requests: &[PlanRequest<'_>]) -> Result<(), CliError> {
    let request = single(requests, "method `pareto`")?;
    if args.output.is_some() || args.certificate.is_some() || args.diff.is_some() {
        return Err(CliError::Usage(
            "method `pareto` makes several plans: take one from `--json`, without -o, --certificate or --diff"
                .to_owned(),
        ));
    }
    let front = trefoil_plan::pareto_plans(request, &args.planning.options())?;
    if args.json {
        let points: Vec<Printed> = front
            .points
            .iter()
            .map(|(cost, plan)| {
                let mut value = serde_json::json!(cost);
                value["plan"] = plan_output::json(plan, &[request.graph])?;
                Ok(value)
            })
            .collect::<Result<_, CliError>>()?;
        return print_json(&serde_json::json!({ "method": "pareto", "exact": front.exact, "points": points }));
    }
    print(&plan_output::front(&front, request.graph))
}

/// Writes a plan file.
pub fn save_plan(plan: &Plan, path: &Path) -> Result<(), CliError> {
    let text = serde_json::to_string_pretty(plan)
        .map_err(|error| CliError::Usage(format!("cannot write the plan: {error}")))?;
    context::write_text(path, &(text + "\n"))
}

/// Reads a plan file.
pub fn load_plan(path: &Path) -> Result<Plan, CliError> {
    let text = context::read_file(path)?;
    serde_json::from_slice(&text).map_err(|error| {
        CliError::Usage(format!("{} is no plan file: {error}; write one with `trefoil plan -o`", path.display()))
    })
}

/// An object from operator to unit in its order. Of a key that stands twice a map would silently keep one.
struct Split(Vec<(String, UnitAddress)>);

impl<'de> Deserialize<'de> for Split {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Split;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object from operators to units")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Split, M::Error> {
                let mut entries: Vec<(String, UnitAddress)> = Vec::new();
                let mut seen = BTreeSet::new();
                while let Some((key, unit)) = map.next_entry::<String, UnitAddress>()? {
                    if !seen.insert(key.clone()) {
                        return Err(M::Error::custom(format!("it names operator `{key}` twice")));
                    }
                    entries.push((key, unit));
                }
                Ok(Split(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// A hand-made split: JSON object from operator name or index to unit; every operator must be named.
fn read_split(path: &Path, graph: &OperatorGraph) -> Result<Vec<(OperatorId, UnitAddress)>, CliError> {
    let text = context::read_file(path)?;
    let Split(split) = serde_json::from_slice(&text).map_err(|error| {
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
