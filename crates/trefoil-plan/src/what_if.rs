//! What if a unit were slower, absent, or busy with something else for a while?
//!
//! A change is applied to a copy of the profile, whose altered records are labelled [`Origin::Predicted`]. Then two things are
//! told: what the plan that was made for the machine as measured costs on the changed one (**replayed**), and what a plan
//! made for the changed one costs (**replanned**).

use crate::list_scheduling::heft_after;
use crate::problem::Problem;
use crate::simulate::{SimulationModel, resource_keys, simulate};
use crate::view::CostView;
use crate::whole::mode_at;
use crate::{PlanError, PlanOptions, PlanRequest, plan_with};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;
use trefoil_core::quantity::short;
use trefoil_core::{
    CoreError, CostRef, Objective, Origin, Outcome, Plan, Profile, Quantity, Samples, Subject, Task, TaskId, Timeline,
    Unit, UnitAddress, Work,
};

/// A change of the machine: `slow:UNIT=1.5`, `without:UNIT`, `busy:UNIT=4.0` (milliseconds from the start).
#[derive(Debug, Clone, PartialEq)]
pub enum WhatIf {
    /// Everything the unit does, transfers to it included, takes this many times as long.
    Slow {
        /// The unit.
        unit: UnitAddress,
        /// Factor, above 0; below 1 means faster.
        factor: f64,
    },
    /// The unit is not there.
    Without {
        /// The unit.
        unit: UnitAddress,
    },
    /// The unit's resources work on something else first.
    Busy {
        /// The unit.
        unit: UnitAddress,
        /// For how many milliseconds of its undisturbed time.
        ms: f64,
    },
}

impl WhatIf {
    /// The unit that changes.
    pub fn unit(&self) -> &UnitAddress {
        match self {
            Self::Slow { unit, .. } | Self::Without { unit } | Self::Busy { unit, .. } => unit,
        }
    }
}

impl fmt::Display for WhatIf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Slow { unit, factor } => write!(f, "slow:{unit}={}", short(*factor)),
            Self::Without { unit } => write!(f, "without:{unit}"),
            Self::Busy { unit, ms } => write!(f, "busy:{unit}={}", short(*ms)),
        }
    }
}

impl FromStr for WhatIf {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, PlanError> {
        let fail = |reason: String| PlanError::WhatIfSyntax { text: text.to_owned(), reason };
        let (what, rest) = text.split_once(':').ok_or_else(|| fail("no `:`".to_owned()))?;
        let unit = |text: &str| text.parse().map_err(|error: CoreError| fail(error.to_string()));
        let with_number = || {
            let (address, number) = rest.rsplit_once('=').ok_or_else(|| fail("no `=` and number".to_owned()))?;
            let number: f64 = number.parse().map_err(|_| fail(format!("`{number}` is no number")))?;
            Ok::<_, PlanError>((unit(address)?, number))
        };
        match what {
            "without" => Ok(Self::Without { unit: unit(rest)? }),
            "slow" => match with_number()? {
                (unit, factor) if factor.is_finite() && factor > 0.0 => Ok(Self::Slow { unit, factor }),
                (_, factor) => Err(fail(format!("{} is no factor above 0", short(factor)))),
            },
            "busy" => match with_number()? {
                (unit, ms) if ms.is_finite() && ms >= 0.0 => Ok(Self::Busy { unit, ms }),
                (_, ms) => Err(fail(format!("{} is no number of milliseconds", short(ms)))),
            },
            other => Err(fail(format!("`{other}` is none of slow, without, busy"))),
        }
    }
}

/// What changes do to a plan.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct Replay {
    /// The changes, as given.
    pub changes: Vec<String>,
    /// What is minimised; the costs below are in its unit.
    pub objective: Objective,
    /// What the costs of operators that the changes do not touch rest on: `measured`, or `simulated from a machine description`.
    pub origin: String,
    /// The plan on the machine as measured.
    pub before: f64,
    /// The same plan on the changed machine; `None` when it uses a unit that is gone.
    pub replayed: Option<f64>,
    /// The best plan found for the changed machine.
    pub replanned: f64,
    /// How that plan was found.
    pub how: String,
    /// That plan.
    pub plan: Plan,
}

