//! The one cost view that every planner, `explain` and the pricing of plans use.

mod price;

use crate::estimate::{MeasuredSet, UnitEstimate};
use crate::order::Dag;
use crate::{Pin, PlanError, PlanRequest};
use std::collections::{BTreeMap, HashMap};
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::ProfileIndex;
use trefoil_core::{
    CoreError, Cost, CostTable, Measurement, MeasurementId, Objective, OperatorGraph, OperatorId, Origin, Outcome,
    Subject, Unit, UnitAddress,
};

/// Cost of one segment on one unit, without transfers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct SegmentCost {
    pub ms: f64,
    /// Measured in one piece (or a lone operator, whose isolated measurement is just that).
    pub whole: bool,
    pub ids: Vec<MeasurementId>,
    pub origin: Origin,
}

/// A set of operators that was tried in one piece and failed or computed wrongly.
#[derive(Debug, Clone)]
pub(crate) struct FailedSet {
    /// Ascending.
    pub operators: Vec<OperatorId>,
    pub reason: String,
}

/// A profile seen by planners of one model: operator costs, transfers, segments measured whole, estimates for the rest,
/// pins, and the objective's price of a millisecond.
#[derive(Debug)]
pub(crate) struct CostView<'a> {
    pub graph: &'a OperatorGraph,
    pub index: ProfileIndex<'a>,
    pub objective: Objective,
    pub table: CostTable,
    /// The units, in the table's order.
    pub units: Vec<&'a Unit>,
    /// The objective's cost of one busy millisecond per unit: 1 for latency, joules for energy.
    pub per_ms: Vec<f64>,
    /// The pin that decides each operator, if any.
    pub pinned: Vec<Option<(usize, Pin)>>,
    pub estimates: Vec<UnitEstimate>,
    /// Per unit, sets measured whole.
    pub measured: Vec<BTreeMap<Vec<OperatorId>, &'a Measurement>>,
    /// Per unit, sets of two or more operators that failed.
    pub failed: Vec<Vec<FailedSet>>,
    pub dag: Dag,
    /// Per tensor, whether the model outputs it.
    pub is_output: Vec<bool>,
    /// The measured sets as calibration takes them, per unit.
    sets: Vec<Vec<(MeasuredSet, MeasurementId)>>,
    /// Row-major operators × units: the isolated measurement, run or failure.
    records: Vec<&'a Measurement>,
}

