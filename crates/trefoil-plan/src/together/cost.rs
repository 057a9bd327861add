//! What a whole model, or a part of it, costs on a unit.

use super::TogetherRequest;
use super::place::Slot;
use crate::PlanError;
use std::collections::BTreeMap;
use trefoil_core::cost::measurement_cost;
use trefoil_core::profile::ProfileIndex;
use trefoil_core::{CostRef, OperatorId, Origin, Profile, Subject, Unit, UnitAddress, UnitKind};

/// Whole-model costs, models × units; `None` where the model was not measured or does not run.
pub(crate) struct Costs {
    units: usize,
    table: Vec<Option<CostRef>>,
    /// Typical slowdown of work beside other work.
    pub beside: f64,
}

/// The cost of nothing.
pub(crate) fn nothing() -> CostRef {
    CostRef { ms: 0.0, joules: None, origin: Origin::Predicted, measurements: Vec::new() }
}

impl Costs {
    pub fn new(request: &TogetherRequest<'_>) -> Result<Self, PlanError> {
        let mut table = Vec::with_capacity(request.models.len() * request.units.len());
        for model in &request.models {
            let index = model.profile.index();
            let subject = Subject::WholeModel { model: model.graph.fingerprint.clone() };
            for unit in &request.units {
                let constant = model.graph.is_empty().then(nothing);
                let cost = constant.or_else(|| measured(model.profile, &index, &subject, unit));
                table.push(cost.map(|cost| strained(request, unit, cost)));
            }
        }
        let factors = &request.slowdown;
        let beside = if factors.is_empty() { 1.0 } else { factors.values().sum::<f64>() / factors.len() as f64 };
        let costs = Self { units: request.units.len(), table, beside };
        match (0..request.models.len()).find(|&model| costs.best(request, model, |_| true).is_none()) {
            Some(model) => Err(runs_nowhere(request, model)),
            None => Ok(costs),
        }
    }

    pub fn whole(&self, model: usize, unit: usize) -> Option<&CostRef> {
        self.table[model * self.units + unit].as_ref()
    }

    /// The cheapest of the units for which `wanted` holds.
    pub fn best(&self, request: &TogetherRequest<'_>, model: usize, wanted: impl Fn(&Unit) -> bool) -> Option<usize> {
        self.best_of(model, (0..self.units).filter(|&unit| wanted(&request.units[unit]))).map(|(unit, _)| unit)
    }

    /// The cheapest unit of a slot, and its cost in milliseconds.
    pub fn in_slot(&self, model: usize, slot: &Slot) -> Option<(usize, f64)> {
        self.best_of(model, slot.units.iter().copied())
    }

    fn best_of(&self, model: usize, units: impl Iterator<Item = usize>) -> Option<(usize, f64)> {
        let priced = units.filter_map(|unit| Some((unit, self.whole(model, unit)?.ms)));
        priced.min_by(|one, other| one.1.total_cmp(&other.1))
    }
}

pub(crate) fn runs_nowhere(request: &TogetherRequest<'_>, model: usize) -> PlanError {
    let names: Vec<_> = request.units.iter().map(|unit| unit.address.to_string()).collect();
    PlanError::Workload {
        model: request.models[model].graph.model.clone(),
        reason: format!("it was measured whole on no unit that fits ({}); profile it there", names.join(", ")),
    }
}

/// A cost on a unit that somebody else is using.
fn strained(request: &TogetherRequest<'_>, unit: &Unit, cost: CostRef) -> CostRef {
    match request.strained.get(&unit.address) {
        Some(factor) => CostRef { ms: cost.ms * factor, origin: Origin::Predicted, ..cost },
        None => cost,
    }
}

