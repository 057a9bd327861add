//! The executor: a plan made ready on real units, run as often as wanted.

use crate::RunError;
use crate::arena::Placement;
use crate::inputs::match_inputs;
use crate::lane::{LaneReport, LaneSetup, Shared, lane_main};
use crate::schedule::{Schedule, ScheduledTask, Source};
use crate::setup::{Buffers, check_resources, find_units, label, lane_setup};
use crate::source::SegmentSource;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use trefoil_core::tensor::AlignedBytes;
use trefoil_core::{
    HostTensor, Lane, NodeTime, OperatorGraph, Origin, Plan, SegmentId, Span, SpanKind, TaskId, TensorId, TensorInfo,
    Timeline, Unit, UnitAddress,
};
use trefoil_units::{Backend, Buffer, RunTiming, UnitError};

/// Finds the backend and the unit behind an address.
pub type FindUnit<'a> = dyn Fn(&UnitAddress) -> Result<(&'static dyn Backend, Unit), UnitError> + 'a;

/// How an executor is built.
#[derive(Debug, Clone)]
pub struct ExecutorOptions {
    /// Folder for compiled blobs; `None` compiles afresh.
    pub cache: Option<PathBuf>,
    /// How long a lane that waits for another lane within a run spins before it sleeps. A sleeping lane takes the kernel
    /// 5 to 50 µs to wake, a spinning one well under 1 µs; but where other work shares the lane's cores, spinning keeps
    /// it from them.
    pub spin: Duration,
    /// How long a lane that waits for the next run, and a caller that waits for the end of one, go on looking before they
    /// sleep, giving their core to whoever wants it between looks. It keeps inferences that follow one another closely from
    /// paying for two wake-ups each; zero saves power where they are rare.
    pub linger: Duration,
    /// Make it an error when something does not happen as asked: a unit that holds other resources here than in the
    /// plan, a port that has to be copied.
    pub strict: bool,
    /// Compile with the backends' profiling on ([`Executor::node_times`]). Costs time; never on when timing.
    pub profiling: bool,
    /// Keep every value's bytes after a run ([`Executor::value`]) instead of reusing them.
    pub keep_values: bool,
}

impl Default for ExecutorOptions {
    fn default() -> Self {
        Self {
            cache: None,
            spin: Duration::from_micros(20),
            linger: Duration::from_micros(100),
            strict: false,
            profiling: false,
            keep_values: false,
        }
    }
}

/// What an executor's memory looks like.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct MemoryReport {
    /// Bytes of the arena, in which values between segments live.
    pub arena_bytes: usize,
    /// Bytes that the same values would take without reuse.
    pub bytes_without_reuse: usize,
    /// Bytes of model inputs and outputs.
    pub port_bytes: usize,
    /// Number of ports of all compiled segments.
    pub ports: usize,
    /// Ports that the backend copies instead of using the executor's bytes directly: segment, unit and port in words.
    pub copied: Vec<String>,
    /// Times per run that a compiled segment is bound to other buffers (only when it runs for several items or
    /// iterations).
    pub rebinds: usize,
}

/// One execution of the last run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TaskTiming {
    /// The plan's task.
    pub task: TaskId,
    /// The plan's segment.
    pub segment: SegmentId,
    /// Start in milliseconds from the start of the run.
    pub start_ms: f64,
    /// End in milliseconds.
    pub end_ms: f64,
    /// What the backend told.
    pub parts: RunTiming,
}

/// A model input's or output's own bytes.
struct PortBuffer {
    info: TensorInfo,
    data: AlignedBytes,
}

impl PortBuffer {
    fn new(info: TensorInfo) -> Self {
        let data = AlignedBytes::zeroed(info.bytes() as usize);
        Self { info, data }
    }

    fn buffer(&mut self) -> Buffer {
        Buffer { pointer: self.data.as_mut_ptr(), length: self.data.len() }
    }
}

/// A plan, compiled and bound. One thread per lane waits for the next run; dropping the executor ends them.
///
/// A **single-lane** plan runs on its lane's thread too, not on the caller's: a compiled segment must run on the thread
/// that compiled it, with the unit's cores and floating-point mode. Putting both on and off the caller for every
/// inference (6 to 7 µs) saves little over waking the lane and being woken by it (8 to 9 µs asleep, 1 µs while both linger:
/// `benches/overhead.rs`), and would meddle with a thread that is not Trefoil's.
///
/// **Core sets.** A lane whose units have different core sets changes its thread's affinity between them, because a
/// unit on one core must run on that core: one system call, paid only where the set changes.
pub struct Executor {
    // The lanes' threads use the memory below until `drop` has joined them.
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    plan: Plan,
    schedule: Schedule,
    placement: Placement,
    inputs: Vec<PortBuffer>,
    /// One per value that is a model output.
    outputs: BTreeMap<usize, PortBuffer>,
    arena: AlignedBytes,
    labels: Vec<String>,
    memory: MemoryReport,
    notes: Vec<String>,
    simulated: bool,
    poisoned: Option<String>,
}

