//! Lower bounds, each checked by substituting its witness.

use crate::costs::Model;
use crate::json::{Reader, text};
use crate::machine::{Class, Machine};
use crate::schedule::{Schedule, Work};
use crate::{CheckError, close_above, priced, search};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const CERTIFICATE: Reader = Reader("certificate");

/// What all proofs need.
pub struct Ground<'a> {
    pub models: &'a [Model],
    pub machine: &'a Machine,
    per_ms: &'a [f64],
    schedule: &'a Schedule,
    /// Whether the bound is over plans of one task per operator, each at its isolated cost.
    pub operator_costs: bool,
    /// Whether units slow each other down: a stream's period counts no slowdown.
    pub contention: bool,
}

impl Ground<'_> {
    /// Least milliseconds that an operator can take on a unit, whoever runs beside it.
    fn fastest(&self, model: usize, operator: usize, unit: usize) -> f64 {
        let own = self.models[model].operators[operator].class;
        // The class of a larger segment is that of most of its time, which may be another.
        let classes = if self.operator_costs { vec![own] } else { vec![Class::Compute, Class::Memory] };
        let factor = classes.into_iter().map(|class| self.machine.least_factor(unit, class)).fold(1.0, f64::min);
        let least = self.least(model, operator, unit);
        if least.is_finite() { least * factor } else { f64::INFINITY }
    }

    /// Least milliseconds that a segment costs on a unit beyond the least of each of its operators; nothing where every
    /// operator is alone.
    fn begins(&self, number: usize, unit: usize) -> f64 {
        if self.operator_costs {
            return 0.0;
        }
        let least = |class| self.machine.least_factor(unit, class);
        self.models[number].least_start(unit) * least(Class::Compute).min(least(Class::Memory))
    }

    /// Least milliseconds to hand an operator's model outputs over from a unit.
    fn handover(&self, model: usize, operator: usize, unit: usize) -> f64 {
        let model = &self.models[model];
        let outputs = model.operators[operator].outputs.iter().filter(|&&tensor| model.tensors[tensor].is_output);
        let ms: f64 = outputs.map(|&tensor| model.host_transfer(tensor, unit, self.machine, true)).sum();
        ms * self.machine.least_factor(unit, Class::Memory)
    }

    /// Least milliseconds for some operators' work: each at the price that `weights` give its cheapest unit, where no set of
    /// units that can be busy at once may do more than 1 of priced work in a millisecond. Handing outputs over counts for the
    /// whole of a plan; before a cut it does not, since that may happen later.
    fn weighted(
        &self,
        number: usize,
        operators: std::ops::Range<usize>,
        weights: &Value,
        handovers: bool,
    ) -> Result<f64, CheckError> {
        let price: Vec<f64> =
            self.machine.units.iter().map(|unit| weights[&unit.address].as_f64().unwrap_or(0.0)).collect();
        if price.iter().any(|weight| !weight.is_finite() || *weight < 0.0) {
            return Err(CheckError::Bound("a load weight is no number that is not negative".to_owned()));
        }
        let rate = |unit: usize, set: &[usize]| {
            if self.contention { 1.0 / self.machine.least_beside(unit, set) } else { 1.0 }
        };
        let work = match self.machine.busy_sets() {
            Some(sets) => {
                let work = |set: &Vec<usize>| set.iter().map(|&unit| price[unit] * rate(unit, set)).sum::<f64>();
                sets.iter().map(work).fold(0.0, f64::max)
            }
            // All at once, each as fast as anything can make it.
            None => (0..self.units())
                .map(|unit| {
                    let least = |class| self.machine.least_factor(unit, class);
                    price[unit] / least(Class::Compute).min(least(Class::Memory))
                })
                .sum(),
        };
        if !close_above(1.0, work) {
            return Err(CheckError::Bound(format!("load weights let {work} of priced work be done in a millisecond")));
        }
        let model = &self.models[number];
        let least = |at: usize| {
            let prices = (0..self.units()).filter_map(|unit| {
                let outputs = model.operators[at].outputs.iter().filter(|&&tensor| model.tensors[tensor].is_output);
                let handed: f64 = outputs.map(|&tensor| model.host_transfer(tensor, unit, self.machine, true)).sum();
                let ms = self.least(number, at, unit) + if handovers { handed } else { 0.0 };
                ms.is_finite().then(|| ms * price[unit])
            });
            prices.reduce(f64::min).unwrap_or(0.0)
        };
        Ok(operators.map(least).sum())
    }

    /// Least milliseconds that an operator can add to a plan when it runs on the unit, undisturbed.
    pub fn least(&self, model: usize, operator: usize, unit: usize) -> f64 {
        let model = &self.models[model];
        if !model.possible(operator, unit) {
            return f64::INFINITY;
        }
        if self.operator_costs {
            model.alone(operator, unit).map_or(f64::INFINITY, |alone| alone.ms)
        } else {
            model.estimates[unit].least[operator]
        }
    }

    pub fn units(&self) -> usize {
        self.machine.units.len()
    }

    /// How often each model is executed.
    pub fn executions(&self, model: usize) -> f64 {
        self.schedule.computed_by.keys().filter(|of| of.0 == model).count() as f64
    }

    /// How many items of a model there are; an item may repeat it.
    pub fn items(&self, model: usize) -> f64 {
        let items = self.schedule.computed_by.keys().filter(|of| of.0 == model).map(|of| of.1);
        items.collect::<BTreeSet<_>>().len() as f64
    }
}