impl fmt::Display for Replay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = if self.objective == Objective::Energy { "J" } else { "ms" };
        let relative = |cost: f64| {
            if self.before > 0.0 { format!(" ({:+.1}%)", 100.0 * (cost / self.before - 1.0)) } else { String::new() }
        };
        writeln!(f, "if {} (assumed; everything else {}):", self.changes.join(" and "), self.origin)?;
        writeln!(f, "  the plan as it is now costs {:.4} {unit} ({})", self.before, self.plan.timeline.origin)?;
        let origin = self.plan.timeline.origin;
        match self.replayed {
            Some(cost) => {
                writeln!(f, "  the same plan would cost {cost:.4} {unit}{} ({origin})", relative(cost))?;
            }
            None => writeln!(f, "  the same plan could not run: it uses a unit that would be gone")?,
        }
        let replanned = self.replanned;
        writeln!(f, "  planned anew: {replanned:.4} {unit}{} ({origin}; {})", relative(replanned), self.how)
    }
}

/// Plans with `method`, applies the changes, replays the plan and plans anew.
///
/// # Errors
/// [`CoreError::UnknownUnit`] for a unit that the profile does not have; [`PlanError::NoUnitLeft`] when none would be left;
/// whatever is wrong with the request, before or after the changes.
pub fn what_if(
    method: &str,
    request: &PlanRequest<'_>,
    options: &PlanOptions,
    changes: &[WhatIf],
) -> Result<Replay, PlanError> {
    let whole_only = |unit: &UnitAddress| match mode_at(request.profile, unit) {
        Some(_) => {
            let what = "a change cannot be replayed on its operators".to_owned();
            Err(PlanError::OnlyWhole { unit: unit.to_string(), what })
        }
        None => Ok(()),
    };
    for change in changes {
        request.profile.unit(change.unit())?;
        whole_only(change.unit())?;
    }
    check_changes(changes)?;
    let plan = plan_with(method, request, options)?;
    plan.units_used().into_iter().try_for_each(whole_only)?;
    let before = score(request, &plan, &[])?.1;
    let profile = changed(request.profile, changes);
    check_size(&profile, changes)?;
    let gone: BTreeSet<&UnitAddress> =
        changes.iter().filter(|change| matches!(change, WhatIf::Without { .. })).map(WhatIf::unit).collect();
    let asked: Vec<UnitAddress> = if request.units.is_empty() {
        request.profile.units.iter().map(|unit| unit.address.clone()).collect()
    } else {
        request.units.clone()
    };
    let units: Vec<UnitAddress> = asked.into_iter().filter(|unit| !gone.contains(unit)).collect();
    if units.is_empty() {
        let gone = changes.iter().filter(|change| matches!(change, WhatIf::Without { .. }));
        return Err(PlanError::NoUnitLeft { changes: gone.map(ToString::to_string).collect::<Vec<_>>().join(", ") });
    }
    let busy: Vec<(UnitAddress, f64)> = changes
        .iter()
        .filter_map(|change| match change {
            WhatIf::Busy { unit, ms } => Some((unit.clone(), *ms)),
            _ => None,
        })
        .collect();
    let now = PlanRequest { profile: &profile, units, ..request.clone() };
    let same = if plan.units_used().iter().any(|unit| gone.contains(unit)) { None } else { repriced(&now, &plan).ok() };
    let replayed = same.as_ref().map(|same| score(&now, same, &busy)).transpose()?;
    let mut candidates: Vec<(String, Plan)> = vec![(format!("method {method}"), plan_with(method, &now, options)?)];
    candidates.extend(same.map(|same| ("the same plan stays best".to_owned(), same)));
    if !busy.is_empty() {
        candidates.extend(around(method, &now, options, &busy)?);
    }
    let mut best: Option<(f64, String, Plan)> = None;
    for (how, candidate) in candidates {
        let (scored, cost) = score(&now, &candidate, &busy)?;
        if best.as_ref().is_none_or(|best| cost < best.0 * (1.0 - 1e-9)) {
            best = Some((cost, how, scored));
        }
    }
    let (replanned, how, mut plan) = best.ok_or(PlanError::NoUnits)?;
    if busy.is_empty() {
        // A plan kept from the machine as measured brings its bound along: state it for the changed one.
        let view = CostView::new(&now)?;
        plan.claimed = replanned;
        (plan.model_bound, plan.gap, plan.exact) = (None, None, false);
        let goal = crate::goal_of(request.objective);
        crate::judge::judge(&mut plan, &[&view], goal, crate::judge::bound_of_all(&view)?)?;
    }
    Ok(Replay {
        changes: changes.iter().map(ToString::to_string).collect(),
        objective: request.objective,
        origin: crate::explain::label(profile_origin(request), None),
        before,
        replayed: replayed.map(|scored| scored.1),
        replanned,
        how,
        plan,
    })
}

