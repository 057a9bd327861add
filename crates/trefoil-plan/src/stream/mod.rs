//! `pipeline`: items (videos) that flow through a sequence of blocks over several units, one stage per unit at a time.
//!
//! [`one_cut`] is HeteroVDiff's planner (4.3), literally: two engines, one cut. [`plan_stream`] generalises it: any number of
//! units, costs per block, blocks that only some units run (the decoder is one of them), several handoffs with costs, memory
//! limits, and a deadline per item.

mod search;

pub use search::plan_stream;

use crate::PlanError;
use serde::{Deserialize, Serialize};
use trefoil_core::Quantity;
use trefoil_core::quantity::{MOST_BYTES, short};

/// HeteroVDiff's three rates, in any one unit of time (its tables use seconds): measured while both engines run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct VideoRates {
    /// `T_G`: a block on the first engine (the paper's GPU).
    pub first: f64,
    /// `T_N`: a block on the second engine (the paper's NPU).
    pub second: f64,
    /// `T_V`: the decoder, on the second engine.
    pub decoder: f64,
}

/// A trajectory of `blocks` block executions cut at one index.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cut {
    /// `k`: the first engine runs blocks `[0, k)`, the second `[k, blocks)` and the decoder.
    pub cut: u32,
    /// `k·T_G`.
    pub first_stage: f64,
    /// `(B−k)·T_N + T_V`.
    pub second_stage: f64,
    /// Equation 4: the larger stage.
    pub period: f64,
    /// The gap between the stages: how long the shorter one waits in every period.
    pub idle: f64,
    /// From the start of an item to its end: both stages.
    pub latency: f64,
}

/// Equation 4 at a given cut.
///
/// # Errors
/// [`PlanError::Stream`] when a rate is no [`Quantity::Time`], or the cut is past the last block.
pub fn cut_at(rates: VideoRates, blocks: u32, cut: u32) -> Result<Cut, PlanError> {
    for (name, rate) in [("T_G", rates.first), ("T_N", rates.second), ("T_V", rates.decoder)] {
        if !Quantity::Time.holds(rate) {
            return Err(PlanError::Stream {
                reason: format!("{name} is {}, which is no {}", short(rate), Quantity::Time),
            });
        }
    }
    if cut > blocks {
        return Err(PlanError::Stream { reason: format!("cut {cut} is past the last of {blocks} blocks") });
    }
    let first_stage = f64::from(cut) * rates.first;
    let second_stage = f64::from(blocks - cut) * rates.second + rates.decoder;
    Ok(Cut {
        cut,
        first_stage,
        second_stage,
        period: first_stage.max(second_stage),
        idle: (first_stage - second_stage).abs(),
        latency: first_stage + second_stage,
    })
}

/// Equation 5: the real crossing `(B·T_N + T_V) / (T_N + T_G)`; infinite when a block costs nothing on either engine.
pub fn crossing(rates: VideoRates, blocks: u32) -> f64 {
    let slope = rates.first + rates.second;
    if slope > 0.0 { (f64::from(blocks) * rates.second + rates.decoder) / slope } else { f64::INFINITY }
}

/// HeteroVDiff 4.3, literally: the better integer neighbour of equation 5's crossing by equation 4. A crossing past the last
/// block (the decoder outweighs everything) means all blocks on the first engine. Ties take the lower cut.
///
/// The period is convex in the cut, so this is the best of all `blocks + 1` cuts.
///
/// # Errors
/// As [`cut_at`]; [`PlanError::Stream`] for no blocks.
pub fn one_cut(rates: VideoRates, blocks: u32) -> Result<Cut, PlanError> {
    if blocks == 0 {
        return Err(PlanError::Stream { reason: "there are no blocks to cut".to_owned() });
    }
    cut_at(rates, blocks, 0)?;
    let below = crossing(rates, blocks).floor().min(f64::from(blocks)) as u32;
    let (low, high) = (cut_at(rates, blocks, below)?, cut_at(rates, blocks, (below + 1).min(blocks))?);
    Ok(if high.period < low.period { high } else { low })
}

/// Period at a cut when the longer stage runs at its solo rates after the shorter one ended: `s + (1 − s/L)·L_solo` with `s`,
/// `L` the shorter and the longer stage at co-run rates. Equation 4 uses co-run rates for all of it.
///
/// # Errors
/// As [`cut_at`].
pub fn period_with_solo_rest(corun: VideoRates, solo: VideoRates, blocks: u32, cut: u32) -> Result<f64, PlanError> {
    let (together, alone) = (cut_at(corun, blocks, cut)?, cut_at(solo, blocks, cut)?);
    let (short, long, long_alone) = if together.first_stage <= together.second_stage {
        (together.first_stage, together.second_stage, alone.second_stage)
    } else {
        (together.second_stage, together.first_stage, alone.first_stage)
    };
    Ok(if long > 0.0 { short + (1.0 - short / long) * long_alone } else { 0.0 })
}