impl Executor {
    /// Checks the plan against its graphs, extracts and compiles every segment once on its lane's thread, and binds all
    /// buffers.
    ///
    /// # Errors
    /// Those of [`Plan::check`] and [`Schedule::new`]; [`RunError::Unit`] for units that are not there,
    /// [`RunError::Extract`], [`RunError::Prepare`] or [`RunError::Panicked`] naming the segment, and
    /// [`RunError::Strict`].
    pub fn new(
        plan: Plan,
        graphs: &[&OperatorGraph],
        source: &dyn SegmentSource,
        find: &FindUnit<'_>,
        options: &ExecutorOptions,
    ) -> Result<Self, RunError> {
        plan.check(graphs)?;
        let schedule = Schedule::new(&plan, graphs)?;
        let units = find_units(&plan, find)?;
        let notes = check_resources(&plan, &units, &schedule)?;
        if let (true, Some(note)) = (options.strict, notes.first()) {
            return Err(RunError::Strict { reason: note.clone() });
        }
        let placement = Placement::new(&schedule, !options.keep_values);
        let mut inputs: Vec<_> = schedule.inputs.iter().map(|port| PortBuffer::new(port.info.clone())).collect();
        let mut outputs = BTreeMap::new();
        for port in &schedule.outputs {
            if let Source::Value(value) = port.source {
                outputs.entry(value).or_insert_with(|| PortBuffer::new(schedule.values[value].info.clone()));
            }
        }
        let mut arena = AlignedBytes::zeroed(placement.bytes);
        let buffers = Buffers {
            inputs: inputs.iter_mut().map(PortBuffer::buffer).collect(),
            values: schedule
                .values
                .iter()
                .enumerate()
                .map(|(index, value)| match placement.offsets[index] {
                    Some(offset) => Buffer {
                        // In bounds by construction of the placement; zero-sized values may point at the end.
                        pointer: arena.as_mut_ptr().wrapping_add(offset),
                        length: value.info.bytes() as usize,
                    },
                    None => outputs.get_mut(&index).expect("a value without offset is a model output").buffer(),
                })
                .collect(),
        };
        let labels: Vec<_> =
            plan.segments.iter().enumerate().map(|(index, segment)| label(index, segment, graphs)).collect();
        let mut setups = Vec::with_capacity(schedule.lanes.len());
        for lane in 0..schedule.lanes.len() {
            setups.push(lane_setup(lane, &plan, graphs, &schedule, source, &units, &buffers, options)?);
        }
        let lengths: Vec<_> = schedule.lanes.iter().map(|lane| lane.tasks.len()).collect();
        let port_bytes = inputs.iter().chain(outputs.values()).map(|port: &PortBuffer| port.data.len()).sum();
        let mut executor = Self {
            shared: Arc::new(Shared::new(&lengths, options.spin, options.linger)),
            threads: Vec::new(),
            memory: MemoryReport {
                arena_bytes: placement.bytes,
                bytes_without_reuse: placement.bytes_without_reuse,
                port_bytes,
                ports: 0,
                copied: Vec::new(),
                rebinds: 0,
            },
            plan,
            schedule,
            placement,
            inputs,
            outputs,
            arena,
            labels,
            notes,
            simulated: units.values().any(|(_, unit)| unit.simulated),
            poisoned: None,
        };
        executor.start(setups)?;
        if let (true, Some(copied)) = (options.strict, executor.memory.copied.first()) {
            return Err(RunError::Strict { reason: format!("{copied} is copied, not shared") });
        }
        Ok(executor)
    }