/// Refuses changes that contradict each other.
fn check_changes(changes: &[WhatIf]) -> Result<(), PlanError> {
    let gone = |unit: &UnitAddress| {
        changes.iter().any(|change| matches!(change, WhatIf::Without { unit: gone } if gone == unit))
    };
    let slows = |unit: &UnitAddress| {
        changes.iter().filter(|change| matches!(change, WhatIf::Slow { unit: slow, .. } if slow == unit)).count()
    };
    for change in changes {
        let reason = match change {
            WhatIf::Slow { unit, .. } | WhatIf::Busy { unit, .. } if gone(unit) => "another change takes the unit away",
            WhatIf::Slow { unit, .. } if slows(unit) > 1 => "the unit is slowed twice; give one factor",
            _ => continue,
        };
        return Err(PlanError::WhatIfSyntax { text: change.to_string(), reason: reason.to_owned() });
    }
    Ok(())
}

/// Refuses changes that make times none.
fn check_size(profile: &Profile, changes: &[WhatIf]) -> Result<(), PlanError> {
    let odd_on = |unit: &UnitAddress| {
        let records = profile.measurements.iter().filter(|record| record.units.last() == Some(unit));
        let timings = records.filter_map(|record| match &record.outcome {
            Outcome::Ok { timing, nodes, .. } => Some((timing, nodes)),
            _ => None,
        });
        let mut times = timings.flat_map(|(timing, nodes)| {
            let parts = [&timing.total, &timing.h2d, &timing.dispatch, &timing.exec, &timing.d2h];
            let typical = parts.into_iter().flatten().map(|samples| (samples.median, samples.p90.max(samples.max)));
            typical.chain(nodes.iter().map(|node| (node.ms, node.ms)))
        });
        let odd = |&(ms, most): &(f64, f64)| !Quantity::Time.holds(ms) || !Quantity::Time.spreads_to(most);
        times.find(odd).map(|(ms, most)| if Quantity::Time.holds(ms) { most } else { ms })
    };
    for change in changes {
        let reason = match change {
            WhatIf::Slow { unit, factor } => odd_on(unit).map(|ms| {
                format!(
                    "{} times what was measured is {} ms, which is no {}",
                    short(*factor),
                    short(ms),
                    Quantity::Time
                )
            }),
            WhatIf::Busy { ms, .. } if !Quantity::Time.holds(*ms) => {
                Some(format!("{} ms is no {}", short(*ms), Quantity::Time))
            }
            WhatIf::Busy { .. } | WhatIf::Without { .. } => None,
        };
        if let Some(reason) = reason {
            return Err(PlanError::WhatIfSyntax { text: change.to_string(), reason });
        }
    }
    Ok(())
}

