//! What the profile says of a model: times of operators alone, of sets measured whole, and the documented estimate for the
//! rest, derived anew from the records.

use crate::CheckError;
use crate::json::{Reader, text};
use crate::machine::{Class, Machine, Transfers, key, newest, time};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const PROFILE: Reader = Reader("profile");

#[derive(Debug)]
pub struct Operator {
    pub inputs: Vec<usize>,
    pub outputs: Vec<usize>,
    pub signature: String,
    pub class: Class,
    pub weight_bytes: f64,
    /// Number of the model's nodes in it.
    pub nodes: usize,
}

#[derive(Debug)]
pub struct Tensor {
    pub bytes: f64,
    pub producer: Option<usize>,
    pub consumers: Vec<usize>,
    pub is_output: bool,
}

/// An operator alone on a unit.
#[derive(Debug, Clone, Copy)]
pub struct Alone {
    pub ms: f64,
    pub h2d: Option<f64>,
    pub d2h: Option<f64>,
}

/// The additive estimate of one unit (`docs/src/planning.md`): a segment costs one dispatch plus its operators' shares.
#[derive(Debug)]
pub struct Estimate {
    pub dispatch: f64,
    pub share: Vec<f64>,
    /// Least that an operator can add to any plan.
    pub least: Vec<f64>,
}

#[derive(Debug)]
pub struct Model {
    pub name: String,
    pub operators: Vec<Operator>,
    pub tensors: Vec<Tensor>,
    /// Row-major operators × units.
    pub alone: Vec<Option<Alone>>,
    /// Row-major operators × units: what each costs as a segment of its own.
    lone: Vec<Option<f64>>,
    /// Per unit: sets measured whole.
    pub sets: Vec<BTreeMap<Vec<usize>, f64>>,
    /// Per unit: sets that failed in one piece, or whose result is not known to be right.
    failed: Vec<Vec<Vec<usize>>>,
    pub estimates: Vec<Estimate>,
    /// The unit that each operator is pinned to.
    pub fixed: Vec<Option<usize>>,
    transfers: Transfers,
    /// Most bytes of weights on each unit, and most nodes of a segment that was not measured.
    memory: Vec<Option<f64>>,
    most_nodes: Vec<Option<f64>>,
    units: usize,
}

/// The profile of each model of a certificate: the one at the model's own place, if it holds the model, else the first that
/// does (several profiles may hold one model).
pub fn profiles_of<'p>(certificate: &Value, profiles: &'p [Value]) -> Result<Vec<(&'p Value, &'p Value)>, CheckError> {
    let named = Reader("certificate").list(certificate, "models")?;
    if profiles.is_empty() {
        return Err(PROFILE.fail("there is none"));
    }
    profiles.iter().try_for_each(|profile| PROFILE.list(profile, "models").map(|_| ()))?;
    named
        .iter()
        .enumerate()
        .map(|(index, named)| {
            let matches = |graph: &&Value| {
                graph["fingerprint"] == named["fingerprint"] && graph["granularity"] == named["granularity"]
            };
            let order = profiles.get(index).into_iter().chain(profiles);
            let mut found =
                order.filter_map(|profile| Some((profile, profile["models"].as_array()?.iter().find(matches)?)));
            found.next().ok_or_else(|| {
                CheckError::OtherProfile(format!("it has no model of fingerprint {}", named["fingerprint"]))
            })
        })
        .collect()
}

impl Model {
    pub fn read_all(
        certificate: &Value,
        found: &[(&Value, &Value)],
        machine: &Machine,
    ) -> Result<Vec<Self>, CheckError> {
        let reader = Reader("certificate");
        let mut models: Vec<Self> =
            found.iter().map(|(profile, graph)| Self::read(profile, graph, machine)).collect::<Result<_, _>>()?;
        for fixed in reader.list(certificate, "fixed")? {
            let model = reader.index(fixed, "model", models.len())?;
            let operator = reader.index(fixed, "operator", models[model].operators.len())?;
            models[model].fixed[operator] = Some(reader.index(fixed, "unit", machine.units.len())?);
        }
        Ok(models)
    }