/// The best proven bound and the proofs' kinds.
pub fn verify(
    certificate: &Value,
    models: &[Model],
    machine: &Machine,
    per_ms: &[f64],
    schedule: &Schedule,
) -> Result<(Option<f64>, Vec<String>), CheckError> {
    let bound = certificate.get("bound").unwrap_or(&Value::Null);
    if bound.is_null() {
        return Ok((None, Vec::new()));
    }
    let operator_costs = match text(bound, "costs") {
        Some("operators") => true,
        Some("segments") => false,
        costs => return Err(CERTIFICATE.fail(format!("bound costs {costs:?}"))),
    };
    let rule = text(&certificate["claim"], "rule").unwrap_or_default();
    let lone = |work: &Work| !matches!(work, Work::Compute(operators) if operators.len() > 1);
    if operator_costs && rule != "paper-sequential" && !schedule.tasks.iter().all(|task| lone(&task.work)) {
        return Err(CheckError::Bound("it is over lone operators, but the schedule has larger segments".to_owned()));
    }
    let ground = Ground { models, machine, per_ms, schedule, operator_costs, contention: rule != "period" };
    let (mut best, mut kinds) = (0.0f64, Vec::new());
    let mut makespan = 0.0f64;
    // Least time from arrival to completion, by model.
    let mut paths: BTreeMap<usize, f64> = BTreeMap::new();
    for proof in CERTIFICATE.list(bound, "proofs")? {
        let kind = text(proof, "kind").unwrap_or_default();
        // What a proof bounds must be what the claim counts.
        let serves: &[&str] = match kind {
            "paper-sequential" => &["paper-sequential"],
            "chain" | "serial" => &["busy-sum"],
            "path" | "load" if rule == "weighted-completion" => &["weighted-completion"],
            "path" => &["makespan", "energy"],
            "load" | "priced-load" => &["makespan", "energy", "period"],
            "energy" => &["energy"],
            "completions" => &["weighted-completion"],
            "search" => &["makespan"],
            _ => return Err(CERTIFICATE.fail(format!("bound proof `{kind}`"))),
        };
        if !serves.contains(&rule) {
            return Err(CheckError::Bound(format!("proof `{kind}` says nothing of a claim by rule `{rule}`")));
        }
        let proven = match kind {
            "paper-sequential" => paper_sequential(proof, &ground)?,
            "chain" => chain(proof, &ground)?,
            "serial" => serial(&ground),
            "path" => path(proof, &ground)?,
            "load" => load(proof, &ground)?,
            "priced-load" => priced::load(proof, &ground)?,
            "completions" => schedule.weighted_mean(|model, _| paths.get(&model).copied().unwrap_or(0.0)),
            "search" => search::verify(&ground, CERTIFICATE.number(proof, "value")?)?,
            _ => {
                let plain = energy(makespan, &ground);
                let idling = machine.idle_watts.unwrap_or(0.0) * makespan / 1e3;
                match proof.get("payments") {
                    Some(_) => plain.max(priced::energy(proof, &ground)? + idling),
                    None => plain,
                }
            }
        };
        let stated = CERTIFICATE.number(proof, "value")?;
        if !close_above(proven, stated) {
            return Err(CheckError::Bound(format!("proof `{kind}` gives {proven}, not {stated}")));
        }
        if matches!(kind, "path" | "load" | "priced-load") {
            makespan = makespan.max(stated);
        }
        if kind == "path" {
            let model = CERTIFICATE.index(proof, "model", models.len())?;
            let last = schedule.latest_arrival(model);
            paths.insert(model, (stated - last).max(0.0));
        }
        let counts = match rule {
            "energy" => kind == "energy",
            "weighted-completion" => kind == "completions",
            _ => true,
        };
        if counts {
            best = best.max(stated);
        }
        kinds.push(kind.to_owned());
    }
    let stated = CERTIFICATE.number(bound, "value")?;
    if !close_above(best, stated) {
        return Err(CheckError::Bound(format!("its proofs give {best}, not {stated}")));
    }
    Ok((Some(stated), kinds))
}

