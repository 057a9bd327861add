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

/// When the last of `clips` whole clips from one queue ends: two lanes whose blocks take `blocks_ms` a clip, and a last stage of `last_ms`
/// that each lane does for itself, or the second one for both, as clips arrive.
pub fn data_parallel_ms(blocks_ms: [f64; 2], last_ms: f64, clips: usize, is_on_second: bool) -> f64 {
    let mut left = clips;
    let mut take = |from: f64, takes: f64| {
        left.checked_sub(1).map(|rest| {
            left = rest;
            from + takes
        })
    };
    let own = if is_on_second { 0.0 } else { last_ms };
    // When either ends the clip it is at; when the second is free for a last stage, and when everything is over.
    let takes = [blocks_ms[0] + own, blocks_ms[1] + last_ms];
    let mut ends = [take(0.0, takes[0]), take(0.0, takes[1])];
    let (mut free, mut over) = (0.0f64, 0.0f64);
    loop {
        match ends {
            [Some(first), second] if second.is_none_or(|second| first <= second) => {
                if is_on_second {
                    if let Some(second) = second {
                        ends[1] = Some(second + last_ms);
                    } else {
                        free = free.max(first) + last_ms;
                        over = over.max(free);
                    }
                } else {
                    over = over.max(first);
                }
                ends[0] = take(first, takes[0]);
            }
            [_, Some(second)] => {
                (free, over) = (second, over.max(second));
                ends[1] = take(second, takes[1]);
            }
            [_, None] => return over,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand with the rates of HeteroVDiff's Table 1 in seconds: three clips on the first engine, seven on the second, whose last
    /// stages wait for nobody.
    #[test]
    fn clips_from_one_queue_by_hand() {
        let (gpu, npu, decoder): (f64, f64, f64) = (180.0 * 12.8, 180.0 * 3.101, 275.0);
        let second_decode = (3.0 * (npu + decoder) + decoder + 3.0 * (npu + decoder)).max(2.0 * gpu) + decoder;
        let last = (second_decode + npu + decoder).max(3.0 * gpu) + decoder;
        let takes = |blocks_ms, last_ms, clips, is_on_second, want: f64| {
            let got = data_parallel_ms(blocks_ms, last_ms, clips, is_on_second);
            assert!((got - want).abs() < 1e-9, "{got} instead of {want}");
        };
        takes([gpu, npu], decoder, 10, true, last);
        takes([4.0, 9.0], 1.0, 1, false, 5.0);
        takes([4.0, 9.0], 1.0, 3, false, 10.0);
        // The second clip is the second engine's; the first one's last stage is done on the way.
        takes([4.0, 9.0], 1.0, 2, true, 11.0);
        takes([4.0, 4.0], 1.0, 0, true, 0.0);
    }
}
