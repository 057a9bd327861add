//! BIDENT: its ten model families and 190 pairs on the simulated machine `sim:lunar-lake`, and what its text gives.
//!
//! The paper publishes ratios, not cost tables, so nothing here can reproduce its milliseconds. What can be checked is
//! checked (`text`'s arithmetic and caps); the rest is simulated from the description's numbers, each sourced or assumed,
//! and printed beside the published figure with the cap that no schedule can pass.

mod builder;
pub mod families;
mod machine;
mod pairs;
mod parallel;
mod sensitivity;
mod text;

pub use builder::Width;
pub use machine::{Sequential, UNITS};
pub use pairs::{Pair, SHARING};
pub use parallel::Parallel;
pub use sensitivity::Variation;

use crate::Relation::Simulates;
use crate::{Interval, PaperError, PaperReport, PublishedNumbers, Section};
use machine::Costs;
use pairs::{PairOptions, geometric_mean};
use serde::Serialize;
use trefoil_core::Origin;
use trefoil_units::sim::SocDescription;

/// The simulated machine's description.
pub const MACHINE: &str = "lunar-lake";

/// The paper's numbers.
///
/// # Errors
/// [`PaperError::Data`] when the data file is damaged.
pub fn published() -> Result<PublishedNumbers, PaperError> {
    PublishedNumbers::parse(include_str!("../../data/bident.json"))
}

/// Everything recomputed. Times and energies are simulated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BidentReport {
    /// How the numbers of `configurations`, `pairs` and `sensitivity` were got.
    pub origin: Origin,
    /// Address of the machine.
    pub machine: String,
    /// Comparisons.
    #[serde(flatten)]
    pub report: PaperReport,
    /// The 19 configurations.
    pub configurations: Vec<Sequential>,
    /// Where the sizes of each come from.
    pub sources: Vec<(String, &'static str)>,
    /// Table 3: the 19 configurations in phases.
    pub parallel: Vec<Parallel>,
    /// The 190 pairs.
    pub pairs: Vec<Pair>,
    /// Every assumed number 20% up and down; empty unless asked for.
    pub sensitivity: Vec<Variation>,
}

/// Plans all configurations and pairs; with `vary`, again for every assumed number 20% up and down.
///
/// # Errors
/// [`PaperError`] when a data file or the machine's description is damaged.
pub fn report(vary: bool) -> Result<BidentReport, PaperError> {
    let numbers = published()?;
    let soc = trefoil_units::sim::description(MACHINE)?;
    let configurations = families::configurations();
    let costs = costs(&soc, &configurations)?;
    let sequential: Vec<Sequential> =
        costs.iter().map(|(name, costs)| machine::sequential(name.clone(), costs)).collect();
    let pairs = pairs::pairs(&soc, &costs, PairOptions { units: true, sharing: SHARING });
    let mut sections = text::sections(&numbers)?;
    sections.push(sequential_section(&numbers, &sequential)?);
    let parallel = parallel::parallel(MACHINE, &configurations, &sequential)?;
    sections.push(parallel::section(&numbers, &parallel)?);
    sections.push(pairs_section(&numbers, &pairs)?);
    let sensitivity = if vary { sensitivity::variations(&soc, &configurations)? } else { Vec::new() };
    Ok(BidentReport {
        origin: Origin::Simulated,
        machine: format!("sim:{MACHINE}"),
        report: PaperReport {
            paper: numbers.paper.clone(),
            sections,
            cannot_be_checked: CANNOT_BE_CHECKED.map(str::to_owned).to_vec(),
        },
        sources: configurations.iter().map(|configuration| (configuration.name(), configuration.source)).collect(),
        configurations: sequential,
        parallel,
        pairs,
        sensitivity,
    })
}