/// Plans that run segments one after another pay at least every operator's least cost.
fn serial(ground: &Ground<'_>) -> f64 {
    let mut total = 0.0;
    for (number, model) in ground.models.iter().enumerate() {
        let one: f64 = (0..model.operators.len())
            .map(|at| {
                let prices = (0..ground.units()).map(|unit| ground.least(number, at, unit) * ground.per_ms[unit]);
                prices.fold(f64::INFINITY, f64::min)
            })
            .filter(|least| least.is_finite())
            .sum();
        total += one * ground.executions(number);
    }
    total
}

/// `potentials[i][u]`: operator i on unit u ends no earlier. Checked edge by edge: an operator ends at its own least time
/// after the last of its inputs, which was made at its potential on some unit and brought over. A cut (an operator that comes
/// before or after every other one) moreover starts only after everything since the cut before, which takes at least its
/// weighted load.
fn path(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let machine = ground.machine;
    let number = CERTIFICATE.index(proof, "model", ground.models.len())?;
    let model = &ground.models[number];
    let (units, count) = (ground.units(), model.operators.len());
    let potentials = CERTIFICATE.rows(proof, "potentials", units)?;
    if potentials.len() != count {
        return Err(CERTIFICATE.fail("potentials of another number of operators"));
    }
    let listed = proof.get("cuts").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let tail = proof.get("tail").filter(|tail| !tail.is_null());
    if (!listed.is_empty() || tail.is_some()) && ground.executions(number) > 1.0 {
        return Err(CheckError::Bound("cuts split time only where the model is executed once".to_owned()));
    }
    let is_cut = cuts_of(model);
    let mut cuts: BTreeMap<usize, &Value> = BTreeMap::new();
    for cut in listed {
        let at = CERTIFICATE.index(cut, "operator", count)?;
        if !is_cut[at] {
            return Err(CheckError::Bound(format!("operator {at} is no cut: others run beside it")));
        }
        cuts.insert(at, cut.get("weights").unwrap_or(&Value::Null));
    }
    let begins: Vec<f64> = (0..units).map(|unit| ground.begins(number, unit)).collect();
    let least_end = |at: usize| potentials[at].iter().copied().fold(f64::INFINITY, f64::min);
    let (mut bound, mut before) = (0.0f64, None);
    for (at, row) in potentials.iter().enumerate() {
        let since = before.map_or((0, 0.0), |cut: usize| (cut + 1, least_end(cut)));
        let mut floor = 0.0;
        if let Some(weights) = cuts.get(&at) {
            if !weights.is_null() {
                floor = since.1 + ground.weighted(number, since.0..at, weights, false)?;
            }
            before = Some(at);
        }
        for (unit, &potential) in row.iter().enumerate() {
            let own = ground.fastest(number, at, unit);
            if own.is_infinite() {
                continue;
            }
            let factor = machine.least_factor(unit, Class::Memory);
            // A segment of which this is the first operator, or which reads something from elsewhere, begins later than that.
            let begins = begins[unit];
            let mut ready = if model.operators[at].inputs.is_empty() { floor + begins } else { floor };
            for &tensor in &model.operators[at].inputs {
                let edge = &model.tensors[tensor];
                let arrives = match edge.producer {
                    None => begins + factor * model.host_transfer(tensor, unit, machine, false),
                    Some(producer) => (0..units)
                        .filter(|&from| model.possible(producer, from))
                        .map(|from| {
                            let moved = factor * machine.transfer(from, unit, edge.bytes);
                            potentials[producer][from] + moved + if from == unit { 0.0 } else { begins }
                        })
                        .fold(f64::INFINITY, f64::min),
                };
                ready = ready.max(arrives);
            }
            if !close_above(ready + own, potential) {
                return Err(CheckError::Bound(format!(
                    "potential {potential} of operator {at} on {} is above {}",
                    machine.units[unit].address,
                    ready + own
                )));
            }
        }
        let least = (0..units)
            .filter(|&unit| ground.fastest(number, at, unit).is_finite())
            .map(|unit| row[unit] + ground.handover(number, at, unit))
            .fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            bound = bound.max(least);
        }
    }
    if let Some(weights) = tail {
        let since = before.map_or((0, 0.0), |cut| (cut + 1, least_end(cut)));
        bound = bound.max(since.1 + ground.weighted(number, since.0..count, weights, true)?);
    }
    Ok(bound + ground.schedule.latest_arrival(number))
}

