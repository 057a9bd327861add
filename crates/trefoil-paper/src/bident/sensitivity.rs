//! Every assumed number of the machine 20% up and down.

use super::families::Configuration;
use super::machine::sequential;
use super::pairs::{PairOptions, SHARING, geometric_mean, pairs};
use crate::PaperError;
use serde::Serialize;
use trefoil_units::sim::SocDescription;

/// One assumed group of numbers changed. Simulated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Variation {
    /// What was changed.
    pub what: String,
    /// By which factor.
    pub factor: f64,
    /// Geometric mean of the sequential speedups.
    pub sequential_mean: f64,
    /// Geometric mean of the paper's pair searches.
    pub pair_mean: f64,
    /// Least and largest.
    pub pair_range: [f64; 2],
    /// Geometric mean of the caps on exclusive units.
    pub cap_mean: f64,
}

/// A change of a description by a factor.
type Change = fn(&mut SocDescription, f64);

/// All rates of one device: the absolute rates are assumed, the ratios between devices are published where their source says so.
fn rates(soc: &mut SocDescription, device: &str, factor: f64, only_assumed: bool) {
    for device in soc.devices.iter_mut().filter(|known| known.name == device || device.is_empty()) {
        for rate in device.rates.iter_mut().filter(|rate| !only_assumed || rate.source.starts_with("assumed")) {
            for point in &mut rate.per_second {
                point[1] *= factor;
            }
        }
    }
}

fn dispatch(soc: &mut SocDescription, device: &str, factor: f64) {
    for device in soc.devices.iter_mut().filter(|known| known.name == device) {
        device.dispatch_ms.value *= factor;
    }
}

const CHANGES: [(&str, Change); 11] = [
    ("nothing", |_, _| ()),
    ("all rates", |soc, factor| rates(soc, "", factor, false)),
    ("rates of which nothing is published, CPU", |soc, factor| rates(soc, "CPU", factor, true)),
    ("rates of which nothing is published, GPU", |soc, factor| rates(soc, "GPU", factor, true)),
    ("rates of which nothing is published, NPU", |soc, factor| rates(soc, "NPU", factor, true)),
    ("dispatch, CPU", |soc, factor| dispatch(soc, "CPU", factor)),
    ("dispatch, GPU", |soc, factor| dispatch(soc, "GPU", factor)),
    ("dispatch, NPU", |soc, factor| dispatch(soc, "NPU", factor)),
    ("transfer latency", |soc, factor| {
        for transfer in &mut soc.transfers {
            transfer.latency_ms *= factor;
        }
    }),
    ("transfer bandwidth", |soc, factor| {
        for transfer in &mut soc.transfers {
            transfer.bytes_per_second *= factor;
        }
    }),
    ("sharing", |_, _| ()),
];

/// Plans everything again for each change and factor.
pub(super) fn variations(soc: &SocDescription, configurations: &[Configuration]) -> Result<Vec<Variation>, PaperError> {
    let mut all = Vec::new();
    for (what, change) in CHANGES {
        let factors: &[f64] = if what == "nothing" { &[1.0] } else { &[0.8, 1.2] };
        for &factor in factors {
            let mut changed = soc.clone();
            change(&mut changed, factor);
            let costs = super::costs(&changed, configurations)?;
            let sharing = if what == "sharing" { SHARING * factor } else { SHARING };
            let pairs = pairs(&changed, &costs, PairOptions { units: false, sharing });
            let speedups = || pairs.iter().map(|pair| pair.literal_speedup);
            all.push(Variation {
                what: if what == "sharing" {
                    "slowdown of two requests on one unit".to_owned()
                } else {
                    what.to_owned()
                },
                factor,
                sequential_mean: geometric_mean(
                    costs.iter().map(|(name, costs)| sequential(name.clone(), costs).speedup),
                ),
                pair_mean: geometric_mean(speedups()),
                pair_range: [speedups().fold(f64::INFINITY, f64::min), speedups().fold(0.0, f64::max)],
                cap_mean: geometric_mean(pairs.iter().map(|pair| pair.cap.speedup)),
            });
        }
    }
    Ok(all)
}
