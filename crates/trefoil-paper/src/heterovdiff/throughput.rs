//! Figures 5 and 7: the five configurations at four lengths and over deadlines.

use super::{BLOCKS, DETAIL_BLOCKS, Rates};
use crate::Relation::{Follows, Models};
use crate::{Interval, PaperError, PublishedNumbers, Section};

/// The clip lengths with their latent frames (one, and one more for every four frames).
const LENGTHS: [(u32, u32); 4] = [(49, 13), (33, 9), (25, 7), (17, 5)];
/// Column-split GEMMs of a block: four projections of each attention and the feed-forward pair.
const BLOCK_GEMMS: u32 = 10;
/// Rank-128 factor GEMMs of a detail-expert block: two for each of the eight projections.
const FACTOR_GEMMS: u32 = 16;

pub(super) fn sections(numbers: &PublishedNumbers) -> Result<Vec<Section>, PaperError> {
    Ok(vec![single(numbers)?, hetero_tensor(numbers)?, figure5(numbers)?, figure7(numbers)?])
}

/// NPU-only seconds a video at a length.
fn npu_only(numbers: &PublishedNumbers, frames: u32) -> Result<Interval, PaperError> {
    match frames {
        49 => numbers.interval("npu_solo_video"),
        17 => numbers.interval("latency_17"),
        _ => Ok(numbers.interval(&format!("deadline_{frames}"))? / 1.5),
    }
}

/// The pipeline's period from the gain that Figure 5 prints.
fn period(numbers: &PublishedNumbers, frames: u32) -> Result<Interval, PaperError> {
    Ok(npu_only(numbers, frames)? / numbers.interval(&format!("f5_{frames}_heterovdiff"))?)
}

/// `T_G` with both engines busy, from the period and the deployed cut: the cut is the best one, so its successor would make the
/// first stage at least the period: `P/(k+1) <= T_G <= P/k`.
fn corun_first(numbers: &PublishedNumbers, frames: u32) -> Result<Interval, PaperError> {
    let (period, cut) = (period(numbers, frames)?, numbers.value(&format!("cut_{frames}"))?);
    Ok(Interval::new(period.low / (cut + 1.0), period.high / cut))
}

/// `T_G − T_N` solo, from the two engines alone: both run 180 blocks and the same decoder.
fn solo_gap(numbers: &PublishedNumbers, frames: u32) -> Result<Interval, PaperError> {
    let slower = Interval::exactly(1.0) / numbers.interval(&format!("f5_{frames}_gpu_only"))? - 1.0;
    Ok(npu_only(numbers, frames)? * slower / f64::from(BLOCKS))
}

fn single(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let at = |name: &str| numbers.interval(name);
    let mut section = Section::new("Stream and single video at 49 frames (6.2)");
    let solo = Rates::table1(numbers, "solo")?;
    let corun = Rates::table1(numbers, "corun")?;
    let deployed = Rates::deployed(numbers)?;
    let period = at("period_49")?;
    section.compare(numbers, "gain_49", Follows, at("npu_only_49")? / period, "917 s / 677 s")?;
    section.compare(numbers, "npu_only_49", Follows, at("npu_solo_video")?, "Table 1")?;
    section.compare(
        numbers,
        "period_49",
        Models,
        deployed.first_stage(51).max(deployed.second_stage(51)),
        "equation 4 with Table 5's rates",
    )?;
    section.compare(
        numbers,
        "period_49",
        Models,
        corun.first_stage(51).max(corun.second_stage(51)),
        "equation 4 with Table 1's co-run rates",
    )?;
    let both = at("t5_51_gpu")? + at("t5_51_npu")?;
    section.compare(numbers, "worst_49", Follows, both, "Table 5: a video passes both stages, one after the other")?;
    let steps = solo.first.max(corun.first) + solo.second.max(corun.second);
    let balanced = Interval::new(2.0 * period.low - steps.high, 2.0 * period.high);
    section.compare(
        numbers,
        "worst_49",
        Follows,
        balanced,
        "at the best cut the stages differ by less than a block of each, so both take nearly two periods",
    )?;
    let arm = |rates: Rates| rates.first * f64::from(BLOCKS) + rates.decoder;
    let arms = arm(corun).hull(arm(deployed));
    section.compare(
        numbers,
        "gpu_arm_49",
        Models,
        arms,
        "180 GPU blocks and a decode, from Table 1's co-run rates to Table 5's",
    )?;
    section.note("a pipeline of two balanced stages ends each video about two periods after its start: a gain of 1.35 over one engine means 1.48 times its latency, not the 1,325 s (1.45) of 6.2");
    Ok(section)
}