    fn read(profile: &Value, graph: &Value, machine: &Machine) -> Result<Self, CheckError> {
        let (listed, tensors) = (PROFILE.list(graph, "operators")?, PROFILE.list(graph, "tensors")?);
        let outputs = PROFILE.indices(graph, "outputs", tensors.len())?;
        let operators: Vec<Operator> = listed
            .iter()
            .map(|operator| {
                Ok(Operator {
                    inputs: PROFILE.indices(operator, "inputs", tensors.len())?,
                    outputs: PROFILE.indices(operator, "outputs", tensors.len())?,
                    signature: text(operator, "signature").unwrap_or_default().to_owned(),
                    class: Class::read(text(operator, "class")),
                    // Looked at before: a whole number where it is stated.
                    weight_bytes: operator["weight_bytes"].as_f64().unwrap_or(0.0),
                    nodes: operator["nodes"].as_array().map_or(0, Vec::len),
                })
            })
            .collect::<Result<_, CheckError>>()?;
        let mut tensors: Vec<Tensor> = tensors
            .iter()
            .map(|tensor| {
                Ok(Tensor {
                    bytes: PROFILE.number(tensor, "bytes")?,
                    producer: None,
                    consumers: Vec::new(),
                    is_output: false,
                })
            })
            .collect::<Result<_, CheckError>>()?;
        // Who writes and who reads follows from the operators; what the tensors say of it is not used.
        for (at, operator) in operators.iter().enumerate() {
            for &tensor in &operator.outputs {
                tensors[tensor].producer = Some(at);
            }
        }
        for (at, operator) in operators.iter().enumerate() {
            for &tensor in &operator.inputs {
                if tensors[tensor].producer.is_some_and(|producer| producer >= at) {
                    return Err(PROFILE.fail(format!("operator {at} reads tensor {tensor} before it is written")));
                }
                tensors[tensor].consumers.push(at);
            }
        }
        for output in outputs {
            tensors[output].is_output = true;
        }
        let units = machine.units.len();
        let records = newest(profile)?;
        let mut model = Self {
            name: text(graph, "model").unwrap_or_default().to_owned(),
            fixed: vec![None; operators.len()],
            alone: Vec::new(),
            lone: Vec::new(),
            sets: vec![BTreeMap::new(); units],
            failed: vec![Vec::new(); units],
            estimates: Vec::new(),
            operators,
            tensors,
            transfers: Transfers::read(records.values().copied(), machine),
            memory: machine.units.iter().map(|unit| unit.memory_bytes).collect(),
            most_nodes: machine.units.iter().map(|unit| unit.max_nodes).collect(),
            units,
        };
        let mut nodes: Vec<Option<&Value>> = vec![None; units];
        let mut dispatch: Vec<Option<f64>> = vec![None; units];
        let mut wrong = vec![false; model.operators.len() * units];
        for (at, operator) in model.operators.iter().enumerate() {
            let subject = json!({ "kind": "operator", "signature": operator.signature });
            for (unit, described) in machine.units.iter().enumerate() {
                let record = records.get(&key(&subject, &json!([described.address])));
                let found = record.and_then(|record| time(record));
                model.alone.push(found.map(|(ms, h2d, d2h)| Alone { ms, h2d, d2h }));
                if let Some(record) = record {
                    wrong[at * units + unit] = text(&record["outcome"], "result") == Some("wrong");
                    if let Some(told) = record["outcome"]["timing"]["dispatch"]["median"].as_f64() {
                        dispatch[unit] = Some(dispatch[unit].map_or(told, |least| least.min(told)));
                    }
                }
            }
        }
        for record in records.values() {
            model.read_set(record, graph, machine, &wrong, &mut nodes);
        }
        model.lone = (0..model.operators.len() * units).map(|at| model.price_lone(at / units, at % units)).collect();
        for unit in 0..units {
            let estimate = model.estimate(unit, dispatch[unit], nodes[unit]);
            let numbers = || std::iter::once(&estimate.dispatch).chain(&estimate.share);
            if !numbers().all(|ms| ms.is_finite()) || estimate.least.iter().any(|least| least.is_nan()) {
                let address = &machine.units[unit].address;
                return Err(PROFILE.fail(format!("its times lead to no estimate on {address}")));
            }
            model.estimates.push(estimate);
        }
        Ok(model)
    }