/// What was measured of a subject on the unit; or, predicted, on another unit of the same backend and device with as many
/// cores: cores are taken to be alike.
fn measured(profile: &Profile, index: &ProfileIndex<'_>, subject: &Subject, unit: &Unit) -> Option<CostRef> {
    if let Some(record) = index.newest(subject, std::slice::from_ref(&unit.address)) {
        let cost = measurement_cost(record)?;
        return Some(CostRef { ms: cost.ms, joules: None, origin: record.origin, measurements: cost.ids });
    }
    twins(profile, unit).find_map(|twin| {
        let cost = measurement_cost(index.newest(subject, std::slice::from_ref(twin))?)?;
        Some(CostRef { ms: cost.ms, joules: None, origin: Origin::Predicted, measurements: cost.ids })
    })
}

/// Other units of the profile that differ only in which cores they use.
fn twins<'a>(profile: &'a Profile, unit: &'a Unit) -> impl Iterator<Item = &'a UnitAddress> {
    let alike = move |other: &&Unit| {
        let (here, there) = (&unit.address, &other.address);
        unit.kind == UnitKind::Cpu
            && other.kind == UnitKind::Cpu
            && here != there
            && (&here.backend, &here.device, here.precision) == (&there.backend, &there.device, there.precision)
            && unit.resources.len() == other.resources.len()
    };
    profile.units.iter().chain(&profile.modes).filter(alike).map(|other| &other.address)
}

/// Costs of prefixes and suffixes of one model's operators (in their order) on one unit.
pub(crate) struct Parts {
    /// Share of the whole model in the first `n` operators, by isolated operator times; 0 to 1.
    share: Vec<f64>,
    whole: CostRef,
    /// Prefixes, and then suffixes, that were measured whole, by number of operators in the prefix; `None` if one failed.
    known: [BTreeMap<usize, Option<CostRef>>; 2],
    /// Of those, share of the whole model and measured over estimated time, ascending; the whole model is the last.
    corrections: [Vec<(f64, f64)>; 2],
}

impl Parts {
    /// `None` if the whole model has no cost there.
    pub fn new(request: &TogetherRequest<'_>, costs: &Costs, model: usize, unit: usize) -> Option<Self> {
        let whole = costs.whole(model, unit)?.clone();
        let (profile, graph) = (request.models[model].profile, request.models[model].graph);
        let index = profile.index();
        let unit = &request.units[unit];
        let count = graph.len();
        let mut share = vec![0.0];
        for id in graph.ids() {
            let subject = Subject::Operator { signature: graph.operator(id).signature.clone() };
            // An operator that was measured elsewhere only still tells more than nothing.
            let others = || {
                let mut addresses = profile.units.iter().map(|unit| &unit.address);
                addresses
                    .find_map(|other| Some(measurement_cost(index.newest(&subject, std::slice::from_ref(other))?)?.ms))
            };
            let ms = measured(profile, &index, &subject, unit).map(|cost| cost.ms).or_else(others).unwrap_or(0.0);
            share.push(share.last().copied().unwrap_or(0.0) + ms);
        }
        let total = share.last().copied().unwrap_or(0.0);
        for (at, sum) in share.iter_mut().enumerate() {
            *sum = if total > 0.0 { *sum / total } else { at as f64 / count.max(1) as f64 };
        }
        let mut known = [BTreeMap::new(), BTreeMap::new()];
        for record in index.all_newest() {
            let Subject::Segment { model, granularity, operators } = &record.subject else { continue };
            let here = record.units.as_slice() == std::slice::from_ref(&unit.address)
                || twins(profile, unit).any(|twin| record.units.as_slice() == std::slice::from_ref(twin));
            if !here || *model != graph.fingerprint || *granularity != graph.granularity || operators.is_empty() {
                continue;
            }
            let exact = record.units.as_slice() == std::slice::from_ref(&unit.address);
            let contiguous = operators.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1);
            let (first, last) = (operators[0].index(), operators[operators.len() - 1].index());
            let side = match (first == 0, last + 1 == count) {
                (true, false) if contiguous => 0,
                (false, true) if contiguous => 1,
                _ => continue,
            };
            let at = if side == 0 { last + 1 } else { first };
            let cost = measurement_cost(record).map(|cost| CostRef {
                ms: cost.ms,
                joules: None,
                origin: if exact { record.origin } else { Origin::Predicted },
                measurements: cost.ids,
            });
            if exact || !known[side].contains_key(&at) {
                known[side].insert(at, cost.map(|cost| strained(request, unit, cost)));
            }
        }
        let corrections = [0, 1].map(|side| corrections(&share, &whole, &known[side], side));
        Some(Self { share, whole, known, corrections })
    }

    /// The first `count` operators; `None` where they are known to fail.
    pub fn head(&self, count: usize) -> Option<CostRef> {
        self.part(0, count, self.share[count])
    }

    /// All but the first `count` operators.
    pub fn tail(&self, count: usize) -> Option<CostRef> {
        self.part(1, count, 1.0 - self.share[count])
    }

    fn part(&self, side: usize, count: usize, share: f64) -> Option<CostRef> {
        if let Some(known) = self.known[side].get(&count) {
            return known.clone();
        }
        let ms = self.whole.ms * share * interpolated(&self.corrections[side], share);
        Some(CostRef { ms, origin: Origin::Predicted, ..self.whole.clone() })
    }
}

