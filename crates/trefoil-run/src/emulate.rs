//! Shaped units (DESIGN 7): a plan for a machine that is not here, executed with real bytes by real backends that are
//! slowed to the rates of its description. What comes out is **emulated**, never measured.
//!
//! Each unit of the plan gets a **carrier**, a real unit that computes its segments. A segment's execution is then held
//! until its described work is done: work is its cost in the plan plus the transfers that precede it, and it progresses at
//! rate `1/f`, `f` being the slowdown by what the other units of the plan execute at that moment, as in the simulator
//! (DESIGN 3). Order, lanes, hand-offs, buffers and results are the executor's own. What carriers need for computing must
//! fit into the described time, so everything is stretched by one `scale`; time by which it did not fit is counted.

use crate::executor::{Executor, ExecutorOptions, FindUnit};
use crate::source::{ExtractedSegments, SegmentSource};
use crate::{RunError, Schedule};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use trefoil_core::{NodeTime, OperatorGraph, Origin, Plan, Timeline, Unit, UnitAddress, Work};
use trefoil_units::{Availability, Backend, Buffer, CompileOptions, Compiled, Ports, RunTiming, SubModel, UnitError};

/// `f` of a segment while others (indices of segments) execute: 1 is undisturbed.
pub type SlowdownOf = dyn Fn(usize, &[usize]) -> f64 + Send + Sync;

/// How a plan is emulated.
pub struct Emulation<'a> {
    /// Real units that compute; unit number `n` of the plan is carried by number `n` modulo their count.
    pub carriers: &'a [UnitAddress],
    /// Finds them.
    pub find: &'a FindUnit<'a>,
    /// Emulated milliseconds per described millisecond.
    pub scale: f64,
    /// Slowdown between segments.
    pub slowdown: Arc<SlowdownOf>,
}

/// A plan ready to be emulated.
pub struct Emulated {
    executor: Executor,
    pacer: Arc<Pacer>,
    scale: f64,
}