    fn read_set<'a>(
        &mut self,
        record: &'a Value,
        graph: &Value,
        machine: &Machine,
        wrong: &[bool],
        nodes: &mut [Option<&'a Value>],
    ) {
        let subject = &record["subject"];
        let (whole, operators) = match text(subject, "kind") {
            Some("whole-model") => (true, (0..self.operators.len()).collect::<Vec<_>>()),
            Some("segment") if subject["granularity"] == graph["granularity"] => {
                let listed: Option<Vec<usize>> = subject["operators"]
                    .as_array()
                    .and_then(|list| list.iter().map(|id| id.as_u64().map(|id| id as usize)).collect());
                (false, listed.unwrap_or_default())
            }
            _ => return,
        };
        let [address] = record["units"].as_array().map_or(&[][..], Vec::as_slice) else { return };
        let Some(unit) = machine.units.iter().position(|unit| *address == *unit.address) else { return };
        if subject["model"] != graph["fingerprint"]
            || operators.is_empty()
            || operators.iter().any(|&at| at >= self.operators.len())
        {
            return;
        }
        // A result that was compared with nothing counts for little when it holds an operator that is wrong alone.
        let unchecked = record["outcome"]["error_to_peak"].is_null();
        let known = time(record).filter(|_| !unchecked || !operators.iter().any(|&at| wrong[at * self.units + unit]));
        if known.is_none() && operators.len() > 1 {
            self.failed[unit].push(operators);
        } else if let Some((ms, ..)) = known {
            // The whole-model record stands before a segment of all operators.
            if whole || !self.sets[unit].contains_key(&operators) {
                self.sets[unit].insert(operators, ms);
            }
            if whole {
                nodes[unit] = Some(&record["outcome"]["nodes"]);
            }
        }
    }

    pub fn alone(&self, operator: usize, unit: usize) -> Option<&Alone> {
        self.alone[operator * self.units + unit].as_ref()
    }

    /// Milliseconds of the operator as a segment of its own: as measured in one piece, else as an operator. Pins and memory are
    /// not asked.
    pub fn lone(&self, operator: usize, unit: usize) -> Option<f64> {
        self.lone[operator * self.units + unit]
    }

    fn price_lone(&self, operator: usize, unit: usize) -> Option<f64> {
        let whole = self.sets[unit].get([operator].as_slice()).copied();
        whole.or_else(|| {
            self.alone(operator, unit).filter(|_| !self.is_too_much(&[operator], unit)).map(|alone| alone.ms)
        })
    }

    /// Whether pins leave the operator free to run on the unit.
    pub fn allowed(&self, operator: usize, unit: usize) -> bool {
        self.fixed[operator].is_none_or(|fixed| fixed == unit)
    }

    /// Milliseconds to bring bytes of a tensor that this model makes from one unit to another.
    pub fn transfer(&self, from: usize, to: usize, bytes: f64) -> f64 {
        self.transfers.ms(from, to, bytes)
    }

    /// Whether the operator may run on the unit in some plan, in any company.
    pub fn possible(&self, operator: usize, unit: usize) -> bool {
        self.allowed(operator, unit)
            && self.memory[unit].is_none_or(|most| self.operators[operator].weight_bytes <= most)
            && (self.alone(operator, unit).is_some()
                || self.sets[unit].keys().any(|set| set.binary_search(&operator).is_ok()))
    }