const CANNOT_BE_CHECKED: [&str; 6] = [
    "every latency of Tables 2 and 3: absolute times, transfers and dispatch of the paper's machine are unpublished",
    "every pair speedup of Figure 9: needs the concurrent times on one unit of 190 pairs, which are unpublished; only the cap can be checked",
    "energy reductions (9.2%, 7.6%, 48.2%): powers are unpublished except one ratio (GPU over CPU 1.19)",
    "Figures 2 to 4 as absolute numbers: ratios only, most without the shape they were measured at",
    "the number of concurrent phases (ViT 51, pi0.5 615, Mamba 25) as such: it needs the backend's fused graphs; ours are printed beside",
    "the rows of Table 3 that the text does not repeat (ResNet-50, Hyena, SNN, and every precision apart), and its times: only the gains of seven models are in the text",
];

fn costs(soc: &SocDescription, configurations: &[families::Configuration]) -> Result<Vec<(String, Costs)>, PaperError> {
    configurations.iter().map(|configuration| Ok((configuration.name(), Costs::new(soc, configuration)?))).collect()
}

fn sequential_section(numbers: &PublishedNumbers, all: &[Sequential]) -> Result<Section, PaperError> {
    let mut section = Section::new("Sequential schedules, simulated (4.2)");
    let how = "equation 1 on sim:lunar-lake";
    let find = |name: &str| all.iter().find(|result| result.name == name).map_or(f64::NAN, |result| result.speedup);
    section.compare(
        numbers,
        "sequential_mean",
        Simulates,
        geometric_mean(all.iter().map(|result| result.speedup)),
        how,
    )?;
    for (published, name) in [
        ("sequential_snn_fp16", "snn_vgg9_fp16"),
        ("sequential_mamba_fp16", "mamba370m_fp16"),
        ("sequential_hyena_fp16", "hyena_fp16"),
        ("sequential_pi05", "pi05"),
        ("sequential_vit", "vit_b16_fp16"),
        ("kan_latency", "kan_fp16"),
    ] {
        section.compare(numbers, published, Simulates, find(name), how)?;
    }
    let mean = |of: fn(&Sequential) -> f64| all.iter().map(of).sum::<f64>() / all.len() as f64;
    section.compare(
        numbers,
        "sequential_energy",
        Simulates,
        mean(|result| result.energy_reduction),
        "energy-optimal, assumed powers",
    )?;
    section.compare(
        numbers,
        "latency_energy",
        Simulates,
        mean(|result| result.latency_energy_reduction),
        "latency-optimal, assumed powers",
    )?;
    section.compare(
        numbers,
        "sequential_energy_latency",
        Simulates,
        geometric_mean(all.iter().map(|result| result.energy_speedup)),
        "energy-optimal schedules' speedup",
    )?;
    let find_energy =
        |name: &str| all.iter().find(|result| result.name == name).map_or(f64::NAN, |result| result.energy_reduction);
    for (published, name) in
        [("energy_snn_fp16", "snn_vgg9_fp16"), ("energy_pi05", "pi05"), ("energy_hyena_fp16", "hyena_fp16")]
    {
        section.compare(numbers, published, Simulates, find_energy(name), "energy-optimal, assumed powers")?;
    }
    if let Some(pi05) = all.iter().find(|result| result.name == "pi05") {
        section.compare(
            numbers,
            "pi05_operators",
            Simulates,
            pi05.operators as f64,
            "our graph of its public parts",
        )?;
        section.compare(numbers, "pi05_npu", Simulates, pi05.placed[2] as f64, how)?;
    }
    if let Some(snn) = all.iter().find(|result| result.name == "snn_vgg9_fp16") {
        section.compare(numbers, "snn_operators", Simulates, snn.operators as f64, "our graph, 6 time steps")?;
    }
    section.note(
        "simulated: agreement or difference tells of the description's assumed numbers, not of the paper's machine",
    );
    Ok(section)
}