impl Emulated {
    /// Compiles every segment on its carrier.
    ///
    /// # Errors
    /// Those of [`Executor::new`]; [`RunError::Plan`] without carriers or with a scale that is no positive number.
    pub fn new(
        plan: Plan,
        graphs: &[&OperatorGraph],
        source: &dyn SegmentSource,
        emulation: &Emulation<'_>,
    ) -> Result<Self, RunError> {
        if emulation.carriers.is_empty() {
            return Err(RunError::plan("there is no unit to carry the emulation".to_owned()));
        }
        if !(emulation.scale.is_finite() && emulation.scale > 0.0) {
            return Err(RunError::plan(format!("an emulation cannot be stretched by {}", emulation.scale)));
        }
        let extracted = ExtractedSegments::of(&plan, source)?;
        let work = described_work(&plan, graphs)?.into_iter().map(|ms| ms * emulation.scale).collect();
        let pacer = Arc::new(Pacer {
            work,
            slowdown: Arc::clone(&emulation.slowdown),
            state: Mutex::new(State { running: Vec::new(), since: Instant::now(), late_ms: 0.0 }),
            changed: Condvar::new(),
        });
        let mut backends: BTreeMap<UnitAddress, (&'static dyn Backend, Unit)> = BTreeMap::new();
        for (number, unit) in plan.units.iter().enumerate() {
            let (backend, carrier) = (emulation.find)(&emulation.carriers[number % emulation.carriers.len()])?;
            let segments = plan.segments.iter().zip(&extracted.0).enumerate();
            let of_unit = segments.filter(|(_, (segment, _))| segment.unit == unit.address);
            let stand_in = Paced {
                backend,
                carrier,
                pacer: Arc::clone(&pacer),
                segments: of_unit.map(|(index, (_, model))| (model.path.clone(), index)).collect(),
            };
            // The executor's threads want backends that live as long as the process; one per emulated unit is small.
            let stand_in: &'static Paced = Box::leak(Box::new(stand_in));
            backends.insert(unit.address.clone(), (stand_in, unit.clone()));
        }
        let find = |address: &UnitAddress| {
            backends.get(address).cloned().ok_or_else(|| UnitError::UnknownDevice {
                backend: address.backend.clone(),
                device: address.device.clone(),
                have: backends.keys().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            })
        };
        let executor = Executor::new(plan, graphs, &extracted, &find, &ExecutorOptions::default())?;
        Ok(Self { executor, pacer, scale: emulation.scale })
    }

    /// The executor, for inputs and outputs.
    pub fn executor(&mut self) -> &mut Executor {
        &mut self.executor
    }

    /// Runs once; returns milliseconds of the described machine.
    ///
    /// # Errors
    /// As [`Executor::run_bound`].
    pub fn run(&mut self) -> Result<f64, RunError> {
        let began = Instant::now();
        self.executor.run_bound()?;
        Ok(milliseconds(began.elapsed()) / self.scale)
    }

    /// Milliseconds of the described machine by which carriers overran their described work, over all runs so far. Above
    /// a few percent of the run time the scale is too small.
    pub fn late_ms(&self) -> f64 {
        self.pacer.lock().late_ms / self.scale
    }

    /// What happened in the last run, in milliseconds of the described machine.
    pub fn trace(&self) -> Timeline {
        let mut trace = self.executor.trace();
        trace.origin = Origin::Emulated;
        for span in trace.lanes.iter_mut().flat_map(|lane| &mut lane.spans) {
            span.start_ms /= self.scale;
            span.end_ms /= self.scale;
        }
        trace
    }
}

/// Milliseconds of each segment's execution on the described machine: its cost, and the transfers that come in before it or,
/// for those that no segment waits for, go out after it.
fn described_work(plan: &Plan, graphs: &[&OperatorGraph]) -> Result<Vec<f64>, RunError> {
    let mut work: Vec<f64> = plan.segments.iter().map(|segment| segment.cost.ms).collect();
    let mut claimed = vec![false; plan.tasks.len()];
    let mut seen = vec![false; plan.segments.len()];
    // The first execution of each segment tells: repetitions bring in the same tensors.
    for scheduled in &Schedule::new(plan, graphs)?.tasks {
        let segment = scheduled.segment.0 as usize;
        let first = !std::mem::replace(&mut seen[segment], true);
        let mut stack = plan.tasks[scheduled.task.0 as usize].after.clone();
        while let Some(before) = stack.pop() {
            let task = &plan.tasks[before.0 as usize];
            if matches!(task.work, Work::Transfer { .. }) && !std::mem::replace(&mut claimed[before.0 as usize], true) {
                if first {
                    work[segment] += task.cost.ms;
                }
                stack.extend(&task.after);
            }
        }
    }
    for (index, task) in plan.tasks.iter().enumerate() {
        if !matches!(task.work, Work::Transfer { .. }) || claimed[index] || task.item > 0 || task.iteration > 0 {
            continue;
        }
        let made_by = task.after.iter().find_map(|before| match plan.tasks[before.0 as usize].work {
            Work::Segment { segment } => Some(segment.0 as usize),
            _ => None,
        });
        if let Some(segment) = made_by {
            work[segment] += task.cost.ms;
        }
    }
    Ok(work)
}

/// Holds executions until their described work is done.
struct Pacer {
    /// Emulated milliseconds per segment.
    work: Vec<f64>,
    slowdown: Arc<SlowdownOf>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    running: Vec<Running>,
    /// When the work left was last brought up to date.
    since: Instant,
    late_ms: f64,
}

struct Running {
    segment: usize,
    left_ms: f64,
    rate: f64,
}

impl Pacer {
    /// Only plain numbers are behind the mutex, valid at every step.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(&self, segment: usize) {
        let mut state = self.lock();
        state.advance();
        state.running.push(Running { segment, left_ms: self.work[segment], rate: 1.0 });
        self.set_rates(&mut state);
    }

