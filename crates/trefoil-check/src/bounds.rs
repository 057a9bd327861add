//! Lower bounds, each checked by substituting its witness.

use crate::costs::Model;
use crate::json::{Reader, text};
use crate::machine::{Class, Machine};
use crate::memory::Prices;
use crate::schedule::{Schedule, Work};
use crate::{CheckError, close_above, placements, priced, ranges, search, serial, workload};
use serde_json::Value;
use std::collections::BTreeMap;

const CERTIFICATE: Reader = Reader("certificate");

/// What all proofs need.
pub struct Ground<'a> {
    pub models: &'a [Model],
    pub machine: &'a Machine,
    pub per_ms: &'a [f64],
    pub schedule: &'a Schedule,
    /// Whether the bound is over plans of one task per operator, each at its cost as a segment of its own.
    pub operator_costs: bool,
    /// Whether units slow each other down: a stream's period counts no slowdown.
    pub contention: bool,
}

impl Ground<'_> {
    /// Least milliseconds that an operator can take on a unit, whoever runs beside it.
    pub fn fastest(&self, model: usize, operator: usize, unit: usize) -> f64 {
        let own = self.models[model].operators[operator].class;
        // The class of a larger segment is that of most of its time, which may be another.
        let classes = if self.operator_costs { vec![own] } else { vec![Class::Compute, Class::Memory] };
        let factor = classes.into_iter().map(|class| self.machine.least_factor(unit, class)).fold(1.0, f64::min);
        let least = self.least(model, operator, unit);
        if least.is_finite() { least * factor } else { f64::INFINITY }
    }

    /// Least milliseconds that a segment costs on a unit beyond the least of each of its operators; nothing where every
    /// operator is alone.
    pub fn begins(&self, number: usize, unit: usize) -> f64 {
        if self.operator_costs {
            return 0.0;
        }
        let least = |class| self.machine.least_factor(unit, class);
        self.models[number].least_start(unit) * least(Class::Compute).min(least(Class::Memory))
    }

    /// When an operator may start on a unit at the earliest: at the `floor`, and when the last of its inputs is there. `made` tells of
    /// one that an operator makes its model, the tensor there and the potentials of its maker; others are at the host from the
    /// `arrival` on. A segment of which this is the first operator, or which reads something from elsewhere, `begins` later than that.
    pub fn ready<'r>(
        &self,
        (number, at): (usize, usize),
        unit: usize,
        (floor, arrival): (f64, f64),
        begins: f64,
        made: impl Fn(usize) -> Option<(usize, usize, &'r [f64])>,
    ) -> f64 {
        let model = &self.models[number];
        let factor = self.machine.least_factor(unit, Class::Memory);
        let inputs = &model.operators[at].inputs;
        let arrives = |&tensor: &usize| match made(tensor) {
            None => arrival + begins + factor * model.host_transfer(tensor, unit, self.machine, false),
            Some((maker, made, potentials)) => {
                let maker = &self.models[maker];
                let from = |(from, end): (usize, &f64)| {
                    let moved = factor * maker.transfer(from, unit, maker.tensors[made].bytes);
                    end + moved + if from == unit { 0.0 } else { begins }
                };
                potentials.iter().enumerate().map(from).fold(f64::INFINITY, f64::min)
            }
        };
        let start = if inputs.is_empty() { floor + begins } else { floor };
        inputs.iter().map(arrives).fold(start, f64::max)
    }

    /// Least milliseconds to hand an operator's model outputs over from a unit.
    pub fn handover(&self, model: usize, operator: usize, unit: usize) -> f64 {
        let model = &self.models[model];
        let outputs = model.operators[operator].outputs.iter().filter(|&&tensor| model.tensors[tensor].is_output);
        let ms: f64 = outputs.map(|&tensor| model.host_transfer(tensor, unit, self.machine, true)).sum();
        ms * self.machine.least_factor(unit, Class::Memory)
    }

    /// Least milliseconds for some operators' work: each at the price that `weights` give its cheapest unit, where no set of
    /// units that can be busy at once may do more than 1 of priced work in a millisecond; and the charge of each operator on a unit
    /// beside its work. Handing outputs over counts for the
    /// whole of a plan; before a cut it does not, since that may happen later.
    fn weighted(
        &self,
        number: usize,
        operators: std::ops::Range<usize>,
        weights: &Value,
        handovers: bool,
        charge: &dyn Fn(usize, usize) -> f64,
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
                ms.is_finite().then(|| ms * price[unit] + charge(at, unit))
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
            model.lone(operator, unit).unwrap_or(f64::INFINITY)
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

    /// Whether every execution of a model brings its inputs and hands its outputs over: repetitions of an item share these,
    /// and links replace them.
    pub fn is_once(&self, model: usize) -> bool {
        self.schedule.links.is_empty() && self.schedule.computed_by.keys().all(|of| of.0 != model || of.2 == 0)
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
    // Least time from arrival to completion, by model and item, where that was proven of each.
    let mut ends: Option<BTreeMap<(usize, u64), f64>> = None;
    // Least time from arrival to completion, by model.
    let mut paths: BTreeMap<usize, f64> = BTreeMap::new();
    for proof in CERTIFICATE.list(bound, "proofs")? {
        let kind = text(proof, "kind").unwrap_or_default();
        // What a proof bounds must be what the claim counts.
        let serves: &[&str] = match kind {
            "paper-sequential" => &["paper-sequential"],
            "chain" | "serial" => &["busy-sum"],
            "path" | "workload-path" | "load" if rule == "weighted-completion" => &["weighted-completion"],
            "path" | "workload-path" | "placements" => &["makespan", "energy"],
            "load" | "priced-load" => &["makespan", "energy", "period"],
            "energy" => &["energy"],
            "completions" => &["weighted-completion"],
            "search" => &["makespan"],
            _ => return Err(CERTIFICATE.fail(format!("bound proof `{kind}`"))),
        };
        // Plans that run one segment after another take what they are busy, so what no plan takes less than bounds them too.
        let of_any = rule == "busy-sum"
            && text(certificate, "objective") == Some("latency")
            && matches!(kind, "path" | "load" | "priced-load" | "placements");
        if !serves.contains(&rule) && !of_any {
            return Err(CheckError::Bound(format!("proof `{kind}` says nothing of a claim by rule `{rule}`")));
        }
        let proven = match kind {
            "paper-sequential" => serial::paper_sequential(proof, &ground)?,
            "chain" => serial::chain(proof, &ground)?,
            "serial" => serial::every_operator(proof, &ground)?,
            "path" => path(proof, &ground)?,
            "workload-path" => {
                let (proven, completions) = workload::path(proof, &ground)?;
                ends = Some(completions);
                proven
            }
            "load" => load(proof, &ground)?,
            "priced-load" => priced::load(proof, &ground)?,
            "placements" => placements::verify(proof, &ground)?,
            "completions" if proof.get("memory").is_some() => workload::completions(proof, &ground)?,
            "completions" => schedule.weighted_mean(|model, item| match &ends {
                Some(ends) => ends.get(&(model, item)).copied().unwrap_or(0.0),
                None => paths.get(&model).copied().unwrap_or(0.0),
            }),
            "search" => search::verify(&ground, CERTIFICATE.number(proof, "value")?)?,
            _ => {
                let plain = energy(makespan, &ground);
                let idling = machine.idle_watts.unwrap_or(0.0) * makespan / 1e3;
                let witnessed = proof.get("payments").is_some() || proof.get("memory").is_some();
                match priced::energy(proof, &ground) {
                    Ok(work) => plain.max(work + idling),
                    Err(error) if witnessed => return Err(error),
                    Err(_) => plain,
                }
            }
        };
        let stated = CERTIFICATE.number(proof, "value")?;
        ranges::witness(proof, stated, machine)?;
        if !proven.is_finite() || !close_above(proven, stated) {
            return Err(CheckError::Bound(format!("proof `{kind}` gives {proven}, not {stated}")));
        }
        if matches!(kind, "path" | "workload-path" | "load" | "priced-load" | "placements") {
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

/// `potentials[i][u]`: operator i on unit u ends no earlier. Checked edge by edge: an operator ends at its own least time
/// after the last of its inputs, which was made at its potential on some unit and brought over. A cut (an operator that comes
/// before or after every other one) moreover starts only after everything since the cut before, which takes at least its
/// weighted load.
fn path(proof: &Value, ground: &Ground<'_>) -> Result<f64, CheckError> {
    let machine = ground.machine;
    let number = CERTIFICATE.index(proof, "model", ground.models.len())?;
    let model = &ground.models[number];
    let (units, count) = (ground.units(), model.operators.len());
    if !ground.schedule.links.is_empty() {
        return Err(CheckError::Bound("the path of one model says nothing of linked stages".to_owned()));
    }
    let mut potentials = CERTIFICATE.rows(proof, "potentials", units)?;
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
    // Of one execution, which holds at most what all of them do.
    let memory = Prices::read(proof, ground)?;
    let charge = |operator: usize, unit: usize| memory.charge(model, operator, unit, 1.0);
    let least_end = |row: &[f64]| row.iter().copied().fold(f64::INFINITY, f64::min);
    let (mut bound, mut before) = (0.0f64, None);
    for at in 0..count {
        let since = before.map_or((0, 0.0), |cut: usize| (cut + 1, least_end(&potentials[cut])));
        let mut floor = 0.0;
        if let Some(weights) = cuts.get(&at) {
            if !weights.is_null() {
                floor = since.1 + ground.weighted(number, since.0..at, weights, false, &charge)?;
            }
            before = Some(at);
        }
        for unit in 0..units {
            let potential = potentials[at][unit];
            let own = ground.fastest(number, at, unit) + charge(at, unit);
            if own.is_infinite() {
                potentials[at][unit] = f64::INFINITY;
                continue;
            }
            let made = |tensor: usize| {
                let producer = model.tensors[tensor].producer?;
                Some((number, tensor, potentials[producer].as_slice()))
            };
            let ready = ground.ready((number, at), unit, (floor, 0.0), begins[unit], made);
            if !close_above(ready + own, potential) {
                return Err(CheckError::Bound(format!(
                    "potential {potential} of operator {at} on {} is above {}",
                    machine.units[unit].address,
                    ready + own
                )));
            }
            // What rounding may add must not add up.
            potentials[at][unit] = potential.min(ready + own);
        }
        let row = &potentials[at];
        let least = (0..units)
            .filter(|&unit| ground.fastest(number, at, unit).is_finite())
            .map(|unit| row[unit] + ground.handover(number, at, unit))
            .fold(f64::INFINITY, f64::min);
        if least.is_finite() {
            bound = bound.max(least);
        }
    }
    if let Some(weights) = tail {
        let since = before.map_or((0, 0.0), |cut| (cut + 1, least_end(&potentials[cut])));
        bound = bound.max(since.1 + ground.weighted(number, since.0..count, weights, true, &charge)?);
    }
    Ok(bound - memory.allowance(std::iter::once(model), ground) + ground.schedule.latest_arrival(number))
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
    let memory = Prices::read(proof, ground)?;
    let mut total = -memory.allowance(ground.models.iter(), ground);
    for (number, model) in ground.models.iter().enumerate() {
        let executions = ground.executions(number);
        let charge = |operator: usize, unit: usize| memory.charge(model, operator, unit, executions);
        // Repetitions of an item hand its outputs over once.
        let once = ground.is_once(number);
        total += ground.weighted(number, 0..model.operators.len(), weights, once, &charge)? * executions;
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
