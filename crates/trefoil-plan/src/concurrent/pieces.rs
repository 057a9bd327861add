//! Ways to cut each model into what is scheduled as one thing: not at all, as `interval` does, or into single operators.

use crate::request::PlanOptions;
use crate::view::CostView;
use crate::{interval, whole};
use std::collections::BTreeSet;
use trefoil_core::{OperatorId, Plan, TensorId};

/// Most mixtures of the models' cuttings that are scheduled.
const MOST_MIXES: usize = 26;
/// Most operators of a model that are scheduled one by one beside others' segments.
const MIXED_OPERATORS: usize = 300;

/// How coarse a cutting is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Grain {
    Whole,
    Segments,
    Operators,
}

/// One model in pieces.
#[derive(Debug, Clone)]
pub(crate) struct Cutting {
    pub grain: Grain,
    /// Operators of each piece, ascending; pieces in the order in which they can run.
    pub groups: Vec<Vec<OperatorId>>,
    /// A unit for each piece: where the model alone would have it.
    pub unit: Vec<u32>,
    /// What the model costs alone like this, in the objective's unit.
    pub alone: f64,
}

impl Cutting {
    /// The cutting of a plan of one model that runs one segment after another; `None` if one of its segments does not hand out what a link
    /// needs.
    pub fn of_plan(view: &CostView<'_>, plan: &Plan, grain: Grain, handed_on: &BTreeSet<TensorId>) -> Option<Self> {
        let inside = |operators: &[OperatorId]| {
            let made = |tensor: &&TensorId| {
                let maker = view.graph.tensor(**tensor).producer;
                maker.is_some_and(|id| operators.binary_search(&id).is_ok())
            };
            handed_on.iter().filter(made).all(|&tensor| view.leaves(operators, tensor))
        };
        let mut cutting = Self { grain, groups: Vec::new(), unit: Vec::new(), alone: plan.claimed };
        for segment in &plan.segments {
            if !inside(&segment.operators) {
                return None;
            }
            cutting.unit.push(view.unit_index(&segment.unit)? as u32);
            cutting.groups.push(segment.operators.clone());
        }
        Some(cutting)
    }

    /// Single operators, each where another cutting has it if it runs there alone, else where it is fastest; `None` where an operator runs alone on
    /// no unit.
    fn apart(view: &CostView<'_>, like: Option<&Self>) -> Option<Self> {
        let mut wanted: Vec<Option<u32>> = vec![None; view.graph.len()];
        for (operators, &unit) in like.into_iter().flat_map(|like| like.groups.iter().zip(&like.unit)) {
            for id in operators {
                wanted[id.index()] = Some(unit);
            }
        }
        let mut unit = Vec::with_capacity(wanted.len());
        for (id, wanted) in view.graph.ids().zip(wanted) {
            let ms = |unit: usize| view.segment_ms(&[id], unit).ok();
            let fastest = (0..view.unit_count())
                .filter_map(|unit| Some((ms(unit)?, unit as u32)))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            unit.push(wanted.filter(|&unit| ms(unit as usize).is_some()).or(fastest.map(|fastest| fastest.1))?);
        }
        let groups = view.graph.ids().map(|id| vec![id]).collect();
        Some(Self { grain: Grain::Operators, groups, unit, alone: f64::INFINITY })
    }
}

/// Cuttings of one model: whole on its best unit, and as `interval` cuts it, where these exist; then single operators. `handed_on`
/// are its tensors that links name.
pub(crate) fn cuttings(view: &CostView<'_>, handed_on: &BTreeSet<TensorId>, options: &PlanOptions) -> Vec<Cutting> {
    let mut found: Vec<Cutting> = Vec::new();
    if let Some(single) = whole::best_single(view) {
        found.extend(Cutting::of_plan(view, &single, Grain::Whole, handed_on));
    }
    // With no time left a model that runs whole is left whole.
    if (found.is_empty() || !options.is_over())
        && let Ok(plan) = interval::interval(view, options)
        && plan.segments.len() > 1
        && plan.segments.len() < view.graph.len()
    {
        found.extend(Cutting::of_plan(view, &plan, Grain::Segments, handed_on));
    }
    let best = found.iter().min_by(|a, b| a.alone.total_cmp(&b.alone));
    found.extend(Cutting::apart(view, best));
    found
}

/// Mixtures of cuttings, one for each model, those of best and coarsest pieces first; without the one of single operators only.
pub(crate) fn mixes(cuttings: &[Vec<Cutting>]) -> Vec<Vec<&Cutting>> {
    if cuttings.iter().any(Vec::is_empty) {
        return Vec::new();
    }
    let best = |list: &'_ Vec<Cutting>| {
        (0..list.len()).min_by(|&a, &b| list[a].alone.total_cmp(&list[b].alone)).unwrap_or_default()
    };
    let at_most = |list: &Vec<Cutting>, at: usize| at.min(list.len() - 1);
    let mut codes: Vec<Vec<usize>> = vec![
        cuttings.iter().map(best).collect(),
        vec![0; cuttings.len()],
        cuttings.iter().map(|list| at_most(list, 1)).collect(),
    ];
    let total = cuttings.iter().try_fold(1usize, |product, list| product.checked_mul(list.len()));
    if total.is_some_and(|total| total <= MOST_MIXES + 1) {
        for code in 0..total.unwrap_or(0) {
            let mut rest = code;
            let digits = cuttings.iter().map(|list| {
                let digit = rest % list.len();
                rest /= list.len();
                digit
            });
            codes.push(digits.collect());
        }
    }
    let mut seen: Vec<Vec<usize>> = Vec::new();
    codes.retain(|code| {
        let fresh = !seen.contains(code);
        seen.push(code.clone());
        fresh
    });
    let mix =
        |code: Vec<usize>| -> Vec<&Cutting> { code.into_iter().zip(cuttings).map(|(at, list)| &list[at]).collect() };
    let mixes = codes.into_iter().map(mix);
    let pieces_of = |mix: &Vec<&Cutting>, grain: Grain| {
        mix.iter().filter(|cutting| cutting.grain == grain).map(|cutting| cutting.groups.len()).sum::<usize>()
    };
    let wanted = |mix: &Vec<&Cutting>| {
        mix.iter().any(|cutting| cutting.grain != Grain::Operators)
            && pieces_of(mix, Grain::Operators) <= MIXED_OPERATORS
    };
    mixes.filter(wanted).collect()
}
