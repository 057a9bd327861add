//! What enters neither a cost nor a bound must be right all the same: names of methods, objectives and models, numbers of items,
//! repetitions and requests, weights; and there is no field that nobody reads.

use crate::json::{Reader, text};
use crate::machine::Machine;
use crate::schedule::{Schedule, Work};
use crate::{CheckError, close};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");

/// Methods of one inference of one model, beside `single:UNIT`.
const OF_ONE: [&str; 8] =
    ["sequential", "interval", "imported", "dag", "phases", "phases-exclusive", "pareto", "pipeline"];
/// Methods of two requests.
const OF_TWO: [&str; 3] = ["aligned", "joint", "joint-units"];
/// Method of any number of models and items.
const OF_ANY: &str = "concurrent";

/// There is no field but those that are read, and the method exists.
pub fn fields(certificate: &Value) -> Result<(), CheckError> {
    let top = [
        "format",
        "version",
        "method",
        "objective",
        "models",
        "units",
        "fixed",
        "requests",
        "links",
        "tasks",
        "claim",
        "bound",
    ];
    only(certificate, "it", &top)?;
    each(certificate, "models", &["name", "fingerprint", "granularity"])?;
    each(certificate, "fixed", &["model", "operator", "unit"])?;
    each(certificate, "requests", &["model", "item", "request", "arrival_ms", "weight"])?;
    each(certificate, "links", &["from", "to"])?;
    for link in listed(certificate, "links") {
        for end in ["from", "to"] {
            only(&link[end], "an end of a link", &["model", "item", "tensor"])?;
        }
    }
    let task = ["unit", "model", "item", "iteration", "operators", "tensor", "from", "ms", "start_ms", "end_ms"];
    each(certificate, "tasks", &task)?;
    for (index, task) in listed(certificate, "tasks").iter().enumerate() {
        let (computes, moves) = (task.get("operators").is_some(), task.get("tensor").is_some());
        if computes == moves || computes && task.get("from").is_some() {
            return Err(
                CERTIFICATE.fail(format!("task {index} is to compute operators or to move a tensor, one of both"))
            );
        }
    }
    only(&certificate["claim"], "the claim", &["rule", "value", "simulated_ms"])?;
    let method = text(certificate, "method").unwrap_or_default();
    let known =
        OF_ONE.contains(&method) || OF_TWO.contains(&method) || method == OF_ANY || method.starts_with("single:");
    if !known {
        return Err(CERTIFICATE.fail(format!("there is no planning method `{method}`")));
    }
    let bound = &certificate["bound"];
    if bound.is_null() {
        return Ok(());
    }
    only(bound, "the bound", &["costs", "value", "proofs"])?;
    for proof in listed(bound, "proofs") {
        let kind = text(proof, "kind").unwrap_or_default();
        let witness: &[&str] = match kind {
            "paper-sequential" => &["potentials"],
            "chain" => &["potentials", "memory"],
            "serial" => &["memory"],
            "path" => &["model", "potentials", "cuts", "tail", "memory"],
            "workload-path" | "completions" => &["executions", "memory"],
            "load" => &["weights", "memory"],
            "placements" => &["weights"],
            "priced-load" => &["weights", "payments", "memory"],
            "energy" => &["payments", "memory"],
            "search" => &[],
            _ => return Err(CERTIFICATE.fail(format!("bound proof `{kind}`"))),
        };
        only(proof, &format!("proof `{kind}`"), &[&["kind", "value"], witness].concat())?;
        each(proof, "cuts", &["operator", "weights"])?;
        each(proof, "executions", &["model", "item", "iteration", "potentials"])?;
        each(proof, "payments", &["model", "tensor", "reader", "paid"])?;
    }
    Ok(())
}

fn listed<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value.get(key).and_then(Value::as_array).map_or(&[], Vec::as_slice)
}

fn only(value: &Value, what: &str, known: &[&str]) -> Result<(), CheckError> {
    let Some(object) = value.as_object() else { return Err(CERTIFICATE.fail(format!("{what} is no object"))) };
    match object.keys().find(|key| !known.contains(&key.as_str())) {
        Some(odd) => Err(CERTIFICATE.fail(format!("{what} has a field `{odd}`, which certificates do not have"))),
        None => Ok(()),
    }
}

