//! Lanes: the threads that execute.
//!
//! How they meet is in [`crate::signals`]. The mutexes here are taken once per run (for the trace), and are not contended while
//! lanes run. Of several failures of a run the first is kept.

use crate::cores::CoreSwitch;
use crate::error::{Place, RunError};
use crate::signals::Signals;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};
use trefoil_core::{NodeTime, Unit};
use trefoil_units::{Backend, Buffer, CompileOptions, Compiled, PortMemory, RunTiming, SubModel, UnitError};

/// One execution as a lane recorded it; nanoseconds since the start of the run.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Record {
    /// Index in the schedule's tasks.
    pub task: usize,
    /// Since when the lane waited for other lanes; equal to `start` if it did not.
    pub waited_from: u64,
    pub start: u64,
    pub end: u64,
    pub timing: RunTiming,
}

/// What all threads of an executor share.
pub(crate) struct Shared {
    signals: Signals,
    traces: Box<[LaneTrace]>,
    failure: Mutex<Option<Failure>>,
    node_times: Mutex<Vec<(usize, Vec<NodeTime>)>>,
    base: Instant,
    started: AtomicU64,
}

/// What a lane recorded in the last run, on cache lines of its own.
#[repr(align(128))]
struct LaneTrace(Mutex<Vec<Record>>);

/// The first failure of a run.
pub(crate) struct Failure {
    pub error: RunError,
    /// Whether a backend panicked, after which its state is unknown.
    pub panicked: bool,
}

/// A mutex here only guards plain data that is valid at every step, so poisoning carries no meaning.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// `tasks[lane]` is the length of the lane's sequence; for the times see [`crate::ExecutorOptions`].
    pub fn new(tasks: &[usize], spin: Duration, linger: Duration) -> Self {
        Self {
            signals: Signals::new(tasks.len(), spin, linger),
            traces: tasks.iter().map(|&count| LaneTrace(Mutex::new(Vec::with_capacity(count)))).collect(),
            failure: Mutex::new(None),
            node_times: Mutex::new(Vec::new()),
            base: Instant::now(),
            started: AtomicU64::new(0),
        }
    }

    /// Starts every lane once. Called by one thread at a time, while all lanes are idle.
    pub fn launch(&self) {
        self.started.store(self.now(), Ordering::Relaxed);
        self.signals.launch();
    }

    /// Waits until all lanes that were started are idle again.
    pub fn join(&self) -> Result<(), Failure> {
        // Only an aborted run has locked and filled the failure.
        if self.signals.join() { lock(&self.failure).take().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// Ends all lane threads after what they are doing.
    pub fn stop(&self) {
        self.signals.stop();
    }

    /// What the lane recorded in the last run.
    pub fn records(&self, lane: usize) -> Vec<Record> {
        lock(&self.traces[lane].0).clone()
    }

    /// Per task of the last run, the backend's node times (only when compiled with profiling).
    pub fn node_times(&self) -> Vec<(usize, Vec<NodeTime>)> {
        lock(&self.node_times).clone()
    }

    fn now(&self) -> u64 {
        self.base.elapsed().as_nanos() as u64
    }

    fn fail(&self, failure: Failure) {
        lock(&self.failure).get_or_insert(failure);
        self.signals.abort();
    }
}

/// A segment for a lane to compile.
pub(crate) struct Program {
    pub place: Place,
    pub backend: &'static dyn Backend,
    pub unit: Unit,
    pub model: SubModel,
    /// Programs with equal numbers run on the same cores, so that nothing is to be changed between them.
    pub core_set: usize,
}

/// An execution for a lane.
pub(crate) struct LaneTask {
    /// Index in the schedule's tasks.
    pub task: usize,
    /// Index in the lane's programs.
    pub program: usize,
    /// Index in the lane's bindings.
    pub binding: usize,
    /// Lanes and the counts they must have reached.
    pub waits: Box<[(usize, u32)]>,
    /// Lanes to wake afterwards.
    pub wakes: Box<[usize]>,
}

/// Buffers for the ports of one program.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Binding {
    pub inputs: Vec<Buffer>,
    pub outputs: Vec<Buffer>,
}

/// Everything a lane thread needs. The buffers stay valid until the thread has ended.
pub(crate) struct LaneSetup {
    pub lane: usize,
    pub programs: Vec<Program>,
    pub tasks: Vec<LaneTask>,
    pub bindings: Vec<Binding>,
    pub options: CompileOptions,
}

