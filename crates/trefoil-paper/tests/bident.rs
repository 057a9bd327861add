//! The text's arithmetic, the simulated machine, and that no search passes its cap.

use std::sync::LazyLock;
use trefoil_core::{Origin, UnitAddress};
use trefoil_paper::Verdict;
use trefoil_paper::bident::{BidentReport, families::configurations};
use trefoil_plan::{PlanRequest, pair_cap_of, plan, plan_pair};
use trefoil_units::sim::simulated_profile;

/// Planned once: it takes seconds.
static REPORT: LazyLock<BidentReport> = LazyLock::new(|| trefoil_paper::bident::report(false).unwrap());

#[test]
fn text_pairs_and_caps() {
    let report = &*REPORT;
    assert_eq!(report.origin, Origin::Simulated);
    let row = |name: &str| report.report.row(name).unwrap();
    for name in ["pairs", "configurations", "pairs_below_one_share", "pi05_operators", "snn_operators"] {
        assert_eq!(row(name).verdict, Verdict::Agrees, "{name}");
    }
    let found: Vec<&str> = report.report.with_verdict(Verdict::Contradicts).map(|row| row.name.as_str()).collect();
    for name in ["pi05_nodes", "parallel_vit_gain", "parallel_energy"] {
        assert!(found.contains(&name), "{name} is not among {found:?}");
    }
    let above: Vec<&str> = report.report.with_verdict(Verdict::AboveCap).map(|row| row.name.as_str()).collect();
    for name in ["pair_most", "pair_mean", "pair_kan_int8_lavish_fp16", "pair_pi05_kan"] {
        assert!(above.contains(&name), "{name} is not among {above:?}");
    }
    assert_eq!(report.configurations.len(), 19);
    assert_eq!(report.pairs.len(), 190);
    for result in &report.configurations {
        assert!(result.speedup >= 1.0 - 1e-12 && result.chain_ms <= result.sequential_ms, "{result:?}");
        assert_eq!(result.placed.iter().sum::<usize>(), result.operators);
        assert!(result.energy_reduction >= -1e-9 && result.energy_reduction >= result.latency_energy_reduction - 1e-9);
        assert!((result.name.starts_with("kan") && result.single_ms[2].is_none()) || !result.name.starts_with("kan"));
        assert!(result.name != "pi05" || (result.single_ms[1].is_none() && result.placed[1] == 0));
    }
    for pair in &report.pairs {
        let slack = 1.0 + 1e-9;
        assert!(pair.literal_speedup <= pair.cap.literal_speedup * slack, "{pair:?}");
        assert!(pair.units_speedup.unwrap() <= pair.cap.speedup * slack, "{pair:?}");
        // Running one after the other is always possible with units in the state.
        assert!(pair.units_speedup.unwrap() >= 1.0 - 1e-9, "{pair:?}");
    }
}

/// Table 3: what the formula claims is never above what the simulator says of the same placement, and chains have no phases.
#[test]
fn phases_of_every_configuration_stand_beside_what_the_text_gives() {
    let report = &*REPORT;
    assert_eq!(report.parallel.len(), 19);
    for (parallel, sequential) in report.parallel.iter().zip(&report.configurations) {
        assert_eq!(parallel.name, sequential.name);
        assert!(parallel.literal_ms > 0.0 && parallel.concurrent_phases <= parallel.phases, "{parallel:?}");
        assert!(parallel.exclusive_ms > 0.0 && parallel.exclusive_gain <= 100.0, "{parallel:?}");
        if parallel.concurrent_phases == 0 {
            assert!(parallel.literal_gain <= 1e-6, "no branch, no gain: {parallel:?}");
        }
    }
    for name in ["parallel_vit_gain", "parallel_mamba_gain", "parallel_lavish_gain", "phases_pi05", "parallel_most"] {
        let simulated = report.report.sections.iter().flat_map(|section| &section.rows);
        let row = simulated.into_iter().find(|row| row.name == name && row.origin == Origin::Simulated);
        assert!(row.is_some_and(|row| row.published.is_some() && row.difference_percent.is_some()), "{name}");
    }
    assert!(report.parallel.iter().any(|parallel| parallel.concurrent_phases > 20));
}

/// The same numbers through profiles and plans: the short cut over arrays is no second truth.
#[test]
fn profiles_give_the_same_costs() {
    let report = &*REPORT;
    let units: Vec<UnitAddress> =
        ["CPU", "GPU", "NPU"].map(|device| UnitAddress::new("sim", format!("lunar-lake/{device}"))).to_vec();
    let all = configurations();
    let profile = |name: &str| {
        let configuration = all.iter().find(|configuration| configuration.name() == name).unwrap();
        simulated_profile(&configuration.graph, &units, "2026-01-01T00:00:00Z").unwrap()
    };
    let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * (1.0 + a.abs());
    let (one, other) = (profile("hyena_fp16"), profile("kan_int8"));
    let request = |profile| PlanRequest::new(profile, &profile.models[0]);
    let sequential = plan("sequential", &request(&one)).unwrap();
    let result = report.configurations.iter().find(|result| result.name == "hyena_fp16").unwrap();
    assert!(close(sequential.claimed, result.sequential_ms), "{} and {}", sequential.claimed, result.sequential_ms);
    assert_eq!(sequential.timeline.origin, Origin::Simulated);
    let pair = report.pairs.iter().find(|pair| pair.first == "hyena_fp16" && pair.second == "kan_int8").unwrap();
    let joint = plan_pair("joint", &request(&one), &request(&other)).unwrap();
    assert!(close(joint.claimed, pair.literal_ms), "{} and {}", joint.claimed, pair.literal_ms);
    assert_eq!(joint.timeline.origin, Origin::Simulated);
    let units_plan = plan_pair("joint-units", &request(&one), &request(&other)).unwrap();
    assert!(close(units_plan.claimed, pair.units_ms.unwrap()));
    let cap = pair_cap_of(&request(&one), &request(&other)).unwrap();
    assert!(close(cap.bound, pair.cap.bound) && close(cap.serial, pair.serial_ms));
}
