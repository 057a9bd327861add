//! The closed loop: round after round, each one inference (or several) of every model.

use super::latencies::{Latencies, LatencySummary};
use super::split::{PartSource, model_plan};
use super::{Arrangement, ModelInputs};
use crate::executor::{Executor, ExecutorOptions, FindUnit};
use crate::source::SegmentSource;
use crate::{RunError, match_inputs};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use trefoil_core::{HostTensor, OperatorGraph, Plan, Timeline};

/// Outputs by model and item, in the model's order: what [`Rounds::outputs`] gives.
pub type Outputs = BTreeMap<(u32, u32), Vec<HostTensor>>;

/// An executor and which model of the arrangement each of its plan's models is.
struct Member {
    executor: Executor,
    models: Vec<u32>,
    /// Per segment of its plan, which it is in the arrangement's plan, and its unit in words.
    segments: Vec<(usize, String)>,
}

/// An arrangement, compiled and bound.
///
/// Ordered arrangements are one [`Executor`], which keeps to the plan. In others every model has an executor of its own and all
/// are started at once; what then shares cores is the operating system's and the backends' affair.
pub struct Rounds {
    members: Vec<Member>,
}

impl Rounds {
    /// Compiles everything; `graphs` and `inputs` are in the order of the plan's models.
    ///
    /// # Errors
    /// Those of [`Executor::new`] and [`match_inputs`].
    pub fn new(
        arrangement: &Arrangement,
        graphs: &[&OperatorGraph],
        source: &dyn SegmentSource,
        find: &FindUnit<'_>,
        options: &ExecutorOptions,
        inputs: &[ModelInputs<'_>],
    ) -> Result<Self, RunError> {
        let plan = &arrangement.plan;
        let mut members = Vec::new();
        if arrangement.ordered {
            let executor = Executor::new(plan.clone(), graphs, source, find, options)?;
            let segments = plan.segments.iter().enumerate().map(|(at, segment)| (at, segment.unit.to_string()));
            let models = (0..graphs.len() as u32).collect();
            members.push(Member { segments: segments.collect(), executor, models });
        } else {
            for (model, graph) in graphs.iter().enumerate() {
                members.push(alone(plan, model as u32, graph, source, find, options)?);
            }
        }
        let mut rounds = Self { members };
        rounds.load(graphs, inputs)?;
        Ok(rounds)
    }

    fn load(&mut self, graphs: &[&OperatorGraph], inputs: &[ModelInputs<'_>]) -> Result<(), RunError> {
        for member in &mut self.members {
            let ports: Vec<_> =
                member.executor.schedule().inputs.iter().map(|port| (port.model, port.tensor)).collect();
            for (index, (model, tensor)) in ports.into_iter().enumerate() {
                let model = member.models[model as usize] as usize;
                let wanted = graphs[model].tensor(tensor).info();
                let given: Vec<&HostTensor> =
                    inputs[model].iter().copied().filter(|given| given.info().name == wanted.name).collect();
                match_inputs(std::slice::from_ref(&wanted), &given)?;
                member.executor.input_mut(index).copy_from_slice(given[0].bytes());
            }
        }
        Ok(())
    }

    /// Runs one round and returns its milliseconds: from everything being asked for to everything being there.
    ///
    /// # Errors
    /// Those of [`Executor::run_bound`]; everything has come to rest.
    pub fn run(&mut self) -> Result<f64, RunError> {
        let began = Instant::now();
        let mut outcome = Ok(());
        let mut launched = 0;
        for member in &mut self.members {
            outcome = member.executor.launch();
            if outcome.is_err() {
                break;
            }
            launched += 1;
        }
        for member in &mut self.members[..launched] {
            let joined = member.executor.join();
            outcome = outcome.and(joined);
        }
        outcome.map(|()| began.elapsed().as_secs_f64() * 1e3)
    }

    /// Of the last round, by model and item: milliseconds from its executor's start to its last task's end.
    pub fn completions(&self) -> BTreeMap<(u32, u32), f64> {
        let mut ends = BTreeMap::new();
        for member in &self.members {
            let plan = member.executor.plan();
            for timing in member.executor.timings() {
                let model = member.models[plan.segments[timing.segment.0 as usize].model as usize];
                let item = plan.tasks[timing.task.0 as usize].item;
                let end = ends.entry((model, item)).or_insert(0.0f64);
                *end = end.max(timing.end_ms);
            }
        }
        ends
    }

    /// Tells of every segment execution of the last round: the segment in the arrangement's plan, its unit, its milliseconds.
    pub fn for_each_segment(&self, tell: &mut dyn FnMut(usize, &str, f64)) {
        for member in &self.members {
            for timing in member.executor.timings() {
                let segment = timing.segment.0 as usize;
                let (whole, unit) = &member.segments[segment];
                tell(*whole, unit, timing.end_ms - timing.start_ms);
            }
        }
    }

    /// Outputs of the last round.
    ///
    /// # Errors
    /// [`RunError::Core`] when an output's bytes do not fit its description, which would be a defect.
    pub fn outputs(&self) -> Result<Outputs, RunError> {
        let mut outputs = Outputs::new();
        for member in &self.members {
            for (index, port) in member.executor.schedule().outputs.iter().enumerate() {
                let tensor = HostTensor::from_bytes(port.info.clone(), member.executor.output(index))?;
                outputs.entry((member.models[port.model as usize], port.item)).or_default().push(tensor);
            }
        }
        Ok(outputs)
    }

    /// Adds how the last round's outputs compare with what each model gave alone.
    pub fn compare(&self, expected: &Outputs, equality: &mut Equality) {
        for member in &self.members {
            let mut seen: BTreeMap<(u32, u32), usize> = BTreeMap::new();
            for (index, port) in member.executor.schedule().outputs.iter().enumerate() {
                let key = (member.models[port.model as usize], port.item);
                let at = seen.entry(key).or_insert(0);
                let wanted = expected.get(&key).and_then(|all| all.get(*at));
                *at += 1;
                equality.add(member.executor.output(index), wanted);
            }
        }
    }

    /// What happened in the last round; several executors' clocks start within microseconds of each other.
    pub fn trace(&self) -> Timeline {
        let mut traces = self.members.iter().map(|member| member.executor.trace());
        let mut whole = traces.next().unwrap_or(Timeline { origin: trefoil_core::Origin::Measured, lanes: Vec::new() });
        for trace in traces {
            for lane in trace.lanes {
                match whole.lanes.iter_mut().find(|known| known.name == lane.name) {
                    Some(known) => known.spans.extend(lane.spans),
                    None => whole.lanes.push(lane),
                }
            }
        }
        for lane in &mut whole.lanes {
            lane.spans.sort_by(|one, other| one.start_ms.total_cmp(&other.start_ms));
        }
        whole
    }

    /// What did not happen as the plan says, without being an error.
    pub fn notes(&self) -> Vec<String> {
        self.members.iter().flat_map(|member| member.executor.notes().iter().cloned()).collect()
    }
}

fn alone(
    plan: &Plan,
    model: u32,
    graph: &OperatorGraph,
    source: &dyn SegmentSource,
    find: &FindUnit<'_>,
    options: &ExecutorOptions,
) -> Result<Member, RunError> {
    let (part, kept) = model_plan(plan, model)?;
    let whole = kept.iter().map(|segment| segment.0 as usize);
    let segments = whole.map(|at| (at, plan.segments[at].unit.to_string())).collect();
    let source = PartSource { whole: plan, kept, source };
    let executor = Executor::new(part, &[graph], &source, find, options)?;
    Ok(Member { executor, models: vec![model], segments })
}

/// Each model's part of the plan as a runnable of its own, in order; what serving needs.
pub(crate) fn each_alone(
    plan: &Plan,
    graphs: &[&OperatorGraph],
    source: &dyn SegmentSource,
    find: &FindUnit<'_>,
    options: &ExecutorOptions,
    inputs: &[ModelInputs<'_>],
) -> Result<Vec<Executor>, RunError> {
    let mut executors = Vec::new();
    for (model, graph) in graphs.iter().enumerate() {
        let mut rounds = Rounds { members: vec![alone(plan, model as u32, graph, source, find, options)?] };
        rounds.load(graphs, inputs)?;
        executors.extend(rounds.members.pop().map(|member| member.executor));
    }
    Ok(executors)
}

/// The whole plan as one runnable.
pub(crate) fn whole(
    plan: &Plan,
    graphs: &[&OperatorGraph],
    source: &dyn SegmentSource,
    find: &FindUnit<'_>,
    options: &ExecutorOptions,
    inputs: &[ModelInputs<'_>],
) -> Result<Executor, RunError> {
    let arrangement = Arrangement { plan: plan.clone(), ordered: true };
    let mut rounds = Rounds::new(&arrangement, graphs, source, find, options, inputs)?;
    let member = rounds.members.pop().ok_or_else(|| RunError::plan("it has nothing to run".to_owned()))?;
    Ok(member.executor)
}

/// What each model gives alone: its part of the plan, run while nothing else does.
///
/// # Errors
/// Those of [`Rounds::new`] and [`Rounds::run`].
pub fn solo_outputs(
    plan: &Plan,
    graphs: &[&OperatorGraph],
    source: &dyn SegmentSource,
    find: &FindUnit<'_>,
    options: &ExecutorOptions,
    inputs: &[ModelInputs<'_>],
) -> Result<Outputs, RunError> {
    let mut outputs = Outputs::new();
    for (model, graph) in graphs.iter().enumerate() {
        let mut rounds = Rounds { members: vec![alone(plan, model as u32, graph, source, find, options)?] };
        rounds.load(graphs, inputs)?;
        rounds.run()?;
        outputs.append(&mut rounds.outputs()?);
    }
    Ok(outputs)
}

/// How outputs compare with those of each model alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Equality {
    /// Outputs compared.
    pub compared: u64,
    /// Outputs that were not bit-equal.
    pub different: u64,
    /// Largest difference relative to the output's peak; 0 if all were bit-equal, [`f64::MAX`] (which files can hold, unlike
    /// infinity) where there is nothing to relate.
    pub worst_error: f64,
}

impl Equality {
    /// Relative difference up to which outputs count as the same: what the reduction order of several threads explains.
    pub const TOLERANCE: f64 = 1e-4;

    pub(crate) fn add(&mut self, bytes: &[u8], wanted: Option<&HostTensor>) {
        self.compared += 1;
        let Some(wanted) = wanted else {
            self.different += 1;
            self.worst_error = f64::MAX;
            return;
        };
        if wanted.bytes() == bytes {
            return;
        }
        self.different += 1;
        let made = HostTensor::from_bytes(wanted.info().clone(), bytes);
        let error = made.map_or(f64::MAX, |made| made.error_to_peak(wanted));
        // A NaN on one side only must not pass for equal.
        self.worst_error = if error.is_finite() { self.worst_error.max(error) } else { f64::MAX };
    }

    /// Whether something was compared and nothing differed beyond [`Equality::TOLERANCE`].
    pub fn ok(&self) -> bool {
        self.compared > 0 && self.worst_error <= Self::TOLERANCE
    }

    /// Adds another's counts.
    pub fn merge(&mut self, other: &Self) {
        self.compared += other.compared;
        self.different += other.different;
        self.worst_error = self.worst_error.max(other.worst_error);
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        match (self.compared, self.different) {
            (0, _) => "no output was compared".to_owned(),
            (compared, 0) => format!("{compared} outputs bit-equal to each model alone"),
            (compared, different) => format!(
                "{different} of {compared} outputs not bit-equal to each model alone (largest difference {:.1e} of peak)",
                self.worst_error
            ),
        }
    }
}

/// When a loop ends.
#[derive(Debug, Clone, Copy)]
pub struct LoopLimit<'a> {
    /// Rounds before the first that counts.
    pub warmup: u32,
    /// Most rounds that count.
    pub rounds: u64,
    /// Time in which a further round is begun, warm-up included; three rounds are run whatever it says.
    pub time: Duration,
    /// Ends the loop after the round that is running.
    pub stop: &'a AtomicBool,
}

/// What a closed loop gave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LoopReport {
    /// Rounds counted.
    pub rounds: u64,
    /// Seconds they took, with what is between them.
    pub seconds: f64,
    /// Rounds a second.
    pub rounds_per_second: f64,
    /// A round's time.
    pub round: LatencySummary,
    /// By model: from the start of a round to the inference's end.
    pub models: Vec<LatencySummary>,
    /// By unit, the fraction of the time in which it ran something.
    pub utilisation: BTreeMap<String, f64>,
    /// Comparison of outputs with each model alone.
    pub equality: Equality,
    /// Resident bytes of the process after warm-up and at the end, where the system tells.
    pub resident_bytes: Option<[u64; 2]>,
    /// Whether it was stopped before its time.
    pub stopped: bool,
}

/// Outputs larger than this are compared in every sixteenth round only.
const COMPARE_ALWAYS: u64 = 1 << 16;

/// What a loop has given so far, in bounded memory.
pub struct LoopMeter {
    started: Instant,
    resident: Option<u64>,
    rounds: u64,
    round: Latencies,
    models: Vec<Latencies>,
    busy: BTreeMap<String, f64>,
    equality: Equality,
}

impl LoopMeter {
    /// Begins to measure a loop of so many models.
    pub fn new(models: usize) -> Self {
        Self {
            started: Instant::now(),
            resident: resident_bytes(),
            rounds: 0,
            round: Latencies::default(),
            models: vec![Latencies::default(); models],
            busy: BTreeMap::new(),
            equality: Equality::default(),
        }
    }

    /// Rounds counted.
    pub fn rounds(&self) -> u64 {
        self.rounds
    }

    /// Counts the round that `rounds` just ran, which took `ms`; its outputs are compared with `expected`.
    pub fn add(&mut self, rounds: &Rounds, ms: f64, expected: Option<&Outputs>) {
        self.round.add(ms);
        for ((model, _), ms) in rounds.completions() {
            self.models[model as usize].add(ms);
        }
        rounds.for_each_segment(&mut |_, unit, ms| match self.busy.get_mut(unit) {
            Some(sum) => *sum += ms,
            None => drop(self.busy.insert(unit.to_owned(), ms)),
        });
        if let Some(expected) = expected {
            let bytes: u64 = expected.values().flatten().map(|one| one.bytes().len() as u64).sum();
            if bytes <= COMPARE_ALWAYS || self.rounds.is_multiple_of(16) {
                rounds.compare(expected, &mut self.equality);
            }
        }
        self.rounds += 1;
    }

    /// What it gave.
    pub fn report(&self, stopped: bool) -> LoopReport {
        let seconds = self.started.elapsed().as_secs_f64();
        LoopReport {
            rounds: self.rounds,
            seconds,
            rounds_per_second: if seconds > 0.0 { self.rounds as f64 / seconds } else { 0.0 },
            round: self.round.summary(),
            models: self.models.iter().map(Latencies::summary).collect(),
            utilisation: self.busy.iter().map(|(unit, ms)| (unit.clone(), ms / 1e3 / seconds.max(1e-9))).collect(),
            equality: self.equality.clone(),
            resident_bytes: self.resident.zip(resident_bytes()).map(|(before, after)| [before, after]),
            stopped,
        }
    }
}

/// Runs rounds until the limit. `each` is told every counted round's milliseconds.
///
/// # Errors
/// Those of [`Rounds::run`].
pub fn closed_loop(
    rounds: &mut Rounds,
    models: usize,
    expected: Option<&Outputs>,
    limit: &LoopLimit<'_>,
    each: &mut dyn FnMut(f64),
) -> Result<LoopReport, RunError> {
    let began = Instant::now();
    let stopped = || limit.stop.load(Ordering::Relaxed);
    for done in 0..limit.warmup.max(1) {
        rounds.run()?;
        if stopped() || done > 0 && began.elapsed() > limit.time / 3 {
            break;
        }
    }
    let mut meter = LoopMeter::new(models);
    while meter.rounds() < limit.rounds && !stopped() && (meter.rounds() < 3 || began.elapsed() <= limit.time) {
        let ms = rounds.run()?;
        each(ms);
        meter.add(rounds, ms, expected);
    }
    Ok(meter.report(stopped()))
}

/// Resident memory of this process, where the system tells.
pub(crate) fn resident_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}
