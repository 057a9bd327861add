//! HeteroVDiff: what its published rates, cuts, gains and sizes give.

mod cuts;
mod memory;
mod throughput;

use crate::{Interval, PaperError, PaperReport, PublishedNumbers, Section};
use trefoil_plan::stream::VideoRates;

/// Block executions of one video: 6 steps of 30 blocks (section 3).
pub const BLOCKS: u32 = 180;
/// Blocks of the model.
pub const LAYERS: u32 = 30;
/// Block executions that use the detail expert: steps 3 to 5 (section 2.1).
pub const DETAIL_BLOCKS: u32 = 90;

/// The paper's numbers.
///
/// # Errors
/// [`PaperError::Data`] when the data file is damaged.
pub fn published() -> Result<PublishedNumbers, PaperError> {
    PublishedNumbers::parse(include_str!("../../data/heterovdiff.json"))
}

/// Three rates as intervals.
#[derive(Debug, Clone, Copy)]
struct Rates {
    first: Interval,
    second: Interval,
    decoder: Interval,
}

impl Rates {
    /// Table 1's, in seconds: `solo` or `corun`.
    fn table1(numbers: &PublishedNumbers, condition: &str) -> Result<Self, PaperError> {
        Ok(Self {
            first: numbers.interval(&format!("gpu_{condition}_block"))? / 1e3,
            second: numbers.interval(&format!("npu_{condition}_block"))? / 1e3,
            decoder: numbers.interval(&format!("npu_{condition}_vae"))?,
        })
    }

    /// What Table 5's row of the deployed cut gives: the stages divided by their blocks, decoder 267 s.
    fn deployed(numbers: &PublishedNumbers) -> Result<Self, PaperError> {
        let decoder = numbers.interval("vae_deployed")?;
        Ok(Self {
            first: numbers.interval("t5_51_gpu")? / 51.0,
            second: (numbers.interval("t5_51_npu")? - decoder) / 129.0,
            decoder,
        })
    }

    /// The middles.
    fn printed(self) -> VideoRates {
        VideoRates { first: self.first.middle(), second: self.second.middle(), decoder: self.decoder.middle() }
    }

    /// All combinations of ends.
    fn corners(self) -> Vec<VideoRates> {
        let ends = |interval: Interval| [interval.low, interval.high];
        let mut corners = Vec::new();
        for first in ends(self.first) {
            for second in ends(self.second) {
                corners.extend(ends(self.decoder).map(|decoder| VideoRates { first, second, decoder }));
            }
        }
        corners
    }

    /// `k·T_G`.
    fn first_stage(self, cut: u32) -> Interval {
        self.first * f64::from(cut)
    }

    /// `(B−k)·T_N + T_V`.
    fn second_stage(self, cut: u32) -> Interval {
        self.second * f64::from(BLOCKS - cut) + self.decoder
    }
}

/// Everything recomputed.
///
/// # Errors
/// [`PaperError::Data`] when the data file is damaged.
pub fn report() -> Result<PaperReport, PaperError> {
    let numbers = published()?;
    let mut sections: Vec<Section> = vec![rates(&numbers)?];
    sections.extend(cuts::sections(&numbers)?);
    sections.extend(throughput::sections(&numbers)?);
    sections.push(memory::section(&numbers)?);
    let cannot = [
        "Tables 4 and 6 (VBench scores): need the phone's numeric paths and the benchmark; nothing published gives them",
        "Table 2 and the solo and co-run rates themselves: measurements of one phone",
        "co-run rates at 33, 25 and 17 frames: unpublished; only the intervals above follow",
        "Figure 5's deployed cuts 54, 59 and 61: chosen from those unpublished rates",
        "the order of the gains printed in Figure 5: its text gives values without bars; they are assigned so that the videos per hour and the stated 0.6 to 6.4% agree",
    ];
    Ok(PaperReport { paper: numbers.paper.clone(), sections, cannot_be_checked: cannot.map(str::to_owned).to_vec() })
}

/// Tables 1 and 2 against the text around them.
fn rates(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    use crate::Relation::{Follows, Models};
    let at = |name: &str| numbers.interval(name);
    let mut section = Section::new("Rates (Tables 1 and 2)");
    let (solo, corun) = (Rates::table1(numbers, "solo")?, Rates::table1(numbers, "corun")?);
    let blocks = f64::from(BLOCKS);
    section.compare(numbers, "gpu_trajectory", Follows, solo.first * blocks, "180 x Table 1's GPU block")?;
    section.compare(numbers, "npu_trajectory", Follows, solo.second * blocks, "180 x Table 1's NPU block")?;
    section.compare(numbers, "block_ratio", Follows, solo.first / solo.second, "Table 1's blocks")?;
    section.compare(numbers, "ratio_49", Follows, solo.first / solo.second, "Table 1's blocks")?;
    section.compare(numbers, "npu_solo_video", Models, solo.second_stage(0), "180 blocks and a decode")?;
    section.compare(numbers, "npu_corun_video", Follows, corun.second_stage(0), "180 blocks and a decode")?;
    let faster = (solo.second / corun.second - 1.0) * 100.0;
    section.compare(numbers, "npu_corun_speedup", Models, faster, "Table 1's NPU blocks, solo over co-run")?;
    section.derive(
        "gpu_corun_slowdown",
        "the GPU's co-run slow-down",
        "%",
        (corun.first / solo.first - 1.0) * 100.0,
        "Table 1's GPU blocks",
    );
    section.compare(numbers, "t2_gpu_int8", Follows, solo.first, "Table 1, GPU solo")?;
    section.compare(numbers, "t2_npu_fp16", Follows, solo.second, "Table 1, NPU solo")?;
    for (engine, fastest, others) in [("gpu", "int8", ["fp16", "fp32"]), ("npu", "fp16", ["int8", "fp32"])] {
        for other in others {
            let ratio = at(&format!("t2_{engine}_{other}"))? / at(&format!("t2_{engine}_{fastest}"))?;
            section.compare(numbers, &format!("t2_{engine}_{other}_ratio"), Follows, ratio, "Table 2's seconds")?;
        }
    }
    let against_table1 = at("t2_gpu_fp16")? / solo.first;
    section.derive(
        "t2_gpu_fp16_ratio_table1",
        "FP16 over INT8 on the GPU with Table 1's INT8 time",
        "x",
        against_table1,
        "42.3 s / 12.633 s; Table 2 prints 3.37",
    );
    section.compare(numbers, "usable_gb", Follows, at("usable_gib")? * 1.073_741_824, "10.85 GiB in GB")?;
    section.note("the block ratio 3.90 is 2,350 / 603; Table 1's own blocks give 3.77, and every statement of 3.9 rests on the 2,350 s that they do not give");
    Ok(section)
}
