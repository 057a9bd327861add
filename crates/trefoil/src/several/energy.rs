//! Joules of arrangements, from measured or declared power.

use super::{Found, Ready};
use crate::error::CliError;
use serde::Serialize;
use std::collections::BTreeMap;
use trefoil_core::{Outcome, Plan, Profile, Subject, Unit, UnitAddress, UnitKind};
use trefoil_plan::together::Powers;
use trefoil_report::format;
use trefoil_run::{Comparison, Reason, Verdict};

/// Arrangements whose joules differ by less than this fraction are told apart by their time.
const ALIKE: f64 = 0.01;

/// Powers, and where they come from.
#[derive(Debug, Clone)]
pub struct KnownPowers {
    /// The watts.
    pub powers: Powers,
    /// `declared`, or `measured (package)`.
    pub origin: &'static str,
    /// What was assumed.
    pub notes: Vec<String>,
}

/// Energy of one arrangement.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Energy {
    /// Its name.
    pub name: String,
    /// Joules of a round: measured busy times and powers; median over fresh processes.
    pub joules: f64,
    /// Of each process.
    pub per_process: Vec<f64>,
    /// From the predicted timeline.
    pub predicted: Option<f64>,
}

/// What is known of the units' power.
///
/// # Errors
/// [`CliError::Usage`] naming a unit whose power nobody measured or declared.
pub fn known_powers(profiles: &[&Profile], units: &[Unit]) -> Result<KnownPowers, CliError> {
    let (mut powers, mut notes, mut declared) = (Powers::default(), Vec::new(), false);
    let idle = find(profiles, None);
    match idle {
        Some((watts, by_hand)) => {
            powers.idle = watts;
            declared |= by_hand;
        }
        None => notes.push("idle power is not known: joules are those of the work alone (`--watts idle=…`)".to_owned()),
    }
    for unit in units {
        if let Some((watts, by_hand)) = find(profiles, Some(&unit.address)) {
            powers.busy.insert(unit.address.clone(), watts);
            declared |= by_hand;
        }
    }
    for unit in units.iter().filter(|unit| !powers.busy.contains_key(&unit.address)).cloned().collect::<Vec<_>>() {
        // A CPU backend's cores are alike: some of them draw their share of what more of them draw above idle.
        let share = units.iter().find_map(|other| {
            let alike = unit.kind == UnitKind::Cpu
                && (&unit.address.backend, &unit.address.device, unit.address.precision)
                    == (&other.address.backend, &other.address.device, other.address.precision);
            let (watts, by_hand) = find(profiles, Some(&other.address)).filter(|_| alike)?;
            let share = unit.resources.len() as f64 / other.resources.len() as f64;
            Some((powers.idle + (watts - powers.idle) * share, by_hand, other.address.clone()))
        });
        let Some((watts, by_hand, from)) = share else {
            let address = &unit.address;
            return Err(CliError::Usage(format!(
                "no power is known of {address}: there is no meter here that can be read; declare it with --watts {address}=WATTS"
            )));
        };
        notes.push(format!("power of {} is taken to be {watts:.2} W, its cores' share of {from}'s", unit.address));
        declared |= by_hand;
        powers.busy.insert(unit.address, watts);
    }
    Ok(KnownPowers { powers, origin: if declared { "declared" } else { "measured (package)" }, notes })
}

/// Watts of a unit or, without one, of the idle package; and whether they are declared. What was measured comes first.
fn find(profiles: &[&Profile], unit: Option<&UnitAddress>) -> Option<(f64, bool)> {
    let place: Vec<UnitAddress> = unit.cloned().into_iter().collect();
    for profile in profiles {
        if let Some(Outcome::Value { value }) =
            profile.index().newest(&Subject::Power, &place).map(|found| &found.outcome)
        {
            return Some((value.median, false));
        }
    }
    let key = unit.map_or_else(|| "idle".to_owned(), ToString::to_string);
    profiles.iter().find_map(|profile| profile.declared_watts.get(&key)).map(|&watts| (watts, true))
}

/// Of several models.
pub fn powers_of(ready: &[Ready], units: &[Unit]) -> Result<KnownPowers, CliError> {
    known_powers(&ready.iter().map(|model| &model.profile).collect::<Vec<_>>(), units)
}

