//! What segments and handovers cost, and whether a segment may be put on a unit.

use super::{CostView, SegmentCost, composed};
use trefoil_core::cost::measurement_cost;
use trefoil_core::{MeasurementId, OperatorId, Origin, TensorId};

impl CostView<'_> {
    /// Whether a segment of these operators (ascending) may be put on the unit; the reason if not. The unit's
    /// memory limits everything. Otherwise a set measured whole decides for itself, and failure is taken to be monotone:
    /// what holds an operator or a set that failed, or has more nodes than the unit takes, fails too.
    pub fn check_segment(&self, operators: &[OperatorId], unit: usize) -> Result<(), String> {
        if let Some((id, pin)) = operators.iter().find_map(|id| match &self.pinned[id.index()] {
            Some((pinned, pin)) if *pinned != unit => Some((id, pin)),
            _ => None,
        }) {
            return Err(format!("operator {id} `{}` is pinned by `{pin}`", self.graph.operator(*id).name));
        }
        let limits = &self.units[unit].limits;
        let bytes = self.graph.weight_bytes(operators.iter().copied());
        if let Some(most) = limits.memory_bytes.filter(|&most| bytes > most) {
            return Err(format!("{bytes} bytes of weights are more than the unit's memory of {most}"));
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
        let nodes: u64 = operators.iter().map(|&id| self.graph.operator(id).nodes.len() as u64).sum();
        if let Some(most) = limits.max_nodes.filter(|&most| nodes > most) {
            return Err(format!("{nodes} nodes are more than the unit's limit of {most}"));
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

    /// Whether a segment of these operators (ascending), of which one makes the tensor, hands it out.
    pub fn leaves(&self, operators: &[OperatorId], tensor: TensorId) -> bool {
        self.is_output[tensor.index()]
            || self.graph.tensor(tensor).consumers.iter().any(|id| operators.binary_search(id).is_err())
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
        let units = (0..self.unit_count()).filter(|&unit| self.possible(id, unit));
        let least =
            units.map(|unit| self.estimates[unit].least[id.index()] * self.per_ms[unit]).fold(f64::INFINITY, f64::min);
        if least.is_finite() { least } else { 0.0 }
    }
}