impl<'a> CostView<'a> {
    pub fn new(request: &PlanRequest<'a>) -> Result<Self, PlanError> {
        let (profile, graph) = (request.profile, request.graph);
        profile.validate()?;
        // The profile's own graphs have just been looked at.
        if !profile.models.iter().any(|model| std::ptr::eq(model, graph)) {
            graph.validate()?;
        }
        let known =
            |model: &OperatorGraph| model.fingerprint == graph.fingerprint && model.granularity == graph.granularity;
        if !profile.models.is_empty() && !profile.models.iter().any(known) {
            let have: Vec<String> = profile
                .models
                .iter()
                .map(|model| format!("`{}` ({}, {} operators)", model.model, model.fingerprint, model.granularity))
                .collect();
            return Err(CoreError::WrongModel {
                want: format!("{}` ({}, {} operators)", graph.model, graph.fingerprint, graph.granularity),
                have: have.join(", "),
            }
            .into());
        }
        let mut addresses: Vec<UnitAddress> = Vec::new();
        let asked = if request.units.is_empty() {
            profile.units.iter().map(|unit| unit.address.clone()).collect()
        } else {
            request.units.clone()
        };
        for address in asked {
            if !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        if addresses.is_empty() {
            return Err(PlanError::NoUnits);
        }
        if let Some(mode) = addresses.iter().find(|address| crate::whole::mode_at(profile, address).is_some()) {
            let what = "its operators have no costs to plan with".to_owned();
            return Err(PlanError::OnlyWhole { unit: mode.to_string(), what });
        }
        let units = addresses.iter().map(|address| profile.unit(address)).collect::<Result<Vec<_>, _>>()?;
        let index = profile.index();
        let table = CostTable::from_index(&index, &without_operators(graph), &addresses)?;
        let per_ms = prices(request.objective, &table)?;
        let mut view = Self {
            graph,
            objective: request.objective,
            units,
            per_ms,
            pinned: vec![None; graph.len()],
            estimates: Vec::new(),
            measured: vec![BTreeMap::new(); addresses.len()],
            failed: vec![Vec::new(); addresses.len()],
            dag: Dag::new(graph),
            sets: vec![Vec::new(); addresses.len()],
            is_output: vec![false; graph.tensors.len()],
            records: Vec::new(),
            table,
            index,
        };
        for output in &graph.outputs {
            view.is_output[output.index()] = true;
        }
        view.read_operators()?;
        view.read_segments();
        view.require_placeable()?;
        view.fit();
        view.apply_pins(&request.pins)?;
        Ok(view)
    }

    pub fn unit_count(&self) -> usize {
        self.units.len()
    }

    pub fn unit_index(&self, address: &UnitAddress) -> Option<usize> {
        self.table.units.iter().position(|unit| unit == address)
    }

    /// Looks up every operator alone on every unit. One pass over the records: networks have many operators of few
    /// signatures, and a look-up each by text would be most of planning.
    fn read_operators(&mut self) -> Result<(), PlanError> {
        let units = self.unit_count();
        let mut numbers: HashMap<&str, usize> = HashMap::with_capacity(self.graph.len());
        let number: Vec<usize> = self
            .graph
            .operators
            .iter()
            .map(|operator| {
                let next = numbers.len();
                *numbers.entry(&operator.signature.0).or_insert(next)
            })
            .collect();
        let mut newest: Vec<Option<&'a Measurement>> = vec![None; numbers.len() * units];
        for record in &self.index.profile.measurements {
            if let (Subject::Operator { signature }, [address]) = (&record.subject, record.units.as_slice())
                && let Some(number) = numbers.get(signature.0.as_str())
                && let Some(unit) = self.table.units.iter().position(|unit| unit == address)
            {
                newest[number * units + unit] = Some(record);
            }
        }
        self.records.reserve(self.graph.len() * units);
        self.table.costs.reserve(self.graph.len() * units);
        for (row, operator) in self.graph.operators.iter().enumerate() {
            for unit in 0..units {
                let record = newest[number[row] * units + unit].ok_or_else(|| {
                    let subject = Subject::Operator { signature: operator.signature.clone() };
                    let address = &self.table.units[unit];
                    CoreError::MissingMeasurement {
                        id: MeasurementId::new(&subject, std::slice::from_ref(address), 0).0,
                        operator: row as u32,
                        name: operator.name.clone(),
                        kind: operator.kind.clone(),
                        unit: address.to_string(),
                    }
                })?;
                self.records.push(record);
                self.table.costs.push(measurement_cost(record));
            }
        }
        Ok(())
    }

    /// Fails on the first operator that no unit runs, neither alone nor inside a set that was measured whole.
    fn require_placeable(&self) -> Result<(), PlanError> {
        let units = self.unit_count();
        let lost = self.graph.ids().find(|&id| {
            let inside = |unit: usize| self.measured[unit].keys().any(|set| set.binary_search(&id).is_ok());
            (0..units).all(|unit| self.table.cost(id, unit).is_none() && !inside(unit))
        });
        let Some(id) = lost else { return Ok(()) };
        let operator = self.graph.operator(id);
        let reasons: Vec<String> =
            (0..units).map(|unit| format!("{}: {}", self.table.units[unit], self.why_absent(id, unit))).collect();
        Err(CoreError::Unplaceable {
            operator: id.0,
            name: operator.name.clone(),
            kind: operator.kind.clone(),
            reasons: reasons.join("; "),
        }
        .into())
    }

    /// Sorts whole-model and segment measurements of this model into runs and failures.
    fn read_segments(&mut self) {
        let everything: Vec<OperatorId> = self.graph.ids().collect();
        if everything.is_empty() {
            return;
        }
        let (graph, table) = (self.graph, &self.table);
        let whole = |subject: &Subject| matches!(subject, Subject::WholeModel { .. } | Subject::Segment { .. });
        let newest: Vec<&'a Measurement> = self.index.newest_of(whole).collect();
        for measurement in newest {
            let [address] = measurement.units.as_slice() else { continue };
            let Some(unit) = table.units.iter().position(|unit| unit == address) else { continue };
            let operators = match &measurement.subject {
                Subject::WholeModel { model } if *model == graph.fingerprint => everything.clone(),
                Subject::Segment { model, granularity, operators }
                    if *model == graph.fingerprint && *granularity == graph.granularity =>
                {
                    // A whole-model record, being the more direct one, stands before a segment of all operators.
                    if *operators == everything && self.measured[unit].contains_key(operators) {
                        continue;
                    }
                    operators.clone()
                }
                _ => continue,
            };
            if operators.is_empty() || operators.iter().any(|id| id.index() >= graph.len()) {
                continue;
            }
            let unchecked = matches!(&measurement.outcome, Outcome::Ok { error_to_peak: None, .. });
            let wrong_alone = operators.iter().find(|id| unchecked && self.is_wrong_alone(**id, unit));
            match (measurement_cost(measurement), wrong_alone) {
                (Some(_), None) => {
                    self.measured[unit].insert(operators, measurement);
                }
                (cost, wrong) => {
                    let reason = match (cost, wrong) {
                        (Some(_), Some(id)) => format!(
                            "its result was compared with nothing and it holds operator {id} `{}`, which computes wrongly alone",
                            graph.operator(*id).name
                        ),
                        _ => measurement.failure().unwrap_or_else(|| "it ran but no time was recorded".to_owned()),
                    };
                    if let [id] = operators.as_slice() {
                        // A lone operator's isolated record decides; keep a contradicting one from being used.
                        self.measured[unit].remove(&vec![*id]);
                    } else {
                        self.failed[unit].push(FailedSet { operators, reason });
                    }
                }
            }
        }
    }

    fn is_wrong_alone(&self, id: OperatorId, unit: usize) -> bool {
        matches!(self.operator_record(id, unit).outcome, Outcome::Wrong { .. })
    }

    pub fn operator_record(&self, id: OperatorId, unit: usize) -> &'a Measurement {
        self.records[id.index() * self.unit_count() + unit]
    }

