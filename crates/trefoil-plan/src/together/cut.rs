//! Cutting the inference that would finish last.

use super::TogetherRequest;
use super::build::Execution;
use super::cost::{Costs, Parts, range};
use super::place::{Job, Slot, beside, slots};
use std::collections::BTreeSet;
use trefoil_core::Origin;

/// Among cuts whose rounds differ by less than this fraction, the one that fewer bytes cross is taken.
const ALIKE: f64 = 0.01;

struct Cut {
    total: f64,
    executions: Vec<Execution>,
}

/// For each model the best cut of its last inference, best model first.
pub(crate) fn best(request: &TogetherRequest<'_>, costs: &Costs) -> Vec<Vec<Execution>> {
    let slots = slots(request);
    let mut cuts: Vec<Cut> =
        (0..request.models.len()).filter_map(|model| best_of(request, costs, &slots, model)).collect();
    cuts.sort_by(|one, other| one.total.total_cmp(&other.total));
    cuts.into_iter().map(|cut| cut.executions).collect()
}

fn best_of(request: &TogetherRequest<'_>, costs: &Costs, slots: &[Slot], model: usize) -> Option<Cut> {
    let graph = request.models[model].graph;
    let cut_job = Job { model, item: request.items - 1 };
    let jobs: Vec<Job> = (0..request.items)
        .flat_map(|item| (0..request.models.len()).map(move |model| Job { model, item }))
        .filter(|&job| job != cut_job)
        .collect();
    let placed = beside(request, costs, slots, &jobs)?;
    let load = |slot: &[(Job, usize)]| -> f64 {
        slot.iter().filter_map(|&(job, unit)| Some(costs.whole(job.model, unit)?.ms)).sum()
    };
    let loads: Vec<f64> = placed.iter().map(|slot| load(slot)).collect();
    let slots_held: BTreeSet<_> = slots.iter().flat_map(|slot| &slot.units).copied().collect();
    // The tail runs with all cores, on the best unit that is no slot itself.
    let wide = costs.best(request, model, |unit| {
        request.units.iter().position(|known| known == unit).is_some_and(|at| !slots_held.contains(&at))
    })?;
    let tails = Parts::new(request, costs, model, wide)?;
    let crossing = crossing_bytes(graph);
    // Every cut: its round, whether both parts are measured, the bytes that cross, the head's unit, the head's operators.
    let mut cuts: Vec<(f64, bool, u64, usize, usize)> = Vec::new();
    for (at, slot) in slots.iter().enumerate() {
        let Some((narrow, _)) = costs.in_slot(model, slot) else { continue };
        let Some(heads) = Parts::new(request, costs, model, narrow) else { continue };
        let others = loads.iter().enumerate().filter(|&(other, _)| other != at);
        let others = others.map(|(_, load)| *load).fold(0.0, f64::max);
        // Work that has no company is not slowed down.
        let slowed = if others > 0.0 { costs.beside } else { 1.0 };
        for (count, &bytes) in crossing.iter().enumerate().take(graph.len()).skip(1) {
            let (Some(head), Some(tail)) = (heads.head(count), tails.tail(count)) else { continue };
            let total = others.max(loads[at] + head.ms) * slowed + tail.ms;
            let measured = head.origin == Origin::Measured && tail.origin == Origin::Measured;
            cuts.push((total, measured, bytes, narrow, count));
        }
    }
    let least = cuts.iter().map(|cut| cut.0).fold(f64::INFINITY, f64::min);
    // What is measured is not given up for an estimate that is hardly better.
    let (total, _, _, narrow, count) = cuts
        .into_iter()
        .filter(|cut| cut.0 <= least * (1.0 + ALIKE))
        .min_by(|one, other| (!one.1, one.2).cmp(&(!other.1, other.2)).then(one.0.total_cmp(&other.0)))?;
    let mut executions = Vec::new();
    let mut push = |job: Job, unit: usize| executions.push(request.whole(costs, job.model, job.item, unit));
    // Each slot in its own order; the head comes last in its slot.
    placed.iter().flatten().for_each(|&(job, unit)| push(job, unit));
    let part = |operators, unit, cost, after| Execution {
        model,
        item: cut_job.item,
        iteration: 0,
        operators,
        unit,
        cost,
        after,
    };
    let heads = Parts::new(request, costs, model, narrow)?;
    executions.push(part(range(0, count), narrow, heads.head(count)?, Vec::new()));
    let head = executions.len() - 1;
    executions.push(part(range(count, graph.len()), wide, tails.tail(count)?, vec![head]));
    Some(Cut { total, executions })
}

/// Bytes made by the first `count` operators and read by later ones, for each `count`.
fn crossing_bytes(graph: &trefoil_core::OperatorGraph) -> Vec<u64> {
    let mut change = vec![0i128; graph.len() + 2];
    for tensor in &graph.tensors {
        let (Some(producer), Some(last)) = (tensor.producer, tensor.consumers.iter().max()) else { continue };
        // Alive at cuts after its producer and before its last reader.
        change[producer.index() + 1] += i128::from(tensor.bytes);
        change[last.index() + 1] -= i128::from(tensor.bytes);
    }
    let mut alive = 0i128;
    change
        .iter()
        .map(|change| {
            alive += change;
            alive as u64
        })
        .collect()
}