fn each(value: &Value, key: &str, known: &[&str]) -> Result<(), CheckError> {
    if value.get(key).is_some_and(|list| !list.is_array()) {
        return Err(CERTIFICATE.fail(format!("`{key}` is no list")));
    }
    listed(value, key).iter().enumerate().try_for_each(|(at, item)| only(item, &format!("{key}[{at}]"), known))
}

/// Prices by unit name units that there are, and are numbers: two by class of work in `priced-load` and `placements`, else one.
pub fn unit_names(certificate: &Value, machine: &Machine) -> Result<(), CheckError> {
    let check = |prices: &Value, classes: Option<usize>| match prices.as_object() {
        Some(prices) => prices.iter().try_for_each(|(name, price)| {
            if machine.units.iter().all(|unit| unit.address != *name) {
                return Err(
                    CERTIFICATE.fail(format!("a proof states a price of `{name}`, which is not among the units"))
                );
            }
            let fits = match (classes, price) {
                (Some(count), Value::Array(list)) => list.len() == count && list.iter().all(Value::is_number),
                (classes, price) => classes.is_none() && price.is_number(),
            };
            let wanted = classes.map_or("a number".to_owned(), |count| format!("a list of {count} numbers"));
            if fits { Ok(()) } else { Err(CERTIFICATE.fail(format!("the price of `{name}` is {price}, not {wanted}"))) }
        }),
        None => Ok(()),
    };
    for proof in listed(&certificate["bound"], "proofs") {
        let by_class = matches!(text(proof, "kind"), Some("priced-load" | "placements"));
        check(&proof["weights"], by_class.then_some(2))?;
        ["tail", "memory"].iter().try_for_each(|key| check(&proof[*key], None))?;
        listed(proof, "cuts").iter().try_for_each(|cut| check(&cut["weights"], None))?;
    }
    Ok(())
}

/// The models' names are the profiles', and no operator is pinned to two units.
pub fn models(certificate: &Value, found: &[(&Value, &Value)]) -> Result<(), CheckError> {
    for (named, (_, graph)) in listed(certificate, "models").iter().zip(found) {
        if named["name"] != graph["model"] {
            let (named, known) = (&named["name"], &graph["model"]);
            return Err(CheckError::OtherProfile(format!(
                "the certificate calls the model {named}, the profile {known}"
            )));
        }
    }
    let mut pinned = BTreeMap::new();
    for fixed in listed(certificate, "fixed") {
        let of = (fixed["model"].as_u64(), fixed["operator"].as_u64());
        if pinned.insert(of, &fixed["unit"]).is_some() {
            return Err(
                CERTIFICATE.fail(format!("operator {} of model {} is fixed twice", fixed["operator"], fixed["model"]))
            );
        }
    }
    Ok(())
}

/// The method can have made such a plan for such an objective, which the claim's rule is for.
pub fn method(certificate: &Value, machine: &Machine, schedule: &Schedule) -> Result<(), CheckError> {
    let method = text(certificate, "method").unwrap_or_default();
    let objective = text(certificate, "objective").unwrap_or_default();
    let rule = text(&certificate["claim"], "rule").unwrap_or_default();
    let single = method.strip_prefix("single:");
    let rules: &[&str] = match objective {
        "latency" => &["makespan", "busy-sum", "weighted-completion", "paper-sequential"],
        "energy" => &["energy", "busy-sum", "paper-sequential", "makespan"],
        "throughput" => &["period"],
        _ => return Err(CERTIFICATE.fail(format!("there is no objective `{objective}`"))),
    };
    if !rules.contains(&rule) {
        return Err(CERTIFICATE.fail(format!("claim rule `{rule}` is not for the objective `{objective}`")));
    }
    if let (None, Some(mode)) = (single, machine.units.iter().find(|unit| unit.is_mode)) {
        return Err(CheckError::Claim(format!(
            "method `{method}` has no costs to plan with on {}, on which only whole models were measured",
            mode.address
        )));
    }
    let serial = matches!(method, "interval" | "imported") || single.is_some();
    let fits = match rule {
        "paper-sequential" => method == "sequential",
        "busy-sum" => serial,
        "period" => matches!(method, "pipeline" | "imported") || method == OF_ANY,
        "weighted-completion" => method == OF_ANY,
        _ => method != "sequential" && method != "pipeline" && !serial,
    };
    if !fits {
        return Err(CheckError::Claim(format!("method `{method}` makes no claim by rule `{rule}`")));
    }
    let models = listed(certificate, "models").len();
    let executions = schedule.computed_by.len();
    if OF_TWO.contains(&method) && models != 2 {
        return Err(CheckError::Claim(format!("method `{method}` plans two models, not {models}")));
    }
    if method != OF_ANY && executions > models || (OF_ONE.contains(&method) || single.is_some()) && models != 1 {
        return Err(CheckError::Claim(format!(
            "method `{method}` plans no {models} models that are executed {executions} times"
        )));
    }
    if let Some(unit) = single {
        let elsewhere = |task: &crate::schedule::Task| {
            matches!(task.work, Work::Compute(_)) && machine.units[task.unit].address != unit
        };
        if schedule.tasks.iter().any(elsewhere) || machine.units.iter().all(|known| known.address != unit) {
            return Err(CheckError::Claim(format!(
                "method `{method}` puts everything on {unit}, and this plan does not"
            )));
        }
    }
    Ok(())
}