/// Operators that come before or after every other one. Operators are in topological order, so one is a cut if everything
/// before it leads to something no later than it, and everything after it reads something no earlier.
fn cuts_of(model: &Model) -> Vec<bool> {
    let count = model.operators.len();
    let next = |at: usize| {
        let readers = model.operators[at].outputs.iter().flat_map(|&tensor| &model.tensors[tensor].consumers);
        readers.copied().min().unwrap_or(usize::MAX)
    };
    let last = |at: usize| {
        let made = model.operators[at].inputs.iter().filter_map(|&tensor| model.tensors[tensor].producer);
        made.max().map_or(0, |producer| producer + 1)
    };
    let mut is_cut = vec![true; count];
    let mut farthest = 0;
    for (at, cut) in is_cut.iter_mut().enumerate() {
        *cut = farthest <= at;
        farthest = farthest.max(next(at));
    }
    // One more than the operator, so that "reads nothing" is 0.
    let mut nearest = usize::MAX;
    for (at, cut) in is_cut.iter_mut().enumerate().rev() {
        *cut &= nearest > at;
        nearest = nearest.min(last(at));
    }
    is_cut
}

/// `weights`: a price of each unit's work. Whatever the placement, every operator adds at least its cheapest priced time, and
/// no millisecond gets more than 1 of that done.
fn load(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let weights = proof.get("weights").unwrap_or(&Value::Null);
    let mut total = 0.0;
    for (number, model) in ground.models.iter().enumerate() {
        // Repetitions of an item hand its outputs over once.
        let once = ground.executions(number) <= ground.items(number);
        total += ground.weighted(number, 0..model.operators.len(), weights, once)? * ground.executions(number);
    }
    Ok(total)
}