fn pairs_section(numbers: &PublishedNumbers, pairs: &[Pair]) -> Result<Section, PaperError> {
    let mut section = Section::new("190 pairs, simulated (4.3)");
    let literal = "the paper's searches under the paper's rules";
    let speedups = || pairs.iter().map(|pair| pair.literal_speedup);
    let range = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)))
    };
    section.compare(numbers, "pairs", Simulates, pairs.len() as f64, "19 configurations")?;
    section.compare(numbers, "pair_mean", Simulates, geometric_mean(speedups()), literal)?;
    let (least, most) = range(&mut speedups());
    section.compare(numbers, "pair_least", Simulates, least, literal)?;
    section.compare(numbers, "pair_most", Simulates, most, literal)?;
    let below = speedups().filter(|speedup| *speedup < 1.0).count();
    section.compare(numbers, "pairs_below_one", Simulates, below as f64, literal)?;
    for (name, first, second) in [
        ("pair_kan_int8_lavish_fp16", "kan_int8", "lavish_fp16"),
        ("pair_mamba_fp16_snn_int8", "mamba370m_fp16", "snn_vgg9_int8"),
        ("pair_pi05_kan", "kan_fp16", "pi05"),
        ("pair_bitnet_fp16_bitnet_fp16", "bitnet_fp16", "bitnet_fp16"),
        ("pair_mamba_fp16_mamba_fp16", "mamba370m_fp16", "mamba370m_fp16"),
    ] {
        let found = pairs.iter().find(|pair| {
            (pair.first == first && pair.second == second) || (pair.first == second && pair.second == first)
        });
        if let Some(pair) = found {
            let how = format!(
                "{literal} ({}); cap {:.2} on exclusive units, {:.2} under the paper's rules",
                pair.method, pair.cap.speedup, pair.cap.literal_speedup
            );
            section.compare(numbers, name, Simulates, pair.literal_speedup, &how)?;
        }
    }
    let units: Vec<f64> = pairs.iter().filter_map(|pair| pair.units_speedup).collect();
    section.derive(
        "units_mean",
        "geometric mean with units in the state, slowdowns and exclusive units",
        "x",
        geometric_mean(units.iter().copied()),
        "joint-units on sim:lunar-lake (simulated)",
    );
    let (low, high) = range(&mut units.iter().copied());
    section.derive(
        "units_range",
        "its range",
        "x",
        Interval::new(low, high),
        "joint-units on sim:lunar-lake (simulated)",
    );
    let caps = || pairs.iter().map(|pair| pair.cap.speedup);
    section.derive(
        "cap_mean",
        "geometric mean of the caps on exclusive units",
        "x",
        geometric_mean(caps()),
        "serial over the largest of either chain and the load bound (simulated)",
    );
    let (low, high) = range(&mut caps());
    section.derive("cap_range", "range of the caps", "x", Interval::new(low, high), "as above");
    let literal_caps = || pairs.iter().map(|pair| pair.cap.literal_speedup);
    section.derive(
        "literal_cap_mean",
        "geometric mean of the caps under the paper's rules",
        "x",
        geometric_mean(literal_caps()),
        "serial over half the sum of both chains (simulated)",
    );
    section.derive("literal_cap_most", "the largest of those", "x", range(&mut literal_caps()).1, "as above");
    let energy: Vec<f64> = pairs.iter().map(|pair| pair.literal_energy_reduction).collect();
    section.compare(
        numbers,
        "pair_energy",
        Simulates,
        energy.iter().sum::<f64>() / energy.len() as f64,
        "the paper's rule: the larger of two energies, not their sum",
    )?;
    section.compare(
        numbers,
        "pair_energy_worse",
        Simulates,
        energy.iter().filter(|&&saved| saved < 0.0).count() as f64,
        "the same",
    )?;
    let counted: Vec<f64> = pairs.iter().filter_map(|pair| pair.units_energy_reduction).collect();
    section.derive(
        "units_energy",
        "average energy reduction with package power counted once",
        "%",
        counted.iter().sum::<f64>() / counted.len().max(1) as f64,
        &format!("joint-units, {} pairs within a million operator pairs (simulated, assumed powers)", counted.len()),
    );
    section.note(format!(
        "concurrent times on one unit are assumed to be {SHARING} times the time alone: the unit takes turns"
    ));
    Ok(section)
}