/// A measured part that takes this many times its estimate, or as little, says nothing about other parts.
const OUTLIER: f64 = 3.0;

/// What isolated operators got wrong about parts that were measured tells something about parts of similar size.
fn corrections(
    share: &[f64],
    whole: &CostRef,
    known: &BTreeMap<usize, Option<CostRef>>,
    side: usize,
) -> Vec<(f64, f64)> {
    let of = |(&count, cost): (&usize, &Option<CostRef>)| {
        let share = if side == 0 { share[count] } else { 1.0 - share[count] };
        let estimate = whole.ms * share;
        let point = cost.as_ref().filter(|_| estimate > 0.0).map(|cost| (share, cost.ms / estimate));
        // What is off by more tells of that one part only: it lost a fusion, or the machine was busy.
        point.filter(|(_, ratio)| (1.0 / OUTLIER..=OUTLIER).contains(ratio))
    };
    let mut points: Vec<(f64, f64)> = known.iter().filter_map(of).chain([(1.0, 1.0)]).collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    points
}

/// Linear between neighbouring points, constant before the first; 1 without any.
fn interpolated(points: &[(f64, f64)], at: f64) -> f64 {
    let above = points.partition_point(|point| point.0 < at);
    match (above.checked_sub(1).and_then(|below| points.get(below)), points.get(above)) {
        (Some(&(low, first)), Some(&(high, second))) if high > low => {
            first + (second - first) * (at - low) / (high - low)
        }
        (_, Some(&(_, value))) | (Some(&(_, value)), None) => value,
        (None, None) => 1.0,
    }
}

/// Operators `from..to`.
pub(crate) fn range(from: usize, to: usize) -> Vec<OperatorId> {
    (from as u32..to as u32).map(OperatorId).collect()
}

#[cfg(test)]
mod tests {
    use super::interpolated;

    #[test]
    fn corrections_are_linear_between_what_is_known() {
        let points = [(0.25, 2.0), (0.5, 1.0), (1.0, 1.0)];
        let close = |at: f64, wanted: f64| assert!((interpolated(&points, at) - wanted).abs() < 1e-12, "at {at}");
        close(0.0, 2.0);
        close(0.25, 2.0);
        close(0.375, 1.5);
        close(0.75, 1.0);
        close(1.5, 1.0);
        assert!((interpolated(&[], 0.3) - 1.0).abs() < 1e-12);
        // Two parts of one share (operators that take no time) must not divide by zero.
        assert!(interpolated(&[(0.5, 3.0), (0.5, 1.0)], 0.5).is_finite());
    }
}