    /// Builds each unit's estimate from isolated and in-situ times and fits it to what was measured whole.
    fn fit(&mut self) {
        for unit in 0..self.unit_count() {
            let dispatch = self
                .graph
                .ids()
                .filter_map(|id| match &self.operator_record(id, unit).outcome {
                    Outcome::Ok { timing, .. } => timing.dispatch.map(|samples| samples.median),
                    _ => None,
                })
                .reduce(f64::min);
            let everything: Vec<OperatorId> = self.graph.ids().collect();
            let nodes = match self.measured[unit].get(&everything).map(|whole| &whole.outcome) {
                Some(Outcome::Ok { nodes, .. }) => nodes.as_slice(),
                _ => &[],
            };
            let mut estimate = UnitEstimate::new(self.graph, &self.table, unit, dispatch, nodes);
            let sets: Vec<(MeasuredSet, MeasurementId)> = self.measured[unit]
                .iter()
                .filter_map(|(operators, record)| {
                    let ms = measurement_cost(record)?.ms;
                    Some((MeasuredSet { operators: operators.clone(), ms }, record.id.clone()))
                })
                .collect();
            let plain: Vec<MeasuredSet> = sets.iter().map(|(set, _)| set.clone()).collect();
            estimate.calibrate(&plain, &self.isolated(unit));
            self.estimates.push(estimate);
            self.sets[unit] = sets;
        }
    }

    /// Isolated milliseconds of every operator on a unit.
    pub fn isolated(&self, unit: usize) -> Vec<Option<f64>> {
        self.graph.ids().map(|id| self.table.cost(id, unit).map(|cost| cost.ms)).collect()
    }

    fn apply_pins(&mut self, pins: &[Pin]) -> Result<(), PlanError> {
        for pin in pins {
            let unit = self
                .unit_index(&pin.unit)
                .ok_or_else(|| PlanError::PinUnit { pin: pin.to_string(), have: self.unit_names() })?;
            let mut matches = false;
            for id in self.graph.ids() {
                if !pin.matches(self.graph.operator(id)) {
                    continue;
                }
                matches = true;
                if let Some((other, earlier)) = &self.pinned[id.index()]
                    && *other != unit
                {
                    return Err(PlanError::PinConflict {
                        pins: format!("`{earlier}` and `{pin}`"),
                        operator: id.0,
                        name: self.graph.operator(id).name.clone(),
                        kind: self.graph.operator(id).kind.clone(),
                    });
                }
                self.pinned[id.index()] = Some((unit, pin.clone()));
            }
            if !matches {
                return Err(PlanError::PinMatchesNothing { pin: pin.to_string(), model: self.graph.model.clone() });
            }
        }
        for id in self.graph.ids() {
            if let Some((unit, pin)) = &self.pinned[id.index()]
                && self.table.cost(id, *unit).is_none()
                && !self.measured[*unit].keys().any(|set| set.binary_search(&id).is_ok())
            {
                let operator = self.graph.operator(id);
                return Err(PlanError::PinImpossible {
                    pin: pin.to_string(),
                    operator: id.0,
                    name: operator.name.clone(),
                    kind: operator.kind.clone(),
                    reason: self.why_absent(id, *unit),
                });
            }
        }
        Ok(())
    }

    /// Whether pins leave the operator free to run on the unit.
    pub fn allowed(&self, id: OperatorId, unit: usize) -> bool {
        self.pinned[id.index()].as_ref().is_none_or(|(pinned, _)| *pinned == unit)
    }

    /// Whether the operator may run on the unit in some plan, alone or inside a set measured whole.
    pub fn possible(&self, id: OperatorId, unit: usize) -> bool {
        self.allowed(id, unit) && self.fits(id, unit) && self.estimates[unit].least[id.index()].is_finite()
    }

