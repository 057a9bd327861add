//! Lanes: the threads that execute, and the few atomics through which they meet.
//!
//! **Protocol.** The caller resets every lane's count of finished tasks, then raises `epoch`; each lane runs its
//! sequence once and lowers `remaining`; the last one wakes the caller. Within a run a lane publishes its count after
//! every task and waits, where its schedule says so, until other lanes' counts have reached stated numbers. Every lane
//! is idle while the caller resets, so no lane ever sees a count of another run.
//!
//! **Sleeping.** A waiter spins for a while, then announces that it parks, looks once more, and parks. A signaller
//! stores, then looks whether the waiter announced. Both have a sequentially consistent fence between their store and
//! their load, so at least one sees the other (Dekker's argument) and no wake-up is lost; a superfluous one is harmless
//! since waiters check again. On the fast path (waiter spins or is busy) nothing enters the kernel, and nothing locks:
//! the one mutex taken per run and lane guards the trace and is never contended while lanes run.
//!
//! **Failure.** The first failure is kept, `abort` is raised and everybody is woken; lanes stop before their next task.
//! A failed task never advances its lane's count, so nothing that depends on it starts.

use crate::error::{Place, RunError};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, mpsc};
use std::thread::Thread;
use std::time::{Duration, Instant};
use trefoil_core::{NodeTime, Unit};
use trefoil_units::{Backend, Buffer, CompileOptions, Compiled, PortMemory, RunTiming, SubModel, UnitError};

/// Makes the calling thread a thread of the unit: pins it to the unit's cores, flushes denormals.
pub type EnterUnit = fn(&Unit) -> Result<(), UnitError>;

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
    lanes: Box<[LaneState]>,
    epoch: AtomicU64,
    remaining: AtomicUsize,
    stop: AtomicBool,
    abort: AtomicBool,
    caller_parked: AtomicBool,
    caller: Mutex<Option<Thread>>,
    failure: Mutex<Option<Failure>>,
    node_times: Mutex<Vec<(usize, Vec<NodeTime>)>>,
    base: Instant,
    started: AtomicU64,
    spin: Duration,
}

/// A lane's public side, on cache lines of its own.
#[repr(align(128))]
struct LaneState {
    finished: AtomicU32,
    parked: AtomicBool,
    thread: OnceLock<Thread>,
    trace: Mutex<Vec<Record>>,
}

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
    /// `tasks[lane]` is the length of the lane's sequence.
    pub fn new(tasks: &[usize], spin: Duration) -> Self {
        let lanes = tasks.iter().map(|&count| LaneState {
            finished: AtomicU32::new(0),
            parked: AtomicBool::new(false),
            thread: OnceLock::new(),
            trace: Mutex::new(Vec::with_capacity(count)),
        });
        Self {
            lanes: lanes.collect(),
            epoch: AtomicU64::new(0),
            remaining: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            abort: AtomicBool::new(false),
            caller_parked: AtomicBool::new(false),
            caller: Mutex::new(None),
            failure: Mutex::new(None),
            node_times: Mutex::new(Vec::new()),
            base: Instant::now(),
            started: AtomicU64::new(0),
            spin,
        }
    }

    /// Runs every lane once. Called by one thread at a time, while all lanes are idle.
    pub fn run(&self) -> Result<(), Failure> {
        if self.lanes.is_empty() {
            return Ok(());
        }
        for lane in &self.lanes {
            lane.finished.store(0, Ordering::Relaxed);
        }
        self.abort.store(false, Ordering::Relaxed);
        self.remaining.store(self.lanes.len(), Ordering::Relaxed);
        self.started.store(self.now(), Ordering::Relaxed);
        self.epoch.fetch_add(1, Ordering::Release);
        fence(Ordering::SeqCst);
        (0..self.lanes.len()).for_each(|lane| self.wake(lane));
        let done = || self.remaining.load(Ordering::Acquire) == 0;
        if !self.spin_until(done) {
            *lock(&self.caller) = Some(std::thread::current());
            park_until(&self.caller_parked, done);
        }
        // Only an aborted run has locked and filled the failure.
        if self.abort.load(Ordering::Relaxed) { lock(&self.failure).take().map_or(Ok(()), Err) } else { Ok(()) }
    }

    /// Ends all lane threads after what they are doing.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.lanes.iter().filter_map(|lane| lane.thread.get()).for_each(Thread::unpark);
    }

    /// What the lane recorded in the last run.
    pub fn records(&self, lane: usize) -> Vec<Record> {
        lock(&self.lanes[lane].trace).clone()
    }

    /// Per task of the last run, the backend's node times (only when compiled with profiling).
    pub fn node_times(&self) -> Vec<(usize, Vec<NodeTime>)> {
        lock(&self.node_times).clone()
    }

    fn now(&self) -> u64 {
        self.base.elapsed().as_nanos() as u64
    }

    /// Wakes a lane if it announced that it parks. The caller has stored what the lane waits for, and fenced.
    fn wake(&self, lane: usize) {
        let lane = &self.lanes[lane];
        if lane.parked.load(Ordering::Relaxed)
            && let Some(thread) = lane.thread.get()
        {
            thread.unpark();
        }
    }

    /// Spins for at most `self.spin`; whether `ready` came true.
    fn spin_until(&self, ready: impl Fn() -> bool) -> bool {
        if ready() {
            return true;
        }
        if self.spin.is_zero() {
            return false;
        }
        let began = Instant::now();
        loop {
            for _ in 0..32 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if began.elapsed() >= self.spin {
                return false;
            }
        }
    }

    fn fail(&self, failure: Failure) {
        lock(&self.failure).get_or_insert(failure);
        self.abort.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        (0..self.lanes.len()).for_each(|lane| self.wake(lane));
    }

    fn finish_lane(&self) {
        if self.remaining.fetch_sub(1, Ordering::AcqRel) == 1 {
            fence(Ordering::SeqCst);
            if self.caller_parked.load(Ordering::Relaxed)
                && let Some(caller) = lock(&self.caller).as_ref()
            {
                caller.unpark();
            }
        }
    }
}

