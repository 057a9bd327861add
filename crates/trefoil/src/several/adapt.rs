//! `--adapt`: what the planners propose when a unit has become slow or is gone.

use super::{Question, Ready, request};
use std::collections::BTreeMap;
use trefoil_core::{Unit, UnitAddress};
use trefoil_plan::together;
use trefoil_run::together::{Arrangement, Situation};

/// A new arrangement must promise at least this fraction less than a round takes now.
const WORTH_SWITCHING: f64 = 0.1;

/// The best arrangement of whole models under what is known of the units now; `None` where none is worth it. After a failure any
/// will do.
pub fn propose(ready: &[Ready], which: &[usize], question: &Question, situation: &Situation) -> Option<Arrangement> {
    let all: Vec<Unit> = question.units.iter().chain(&question.baseline_units).cloned().collect();
    let mut units: Vec<Unit> = Vec::new();
    for unit in all {
        let known = units.iter().any(|other| other.address == unit.address);
        if !known && !situation.lost.contains(&unit.address) {
            units.push(unit);
        }
    }
    let mut asked = request(ready, which, &units, question.items);
    asked.strained = strained(&units, &situation.slow);
    let plans = [together::placed(&asked), together::serial(&asked), together::one_per_unit(&asked)];
    let best = plans.into_iter().filter_map(Result::ok).min_by(|one, other| one.claimed.total_cmp(&other.claimed))?;
    let worth = situation.round_ms.is_none_or(|now| best.claimed < now * (1.0 - WORTH_SWITCHING));
    worth.then_some(Arrangement { plan: best, ordered: true })
}

/// A core that somebody else uses slows every unit that needs it: those that hold all that the slow unit holds. Units that hold
/// only a part of it are given the benefit of the doubt until they are seen to be slow.
fn strained(units: &[Unit], slow: &BTreeMap<UnitAddress, f64>) -> BTreeMap<UnitAddress, f64> {
    let mut strained: BTreeMap<UnitAddress, f64> = BTreeMap::new();
    for (address, &factor) in slow {
        let Some(slow) = units.iter().find(|unit| unit.address == *address) else { continue };
        for unit in units.iter().filter(|unit| slow.resources.is_subset(&unit.resources)) {
            let worst = strained.entry(unit.address.clone()).or_insert(factor);
            *worst = worst.max(factor);
        }
    }
    strained
}

#[cfg(test)]
mod tests {
    use super::*;
    use trefoil_core::{Resource, UnitKind, UnitLimits};

    #[test]
    fn a_slow_core_strains_what_needs_it_and_nothing_else() {
        let unit = |address: &str, cores: &[u32]| Unit {
            address: address.parse().unwrap(),
            kind: UnitKind::Cpu,
            resources: cores.iter().copied().map(Resource::Core).collect(),
            limits: UnitLimits::default(),
            simulated: false,
            description: None,
        };
        let units = [unit("a:CPU@0", &[0]), unit("a:CPU@1", &[1]), unit("b:CPU@0", &[0]), unit("b:CPU", &[0, 1])];
        let slow = |address: &str| BTreeMap::from([(address.parse().unwrap(), 2.0)]);
        let names = |address: &str| -> Vec<String> {
            strained(&units, &slow(address)).keys().map(ToString::to_string).collect()
        };
        assert_eq!(names("a:CPU@0"), ["a:CPU@0", "b:CPU", "b:CPU@0"]);
        assert_eq!(names("b:CPU"), ["b:CPU"]);
    }
}