/// How the profile's numbers were got: measured, or the one of its operators' that must show.
fn profile_origin(request: &PlanRequest<'_>) -> Origin {
    let records = request.profile.measurements.iter();
    let origins =
        records.filter(|record| matches!(record.subject, Subject::Operator { .. })).map(|record| record.origin);
    origins.fold(Origin::Measured, |so_far, origin| match (so_far, origin) {
        (Origin::Simulated, _) | (_, Origin::Simulated) => Origin::Simulated,
        (Origin::Emulated, _) | (_, Origin::Emulated) => Origin::Emulated,
        (Origin::Measured, origin) => origin,
        (so_far, _) => so_far,
    })
}

/// A copy of the profile with slower units; altered records are predictions.
fn changed(profile: &Profile, changes: &[WhatIf]) -> Profile {
    let mut profile = profile.clone();
    for change in changes {
        let WhatIf::Slow { unit, factor } = change else { continue };
        for record in &mut profile.measurements {
            // The destination does the work of a transfer.
            let (Subject::Operator { .. }
            | Subject::Segment { .. }
            | Subject::WholeModel { .. }
            | Subject::Transfer { .. }) = record.subject
            else {
                continue;
            };
            if record.units.last() != Some(unit) {
                continue;
            }
            if let Outcome::Ok { timing, nodes, .. } = &mut record.outcome {
                let parts =
                    [&mut timing.total, &mut timing.h2d, &mut timing.dispatch, &mut timing.exec, &mut timing.d2h];
                parts.into_iter().flatten().for_each(|samples| scale(samples, *factor));
                for node in nodes {
                    node.ms *= factor;
                }
                if record.origin == Origin::Measured {
                    record.origin = Origin::Predicted;
                }
            }
        }
        profile.notes.push(format!("as if {change}"));
    }
    profile
}

fn scale(samples: &mut Samples, factor: f64) {
    for value in [&mut samples.median, &mut samples.p10, &mut samples.p90, &mut samples.min, &mut samples.max] {
        *value *= factor;
    }
}

/// The plan with every cost as the request's profile has it now.
fn repriced(request: &PlanRequest<'_>, plan: &Plan) -> Result<Plan, PlanError> {
    let view = CostView::new(request)?;
    let mut plan = plan.clone();
    let index = |address: &UnitAddress| {
        view.unit_index(address)
            .ok_or_else(|| CoreError::UnknownUnit { want: address.to_string(), have: view.unit_names() })
    };
    for segment in &mut plan.segments {
        let unit = index(&segment.unit)?;
        let cost = view.segment(&segment.operators, unit).map_err(|reason| PlanError::Unrunnable {
            unit: segment.unit.to_string(),
            what: crate::assemble::describe(&view, &segment.operators),
            model: view.graph.model.clone(),
            reason,
        })?;
        segment.cost = CostRef {
            ms: cost.ms,
            joules: view.table.watts[unit].map(|watts| watts * cost.ms / 1e3),
            origin: cost.origin,
            measurements: cost.ids,
        };
    }
    for task in &mut plan.tasks {
        match &task.work {
            Work::Segment { segment } => task.cost = plan.segments[segment.0 as usize].cost.clone(),
            Work::Transfer { tensor, from, .. } => {
                let unit = index(&task.unit)?;
                task.cost.ms = match from {
                    None => view.input_ms(*tensor, unit).0,
                    Some(from) if *from == task.unit => view.output_ms(*tensor, unit).0,
                    Some(from) => view.table.transfer(index(from)?, unit).ms(view.graph.tensor(*tensor).bytes),
                };
                task.cost.joules = view.table.watts[unit].map(|watts| watts * task.cost.ms / 1e3);
            }
            Work::Blocks { .. } => {}
        }
    }
    Ok(plan)
}