/// What a lane tells after compiling.
pub(crate) struct LaneReport {
    /// Per copied port: segment, unit, port name.
    pub copied: Vec<(Place, String)>,
    /// All ports.
    pub ports: usize,
    /// Times per run that a program is bound to other buffers.
    pub rebinds: usize,
}

/// Body of a lane thread: compiles, reports, then runs once per epoch until stopped.
pub(crate) fn lane_main(
    setup: LaneSetup,
    shared: &Arc<Shared>,
    report: &mpsc::Sender<(usize, Result<LaneReport, RunError>)>,
) {
    let index = setup.lane;
    let (mut lane, mut cores) = match Lane::prepare(setup) {
        Ok((lane, cores, told)) => {
            let _ = report.send((index, Ok(told)));
            (lane, cores)
        }
        Err(error) => {
            let _ = report.send((index, Err(error)));
            return;
        }
    };
    let mut seen = 0;
    while let Some(run) = shared.signals.next_run(index, seen) {
        seen = run;
        lane.run(shared, &mut cores);
        shared.signals.finish_lane();
    }
}

struct Lane {
    setup: LaneSetup,
    compiled: Vec<Box<dyn Compiled>>,
    /// Per program, the binding it has now.
    bound: Vec<usize>,
    /// The program inside whose unit the whole sequence runs, if that saves thread switches.
    host: Option<usize>,
}

impl Lane {
    fn prepare(setup: LaneSetup) -> Result<(Self, CoreSwitch, LaneReport), RunError> {
        let mut compiled: Vec<Box<dyn Compiled>> = Vec::with_capacity(setup.programs.len());
        let mut report = LaneReport { copied: Vec::new(), ports: 0, rebinds: 0 };
        let mut cores = CoreSwitch::default();
        for program in &setup.programs {
            let not_ready = |source| RunError::Prepare { place: Box::new(program.place.clone()), source };
            cores.enter(program.core_set, &program.unit).map_err(not_ready)?;
            let attempt = catch_unwind(AssertUnwindSafe(|| {
                program.backend.compile(&program.model, &program.unit, &setup.options)
            }));
            let ready = match attempt {
                Ok(result) => result.map_err(not_ready)?,
                Err(panic) => {
                    return Err(RunError::Panicked {
                        place: Box::new(program.place.clone()),
                        message: panic_message(&*panic),
                    });
                }
            };
            let ports = ready.ports();
            report.ports += ports.inputs.len() + ports.outputs.len();
            report.copied.extend(
                ports
                    .inputs
                    .iter()
                    .chain(&ports.outputs)
                    .filter(|port| port.memory == PortMemory::Copied)
                    .map(|port| (program.place.clone(), port.info.name.clone())),
            );
            compiled.push(ready);
        }
        let bound = vec![usize::MAX; compiled.len()];
        let host = host(&setup).map_err(|(program, source)| RunError::Prepare {
            place: Box::new(setup.programs[program].place.clone()),
            source,
        })?;
        let mut lane = Self { setup, compiled, bound, host };
        // The first run finds every program bound to what its first task needs.
        for task in (0..lane.setup.tasks.len()).rev() {
            lane.bind(task)
                .map_err(|source| RunError::Prepare { place: Box::new(lane.place(task).clone()), source })?;
        }
        let mut bound = lane.bound.clone();
        // From the second run on, programs start where the last run left them.
        for _ in 0..2 {
            report.rebinds = 0;
            for task in &lane.setup.tasks {
                if bound[task.program] != task.binding {
                    bound[task.program] = task.binding;
                    report.rebinds += 1;
                }
            }
        }
        Ok((lane, cores, report))
    }

    fn place(&self, task: usize) -> &Place {
        &self.setup.programs[self.setup.tasks[task].program].place
    }

    /// Binds the task's program to the task's buffers if it is bound to others; whether it was.
    fn bind(&mut self, task: usize) -> Result<bool, UnitError> {
        let task = &self.setup.tasks[task];
        if self.bound[task.program] == task.binding {
            return Ok(false);
        }
        let binding = &self.setup.bindings[task.binding];
        // SAFETY: the executor owns the memory behind every buffer and joins this thread before it frees it. While this
        // task runs nobody else writes its inputs or touches its outputs: the schedule orders it after its producers, and
        // the placement gives overlapping bytes only to values that are certainly dead or not yet made by then.
        unsafe { self.compiled[task.program].bind(&binding.inputs, &binding.outputs)? };
        self.bound[task.program] = task.binding;
        Ok(true)
    }