/// Idle power for as long as the proven makespan, plus every operator's least energy above idle.
fn energy(makespan: f64, ground: &Ground<'_>) -> f64 {
    let idle = ground.machine.idle_watts.unwrap_or(0.0);
    let above = |unit: usize| f64::max(ground.machine.units[unit].watts.unwrap_or(0.0) - idle, 0.0) / 1e3;
    let mut total = idle * makespan / 1e3;
    for (number, model) in ground.models.iter().enumerate() {
        let least = |at: usize| {
            let joules = (0..ground.units()).filter_map(|unit| {
                let ms = ground.fastest(number, at, unit);
                ms.is_finite().then(|| ms * above(unit))
            });
            joules.reduce(f64::min).unwrap_or(0.0)
        };
        total += (0..model.operators.len()).map(least).sum::<f64>() * ground.executions(number);
    }
    total
}

/// BIDENT's terms of one operator on one unit, in the objective's unit: `w`, H2D and D2H.
fn paper_terms(model: &Model, machine: &Machine, per_ms: &[f64], at: usize, unit: usize) -> (f64, f64, f64) {
    let price = per_ms[unit];
    let fits = machine.units[unit].memory_bytes.is_none_or(|most| model.operators[at].weight_bytes <= most);
    let alone = model.alone(at, unit).filter(|_| fits && model.allowed(at, unit));
    let work = alone.map_or(f64::INFINITY, |alone| alone.ms * price);
    if !machine.units[unit].accelerator {
        return (work, 0.0, 0.0);
    }
    let host = machine.units.iter().position(|unit| !unit.accelerator);
    let operator = &model.operators[at];
    let moved = |tensors: &[usize], outward: bool| -> f64 {
        let one = |bytes: f64| match host {
            Some(host) if outward => machine.transfer(unit, host, bytes),
            Some(host) => machine.transfer(host, unit, bytes),
            // Accelerators only: the measured transfer covers both ends and is charged at the entry.
            None if outward || machine.units.len() == 1 => 0.0,
            None => (0..machine.units.len())
                .filter(|&other| other != unit)
                .map(|other| machine.transfer(other, unit, bytes))
                .fold(f64::INFINITY, f64::min),
        };
        tensors.iter().map(|&tensor| one(model.tensors[tensor].bytes)).sum()
    };
    let h2d = alone.and_then(|alone| alone.h2d).unwrap_or_else(|| moved(&operator.inputs, false));
    let d2h = alone.and_then(|alone| alone.d2h).unwrap_or_else(|| moved(&operator.outputs, true));
    (work, h2d * price, d2h * price)
}

/// BIDENT eq. 1 of one assignment.
pub fn paper_cost(model: &Model, machine: &Machine, per_ms: &[f64], assignment: &[usize]) -> f64 {
    let mut total = 0.0;
    let mut before: Option<(usize, f64)> = None;
    for (at, &unit) in assignment.iter().enumerate() {
        let (work, h2d, d2h) = paper_terms(model, machine, per_ms, at, unit);
        total += work;
        match before {
            None => total += h2d,
            Some((from, left)) if from != unit => total += left + h2d,
            Some(_) => {}
        }
        before = Some((unit, d2h));
    }
    total + before.map_or(0.0, |last| last.1)
}

/// `potentials[i][j]`: no path of the paper's graph reaches operator i on unit j for less.
fn paper_sequential(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let [model] = ground.models else { return Err(CERTIFICATE.fail("the paper's graph is of one model")) };
    let units = ground.units();
    let potentials = CERTIFICATE.rows(proof, "potentials", units)?;
    if potentials.len() != model.operators.len() {
        return Err(CERTIFICATE.fail("potentials of another number of operators"));
    }
    let mut left: Vec<f64> = Vec::new();
    for (at, row) in potentials.iter().enumerate() {
        let terms: Vec<_> =
            (0..units).map(|unit| paper_terms(model, ground.machine, ground.per_ms, at, unit)).collect();
        for (unit, &(work, h2d, _)) in terms.iter().enumerate() {
            let reached = match at {
                0 => h2d,
                _ => (0..units)
                    .map(|from| if from == unit { potentials[at - 1][from] } else { left[from] + h2d })
                    .fold(f64::INFINITY, f64::min),
            };
            if !close_above(reached + work, row[unit]) && (reached + work).is_finite() {
                return Err(CheckError::Bound(format!("potential of operator {at} on unit {unit} is too high")));
            }
        }
        left = (0..units)
            .map(|unit| if terms[unit].0.is_finite() { row[unit] + terms[unit].2 } else { f64::INFINITY })
            .collect();
    }
    Ok(left.into_iter().fold(f64::INFINITY, f64::min))
}