fn hetero_tensor(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let at = |name: &str| numbers.interval(name);
    let blocks = f64::from(BLOCKS);
    let mut section = Section::new("Hetero-Tensor (6.2)");
    let alone = at("npu_solo_video")?;
    section.compare(
        numbers,
        "ht_49",
        Follows,
        alone + (at("ht_pays")? - at("ht_saves")?) * (blocks / 1e3),
        "916.7 s + 180 x (155 - 50) ms",
    )?;
    section.compare(
        numbers,
        "ht_ratio",
        Follows,
        alone / at("ht_49")?,
        "916.7 / 860.5: a throughput above NPU-only's; 0.94 is the ratio of times",
    )?;
    section.compare(numbers, "f5_49_ht", Follows, alone / at("ht_49")?, "916.7 / 860.5")?;
    section.compare(numbers, "f5_49_ht_rate", Follows, Interval::exactly(3600.0) / at("ht_49")?, "3600 / 860.5")?;
    section.compare(
        numbers,
        "f5_49_ht",
        Follows,
        alone / (alone + (at("ht_pays")? - at("ht_saves")?) * (blocks / 1e3)),
        "with the 105 ms a block that it loses",
    )?;
    section.derive(
        "ht_handoffs_per_block",
        "hand-offs a block execution in the paper's count",
        "",
        at("ht_handoffs")? / blocks,
        "4,680 / 180",
    );
    section.derive(
        "ht_handoffs_all",
        "10 GEMMs and 16 adapter GEMMs in all 180 block executions",
        "",
        f64::from((BLOCK_GEMMS + FACTOR_GEMMS) * BLOCKS),
        "the paper's 4,680",
    );
    let ours = f64::from(BLOCK_GEMMS * BLOCKS + FACTOR_GEMMS * DETAIL_BLOCKS);
    section.compare(
        numbers,
        "ht_handoffs",
        Models,
        ours,
        "10 GEMMs a block, and 16 adapter GEMMs in the 90 detail-expert executions only",
    )?;
    section.derive(
        "ht_handoffs_base",
        "without any split adapter GEMM",
        "",
        f64::from(BLOCK_GEMMS * BLOCKS),
        "10 GEMMs a block, an exchange after each",
    );
    section.note("26 a block equals 10 + 16, which would count the factor GEMMs in the semantic expert's steps too, which have none; the paper does not say what it counts");
    Ok(section)
}

/// Seconds until `videos` videos are done by data parallelism: both engines take whole videos from one queue; the second
/// decodes the first's latents as soon as it ends what it is at.
fn data_parallel(first: f64, second: f64, decoder: f64, videos: u32) -> f64 {
    let (first_video, second_video) = (first * f64::from(BLOCKS), second * f64::from(BLOCKS) + decoder);
    let mut left = videos;
    let (mut first_free, mut second_free) = (0.0f64, 0.0f64);
    // Latents that wait for the decoder, by when they are there.
    let mut latents: std::collections::VecDeque<f64> = std::collections::VecDeque::new();
    let mut end = 0.0f64;
    loop {
        while left > 0 && first_free <= second_free {
            left -= 1;
            first_free += first_video;
            latents.push_back(first_free);
        }
        match latents.front().copied() {
            Some(ready) if ready <= second_free || left == 0 => {
                latents.pop_front();
                second_free = second_free.max(ready) + decoder;
            }
            _ if left > 0 => {
                left -= 1;
                second_free += second_video;
            }
            _ => return end,
        }
        end = end.max(second_free);
    }
}

/// Gain of data parallelism in an endless stream: the first engine's videos cost the second a decode each.
fn fluid_gain(alone: Interval, first: Interval, second_video: Interval, decoder: Interval) -> Interval {
    let arm = Interval::exactly(1.0) / (first * f64::from(BLOCKS));
    let spare = Interval::exactly(1.0) - arm * decoder;
    alone * (arm + spare / second_video)
}

