//! A closed loop that notices when a unit becomes slow or fails, asks for another arrangement, and goes on with that.
//!
//! Nothing is decided here: the caller re-plans ([`adapting_loop`]'s `replan`), this watches, switches between rounds, and keeps
//! count. A round that failed is run again on the next arrangement, so that none is lost.

use super::rounds::{LoopLimit, LoopMeter, LoopReport, Outputs, Rounds, solo_outputs};
use super::watch::{Watch, WatchRule};
use super::{Arrangement, ModelInputs};
use crate::RunError;
use crate::executor::{ExecutorOptions, FindUnit};
use crate::source::SegmentSource;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use trefoil_core::{OperatorGraph, Timeline, UnitAddress};

/// What the arrangement is to be adapted to.
#[derive(Debug, Clone, PartialEq)]
pub struct Situation {
    /// Units that work slower than normal, by factor, as far as is known: also those that were left because of it.
    pub slow: BTreeMap<UnitAddress, f64>,
    /// Units that failed.
    pub lost: BTreeSet<UnitAddress>,
    /// Units that were slow some time ago and are no longer held to be: they may be tried again.
    pub forgiven: BTreeSet<UnitAddress>,
    /// A round's time now, in milliseconds; `None` if the last one failed.
    pub round_ms: Option<f64>,
}

/// One adaptation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Adaptation {
    /// Seconds from the start of the loop.
    pub at_seconds: f64,
    /// Units that worked slower than normal, by factor.
    pub slow: BTreeMap<String, f64>,
    /// Units that had failed.
    pub lost: Vec<String>,
    /// Units that were slow some time ago and may be tried again.
    #[serde(default)]
    pub forgiven: Vec<String>,
    /// The error of the last one, if that is why.
    pub error: Option<String>,
    /// Milliseconds that re-planning took.
    pub plan_ms: f64,
    /// Milliseconds to compile the new arrangement, in which no round ran; `None` if the old one was kept.
    pub switch_ms: Option<f64>,
    /// A round's time before, in milliseconds.
    pub round_ms: Option<f64>,
    /// What the new arrangement claims.
    pub claimed_ms: Option<f64>,
    /// Its segments' units.
    pub units: Vec<String>,
}

/// What an adapting loop gave.
#[derive(Debug)]
pub struct AdaptReport {
    /// The loop as a whole.
    pub run: LoopReport,
    /// Every re-planning, in order.
    pub adaptations: Vec<Adaptation>,
    /// Rounds that failed and were run again.
    pub repeated: u64,
    /// What happened in the last round.
    pub trace: Timeline,
    /// Its outputs.
    pub outputs: Outputs,
    /// The arrangement in the end.
    pub last: Arrangement,
}

/// When to re-plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdaptRule {
    /// When a unit counts as slow.
    pub watch: WatchRule,
    /// Least time between two re-plannings, failures apart.
    pub pause: Duration,
    /// After which time a unit that was slow may be tried again; twice as long each time that it is slow again.
    pub patience: Duration,
}

impl Default for AdaptRule {
    fn default() -> Self {
        Self { watch: WatchRule::default(), pause: Duration::from_millis(500), patience: Duration::from_secs(10) }
    }
}

/// Most re-plannings of one loop; what still changes after that is not worth following.
const MOST: usize = 64;
/// A unit's slowdown must change by this factor before it is asked about again.
const NEWS: f64 = 1.3;

/// Everything that an arrangement is compiled from.
pub struct Compiling<'a> {
    /// Graphs, in the order of the plan's models.
    pub graphs: &'a [&'a OperatorGraph],
    /// Sub-models of any arrangement's segments.
    pub source: &'a dyn SegmentSource,
    /// Finds units.
    pub find: &'a FindUnit<'a>,
    /// How to compile.
    pub options: &'a ExecutorOptions,
    /// Inputs of each model.
    pub inputs: &'a [ModelInputs<'a>],
}

impl Compiling<'_> {
    fn alone(&self, arrangement: &Arrangement) -> Result<Outputs, RunError> {
        solo_outputs(&arrangement.plan, self.graphs, self.source, self.find, self.options, self.inputs)
    }

    fn rounds(&self, arrangement: &Arrangement) -> Result<Rounds, RunError> {
        Rounds::new(arrangement, self.graphs, self.source, self.find, self.options, self.inputs)
    }
}