/// `potentials[b][u]`: operators before b are not done for less when the last segment was on unit u. A chain's segments
/// are intervals; a tensor made by the last operator of a segment is on its unit.
fn chain(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let [model] = ground.models else { return Err(CERTIFICATE.fail("the chain's graph is of one model")) };
    let (units, count, machine) = (ground.units(), model.operators.len(), ground.machine);
    for at in 1..count {
        let linked = model.operators[at].inputs.iter().any(|&tensor| model.tensors[tensor].producer == Some(at - 1));
        if !linked {
            return Err(CheckError::Bound(format!(
                "the model is no chain: operator {at} does not read its predecessor"
            )));
        }
    }
    let potentials = CERTIFICATE.rows(proof, "potentials", units)?;
    if potentials.len() != count + 1 {
        return Err(CERTIFICATE.fail("potentials of another number of operators"));
    }
    // Measured intervals by start; every other interval follows from prefix sums.
    let mut measured: Vec<BTreeMap<(usize, usize), f64>> = vec![BTreeMap::new(); units];
    for (unit, sets) in model.sets.iter().enumerate() {
        for (set, &ms) in sets {
            if set[set.len() - 1] + 1 - set[0] == set.len() {
                measured[unit].insert((set[0], set[set.len() - 1] + 1), ms);
            }
        }
    }
    for start in 0..count {
        for unit in 0..units {
            let price = ground.per_ms[unit];
            let estimate = &model.estimates[unit];
            let (mut shares, mut handed, mut broken, mut host) = (0.0, 0.0, false, 0.0);
            // Per source unit, tensors of the operator before that were brought along so far.
            let mut moved = vec![0.0; units];
            let mut seen: Vec<usize> = Vec::new();
            for end in start + 1..=count {
                let at = end - 1;
                if !model.allowed(at, unit) {
                    break;
                }
                broken |= model.alone(at, unit).is_none();
                shares += estimate.share[at];
                for &tensor in &model.operators[at].outputs {
                    if model.tensors[tensor].is_output {
                        handed += model.host_transfer(tensor, unit, machine, true);
                    }
                }
                for &tensor in &model.operators[at].inputs {
                    let edge = &model.tensors[tensor];
                    let fresh = !seen.contains(&tensor);
                    if fresh && start > 0 && edge.producer == Some(start - 1) {
                        seen.push(tensor);
                        for (from, sum) in moved.iter_mut().enumerate() {
                            *sum += machine.transfer(from, unit, edge.bytes);
                        }
                    } else if fresh && edge.producer.is_none() && edge.consumers.first() >= Some(&start) {
                        seen.push(tensor);
                        host += model.host_transfer(tensor, unit, machine, false);
                    }
                }
                let segment = match measured[unit].get(&(start, end)) {
                    Some(&ms) => ms,
                    None if broken => continue,
                    None if end == start + 1 => model.alone(at, unit).map_or(f64::INFINITY, |alone| alone.ms),
                    None => estimate.dispatch + shares,
                };
                let reached = if start == 0 {
                    0.0
                } else {
                    (0..units).map(|from| potentials[start][from] + moved[from] * price).fold(f64::INFINITY, f64::min)
                };
                let cost = reached + (segment + handed + host) * price;
                if cost.is_finite() && !close_above(cost, potentials[end][unit]) {
                    return Err(CheckError::Bound(format!(
                        "potential {} before operator {end} on unit {unit} is above {cost}",
                        potentials[end][unit]
                    )));
                }
            }
        }
    }
    Ok(potentials[count].iter().copied().fold(f64::INFINITY, f64::min))
}