fn figure5(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let mut section = Section::new("Figure 5: five configurations, four lengths");
    let hour = Interval::exactly(3600.0);
    let solo = Rates::table1(numbers, "solo")?;
    for (frames, latent) in LENGTHS {
        let alone = npu_only(numbers, frames)?;
        let gain = |name: &str| numbers.interval(&format!("f5_{frames}_{name}"));
        section.compare(
            numbers,
            &format!("tokens_{frames}"),
            Follows,
            f64::from(latent * 30 * 52),
            "latent frames x 30 x 52",
        )?;
        section.compare(numbers, &format!("deadline_{frames}"), Follows, alone * 1.5, "1.5 x NPU-only")?;
        section.compare(numbers, &format!("f5_{frames}_npu_only_rate"), Follows, hour / alone, "3600 / NPU-only")?;
        section.compare(
            numbers,
            &format!("f5_{frames}_heterovdiff_rate"),
            Follows,
            hour / alone * gain("heterovdiff")?,
            "gain x NPU-only",
        )?;
        section.compare(
            numbers,
            &format!("f5_{frames}_ht_rate"),
            Follows,
            hour / alone * gain("ht")?,
            "gain x NPU-only",
        )?;
        section.compare(
            numbers,
            &format!("f5_{frames}_dp_rate"),
            Follows,
            hour / alone,
            "only the NPU arm meets the deadline (its decoding for the GPU arm left out)",
        )?;
        section.derive(
            &format!("gpu_only_{frames}"),
            &format!("GPU-only at {frames} frames"),
            "s",
            alone / gain("gpu_only")?,
            "NPU-only / gain",
        );
        section.derive(
            &format!("period_{frames}_gain"),
            &format!("period at {frames} frames"),
            "s",
            period(numbers, frames)?,
            "NPU-only / gain",
        );
        let first = corun_first(numbers, frames)?;
        section.derive(
            &format!("corun_gpu_{frames}"),
            &format!("GPU block beside the NPU at {frames} frames"),
            "s",
            first,
            "the period over the deployed cut and the next",
        );
        section.derive(
            &format!("solo_gap_{frames}"),
            &format!("GPU block less NPU block, solo, at {frames} frames"),
            "s",
            solo_gap(numbers, frames)?,
            "GPU-only less NPU-only over 180 blocks: the decoder is the same",
        );
        // The decoder at other lengths is unpublished: all of Table 1's and 6.5.1's times, by latent frames.
        let decoder = Interval::new(numbers.value("vae_drift_low")?, solo.decoder.high) * (f64::from(latent) / 13.0);
        let faster = Interval::new(1.08, 1.19);
        let predicted = fluid_gain(alone, first, alone / faster, decoder);
        section.compare(
            numbers,
            &format!("f5_{frames}_dp"),
            Models,
            predicted,
            "an endless stream: GPU block as above, NPU 8 to 19% faster, decoder by latent frames (assumed)",
        )?;
    }
    let behind = |frames: u32| -> Result<Interval, PaperError> {
        let gain = |name: &str| numbers.interval(&format!("f5_{frames}_{name}"));
        Ok((Interval::exactly(1.0) - gain("dp")? / gain("heterovdiff")?) * 100.0)
    };
    section.compare(numbers, "dp_behind_low", Follows, behind(33)?, "Figure 5 at 33 frames")?;
    section.compare(numbers, "dp_behind_high", Follows, behind(25)?, "Figure 5 at 25 frames")?;
    let alone = npu_only(numbers, 49)?.middle();
    for (name, rates) in [("table1", Rates::table1(numbers, "corun")?), ("table5", Rates::deployed(numbers)?)] {
        let ten = data_parallel(rates.first.middle(), rates.second.middle(), rates.decoder.middle(), 10) / 10.0;
        section.derive(
            &format!("dp_ten_{name}"),
            "DP gain over ten videos at 49 frames",
            "x",
            alone / ten,
            "both engines take whole videos from one queue until ten are done",
        );
        let endless = fluid_gain(npu_only(numbers, 49)?, rates.first, rates.second_stage(0), rates.decoder);
        section.compare(numbers, "f5_49_dp", Models, alone / ten, &format!("ten videos, {name}'s co-run rates"))?;
        section.derive(
            &format!("dp_endless_{name}"),
            "DP gain in an endless stream at 49 frames",
            "x",
            endless,
            "the same without an end",
        );
        let pipeline = Interval::exactly(alone) / rates.first_stage(51).max(rates.second_stage(51));
        section.derive(
            &format!("pipeline_{name}"),
            "pipeline gain at 49 frames and cut 51",
            "x",
            pipeline,
            "equation 4",
        );
    }
    let ratio = numbers.interval("ratio_17")?;
    let second = solo_gap(numbers, 17)? / (ratio - 1.0);
    section.derive(
        "solo_npu_17",
        "NPU block, solo, at 17 frames",
        "s",
        second,
        "the difference above and the stated ratio 2.7",
    );
    let decoder = npu_only(numbers, 17)? - second * f64::from(BLOCKS);
    section.derive(
        "solo_vae_17",
        "decoder at 17 frames",
        "s",
        decoder,
        "NPU-only less 180 blocks; 308 s x 5/13 is 118.5",
    );
    section.note("in an endless stream whole videos on both engines give the pipeline's gain or slightly more, since they balance without a cut: a stream of ten ends raggedly (one engine waits for the other's last video), which is enough to explain DP's deficit in Figure 5");
    section.note("the NPU arm of DP decodes the GPU arm's latents, so it cannot keep the full NPU-only rate that Figure 5 counts for it");
    Ok(section)
}