/// Runs rounds until the limit; between rounds, when a unit has become slow or a round has failed, `replan` is asked for another
/// arrangement. `None` keeps the present one, which after a failure ends the loop with its error.
///
/// # Errors
/// Those of [`Rounds::new`] and [`Rounds::run`], after a failure for which `replan` knows no help.
pub fn adapting_loop(
    first: Arrangement,
    compiling: &Compiling<'_>,
    limit: &LoopLimit<'_>,
    rule: AdaptRule,
    replan: &mut dyn FnMut(&Situation) -> Option<Arrangement>,
) -> Result<AdaptReport, RunError> {
    let mut arrangement = first;
    let mut alone = compiling.alone(&arrangement)?;
    let mut rounds = compiling.rounds(&arrangement)?;
    for _ in 0..limit.warmup.max(1) {
        rounds.run()?;
    }
    let mut state = State::new(units_of(&arrangement), rule);
    let mut meter = LoopMeter::new(compiling.graphs.len());
    let began = Instant::now();
    let stopped = || limit.stop.load(Ordering::Relaxed);
    while meter.rounds() < limit.rounds && !stopped() && (meter.rounds() < 3 || began.elapsed() <= limit.time) {
        let failure = match rounds.run() {
            Ok(ms) => {
                meter.add(&rounds, ms, Some(&alone));
                rounds.for_each_segment(&mut |segment, _, ms| state.watch.add(segment, ms));
                state.recent_ms = Some(state.recent_ms.map_or(ms, |recent| 0.9 * recent + 0.1 * ms));
                None
            }
            Err(error) => Some(error),
        };
        let Some(situation) = state.news(failure.as_ref()) else {
            match failure {
                Some(error) => return Err(error),
                None => continue,
            }
        };
        state.repeated += u64::from(failure.is_some());
        let asked = Instant::now();
        let proposal = if state.adaptations.len() < MOST { replan(&situation) } else { None };
        let mut entry = Adaptation {
            at_seconds: began.elapsed().as_secs_f64(),
            slow: situation.slow.iter().map(|(unit, factor)| (unit.to_string(), *factor)).collect(),
            lost: situation.lost.iter().map(ToString::to_string).collect(),
            forgiven: situation.forgiven.iter().map(ToString::to_string).collect(),
            error: failure.as_ref().map(ToString::to_string),
            plan_ms: asked.elapsed().as_secs_f64() * 1e3,
            switch_ms: None,
            round_ms: situation.round_ms,
            claimed_ms: None,
            units: Vec::new(),
        };
        match (proposal, failure) {
            (Some(next), _) => {
                let switching = Instant::now();
                alone = compiling.alone(&next)?;
                rounds = compiling.rounds(&next)?;
                rounds.run()?;
                entry.switch_ms = Some(switching.elapsed().as_secs_f64() * 1e3);
                entry.claimed_ms = Some(next.plan.claimed).filter(|&ms| ms > 0.0);
                entry.units = next.plan.segments.iter().map(|segment| segment.unit.to_string()).collect();
                state.switch(units_of(&next), next.plan.segments.iter().map(|segment| segment.cost.ms).collect());
                arrangement = next;
            }
            (None, Some(error)) => return Err(error),
            (None, None) => {}
        }
        state.adaptations.push(entry);
    }
    Ok(AdaptReport {
        run: meter.report(stopped()),
        adaptations: state.adaptations,
        repeated: state.repeated,
        trace: rounds.trace(),
        outputs: rounds.outputs()?,
        last: arrangement,
    })
}

fn units_of(arrangement: &Arrangement) -> Vec<UnitAddress> {
    arrangement.plan.segments.iter().map(|segment| segment.unit.clone()).collect()
}

/// What is known of a unit that was slow.
#[derive(Debug, Clone, Copy)]
struct Slow {
    factor: f64,
    since: Instant,
    patience: Duration,
    forgiven: bool,
}

struct State {
    rule: AdaptRule,
    watch: Watch,
    known: BTreeMap<UnitAddress, Slow>,
    /// What was asked about since the present arrangement began.
    asked: BTreeMap<UnitAddress, f64>,
    lost: BTreeSet<UnitAddress>,
    last: Option<Instant>,
    recent_ms: Option<f64>,
    repeated: u64,
    adaptations: Vec<Adaptation>,
}

impl State {
    fn new(units: Vec<UnitAddress>, rule: AdaptRule) -> Self {
        Self {
            watch: Watch::new(units, rule.watch),
            rule,
            known: BTreeMap::new(),
            asked: BTreeMap::new(),
            lost: BTreeSet::new(),
            last: None,
            recent_ms: None,
            repeated: 0,
            adaptations: Vec::new(),
        }
    }