/// Joules of every arrangement that ran, in the contest's order.
pub fn energies(found: &Found, known: &KnownPowers) -> Vec<Energy> {
    let mut energies = Vec::new();
    for entrant in &found.contest.entrants {
        let process = |figures: &trefoil_run::together::ProcessFigures| {
            let ms = 1e3 / figures.per_second;
            let busy: Option<BTreeMap<UnitAddress, f64>> =
                figures.utilisation.iter().map(|(unit, share)| Some((unit.parse().ok()?, share * ms))).collect();
            known.powers.joules(ms, busy?.iter().map(|(unit, &ms)| (unit, ms))).filter(|joules| joules.is_finite())
        };
        let candidate = found.candidates.iter().find(|candidate| candidate.entrant.name == entrant.name);
        // Models that fight for the same cores are busy longer than they compute: nothing can be said of their energy.
        let Some(candidate) = candidate.filter(|one| one.entrant.arrangement.ordered) else { continue };
        let per_process: Vec<f64> = entrant.processes.iter().filter_map(process).collect();
        let Some(median) = trefoil_core::Samples::from_values(&mut per_process.clone()) else { continue };
        energies.push(Energy {
            name: entrant.name.clone(),
            joules: median.median,
            per_process,
            predicted: known.powers.joules_of(&candidate.entrant.arrangement.plan.timeline),
        });
    }
    energies
}

/// The arrangement that takes least energy; among those within 1 % the fastest.
pub fn verdict(found: &Found, energies: &[Energy], origin: &str) -> Verdict {
    let sound = |energy: &&Energy| {
        let entrant = found.contest.entrants.iter().find(|entrant| entrant.name == energy.name);
        entrant.is_some_and(|entrant| entrant.equality.compared == 0 || entrant.equality.ok())
    };
    let ms = |name: &str| {
        let contender = found.contest.comparison.contenders.iter().find(|contender| contender.name == name);
        contender.and_then(|contender| contender.measured.as_ref()).map_or(f64::INFINITY, |samples| samples.median)
    };
    let sound: Vec<Energy> = energies.iter().filter(sound).cloned().collect();
    let Some((best, against)) = least(&sound, &ms) else { return found.contest.verdict() };
    let baseline = found.candidates.iter().any(|one| one.entrant.name == best && one.entrant.baseline);
    Verdict {
        choice: Some(best.clone()),
        uses_plan: !baseline,
        reason: if baseline { Reason::NoPlan } else { Reason::PlanFaster },
        message: format!("{best} takes least energy: {against} ({origin} watts)"),
    }
}

/// Joules of one model's contenders: each one's typical inference, stretched to its median time. Contenders without a trace are left
/// out.
pub fn of_contenders<'a>(
    comparison: &Comparison,
    plan_of: impl Fn(&str) -> Option<&'a Plan>,
    known: &KnownPowers,
) -> Vec<Energy> {
    let mut energies = Vec::new();
    for contender in &comparison.contenders {
        let (Some(measured), Some(trace)) = (&contender.measured, &contender.trace) else { continue };
        let length = trace.end_ms();
        let Some(joules) = known.powers.joules_of(trace).filter(|_| length > 0.0) else { continue };
        let per_process: Vec<f64> = contender.round_medians.iter().map(|ms| joules * ms / length).collect();
        energies.push(Energy {
            name: contender.name.clone(),
            joules: joules * measured.median / length,
            per_process,
            predicted: plan_of(&contender.name)
                .filter(|plan| plan.simulated_ms > 0.0)
                .and_then(|plan| known.powers.joules_of(&plan.timeline)),
        });
    }
    energies
}

/// Of one model, the contender that takes least energy; among those within 1 % the fastest. And what to say of it.
pub fn least_of(comparison: &Comparison, energies: &[Energy], origin: &str) -> Option<(String, String)> {
    let ms = |name: &str| {
        let contender = comparison.contenders.iter().find(|contender| contender.name == name);
        contender.and_then(|contender| contender.measured.as_ref()).map_or(f64::INFINITY, |samples| samples.median)
    };
    let (best, against) = least(energies, &ms)?;
    Some((best.clone(), format!("{best} takes least energy: {against} ({origin} watts)")))
}

/// The one with least energy, among those within [`ALIKE`] the fastest, and how it stands against the fastest of all.
fn least(energies: &[Energy], ms: &dyn Fn(&str) -> f64) -> Option<(String, String)> {
    let least = energies.iter().map(|energy| energy.joules).fold(f64::INFINITY, f64::min);
    let alike = energies.iter().filter(|energy| energy.joules <= least * (1.0 + ALIKE));
    let best = alike.min_by(|one, other| ms(&one.name).total_cmp(&ms(&other.name)))?;
    let fastest = energies.iter().min_by(|one, other| ms(&one.name).total_cmp(&ms(&other.name)))?;
    let of = |energy: &Energy| format!("{} in {}", format::joules(energy.joules), format::time(ms(&energy.name)));
    let against = if fastest.name == best.name {
        format!("{}, and nothing is faster", of(best))
    } else {
        format!("{}; the fastest, {}, takes {}", of(best), fastest.name, of(fastest))
    };
    Some((best.name.clone(), against))
}