    /// Starts the lanes and waits until all have compiled.
    fn start(&mut self, setups: Vec<LaneSetup>) -> Result<(), RunError> {
        let (sender, receiver) = mpsc::channel();
        let mut reports: Vec<Option<Result<LaneReport, RunError>>> = setups.iter().map(|_| None).collect();
        for setup in setups {
            let (shared, sender, lane) = (Arc::clone(&self.shared), sender.clone(), setup.lane);
            let thread = std::thread::Builder::new()
                .name(format!("trefoil-lane-{lane}"))
                .spawn(move || lane_main(setup, &shared, &sender))
                .map_err(|error| RunError::Start { what: format!("lane {lane}"), reason: error.to_string() })?;
            self.threads.push(thread);
        }
        drop(sender);
        for (lane, report) in receiver {
            reports[lane] = Some(report);
            if reports.iter().all(Option::is_some) {
                break;
            }
        }
        for (lane, report) in reports.into_iter().enumerate() {
            let gone = || RunError::Start { what: format!("lane {lane}"), reason: "its thread ended".to_owned() };
            let report = report.ok_or_else(gone)??;
            self.memory.ports += report.ports;
            self.memory.rebinds += report.rebinds;
            self.memory.copied.extend(
                report
                    .copied
                    .into_iter()
                    .map(|(place, port)| format!("port `{port}` of segment {} on {}", place.segment, place.unit)),
            );
        }
        Ok(())
    }

    /// Runs one inference (all items of the plan) on what [`Executor::input_mut`] holds; results are in
    /// [`Executor::output`]. Allocates nothing of Trefoil's own after the first call.
    ///
    /// # Errors
    /// [`RunError::Segment`], after which the executor stays usable; [`RunError::Panicked`], after which it is poisoned
    /// and returns [`RunError::Poisoned`].
    pub fn run_bound(&mut self) -> Result<(), RunError> {
        self.launch()?;
        self.join()
    }

    /// Starts what [`Executor::run_bound`] does and returns at once. Until [`Executor::join`] has returned, the lanes read the
    /// inputs and write the outputs: nobody else may touch them.
    ///
    /// # Errors
    /// [`RunError::Poisoned`].
    pub(crate) fn launch(&mut self) -> Result<(), RunError> {
        if let Some(first) = &self.poisoned {
            return Err(RunError::Poisoned { first: first.clone() });
        }
        self.shared.launch();
        Ok(())
    }

    /// Waits for what [`Executor::launch`] started.
    ///
    /// # Errors
    /// As [`Executor::run_bound`].
    pub(crate) fn join(&mut self) -> Result<(), RunError> {
        self.shared.join().map_err(|failure| {
            if failure.panicked {
                self.poisoned = Some(failure.error.to_string());
            }
            failure.error
        })
    }

    /// Copies the given tensors (by name, in any order) into the inputs, runs, and copies the outputs out, in the
    /// model's order.
    ///
    /// # Errors
    /// Those of [`match_inputs`] and [`Executor::run_bound`].
    pub fn run(&mut self, given: &[&HostTensor]) -> Result<Vec<HostTensor>, RunError> {
        self.load(given)?;
        self.run_bound()?;
        (0..self.schedule.outputs.len())
            .map(|index| {
                let info = self.schedule.outputs[index].info.clone();
                HostTensor::from_bytes(info, self.output(index)).map_err(RunError::from)
            })
            .collect()
    }

    /// Copies the given tensors (by name, in any order) into the inputs.
    ///
    /// # Errors
    /// Those of [`match_inputs`].
    pub fn load(&mut self, given: &[&HostTensor]) -> Result<(), RunError> {
        let ports: Vec<_> = self.inputs.iter().map(|port| port.info.clone()).collect();
        for (port, index) in self.inputs.iter_mut().zip(match_inputs(&ports, given)?) {
            port.data.as_mut_slice().copy_from_slice(given[index].bytes());
        }
        Ok(())
    }

    /// Descriptions of the inputs, in order.
    pub fn input_infos(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.inputs.iter().map(|port| &port.info)
    }

    /// Descriptions of the outputs, in order.
    pub fn output_infos(&self) -> impl ExactSizeIterator<Item = &TensorInfo> {
        self.schedule.outputs.iter().map(|port| &port.info)
    }

    /// Bytes of input `index`, to be filled before a run; they survive runs.
    pub fn input_mut(&mut self, index: usize) -> &mut [u8] {
        self.inputs[index].data.as_mut_slice()
    }

    /// Bytes of output `index` after the last run.
    pub fn output(&self, index: usize) -> &[u8] {
        self.source_bytes(self.schedule.outputs[index].source)
    }

    /// Bytes of a value after a run of an executor with [`ExecutorOptions::keep_values`], of the highest iteration; or
    /// of a model input or output. `None` if no segment hands the tensor out.
    pub fn value(&self, model: u32, item: u32, tensor: TensorId) -> Option<&[u8]> {
        let of = |port: &&crate::schedule::ModelPort| port.model == model && port.item == item && port.tensor == tensor;
        if let Some(port) = self.schedule.inputs.iter().find(of) {
            return Some(self.source_bytes(port.source));
        }
        let (index, _) = self
            .schedule
            .values
            .iter()
            .enumerate()
            .filter(|(_, value)| value.model == model && value.item == item && value.tensor == tensor)
            .max_by_key(|(_, value)| value.iteration)?;
        Some(self.source_bytes(Source::Value(index)))
    }