/// Requests and tasks are of the same items; what is complete together arrives together and weighs the same; weights are stated
/// where they count.
pub fn requests(certificate: &Value, schedule: &Schedule) -> Result<(), CheckError> {
    let weighted = text(&certificate["claim"], "rule") == Some("weighted-completion");
    let executed: BTreeSet<(usize, u64)> = schedule.computed_by.keys().map(|of| (of.0, of.1)).collect();
    for (index, task) in schedule.tasks.iter().enumerate() {
        if !schedule.computed_by.contains_key(&task.of) {
            let (model, item, iteration) = task.of;
            return Err(CheckError::Schedule(format!(
                "task {index} is of repetition {iteration} of item {item} of model {model}, which computes nothing"
            )));
        }
    }
    let stated = listed(certificate, "requests");
    if stated.is_empty() && weighted {
        return Err(CERTIFICATE.fail("it states no requests, whose completions the claim weighs"));
    }
    if stated.is_empty() {
        return unasked(text(certificate, "method").unwrap_or_default(), &executed);
    }
    let mut seen = BTreeSet::new();
    let mut together: BTreeMap<u64, (f64, f64)> = BTreeMap::new();
    for (at, request) in stated.iter().enumerate() {
        let of = (CERTIFICATE.count(request, "model")? as usize, CERTIFICATE.count(request, "item")?);
        if !seen.insert(of) {
            return Err(CERTIFICATE.fail(format!("item {} of model {} is requested twice", of.1, of.0)));
        }
        let weight = match request.get("weight") {
            Some(_) if weighted => CERTIFICATE.number(request, "weight")?,
            None if !weighted => 1.0,
            Some(_) => {
                return Err(
                    CERTIFICATE.fail(format!("requests[{at}] states a weight, which this claim does not count"))
                );
            }
            None => return Err(CERTIFICATE.fail(format!("requests[{at}] states no weight, which this claim counts"))),
        };
        let own = (CERTIFICATE.number(request, "arrival_ms")?, weight);
        let number = CERTIFICATE.count(request, "request")?;
        let known = together.entry(number).or_insert(own);
        if !close(known.0, own.0) || !close(known.1, own.1) {
            return Err(CERTIFICATE.fail(format!("parts of request {number} arrive apart or weigh differently")));
        }
    }
    if let Some((gap, _)) = (0..).zip(together.keys()).find(|(place, number)| place != *number) {
        return Err(CERTIFICATE.fail(format!("request {gap} is missing: they are numbered from 0 without gaps")));
    }
    match executed.iter().find(|of| !seen.contains(of)) {
        Some((model, item)) => {
            Err(CheckError::Schedule(format!("item {item} of model {model} is executed but in no request")))
        }
        None => Ok(()),
    }
}

/// Without requests the items of a model are numbered from 0; planners of two requests number them by model.
fn unasked(method: &str, executed: &BTreeSet<(usize, u64)>) -> Result<(), CheckError> {
    let mut next: BTreeMap<usize, u64> = BTreeMap::new();
    for &(model, item) in executed {
        let expected = next.entry(model).or_insert(if OF_TWO.contains(&method) { model as u64 } else { 0 });
        if item != *expected {
            return Err(CheckError::Schedule(format!(
                "model {model} is executed as item {item}, but its next one is {expected}"
            )));
        }
        *expected += 1;
    }
    Ok(())
}