    /// Least milliseconds that any segment on a unit costs beyond the least of each of its operators: of single ones, of those
    /// measured whole, and (the dispatch) of those estimated.
    pub fn least_start(&self, unit: usize) -> f64 {
        let estimate = &self.estimates[unit];
        let alone = (0..self.operators.len()).filter_map(|at| Some(self.alone(at, unit)?.ms - estimate.least[at]));
        let whole = self.sets[unit].iter().map(|(set, ms)| ms - set.iter().map(|&at| estimate.least[at]).sum::<f64>());
        alone.chain(whole).fold(estimate.dispatch, f64::min).max(0.0)
    }

    /// Whether the operators from `start` to before `end` are too much.
    pub fn fails_from(&self, start: usize, end: usize, unit: usize) -> bool {
        if self.most_nodes[unit].is_none() && self.failed[unit].is_empty() {
            return false;
        }
        self.is_too_much(&(start..end).collect::<Vec<_>>(), unit)
    }

    /// Whether operators (ascending) are more in one piece than the unit takes: nodes, or what failed there. What was measured
    /// whole is not asked.
    pub fn is_too_much(&self, operators: &[usize], unit: usize) -> bool {
        let nodes: usize = operators.iter().map(|&at| self.operators[at].nodes).sum();
        let holds = |set: &Vec<usize>| set.iter().all(|at| operators.binary_search(at).is_ok());
        self.most_nodes[unit].is_some_and(|most| nodes as f64 > most) || self.failed[unit].iter().any(holds)
    }

    /// Cost of a set (ascending) on a unit, and whether it is an estimate; `None` where it cannot run.
    pub fn segment(&self, operators: &[usize], unit: usize) -> Option<(f64, bool)> {
        if operators.iter().any(|&at| !self.allowed(at, unit)) {
            return None;
        }
        if let [at] = operators {
            return self.lone(*at, unit).map(|ms| (ms, false));
        }
        if let Some(&ms) = self.sets[unit].get(operators) {
            return Some((ms, false));
        }
        if operators.iter().any(|&at| self.alone(at, unit).is_none()) {
            return None;
        }
        if self.is_too_much(operators, unit) {
            return None;
        }
        let estimate = &self.estimates[unit];
        Some((estimate.dispatch + operators.iter().map(|&at| estimate.share[at]).sum::<f64>(), true))
    }

    /// Milliseconds to bring a model input to an accelerator, or to hand a model output over, where its backend tells.
    pub fn host_transfer(&self, tensor: usize, unit: usize, machine: &Machine, outward: bool) -> f64 {
        if !machine.units[unit].accelerator {
            return 0.0;
        }
        let edge = &self.tensors[tensor];
        let share = |among: &[usize]| {
            let total: f64 = among.iter().map(|&other| self.tensors[other].bytes).sum();
            if total > 0.0 { edge.bytes / total } else { 1.0 / among.len().max(1) as f64 }
        };
        if outward {
            let Some(at) = edge.producer else { return 0.0 };
            let told = self.alone(at, unit).and_then(|alone| alone.d2h);
            return told.map_or(0.0, |ms| ms * share(&self.operators[at].outputs));
        }
        let told = edge.consumers.iter().find_map(|&at| Some((at, self.alone(at, unit)?.h2d?)));
        told.map_or(0.0, |(at, ms)| ms * share(&self.operators[at].inputs))
    }

