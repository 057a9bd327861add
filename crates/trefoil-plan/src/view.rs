//! The one cost view that every planner, `explain` and the pricing of plans use.

use crate::estimate::{MeasuredSet, UnitEstimate};
use crate::order::Dag;
use crate::{Pin, PlanError, PlanRequest};
use std::collections::BTreeMap;
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::ProfileIndex;
use trefoil_core::{
    CoreError, Cost, CostTable, Measurement, MeasurementId, Objective, OperatorGraph, OperatorId, Origin, Outcome,
    Subject, TensorId, Unit, UnitAddress,
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
        graph.validate()?;
        if let Some((name, watts)) =
            profile.declared_watts.iter().find(|(_, watts)| !watts.is_finite() || **watts < 0.0)
        {
            return Err(CoreError::BadNumber {
                place: format!("declared power of {name}"),
                value: watts.to_string(),
                what: "power".to_owned(),
            }
            .into());
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
        let units = addresses.iter().map(|address| profile.unit(address)).collect::<Result<Vec<_>, _>>()?;
        let table = CostTable::from_profile(profile, &without_operators(graph), &addresses)?;
        let per_ms = prices(request.objective, &table)?;
        let index = profile.index();
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

    /// Looks up every operator alone on every unit.
    fn read_operators(&mut self) -> Result<(), PlanError> {
        for (row, operator) in self.graph.operators.iter().enumerate() {
            let subject = Subject::Operator { signature: operator.signature.clone() };
            for address in &self.table.units {
                let key = std::slice::from_ref(address);
                let record = self.index.newest(&subject, key).ok_or_else(|| CoreError::MissingMeasurement {
                    id: MeasurementId::new(&subject, key, 0).0,
                    operator: row as u32,
                    name: operator.name.clone(),
                    kind: operator.kind.clone(),
                    unit: address.to_string(),
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
        let newest: Vec<&'a Measurement> = self.index.all_newest().collect();
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

    fn operator_record(&self, id: OperatorId, unit: usize) -> &'a Measurement {
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
                if pin.matches(self.graph.operator(id)) {
                    matches = true;
                    self.pinned[id.index()] = Some((unit, pin.clone()));
                }
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

    /// The operator's isolated cost where it runs alone on the unit and no pin forbids it.
    pub fn runnable(&self, id: OperatorId, unit: usize) -> Option<&Cost> {
        self.table.cost(id, unit).filter(|_| self.allowed(id, unit))
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

    /// Whether a segment of these operators (ascending) may be put on the unit; the reason if not. A set measured whole
    /// decides for itself. Otherwise failure is taken to be monotone: what holds an operator or a set that failed, or
    /// exceeds the unit's stated limits, fails too.
    pub fn check_segment(&self, operators: &[OperatorId], unit: usize) -> Result<(), String> {
        if let Some((id, pin)) = operators.iter().find_map(|id| match &self.pinned[id.index()] {
            Some((pinned, pin)) if *pinned != unit => Some((id, pin)),
            _ => None,
        }) {
            return Err(format!("operator {id} `{}` is pinned by `{pin}`", self.graph.operator(*id).name));
        }
        if self.measured[unit].contains_key(operators) {
            return Ok(());
        }
        let absent: Vec<OperatorId> =
            operators.iter().copied().filter(|&id| self.table.cost(id, unit).is_none()).collect();
        if let Some(&first) = absent.first() {
            let operator = self.graph.operator(first);
            let more = if absent.len() > 1 { format!(" (and {} more)", absent.len() - 1) } else { String::new() };
            return Err(format!(
                "operator {first} `{}` ({}): {}{more}",
                operator.name,
                operator.kind,
                self.why_absent(first, unit)
            ));
        }
        for failed in &self.failed[unit] {
            if failed.operators.iter().all(|id| operators.binary_search(id).is_ok()) {
                return Err(format!(
                    "{} operators of it failed in one piece: {}",
                    failed.operators.len(),
                    failed.reason
                ));
            }
        }
        let limits = &self.units[unit].limits;
        let nodes: u64 = operators.iter().map(|&id| self.graph.operator(id).nodes.len() as u64).sum();
        if let Some(most) = limits.max_nodes.filter(|&most| nodes > most) {
            return Err(format!("{nodes} nodes are more than the unit's limit of {most}"));
        }
        let bytes: u64 = operators.iter().map(|&id| self.graph.operator(id).weight_bytes).sum();
        if let Some(most) = limits.memory_bytes.filter(|&most| bytes > most) {
            return Err(format!("{bytes} bytes of weights are more than the unit's memory of {most}"));
        }
        Ok(())
    }

    /// `S`: the cost of a segment (operators ascending) on a unit, or why it cannot run there.
    pub fn segment(&self, operators: &[OperatorId], unit: usize) -> Result<SegmentCost, String> {
        self.check_segment(operators, unit)?;
        if let Some((record, cost)) =
            self.measured[unit].get(operators).and_then(|record| Some((record, measurement_cost(record)?)))
        {
            return Ok(SegmentCost { ms: cost.ms, whole: true, ids: vec![record.id.clone()], origin: record.origin });
        }
        if let [id] = operators
            && let Some(cost) = self.table.cost(*id, unit)
        {
            return Ok(SegmentCost { ms: cost.ms, whole: true, ids: cost.ids.clone(), origin: cost.origin });
        }
        let estimate = &self.estimates[unit];
        let mut ids: Vec<MeasurementId> = Vec::new();
        let mut origin = Origin::Predicted;
        let mut evidence: Vec<u32> = Vec::new();
        for id in operators {
            if let Some(cost) = self.table.cost(*id, unit) {
                ids.extend(cost.ids.iter().cloned());
                origin = composed(origin, cost.origin);
            }
            evidence.extend(estimate.evidence[id.index()]);
        }
        evidence.sort_unstable();
        evidence.dedup();
        ids.extend(evidence.iter().map(|&index| self.sets[unit][index as usize].1.clone()));
        ids.sort_unstable();
        ids.dedup();
        Ok(SegmentCost { ms: estimate.segment_ms(operators), whole: false, ids, origin })
    }

    /// Milliseconds of [`Self::segment`], without its evidence.
    pub fn segment_ms(&self, operators: &[OperatorId], unit: usize) -> Result<f64, String> {
        self.check_segment(operators, unit)?;
        if let Some(cost) = self.measured[unit].get(operators).and_then(|record| measurement_cost(record)) {
            return Ok(cost.ms);
        }
        match operators {
            [id] if self.table.cost(*id, unit).is_some() => Ok(self.table.cost(*id, unit).map_or(0.0, |cost| cost.ms)),
            _ => Ok(self.estimates[unit].segment_ms(operators)),
        }
    }

    /// Whether putting `id` into the piece keeps it runnable as one segment.
    pub fn can_extend(&self, piece: &crate::assemble::Piece, id: OperatorId) -> bool {
        let limits = &self.units[piece.unit].limits;
        if self.failed[piece.unit].is_empty() && limits.max_nodes.is_none() && limits.memory_bytes.is_none() {
            return true;
        }
        let mut joint = piece.operators.clone();
        joint.push(id);
        joint.sort_unstable();
        self.check_segment(&joint, piece.unit).is_ok()
    }

    /// Milliseconds to make a model input available to a unit, where its backend tells `h2d`: the first reader's h2d
    /// divided by bytes among that reader's inputs. 0 where it cannot tell.
    pub fn input_ms(&self, tensor: TensorId, unit: usize) -> (f64, &[MeasurementId], Origin) {
        let edge = self.graph.tensor(tensor);
        let told = edge.consumers.iter().find_map(|&id| {
            let cost = self.table.cost(id, unit)?;
            Some((id, cost.h2d_ms?, cost))
        });
        match told {
            Some((id, ms, cost)) if self.table.accelerator[unit] => {
                (ms * self.byte_share(tensor, &self.graph.operator(id).inputs), &cost.ids, cost.origin)
            }
            _ => (0.0, &[], Origin::Measured),
        }
    }

    /// Milliseconds to hand a model output from its producer's unit to the host, where its backend tells `d2h`.
    pub fn output_ms(&self, tensor: TensorId, unit: usize) -> (f64, &[MeasurementId], Origin) {
        let edge = self.graph.tensor(tensor);
        let told = edge.producer.and_then(|id| {
            let cost = self.table.cost(id, unit)?;
            Some((id, cost.d2h_ms?, cost))
        });
        match told {
            Some((id, ms, cost)) if self.table.accelerator[unit] => {
                (ms * self.byte_share(tensor, &self.graph.operator(id).outputs), &cost.ids, cost.origin)
            }
            _ => (0.0, &[], Origin::Measured),
        }
    }

    fn byte_share(&self, tensor: TensorId, among: &[TensorId]) -> f64 {
        let bytes = |tensor: TensorId| self.graph.tensor(tensor).bytes as f64;
        let total: f64 = among.iter().map(|&other| bytes(other)).sum();
        if total > 0.0 { bytes(tensor) / total } else { 1.0 / among.len().max(1) as f64 }
    }

    /// Lower bound, in the objective's unit, on every plan that runs segments one after another under this cost view:
    /// each operator at the least it can add anywhere, transfers and dispatches free.
    pub fn lower_bound(&self) -> f64 {
        self.graph.ids().map(|id| self.least(id)).sum()
    }

    /// One operator's part of [`Self::lower_bound`].
    pub fn least(&self, id: OperatorId) -> f64 {
        let units = (0..self.unit_count()).filter(|&unit| self.allowed(id, unit));
        let least =
            units.map(|unit| self.estimates[unit].least[id.index()] * self.per_ms[unit]).fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 0.0 }
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
