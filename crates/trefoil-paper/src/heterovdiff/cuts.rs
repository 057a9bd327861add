//! Cuts, step cuts and Table 5.

use super::{BLOCKS, Rates};
use crate::Relation::{Follows, Models};
use crate::{Interval, PaperError, PublishedNumbers, Section};
use trefoil_plan::stream::{crossing, cut_at, one_cut, period_with_solo_rest};

/// All cuts that rates within the intervals give, as one interval.
fn cut_range(rates: Rates) -> Result<Interval, PaperError> {
    let mut range = Interval::exactly(f64::from(one_cut(rates.printed(), BLOCKS)?.cut));
    // The crossing is monotone in each rate, so the extremes are at corners.
    for corner in rates.corners() {
        range = range.hull(Interval::exactly(f64::from(one_cut(corner, BLOCKS)?.cut)));
    }
    Ok(range)
}

pub(super) fn sections(numbers: &PublishedNumbers) -> Result<Vec<Section>, PaperError> {
    Ok(vec![cuts(numbers)?, step_cuts(numbers)?, table5(numbers)?])
}

fn cuts(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let mut section = Section::new("Where to cut (4.3, Table 5)");
    let (solo, corun, deployed) =
        (Rates::table1(numbers, "solo")?, Rates::table1(numbers, "corun")?, Rates::deployed(numbers)?);
    let no_decoder = Rates { decoder: Interval::exactly(0.0), ..deployed };
    section.compare(
        numbers,
        "cut_corun",
        Follows,
        cut_range(deployed)?,
        "equation 4 with 676/51, 408/129 and 267 s",
    )?;
    section.compare(numbers, "cut_no_vae", Follows, cut_range(no_decoder)?, "the same without T_V")?;
    section.compare(numbers, "cut_solo", Follows, cut_range(solo)?, "equation 4 with Table 1's solo rates")?;
    section.derive(
        "cut_table1",
        "cut from Table 1's co-run rates",
        "blocks",
        cut_range(corun)?,
        "equation 4 with 12.8, 3.101 and 275 s; the paper deploys 51",
    );
    section.derive(
        "crossing_deployed",
        "crossing of the stages",
        "blocks",
        crossing(deployed.printed(), BLOCKS),
        "equation 5 with Table 5's rates",
    );
    section.derive(
        "crossing_table1",
        "crossing of the stages",
        "blocks",
        crossing(corun.printed(), BLOCKS),
        "equation 5 with Table 1's co-run rates",
    );
    let best = one_cut(deployed.printed(), BLOCKS)?;
    section.derive("period_deployed", "period at cut 51", "s", best.period, "equation 4 with Table 5's rates");
    section
        .note("Table 1's rounded co-run rates give 52 and Table 5's stage times 51; both are right for their inputs");
    Ok(section)
}

fn step_cuts(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let mut section = Section::new("Cuts at step boundaries (3.3, Table 5)");
    let (solo, corun, deployed) =
        (Rates::table1(numbers, "solo")?, Rates::table1(numbers, "corun")?, Rates::deployed(numbers)?);
    for (name, cut) in [("idle_30", 30), ("idle_60", 60)] {
        let gap = corun.second_stage(cut) - corun.first_stage(cut);
        let idle = if gap.middle() < 0.0 { gap * -1.0 } else { gap };
        section.compare(numbers, name, Follows, idle, "Table 1's co-run rates")?;
    }
    for cut in [30, 60, 34, 57] {
        let rates = deployed.printed();
        let at = cut_at(rates, BLOCKS, cut)?;
        let how = "Table 5's rates at cut 51";
        for (engine, stage) in [("gpu", at.first_stage), ("npu", at.second_stage)] {
            section.compare(numbers, &format!("t5_{cut}_{engine}"), Models, stage, how)?;
        }
        section.compare(numbers, &format!("t5_{cut}_period"), Models, at.period, how)?;
        let rest = period_with_solo_rest(corun.printed(), solo.printed(), BLOCKS, cut)?;
        section.derive(
            &format!("rest_{cut}"),
            &format!("period at cut {cut} when the longer stage ends alone"),
            "s",
            rest,
            "Table 1's co-run rates while both work, its solo rates for the rest",
        );
    }
    section.note("equation 4 takes co-run rates for the whole of the longer stage; an engine that works on alone returns to its solo rate (slower for this NPU, faster for this GPU)");
    Ok(section)
}

fn table5(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let at = |name: String| numbers.interval(&name);
    let mut section = Section::new("Table 5 against itself");
    let deployed_period = at("t5_51_period".to_owned())?;
    for cut in [30, 60, 34, 57, 51] {
        let (gpu, npu) = (at(format!("t5_{cut}_gpu"))?, at(format!("t5_{cut}_npu"))?);
        let gap = gpu - npu;
        let idle = if gap.middle() < 0.0 { gap * -1.0 } else { gap };
        section.compare(numbers, &format!("t5_{cut}_idle"), Follows, idle, "the row's stage times")?;
        section.compare(numbers, &format!("t5_{cut}_period"), Models, gpu.max(npu), "the longer stage: equation 4")?;
        if cut != 51 {
            let above = (at(format!("t5_{cut}_period"))? / deployed_period - 1.0) * 100.0;
            section.compare(numbers, &format!("t5_{cut}_above"), Follows, above, "the row's period over 683 s")?;
        }
        section.derive(
            &format!("t5_{cut}_block_gpu"),
            &format!("GPU block at cut {cut}"),
            "s",
            gpu / f64::from(cut),
            "the row's GPU stage",
        );
        let second = (npu - numbers.interval("vae_deployed")?) / f64::from(BLOCKS - cut);
        section.derive(
            &format!("t5_{cut}_block_npu"),
            &format!("NPU block at cut {cut}"),
            "s",
            second,
            "the row's NPU stage less 267 s",
        );
    }
    section.compare(numbers, "period_49", Follows, deployed_period, "Table 5's period of the same cut")?;
    section.compare(
        numbers,
        "gpu_corun_block",
        Models,
        at("t5_51_gpu".to_owned())? / 51.0 * 1e3,
        "Table 5's GPU stage at cut 51",
    )?;
    let drift = Interval::new(numbers.value("vae_drift_low")?, numbers.value("vae_drift_high")?);
    section.compare(
        numbers,
        "npu_corun_vae",
        Follows,
        drift,
        "6.5.1: the decoder's time drifted from 186 to 270 s between days",
    )?;
    section.note(
        "one set of rates does not give Table 5: its GPU block takes 14.37 s at cut 30 and 13.03 s at cuts 34 and 60",
    );
    Ok(section)
}
