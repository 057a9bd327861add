//! Where to cut, chosen in five ways (HeteroVDiff 6.5.1, Table 5).

use super::measured::Measured;
use crate::error::CliError;
use serde::Serialize;
use trefoil_plan::stream::{Cut, VideoRates, cut_at, one_cut};

/// Who chose a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Chooser {
    /// Rates while both work, with the last stage: what Trefoil does.
    CorunRates,
    /// Rates of each alone, with the last stage.
    SoloRates,
    /// Blocks while both work, without the last stage.
    BlockRates,
    /// The step boundary at or before the first chooser's cut.
    StepBefore,
    /// The step boundary after it.
    StepAfter,
}

impl Chooser {
    /// For people.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::CorunRates => "rates while both work, with T_V",
            Self::SoloRates => "rates alone, with T_V",
            Self::BlockRates => "rates while both work, blocks alone",
            Self::StepBefore => "step boundary at or before",
            Self::StepAfter => "step boundary after",
        }
    }
}

/// A cut and what is expected of it.
#[derive(Debug, Clone, Serialize)]
pub struct Chosen {
    /// Who chose it.
    pub chooser: Chooser,
    /// What equation 4 gives for it with the rates while both work.
    pub expected: Cut,
    /// What it gives with the rates that the chooser looked at.
    pub promised: Cut,
}

/// All five; several may choose the same cut.
pub fn choose(measured: &Measured) -> Result<Vec<Chosen>, CliError> {
    let (blocks, layers) = (measured.blocks as u32, measured.layers as u32);
    let (corun, solo) = (measured.corun(), measured.solo());
    let without = VideoRates { decoder: 0.0, ..corun };
    let best = one_cut(corun, blocks)?;
    let before = best.cut / layers * layers;
    let after = (before + layers).min(blocks);
    let promises = [
        (Chooser::CorunRates, best),
        (Chooser::SoloRates, one_cut(solo, blocks)?),
        (Chooser::BlockRates, one_cut(without, blocks)?),
        (Chooser::StepBefore, cut_at(corun, blocks, before)?),
        (Chooser::StepAfter, cut_at(corun, blocks, after)?),
    ];
    promises
        .into_iter()
        .map(|(chooser, promised)| Ok(Chosen { chooser, promised, expected: cut_at(corun, blocks, promised.cut)? }))
        .collect()
}