    /// Whether the unit's memory holds the operator's weights.
    fn fits(&self, id: OperatorId, unit: usize) -> bool {
        self.units[unit].limits.memory_bytes.is_none_or(|most| self.graph.operator(id).weight_bytes <= most)
    }

    /// Why [`Self::possible`] is not so.
    pub fn why_impossible(&self, id: OperatorId, unit: usize) -> String {
        match self.units[unit].limits.memory_bytes {
            Some(most) if !self.fits(id, unit) => {
                let bytes = self.graph.operator(id).weight_bytes;
                format!("its weights take {bytes} bytes of a memory of {most}")
            }
            _ if !self.allowed(id, unit) => "it is pinned elsewhere".to_owned(),
            _ => self.why_absent(id, unit),
        }
    }

    /// Least milliseconds that any segment on the unit costs beyond the least of each of its operators
    /// ([`UnitEstimate::least`]): about one dispatch.
    pub fn least_start(&self, unit: usize) -> f64 {
        let estimate = &self.estimates[unit];
        let least = |id: OperatorId| estimate.least[id.index()];
        let alone = self.graph.ids().filter_map(|id| Some(self.table.cost(id, unit)?.ms - least(id)));
        let whole = self.measured[unit].iter().filter_map(|(operators, record)| {
            Some(measurement_cost(record)?.ms - operators.iter().map(|&id| least(id)).sum::<f64>())
        });
        alone.chain(whole).fold(estimate.dispatch_ms, f64::min).max(0.0)
    }

    /// The operator's isolated cost where it runs alone on the unit, its weights fit there and no pin forbids it.
    pub fn runnable(&self, id: OperatorId, unit: usize) -> Option<&Cost> {
        self.table.cost(id, unit).filter(|_| self.fits(id, unit) && self.allowed(id, unit))
    }

    /// That some operator runs alone on no unit, and why.
    pub fn no_unit(&self) -> PlanError {
        let lost = self.graph.ids().find(|&id| (0..self.unit_count()).all(|unit| self.runnable(id, unit).is_none()));
        let Some(id) = lost else { return self.no_split("an operator runs on no unit") };
        let reasons: Vec<String> = (0..self.unit_count())
            .filter_map(|unit| Some(format!("{}: {}", self.table.units[unit], self.check_segment(&[id], unit).err()?)))
            .collect();
        let name = &self.graph.operator(id).name;
        self.no_split(&format!("operator {id} `{name}` runs on no unit alone: {}", reasons.join("; ")))
    }

    /// Why the operator has no isolated cost on the unit.
    pub fn why_absent(&self, id: OperatorId, unit: usize) -> String {
        self.operator_record(id, unit).failure().unwrap_or_else(|| "it ran but no time was recorded".to_owned())
    }

    /// `openvino:CPU, ort:CPU`.
    pub fn unit_names(&self) -> String {
        self.table.units.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    }

    pub fn no_split(&self, reason: &str) -> PlanError {
        PlanError::NoSplit { model: self.graph.model.clone(), units: self.unit_names(), reason: reason.to_owned() }
    }
}

/// The graph's frame. The core's table refuses a profile in which an operator fails alone on every unit; here a set that
/// was measured whole may vouch for it, so operators are looked up by this view and the core's table gives the rest.
fn without_operators(graph: &OperatorGraph) -> OperatorGraph {
    OperatorGraph {
        model: graph.model.clone(),
        fingerprint: graph.fingerprint.clone(),
        granularity: graph.granularity,
        tensors: Vec::new(),
        operators: Vec::new(),
        inputs: Vec::new(),
        outputs: Vec::new(),
    }
}

/// The objective's price of one busy millisecond on each unit.
fn prices(objective: Objective, table: &CostTable) -> Result<Vec<f64>, PlanError> {
    if objective != Objective::Energy {
        return Ok(vec![1.0; table.units.len()]);
    }
    let lacking: Vec<String> = table
        .units
        .iter()
        .zip(&table.watts)
        .filter(|(_, watts)| watts.is_none())
        .map(|(unit, _)| unit.to_string())
        .collect();
    match lacking.first() {
        Some(first) => Err(PlanError::NoPower { units: lacking.join(", "), example: format!("{first}=15") }),
        None => Ok(table.watts.iter().map(|watts| watts.unwrap_or(0.0) / 1e3).collect()),
    }
}

/// Origin of a number composed from parts: predicted, unless a part is simulated or emulated, which must show.
pub(crate) fn composed(so_far: Origin, part: Origin) -> Origin {
    match (so_far, part) {
        (Origin::Simulated, _) | (_, Origin::Simulated) => Origin::Simulated,
        (Origin::Emulated, _) | (_, Origin::Emulated) => Origin::Emulated,
        _ => Origin::Predicted,
    }
}