    /// Waits until the segment's work is done and takes it out.
    fn finish(&self, segment: usize) {
        let mut state = self.lock();
        let mut first_look = true;
        loop {
            state.advance();
            let Some(at) = state.running.iter().position(|running| running.segment == segment) else { return };
            let (left, rate) = (state.running[at].left_ms, state.running[at].rate);
            if left <= 0.0 {
                // Found overdue when the carrier came back: it took longer than the description says.
                if first_look {
                    state.late_ms += -left / rate;
                }
                state.running.swap_remove(at);
                self.set_rates(&mut state);
                return;
            }
            first_look = false;
            let wait = Duration::from_secs_f64((left / rate / 1e3).min(3600.0));
            state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes out what failed.
    fn give_up(&self, segment: usize) {
        let mut state = self.lock();
        state.advance();
        state.running.retain(|running| running.segment != segment);
        self.set_rates(&mut state);
    }

    fn set_rates(&self, state: &mut State) {
        let segments: Vec<usize> = state.running.iter().map(|running| running.segment).collect();
        for running in &mut state.running {
            let others: Vec<usize> = segments.iter().copied().filter(|&other| other != running.segment).collect();
            running.rate = 1.0 / (self.slowdown)(running.segment, &others).max(1e-6);
        }
        self.changed.notify_all();
    }
}

impl State {
    fn advance(&mut self) {
        let now = Instant::now();
        let passed = milliseconds(now - self.since);
        self.since = now;
        for running in &mut self.running {
            running.left_ms -= passed * running.rate;
        }
    }
}

/// A carrier in the role of an emulated unit.
struct Paced {
    backend: &'static dyn Backend,
    carrier: Unit,
    pacer: Arc<Pacer>,
    segments: HashMap<PathBuf, usize>,
}

impl Backend for Paced {
    fn name(&self) -> &'static str {
        "emulated"
    }

    fn check(&self) -> Availability {
        self.backend.check()
    }

    fn units(&self) -> Vec<(Unit, Availability)> {
        Vec::new()
    }

    fn unit(&self, address: &UnitAddress) -> Result<Unit, UnitError> {
        Ok(Unit { address: address.clone(), ..self.carrier.clone() })
    }

    fn compile(&self, model: &SubModel, unit: &Unit, options: &CompileOptions) -> Result<Box<dyn Compiled>, UnitError> {
        let segment = *self.segments.get(&model.path).ok_or_else(|| UnitError::Compile {
            unit: unit.address.to_string(),
            model: model.path.display().to_string(),
            reason: "it is no segment of the emulated plan".to_owned(),
        })?;
        let inner = self.backend.compile(model, &self.carrier, options)?;
        Ok(Box::new(PacedCompiled { inner, pacer: Arc::clone(&self.pacer), segment }))
    }

    fn versions(&self) -> BTreeMap<String, String> {
        self.backend.versions()
    }
}

struct PacedCompiled {
    inner: Box<dyn Compiled>,
    pacer: Arc<Pacer>,
    segment: usize,
}

impl Compiled for PacedCompiled {
    fn ports(&self) -> &Ports {
        self.inner.ports()
    }

    unsafe fn bind(&mut self, inputs: &[Buffer], outputs: &[Buffer]) -> Result<(), UnitError> {
        // SAFETY: the caller's contract is passed on.
        unsafe { self.inner.bind(inputs, outputs) }
    }

    fn submit(&mut self) -> Result<(), UnitError> {
        self.pacer.start(self.segment);
        self.inner.submit().inspect_err(|_| self.pacer.give_up(self.segment))
    }

    fn wait(&mut self) -> Result<RunTiming, UnitError> {
        self.inner.wait().inspect_err(|_| self.pacer.give_up(self.segment))?;
        self.pacer.finish(self.segment);
        // The carrier's own parts say nothing about the emulated unit.
        Ok(RunTiming::default())
    }

    fn node_times(&mut self) -> Option<Vec<NodeTime>> {
        None
    }
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pacer(work: &[f64], slowdown: f64) -> Pacer {
        let slowdown = move |_: usize, others: &[usize]| if others.is_empty() { 1.0 } else { slowdown };
        Pacer {
            work: work.to_vec(),
            slowdown: Arc::new(slowdown),
            state: Mutex::new(State { running: Vec::new(), since: Instant::now(), late_ms: 0.0 }),
            changed: Condvar::new(),
        }
    }

    fn run(pacer: &Pacer, segment: usize) -> f64 {
        let began = Instant::now();
        pacer.start(segment);
        pacer.finish(segment);
        milliseconds(began.elapsed())
    }

    #[test]
    fn work_takes_no_less_than_described_and_more_beside_other_work() {
        let pacer = pacer(&[20.0, 30.0], 2.0);
        assert!(run(&pacer, 0) >= 20.0);
        let rates = || pacer.lock().running.iter().map(|running| running.rate).collect::<Vec<_>>();
        pacer.start(0);
        pacer.start(1);
        assert_eq!(rates(), [0.5, 0.5]);
        pacer.give_up(1);
        assert_eq!(rates(), [1.0]);
        pacer.finish(0);
        assert!(pacer.lock().running.is_empty());
    }

    #[test]
    fn a_carrier_that_is_too_slow_is_counted() {
        let pacer = pacer(&[1.0], 1.0);
        pacer.start(0);
        std::thread::sleep(Duration::from_millis(5));
        pacer.finish(0);
        assert!(pacer.lock().late_ms >= 3.9);
    }
}