/// Announces on `parked`, checks, parks; until `ready`.
fn park_until(parked: &AtomicBool, ready: impl Fn() -> bool) {
    loop {
        parked.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if ready() {
            break;
        }
        std::thread::park();
    }
    parked.store(false, Ordering::Relaxed);
}

/// A segment for a lane to compile.
pub(crate) struct Program {
    pub place: Place,
    pub backend: &'static dyn Backend,
    pub unit: Unit,
    pub model: SubModel,
    /// Programs with equal numbers run on the same cores, so that nothing is to be entered between them.
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
    pub enter: EnterUnit,
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
    let state = &shared.lanes[index];
    let _ = state.thread.set(std::thread::current());
    let mut lane = match Lane::prepare(setup) {
        Ok((lane, told)) => {
            let _ = report.send((index, Ok(told)));
            lane
        }
        Err(error) => {
            let _ = report.send((index, Err(error)));
            return;
        }
    };
    let mut seen = 0;
    loop {
        let called = || shared.epoch.load(Ordering::Acquire) != seen || shared.stop.load(Ordering::Acquire);
        if !shared.spin_until(called) {
            park_until(&state.parked, called);
        }
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        seen = shared.epoch.load(Ordering::Acquire);
        lane.run(shared);
        shared.finish_lane();
    }
}

struct Lane {
    setup: LaneSetup,
    compiled: Vec<Box<dyn Compiled>>,
    /// Per program, the binding it has now.
    bound: Vec<usize>,
    /// The core set the thread is on.
    entered: usize,
}

impl Lane {
    fn prepare(setup: LaneSetup) -> Result<(Self, LaneReport), RunError> {
        let mut compiled: Vec<Box<dyn Compiled>> = Vec::with_capacity(setup.programs.len());
        let mut report = LaneReport { copied: Vec::new(), ports: 0, rebinds: 0 };
        let mut entered = usize::MAX;
        for program in &setup.programs {
            let not_ready = |source| RunError::Prepare { place: program.place.clone(), source };
            if entered != program.core_set {
                (setup.enter)(&program.unit).map_err(not_ready)?;
                entered = program.core_set;
            }
            let attempt = catch_unwind(AssertUnwindSafe(|| {
                program.backend.compile(&program.model, &program.unit, &setup.options)
            }));
            let ready = match attempt {
                Ok(result) => result.map_err(not_ready)?,
                Err(panic) => {
                    return Err(RunError::Panicked { place: program.place.clone(), message: panic_message(&*panic) });
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
        let mut lane = Self { setup, compiled, bound, entered };
        // The first run finds every program bound to what its first task needs.
        for task in (0..lane.setup.tasks.len()).rev() {
            lane.bind(task).map_err(|source| RunError::Prepare { place: lane.place(task).clone(), source })?;
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
        Ok((lane, report))
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

    fn run(&mut self, shared: &Shared) {
        let current = Cell::new(0);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.run_tasks(shared, &current)));
        let failure = match outcome {
            Ok(Ok(())) => return,
            Ok(Err(source)) => {
                // The binding may be half done; bind afresh next time.
                self.bound.fill(usize::MAX);
                Failure {
                    error: RunError::Segment { place: self.place(current.get()).clone(), source },
                    panicked: false,
                }
            }
            Err(panic) => Failure {
                error: RunError::Panicked {
                    place: self.place(current.get()).clone(),
                    message: panic_message(&*panic),
                },
                panicked: true,
            },
        };
        shared.fail(failure);
    }

    fn run_tasks(&mut self, shared: &Shared, current: &Cell<usize>) -> Result<(), UnitError> {
        let state = &shared.lanes[self.setup.lane];
        let mut trace = lock(&state.trace);
        trace.clear();
        if self.setup.options.profiling {
            lock(&shared.node_times).clear();
        }
        let origin = shared.started.load(Ordering::Relaxed);
        let mut last_end = shared.now() - origin;
        for index in 0..self.setup.tasks.len() {
            current.set(index);
            let task = &self.setup.tasks[index];
            let (number, program) = (task.task, task.program);
            let ready = || task.waits.iter().all(|&(lane, count)| shared.lanes[lane].finished.load(Ordering::Acquire) >= count);
            let waited_from = last_end;
            let mut start = last_end;
            if !ready() {
                let released = || ready() || shared.abort.load(Ordering::Acquire);
                if !shared.spin_until(released) {
                    park_until(&state.parked, released);
                }
                start = shared.now() - origin;
            }
            if shared.abort.load(Ordering::Relaxed) {
                return Ok(());
            }
            let unit = &self.setup.programs[program];
            let mut prepared = false;
            if self.entered != unit.core_set {
                (self.setup.enter)(&unit.unit)?;
                self.entered = unit.core_set;
                prepared = true;
            }
            prepared |= self.bind(index)?;
            if prepared {
                start = shared.now() - origin;
            }
            let compiled = &mut self.compiled[program];
            compiled.submit()?;
            let timing = compiled.wait()?;
            last_end = shared.now() - origin;
            state.finished.store(index as u32 + 1, Ordering::Release);
            let wakes = &self.setup.tasks[index].wakes;
            if !wakes.is_empty() {
                fence(Ordering::SeqCst);
                wakes.iter().for_each(|&lane| shared.wake(lane));
            }
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

/// The text of a panic.
fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned());
    trefoil_units::one_line(&text)
}
