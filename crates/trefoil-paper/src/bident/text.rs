//! What BIDENT's text gives by arithmetic alone, and what its sequential speedups allow its pairs.

use crate::Relation::Follows;
use crate::{Interval, PaperError, PublishedNumbers, Section};

pub(super) fn sections(numbers: &PublishedNumbers) -> Result<Vec<Section>, PaperError> {
    Ok(vec![arithmetic(numbers)?, caps(numbers)?])
}

fn arithmetic(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let at = |name: &str| numbers.interval(name);
    let value = |name: &str| numbers.value(name);
    let mut section = Section::new("The text against itself");
    let configurations = value("configurations")?;
    section.compare(numbers, "configurations", Follows, 9.0 * 2.0 + 1.0, "nine models at two precisions and pi0.5")?;
    section.compare(
        numbers,
        "pairs",
        Follows,
        configurations * (configurations + 1.0) / 2.0,
        "19 x 20 / 2: every configuration with every one and itself",
    )?;
    section.compare(
        numbers,
        "pairs_below_one_share",
        Follows,
        100.0 * value("pairs_below_one")? / value("pairs")?,
        "2 of 190",
    )?;
    section.compare(numbers, "pi05_operators", Follows, value("pi05_npu")? + value("pi05_cpu")?, "3,992 + 603")?;
    section.compare(
        numbers,
        "pi05_nodes",
        Follows,
        2.0 * value("pi05_operators")?,
        "4,595 operators on the two units it is evaluated on (4.1); 14,000 is three units'",
    )?;
    section.compare(
        numbers,
        "snn_operators",
        Follows,
        value("snn_npu")? + value("snn_cpu")? + value("snn_gpu")?,
        "50 + 39 + 4",
    )?;
    for (model, sequential) in [("vit", "sequential_vit"), ("pi05", "sequential_pi05")] {
        let (before, after) = (at(sequential)?, at(&format!("parallel_{model}"))?);
        let gain = format!("parallel_{model}_gain");
        section.compare(
            numbers,
            &gain,
            Follows,
            (after / before - 1.0) * 100.0,
            "parallel speedup over sequential speedup",
        )?;
        section.compare(numbers, &gain, Follows, (before / after - 1.0) * -100.0, "as a reduction of time instead")?;
    }
    section.compare(
        numbers,
        "parallel_energy",
        Follows,
        value("sequential_energy")?,
        "at least: running a phase's branches one after the other is a parallel schedule too, so an optimum over all saves no less",
    )?;
    section.derive(
        "gpu_over_cpu_power",
        "the GPU's power over the CPU's (KAN)",
        "x",
        (at("kan_energy")? / 100.0 + 1.0) * at("kan_latency")?,
        "1.01x the speed at 18% more energy",
    );
    section.derive(
        "p1_hidden",
        "Conv2D on the CPU, of MatMul's time on the GPU",
        "x",
        (at("p1")? - 1.0) * at("conv_cpu_gpu")?,
        "P1: (1.41 - 1) x 2.2; at most 1 if hidden entirely, as the text says",
    );
    let named = at("sequential_snn_fp16")?
        * at("sequential_mamba_fp16")?
        * at("sequential_hyena_fp16")?
        * at("sequential_pi05")?;
    let four = |low: f64, high: f64| Interval::new(low.powi(4), high.powi(4));
    let known = named
        * four(value("sequential_conventional_least")?, value("sequential_vit_most")?)
        * four(value("sequential_least")?, value("sequential_kan_most")?);
    let whole = Interval::new(at("sequential_mean")?.low.powi(19), at("sequential_mean")?.high.powi(19));
    let rest = whole / known;
    let root = Interval::new(rest.low.powf(1.0 / 7.0), rest.high.powf(1.0 / 7.0));
    section.derive(
        "rest_mean",
        "geometric mean of the seven configurations whose speedup the text does not give",
        "x",
        root,
        "1.09 over 19, less the twelve given or bounded",
    );
    section.note(
        "the gains of the parallel schedules (+29%, +16%) are reductions of time: as speedups they are +41% and +19%",
    );
    Ok(section)
}

/// Largest arithmetic mean of `count` speedups of that geometric mean within `[least, most]`: some at each end.
fn largest_mean(count: f64, geometric: f64, least: f64, most: f64) -> f64 {
    let at_most = (count * geometric.ln() - count * least.ln()) / (most.ln() - least.ln());
    (at_most * most + (count - at_most) * least) / count
}

fn caps(numbers: &PublishedNumbers) -> Result<Section, PaperError> {
    let value = |name: &str| numbers.value(name);
    let mut section = Section::new("Pairs against the cap that sequential speedups set");
    let most = numbers.interval("sequential_most")?.high;
    let how =
        |text: &str| format!("{text}; 2 x the larger: a step costs at least half the sum of its two operators alone");
    section.cap(numbers, "pair_most", 2.0 * most, &how("the largest sequential speedup, 1.58"))?;
    let given = |name: &str| Ok::<_, PaperError>(numbers.interval(name)?.high);
    let pi05 = given("sequential_pi05")?;
    for (name, larger, from) in [
        ("pair_kan_int8_lavish_fp16", most, "KAN at most 1.02, LAVISH at most 1.58"),
        ("pair_mamba_fp16_snn_int8", most, "Mamba 1.14, SNN INT8 at most 1.58"),
        ("pair_pi05_kan", pi05, "pi0.5 1.23, KAN at most 1.02"),
        ("pair_bitnet_fp16_bitnet_fp16", most, "BitNet at most 1.58"),
        ("pair_mamba_fp16_mamba_fp16", given("sequential_mamba_fp16")?, "Mamba 1.14"),
    ] {
        section.cap(numbers, name, 2.0 * larger, &how(from))?;
    }
    section.cap(numbers, "pair_mean", 2.0 * most, &how("every pair at most 1.58"))?;
    let mean = numbers.interval("sequential_mean")?.high;
    let mean_cap = 2.0 * largest_mean(19.0, mean, numbers.interval("sequential_least")?.low, most);
    section.cap(numbers, "pair_mean", mean_cap, "where two operators never share a unit: a step costs at least its slower operator, so a pair gains at most s1 + s2, whose mean over 190 pairs is twice the mean speedup")?;
    section.note("conditions of these caps: requests pay for moving between units as in the sequential search, an operator never runs faster beside another than alone, and the serial baseline is the best single unit of the sequential table");
    section.derive("needed_ratio", "best single unit over the sum of per-operator minima that 22.4 x needs", "x", value("pair_most")? / 2.0, "22.4 / 2; free moves between units (the joint state holds none) could give it only if moves eat nearly all of it in the sequential search");
    section.note("complete overlap of two requests at most doubles throughput; every published pair speedup above twice a sequential speedup needs something that the text does not describe (a slower serial baseline, costs per operator that differ between the two searches, or concurrent times below solo times)");
    section.note("the joint search's state holds no units (3.2.2), so its schedules move between units for free, which the sequential search pays: the two are not comparable as printed");
    Ok(section)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_mean_is_reached_at_the_ends() {
        let mean = largest_mean(19.0, 1.09, 1.01, 1.58);
        assert!((1.09..1.12).contains(&mean), "{mean}");
        // Two numbers of geometric mean 2 within 1 to 4: 1 and 4.
        assert!((largest_mean(2.0, 2.0, 1.0, 4.0) - 2.5).abs() < 1e-12);
    }
}