/// A unit of a stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamUnit {
    /// Name or address.
    pub name: String,
    /// What it occupies: units with the same resource never work at once. Units without one hold one of their own.
    #[serde(default)]
    pub resource: Option<String>,
    /// Most bytes of weights resident on it.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

/// A block of a stream: one execution in the sequence that every item passes through. The decoder is the last one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamBlock {
    /// Time on each unit; `null` where it does not run.
    pub cost: Vec<Option<f64>>,
    /// Which weights it reads; blocks of different steps that share weights name the same.
    #[serde(default)]
    pub weights: Option<u32>,
    /// Size of those weights.
    #[serde(default)]
    pub weight_bytes: u64,
}

/// A question for [`plan_stream`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamProblem {
    /// The units, at most 8.
    pub units: Vec<StreamUnit>,
    /// The blocks in order.
    pub blocks: Vec<StreamBlock>,
    /// Cost of handing an item over before block b, from one unit to another, paid by the receiver: `[b][from][to]` row-major,
    /// blocks × units × units; empty means free.
    #[serde(default)]
    pub handoffs: Vec<f64>,
    /// Most handoffs of an item; `null` for as many as there are units less one.
    #[serde(default)]
    pub most_handoffs: Option<u32>,
    /// Whether a unit may have several stages of an item.
    #[serde(default)]
    pub revisits: bool,
    /// Longest time from an item's start to its end.
    #[serde(default)]
    pub deadline: Option<f64>,
}

impl StreamProblem {
    /// Checks what somebody wrote: names of units that stand once, costs and a deadline that are times, bytes that can be added up.
    ///
    /// # Errors
    /// [`PlanError::Stream`] naming the unit, block or handoff.
    pub fn check(&self) -> Result<(), PlanError> {
        let fail = |reason: String| Err(PlanError::Stream { reason });
        let time = |what: &dyn Fn() -> String, cost: f64| {
            let odd = || fail(format!("{} {}, which is no {}", what(), short(cost), Quantity::Time));
            if Quantity::Time.holds(cost) { Ok(()) } else { odd() }
        };
        for (at, unit) in self.units.iter().enumerate() {
            if self.units[..at].iter().any(|other| other.name == unit.name) {
                return fail(format!("two units are named `{}`; name each otherwise", unit.name));
            }
        }
        let mut bytes = 0u64;
        for (at, block) in self.blocks.iter().enumerate() {
            for (cost, unit) in block.cost.iter().zip(&self.units) {
                time(&|| format!("block {at} on {} costs", unit.name), cost.unwrap_or(0.0))?;
            }
            bytes = bytes.saturating_add(block.weight_bytes);
            if bytes > MOST_BYTES {
                let own = block.weight_bytes;
                return fail(format!(
                    "block {at} has {own} bytes of weights, all up to it {bytes}, more than the {MOST_BYTES} that can be added up"
                ));
            }
        }
        for (at, &cost) in self.handoffs.iter().enumerate() {
            time(&|| format!("handoff {at} costs"), cost)?;
        }
        time(&|| "the deadline is".to_owned(), self.deadline.unwrap_or(0.0))
    }

    /// HeteroVDiff's question as a general one: two units, equal blocks, and the decoder, which only the second runs.
    pub fn from_rates(rates: VideoRates, blocks: u32) -> Self {
        let unit = |name: &str| StreamUnit { name: name.to_owned(), resource: None, memory_bytes: None };
        let block = |cost| StreamBlock { cost, weights: None, weight_bytes: 0 };
        let mut list = vec![block(vec![Some(rates.first), Some(rates.second)]); blocks as usize];
        list.push(block(vec![None, Some(rates.decoder)]));
        Self {
            units: vec![unit("first"), unit("second")],
            blocks: list,
            handoffs: Vec::new(),
            most_handoffs: Some(1),
            revisits: false,
            deadline: None,
        }
    }
}

/// Consecutive blocks of an item on one unit.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Stage {
    /// Index of the unit.
    pub unit: usize,
    /// First block.
    pub first: usize,
    /// One past the last block.
    pub end: usize,
    /// Receiving the item and running the blocks.
    pub time: f64,
    /// When it starts, counted from the item's start, in the steady state.
    pub start: f64,
}

/// Stages and what they give.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamPlan {
    /// The stages in order.
    pub stages: Vec<Stage>,
    /// Steady state: one item ends in each period. The busiest resource's work per item.
    pub period: f64,
    /// From an item's start to its end, in a schedule that repeats every period: each resource runs its stages in a fixed
    /// cyclic order. The sum of the stages when no resource has two.
    pub latency: f64,
    /// From the first item's start until items end every period: the first item's latency.
    pub fill: f64,
    /// Idle time of each unit in a period.
    pub idle: Vec<f64>,
    /// Whether no plan within the problem's limits has a shorter period.
    pub exact: bool,
}

impl StreamPlan {
    /// Time until `items` items have ended.
    pub fn time_of(&self, items: u32) -> f64 {
        if items == 0 { 0.0 } else { self.fill + f64::from(items - 1) * self.period }
    }
}