    fn source_bytes(&self, source: Source) -> &[u8] {
        match source {
            Source::Input(port) => self.inputs[port].data.as_slice(),
            Source::Value(value) => match self.placement.offsets[value] {
                Some(offset) => {
                    let length = self.schedule.values[value].info.bytes() as usize;
                    &self.arena.as_slice()[offset..offset + length]
                }
                None => self.outputs[&value].data.as_slice(),
            },
        }
    }

    /// The plan it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// What each lane does.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Memory use.
    pub fn memory(&self) -> &MemoryReport {
        &self.memory
    }

    /// What did not happen as the plan says, without being an error.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Milliseconds of the last run from the start of its first task to the end of its last one, by the lanes' own clocks: without
    /// what it takes to wake a lane and to be woken by it.
    pub(crate) fn busy_ms(&self) -> f64 {
        let records = (0..self.schedule.lanes.len()).flat_map(|lane| self.shared.records(lane));
        let span = records.fold(None, |span: Option<(_, _)>, record| {
            let (start, end) = span.unwrap_or((record.start, record.end));
            Some((start.min(record.start), end.max(record.end)))
        });
        span.map_or(0.0, |(start, end)| milliseconds(end) - milliseconds(start))
    }

    /// What happened in the last run, one lane per unit. [`Origin::Simulated`] if any of its units is simulated.
    pub fn trace(&self) -> Timeline {
        let mut lanes: BTreeMap<&UnitAddress, Vec<Span>> = BTreeMap::new();
        for (lane, schedule) in self.schedule.lanes.iter().enumerate() {
            schedule.units.iter().for_each(|unit| {
                lanes.entry(unit).or_default();
            });
            for record in self.shared.records(lane) {
                let ScheduledTask { task, segment, .. } = self.schedule.tasks[record.task];
                let spans = lanes.entry(&self.plan.segments[segment.0 as usize].unit).or_default();
                if record.waited_from < record.start && !self.schedule.tasks[record.task].waits.is_empty() {
                    spans.push(Span {
                        task,
                        label: "waiting".to_owned(),
                        kind: SpanKind::Wait,
                        start_ms: milliseconds(record.waited_from),
                        end_ms: milliseconds(record.start),
                    });
                }
                spans.push(Span {
                    task,
                    label: self.labels[segment.0 as usize].clone(),
                    kind: SpanKind::Compute,
                    start_ms: milliseconds(record.start),
                    end_ms: milliseconds(record.end),
                });
            }
        }
        Timeline {
            origin: if self.simulated { Origin::Simulated } else { Origin::Measured },
            lanes: lanes.into_iter().map(|(unit, spans)| Lane { name: unit.to_string(), spans }).collect(),
        }
    }

    /// Times of the last run by task, with what backends told about their parts; in schedule order.
    pub fn timings(&self) -> Vec<TaskTiming> {
        let mut records: Vec<_> = (0..self.schedule.lanes.len()).flat_map(|lane| self.shared.records(lane)).collect();
        records.sort_by_key(|record| record.task);
        records
            .into_iter()
            .map(|record| TaskTiming {
                task: self.schedule.tasks[record.task].task,
                segment: self.schedule.tasks[record.task].segment,
                start_ms: milliseconds(record.start),
                end_ms: milliseconds(record.end),
                parts: record.timing,
            })
            .collect()
    }

    /// Node times of the last run by segment, from backends that report them; only with
    /// [`ExecutorOptions::profiling`].
    pub fn node_times(&self) -> Vec<(SegmentId, Vec<NodeTime>)> {
        let times = self.shared.node_times().into_iter();
        times.map(|(task, nodes)| (self.schedule.tasks[task].segment, nodes)).collect()
    }
}

impl Drop for Executor {
    fn drop(&mut self) {
        self.shared.stop();
        for thread in self.threads.drain(..) {
            // A lane catches its backends' panics; one that got through (a panic while dropping) has ended the thread,
            // which is all that matters here.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Executor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Executor")
            .field("method", &self.plan.method)
            .field("segments", &self.plan.segments.len())
            .field("lanes", &self.schedule.lanes.len())
            .field("memory", &self.memory)
            .finish_non_exhaustive()
    }
}

fn milliseconds(nanoseconds: u64) -> f64 {
    nanoseconds as f64 / 1e6
}