fn figure7(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let at = |name: &str| numbers.interval(name);
    let mut section = Section::new("Figure 7: deadlines at 17 frames");
    let alone = at("latency_17")?;
    let hour = Interval::exactly(3600.0) / alone;
    let rate = |name: &str| Ok::<_, PaperError>(hour * at(&format!("f5_17_{name}"))?);
    section.compare(numbers, "f7_heterovdiff", Follows, rate("heterovdiff")?, "Figure 5's gain x NPU-only")?;
    section.compare(numbers, "f7_heterovdiff", Follows, at("f5_17_heterovdiff_rate")?, "Figure 5's videos per hour")?;
    section.compare(numbers, "f7_npu_arm", Follows, hour, "3600 / 329.3")?;
    section.compare(numbers, "f7_dp_3", Follows, rate("dp")?, "Figure 5's gain x NPU-only")?;
    section.compare(numbers, "f7_gpu_3", Follows, rate("gpu_only")?, "Figure 5's gain x NPU-only")?;
    section.compare(numbers, "f7_ht", Follows, rate("ht")?, "Figure 5's gain x NPU-only")?;
    let gpu_needs = Interval::exactly(1.0) / at("f5_17_gpu_only")?;
    section.compare(numbers, "f7_gpu_needs", Follows, gpu_needs, "1 / GPU-only's gain")?;
    let period = period(numbers, 17)?;
    let first = corun_first(numbers, 17)?;
    let second = solo_gap(numbers, 17)? / (at("ratio_17")? - 1.0);
    let worst = Interval::new(2.0 * period.low - first.high - second.high, 2.0 * period.high) / alone;
    section.compare(
        numbers,
        "f7_worst",
        Follows,
        worst,
        "at the best cut both stages take nearly a period each: about 2 / 1.50",
    )?;
    let configurations = [
        ("npu_only", Interval::exactly(1.0), hour, Interval::exactly(0.0)),
        ("gpu_only", gpu_needs, rate("gpu_only")?, Interval::exactly(0.0)),
        ("dp", gpu_needs, rate("dp")?, hour),
        ("ht", Interval::exactly(1.0) / at("f5_17_ht")?, rate("ht")?, Interval::exactly(0.0)),
        ("heterovdiff", worst, rate("heterovdiff")?, Interval::exactly(0.0)),
    ];
    for factor in [1.25, 1.5, 1.75, 2.0, 3.0] {
        for (name, needs, within, below) in configurations {
            let met = if needs.high <= factor {
                within
            } else if needs.low > factor {
                below
            } else {
                within.hull(below)
            };
            let what = format!("{} at a deadline of {factor} x", name.replace('_', "-"));
            section.derive(
                &format!("f7_{name}_{factor}"),
                &what,
                "videos/h",
                met,
                "its rate where its slowest video meets the deadline",
            );
        }
    }
    section.note("by its own period the pipeline misses a deadline of 1.25 x, where the figure shows it clearing");
    Ok(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand with Table 1's co-run rates: three videos on the GPU, seven on the NPU, the last latent decoded at the end.
    #[test]
    fn ten_videos_by_hand() {
        let (gpu, npu): (f64, f64) = (180.0 * 12.8, 180.0 * 3.101 + 275.0);
        let second_decode = (3.0 * npu + 275.0 + 3.0 * npu).max(2.0 * gpu) + 275.0;
        let last = (second_decode + npu).max(3.0 * gpu) + 275.0;
        assert!((data_parallel(12.8, 3.101, 275.0, 10) - last).abs() < 1e-9);
        assert!((data_parallel(12.8, 3.101, 275.0, 1) - (gpu + 275.0)).abs() < 1e-9);
        assert!(data_parallel(12.8, 3.101, 275.0, 0).abs() < 1e-12);
    }
}