/// The plan with busy units' other work put first, simulated; and its cost in the objective's unit.
fn score(request: &PlanRequest<'_>, plan: &Plan, busy: &[(UnitAddress, f64)]) -> Result<(Plan, f64), PlanError> {
    let mut blocked = plan.clone();
    for (address, ms) in busy {
        let unit = request.profile.unit(address)?;
        block(&mut blocked, unit, *ms);
    }
    let model = SimulationModel::new(&request.profile.index(), &[request.graph], &blocked)?;
    let simulation = simulate(&blocked, &model)?;
    blocked.timeline = named(simulation.timeline, plan.tasks.len());
    blocked.simulated_ms = simulation.makespan_ms;
    let cost = match request.objective {
        Objective::Energy => simulation.energy_j.unwrap_or(blocked.claimed),
        Objective::Latency | Objective::Throughput => simulation.makespan_ms,
    };
    if !busy.is_empty() {
        blocked.claimed = cost;
        (blocked.model_bound, blocked.gap, blocked.exact) = (None, None, false);
    }
    Ok((blocked, cost))
}

/// Adds a task that holds the unit's resources before everything else.
fn block(plan: &mut Plan, unit: &Unit, ms: f64) {
    let id = TaskId(plan.tasks.len() as u32);
    if !plan.units.iter().any(|known| known.address == unit.address) {
        plan.units.push(unit.clone());
    }
    for key in resource_keys(unit) {
        let order = plan.order.entry(key).or_default();
        // Behind what another change has already put first.
        let first = order.iter().take_while(|task| is_block(plan.tasks.get(task.0 as usize))).count();
        order.insert(first, id);
    }
    plan.tasks.push(Task {
        work: Work::Blocks { first: 0, count: 0 },
        unit: unit.address.clone(),
        iteration: 0,
        item: 0,
        after: Vec::new(),
        cost: CostRef { ms, joules: None, origin: Origin::Declared, measurements: Vec::new() },
    });
}

fn is_block(task: Option<&Task>) -> bool {
    task.is_some_and(|task| matches!(task.work, Work::Blocks { count: 0, .. }))
}

/// Spans of blocking tasks (those from `own` on) say what they are.
fn named(mut timeline: Timeline, own: usize) -> Timeline {
    for span in timeline.lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
        if span.task.0 as usize >= own {
            "busy with something else".clone_into(&mut span.label);
        }
    }
    timeline
}

/// Plans that work around busy units: without them, and by earliest finish with them joining late.
fn around(
    method: &str,
    request: &PlanRequest<'_>,
    options: &PlanOptions,
    busy: &[(UnitAddress, f64)],
) -> Result<Vec<(String, Plan)>, PlanError> {
    let mut found = Vec::new();
    let blocked: Vec<&Unit> =
        busy.iter().map(|(unit, _)| request.profile.unit(unit)).collect::<Result<_, CoreError>>()?;
    let free: Vec<UnitAddress> = request
        .units
        .iter()
        .filter(|address| {
            request.profile.unit(address).is_ok_and(|unit| blocked.iter().all(|other| unit.is_disjoint(other)))
                && !busy.iter().any(|(other, _)| other == *address)
        })
        .cloned()
        .collect();
    if !free.is_empty()
        && let Ok(plan) = plan_with(method, &PlanRequest { units: free, ..request.clone() }, options)
    {
        found.push((format!("method {method} without the busy unit"), plan));
    }
    let view = CostView::new(request)?;
    let problem = Problem::from_view(&view)?;
    let mut until: BTreeMap<&str, f64> = BTreeMap::new();
    let keys: Vec<(Vec<String>, f64)> =
        blocked.iter().zip(busy).map(|(unit, (_, ms))| (resource_keys(unit), *ms)).collect();
    for (keys, ms) in &keys {
        for key in keys {
            *until.entry(key).or_default() += ms;
        }
    }
    let ready: Vec<f64> =
        problem.resources().iter().map(|name| until.get(name.as_str()).copied().unwrap_or(0.0)).collect();
    let schedule = heft_after(&problem, &ready);
    found.push((
        "list scheduling with the busy unit joining late".to_owned(),
        problem.to_plan(&[&view], &schedule, "heft", true)?,
    ));
    Ok(found)
}