    fn run(&mut self, shared: &Shared, cores: &mut CoreSwitch) {
        let current = AtomicUsize::new(0);
        let outcome = if let Some(program) = self.host {
            let Program { backend, unit, .. } = &self.setup.programs[program];
            let (backend, unit) = (*backend, unit.clone());
            let mut outcome = Ok(Ok(()));
            let entered = backend.run_inside(&unit, &mut || {
                outcome = catch_unwind(AssertUnwindSafe(|| self.run_tasks(shared, &current, None)));
            });
            entered.map_or_else(|error| Ok(Err(error)), |()| outcome)
        } else {
            catch_unwind(AssertUnwindSafe(|| self.run_tasks(shared, &current, Some(cores))))
        };
        let failure = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(source)) => {
                // The binding may be half done; bind afresh next time.
                self.bound.fill(usize::MAX);
                Failure {
                    error: RunError::Segment {
                        place: Box::new(self.place(current.load(Ordering::Relaxed)).clone()),
                        source,
                    },
                    panicked: false,
                }
            }
            Err(panic) => Failure {
                error: RunError::Panicked {
                    place: Box::new(self.place(current.load(Ordering::Relaxed)).clone()),
                    message: panic_message(&*panic),
                },
                panicked: true,
            },
        };
        shared.fail(failure);
    }

    /// Runs the sequence; keeps `current` at the task it is at. Without `cores` the thread is where it has to be.
    fn run_tasks(
        &mut self,
        shared: &Shared,
        current: &AtomicUsize,
        mut cores: Option<&mut CoreSwitch>,
    ) -> Result<(), UnitError> {
        let mut trace = lock(&shared.traces[self.setup.lane].0);
        trace.clear();
        if self.setup.options.profiling {
            lock(&shared.node_times).clear();
        }
        let origin = shared.started.load(Ordering::Relaxed);
        let mut last_end = shared.now() - origin;
        for index in 0..self.setup.tasks.len() {
            current.store(index, Ordering::Relaxed);
            let task = &self.setup.tasks[index];
            let (number, program) = (task.task, task.program);
            let waited_from = last_end;
            let mut start = last_end;
            if shared.signals.wait_for(self.setup.lane, &task.waits) {
                start = shared.now() - origin;
            }
            if shared.signals.aborted() {
                return Ok(());
            }
            let core_set = self.setup.programs[program].core_set;
            let switched = cores.as_mut().is_some_and(|cores| cores.switch(core_set));
            if self.bind(index)? || switched {
                start = shared.now() - origin;
            }
            let compiled = &mut self.compiled[program];
            compiled.submit()?;
            let timing = compiled.wait()?;
            last_end = shared.now() - origin;
            shared.signals.publish(self.setup.lane, index as u32 + 1, &self.setup.tasks[index].wakes);
            trace.push(Record { task: number, waited_from, start, end: last_end, timing });
            if self.setup.options.profiling
                && let Some(nodes) = self.compiled[program].node_times()
            {
                lock(&shared.node_times).push((number, nodes));
            }
        }
        Ok(())
    }
}

/// Finds a program inside whose unit ([`Backend::run_inside`]) the whole sequence is better run: its backend hands calls
/// to threads of its own, which costs two thread switches per segment unless one is on such a thread already. Only for
/// lanes on one core set: that thread is pinned to it like the lane's own. Among several the one with most tasks.
///
/// The lane goes inside once per run rather than for good, because backends share such threads between executors.
fn host(setup: &LaneSetup) -> Result<Option<usize>, (usize, UnitError)> {
    let Some(first) = setup.programs.first() else { return Ok(None) };
    if setup.programs.iter().any(|program| program.core_set != first.core_set) {
        return Ok(None);
    }
    let mut best: Option<(usize, usize)> = None;
    for (index, program) in setup.programs.iter().enumerate() {
        let same_unit = |other: &Program| other.unit.address == program.unit.address;
        if setup.programs[..index].iter().any(same_unit) {
            continue;
        }
        let mut inside = None;
        program
            .backend
            .run_inside(&program.unit, &mut || inside = Some(std::thread::current().id()))
            .map_err(|error| (index, error))?;
        if inside.is_some_and(|thread| thread != std::thread::current().id()) {
            let tasks = setup.tasks.iter().filter(|task| same_unit(&setup.programs[task.program])).count();
            if best.is_none_or(|(most, _)| tasks > most) {
                best = Some((tasks, index));
            }
        }
    }
    Ok(best.map(|(_, index)| index))
}

/// The text of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    trefoil_units::one_line(&text)
}