    fn situation(&self, forgiven: BTreeSet<UnitAddress>, round_ms: Option<f64>) -> Situation {
        let slow = self.known.iter().filter(|(_, slow)| !slow.forgiven);
        let slow = slow.map(|(unit, slow)| (unit.clone(), slow.factor)).collect();
        Situation { slow, lost: self.lost.clone(), forgiven, round_ms }
    }

    /// What to re-plan for, if there is anything new.
    fn news(&mut self, failure: Option<&RunError>) -> Option<Situation> {
        if let Some(error) = failure {
            let (RunError::Segment { place, .. } | RunError::Panicked { place, .. }) = error else { return None };
            self.lost.insert(place.unit.parse().ok()?);
            return Some(self.situation(BTreeSet::new(), None));
        }
        if self.last.is_some_and(|last| last.elapsed() < self.rule.pause) {
            return None;
        }
        let slow = self.watch.slow();
        let asked = &self.asked;
        let is_news = |(unit, factor): (&UnitAddress, &f64)| asked.get(unit).is_none_or(|known| factor / known >= NEWS);
        if slow.iter().any(is_news) {
            for (unit, factor) in slow {
                // Slow again after it was forgiven: the next chance comes later.
                let patience = match self.known.get(&unit) {
                    Some(before) if before.forgiven => before.patience * 2,
                    Some(before) => before.patience,
                    None => self.rule.patience,
                };
                self.asked.insert(unit.clone(), factor);
                self.known.insert(unit, Slow { factor, since: Instant::now(), patience, forgiven: false });
            }
            self.last = Some(Instant::now());
            return Some(self.situation(BTreeSet::new(), self.recent_ms));
        }
        let mut forgiven = BTreeSet::new();
        for (unit, slow) in self.known.iter_mut().filter(|(_, slow)| !slow.forgiven) {
            if slow.since.elapsed() >= slow.patience {
                slow.forgiven = true;
                forgiven.insert(unit.clone());
            }
        }
        if forgiven.is_empty() {
            return None;
        }
        self.last = Some(Instant::now());
        Some(self.situation(forgiven, self.recent_ms))
    }

    /// Another arrangement runs from now on. What its plan expects of its segments is normal, where it expects anything; else
    /// what is seen first.
    fn switch(&mut self, units: Vec<UnitAddress>, normal_ms: Vec<f64>) {
        self.watch = Watch::expecting(units, normal_ms, self.rule.watch);
        self.asked.clear();
        self.recent_ms = None;
        self.last = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn unit(text: &str) -> UnitAddress {
        text.parse().unwrap()
    }

    fn state(patience: Duration) -> State {
        let watch = WatchRule { window: 2, factor: 1.5 };
        State::new(vec![unit("a:CPU@0")], AdaptRule { watch, pause: Duration::ZERO, patience })
    }

    fn run(state: &mut State, ms: f64) {
        (0..4).for_each(|_| state.watch.add(0, ms));
    }

    #[test]
    fn a_slow_unit_is_told_once_and_again_when_it_gets_worse() {
        let mut state = state(Duration::from_hours(1));
        run(&mut state, 1.0);
        assert_eq!(state.news(None), None);
        run(&mut state, 2.0);
        let situation = state.news(None).expect("it is slow");
        assert_eq!(situation.slow, BTreeMap::from([(unit("a:CPU@0"), 2.0)]));
        assert_eq!(state.news(None), None, "that is known");
        run(&mut state, 3.0);
        assert!(state.news(None).is_some_and(|situation| situation.slow[&unit("a:CPU@0")] > 2.5));
    }

    #[test]
    fn a_unit_that_was_left_is_forgiven_and_forgiven_later_the_second_time() {
        let mut state = state(Duration::ZERO);
        run(&mut state, 1.0);
        run(&mut state, 2.0);
        assert!(state.news(None).is_some_and(|situation| !situation.slow.is_empty()));
        state.switch(vec![unit("a:CPU@1")], vec![0.0]);
        let situation = state.news(None).expect("patience is over");
        assert_eq!((situation.forgiven.len(), situation.slow.len()), (1, 0));
        assert_eq!(state.news(None), None, "it is forgiven once");
        // Back on it, and it is still slow.
        state.rule.patience = Duration::from_hours(1);
        state.known.values_mut().for_each(|slow| slow.patience = Duration::from_hours(1));
        state.switch(vec![unit("a:CPU@0")], vec![1.0]);
        run(&mut state, 2.0);
        assert!(state.news(None).is_some_and(|situation| !situation.slow.is_empty()));
        assert_eq!(state.known[&unit("a:CPU@0")].patience, Duration::from_hours(2));
        assert_eq!(state.news(None), None);
    }
}