    fn estimate(&self, unit: usize, told: Option<f64>, nodes: Option<&Value>) -> Estimate {
        let count = self.operators.len();
        let isolated: Vec<Option<f64>> = (0..count).map(|at| self.alone(at, unit).map(|alone| alone.ms)).collect();
        let known: Vec<f64> = isolated.iter().flatten().copied().collect();
        let smallest = known.iter().copied().fold(f64::INFINITY, f64::min);
        let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
        let dispatch = match told {
            _ if known.is_empty() => 0.0,
            Some(told) => told.min(smallest),
            None => smallest.min(0.25 * mean),
        };
        let alone: Vec<f64> =
            isolated.iter().map(|ms| ms.map_or(0.0, |ms| f64::max(ms - dispatch, 0.1 * ms))).collect();
        let base = nodes.and_then(|nodes| in_place(&alone, nodes)).unwrap_or(alone);
        let mut least: Vec<f64> = isolated.iter().map(|ms| ms.unwrap_or(f64::INFINITY)).collect();
        for (set, &ms) in self.sets[unit].iter().filter(|set| set.0.len() == 1) {
            least[set[0]] = least[set[0]].min(ms);
        }
        // From the largest set to the smallest: the last one written is the most local evidence.
        let mut sets: Vec<(&Vec<usize>, f64)> =
            self.sets[unit].iter().filter(|set| set.0.len() > 1).map(|(set, &ms)| (set, ms)).collect();
        sets.sort_by_key(|set| std::cmp::Reverse(set.0.len()));
        let mut ratio: Vec<Option<f64>> = vec![None; count];
        let mut smallest_ratio: Option<f64> = None;
        for (set, ms) in sets {
            let total: f64 = set.iter().map(|&at| base[at]).sum();
            let fitted = (total > 0.0).then(|| f64::max(ms - dispatch, 0.0) / total);
            if let Some(fitted) = fitted {
                smallest_ratio = Some(smallest_ratio.map_or(fitted, |least| least.min(fitted)));
            }
            for &at in set {
                least[at] = least[at].min(if total > 0.0 { ms * base[at] / total } else { 0.0 });
                ratio[at] = fitted.or(ratio[at]);
            }
        }
        let share: Vec<f64> = (0..count).map(|at| base[at] * ratio[at].or(smallest_ratio).unwrap_or(1.0)).collect();
        let finite = |(least, share): (&f64, &f64)| if least.is_finite() { least.min(*share) } else { *least };
        let least = least.iter().zip(&share).map(finite).collect();
        Estimate { dispatch, share, least }
    }
}

/// Shares from in-place node times, when at least half of the time was matched to operators.
fn in_place(alone: &[f64], nodes: &Value) -> Option<Vec<f64>> {
    let nodes: Vec<(f64, Vec<usize>)> = nodes
        .as_array()?
        .iter()
        .map(|node| {
            let listed = node["operators"].as_array().map_or(&[][..], Vec::as_slice);
            (
                node["ms"].as_f64().unwrap_or(0.0),
                listed.iter().filter_map(Value::as_u64).map(|at| at as usize).collect(),
            )
        })
        .collect();
    let total: f64 = nodes.iter().map(|node| node.0).sum();
    let matched: f64 = nodes.iter().filter(|node| !node.1.is_empty()).map(|node| node.0).sum();
    if total <= 0.0 || matched < 0.5 * total {
        return None;
    }
    let mut share = vec![0.0; alone.len()];
    let mut covered = vec![false; alone.len()];
    let mut spread = |members: &[usize], ms: f64| {
        let weight: f64 = members.iter().map(|&at| alone[at]).sum();
        for &at in members {
            share[at] += if weight > 0.0 { ms * alone[at] / weight } else { ms / members.len() as f64 };
        }
    };
    for (ms, operators) in &nodes {
        let members: Vec<usize> = operators.iter().copied().filter(|&at| at < alone.len()).collect();
        if !members.is_empty() {
            spread(&members, *ms);
            for at in members {
                covered[at] = true;
            }
        }
    }
    let rest: Vec<usize> = (0..alone.len()).filter(|&at| !covered[at]).collect();
    if !rest.is_empty() && total > matched {
        spread(&rest, total - matched);
    }
    Some(share)
}
