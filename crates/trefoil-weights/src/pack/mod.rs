//! Packing a checkpoint into an artefact: plan from shapes, then stream.
//!
//! Three stages run at once and hand over bounded buffers: source windows are read, quantised into tile columns on all
//! threads, and hashed and written on another. Peak memory is a few windows, whatever the model (see [`WINDOW_BYTES`]).

mod plan;

pub use plan::{PackPlan, PlannedRegion, PlannedTensor};

use crate::artefact::{MemoryClasses, memory_classes};
use crate::checkpoint::{Checkpoint, SourceTensor, SourceType, TensorWindow};
use crate::quantise::{MatrixSource, Orientation, quantise_tile_columns};
use crate::rules::{Placement, RuleSet};
use crate::tile::{TILE, TileShape, code_bytes};
use crate::{ArtefactWriter, SectionName, TensorClass, TensorSpec, WeightsError, WriteSummary, memory};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Instant;

/// Source bytes of a matrix that are read at a time.
pub const WINDOW_BYTES: usize = 8 << 20;
/// Source bytes of an unquantised tensor that are copied at a time: smaller, because widening makes them grow.
const PLAIN_WINDOW_BYTES: u64 = 1 << 20;
/// Buffers that may wait for the writing thread.
const WRITE_QUEUE: usize = 2;

/// How to pack.
#[derive(Debug, Clone, Default)]
pub struct PackOptions {
    /// Rules; detected from the tensor names where `None`.
    pub rules: Option<RuleSet>,
    /// Further checkpoints whose tensors join, such as adapters kept in a file of their own.
    pub extra_sources: Vec<PathBuf>,
    /// Threads that quantise; 0 means all that this process may use.
    pub threads: usize,
    /// Largest region in bytes that the target platform maps; larger ones are an error before anything is written.
    pub region_limit: Option<u64>,
    /// Factor of the adapter delta (`2` in `y = xW + (xAᵀ)(2B)ᵀ`), recorded as `adapter_scaling`. Where `None`: `lora_alpha /
    /// lora_rank` of the model's configuration, else 2 (HeteroVDiff equation 3).
    pub adapter_scaling: Option<f64>,
    /// Recorded in the artefact as it is.
    pub metadata: serde_json::Map<String, serde_json::Value>,
    /// Tensors that no checkpoint holds (schedules, activation scales), with their bytes.
    pub extra_tensors: Vec<(TensorSpec, Vec<u8>)>,
    /// Looked at before each window: once it is true, packing ends with [`WeightsError::Stopped`] and removes what it has written.
    pub stop: Option<&'static AtomicBool>,
}

/// Where a packing run stands; given to the callback before each tensor and once at the end.
#[derive(Debug, Clone, Copy)]
pub struct PackProgress<'a> {
    /// Tensor being packed, empty at the end.
    pub tensor: &'a str,
    /// Source bytes done.
    pub done_bytes: u64,
    /// Source bytes in all.
    pub total_bytes: u64,
}

/// What a packing run did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PackReport {
    /// Output file.
    pub output: String,
    /// Fingerprint of the artefact.
    pub fingerprint: String,
    /// Name of the rule set.
    pub rules: String,
    /// Files read.
    pub sources: Vec<String>,
    /// Bytes of source tensors.
    pub source_bytes: u64,
    /// Bytes of the artefact.
    pub file_bytes: u64,
    /// Elements of the source.
    pub parameters: u64,
    /// Elements quantised.
    pub quantised_elements: u64,
    /// Regions written.
    pub regions: usize,
    /// Largest region in bytes.
    pub largest_region_bytes: u64,
    /// The paper's memory classes.
    pub memory: MemoryClasses,
    /// Matrices that were padded to multiples of 32.
    pub padded: Vec<String>,
    /// Source tensors that no rule knew; they are stored unquantised as class `other`.
    pub unmatched: Vec<String>,
    /// Threads that quantised.
    pub threads: usize,
    /// Wall time in milliseconds, syncing to disk included.
    pub elapsed_ms: f64,
    /// Processor time that this process used meanwhile, all threads together, in milliseconds: the figure to compare on a
    /// loaded machine.
    pub cpu_ms: f64,
    /// Source megabytes (10⁶ bytes) per second of wall time.
    pub source_mb_per_s: f64,
    /// Highest resident memory of this process so far (`VmHWM`), in bytes, where the kernel tells it.
    pub peak_resident_bytes: Option<u64>,
}

/// Packs `source` (see [`Checkpoint::open`]) into `output`. The output appears only when complete.
///
/// The result depends only on the inputs: packing twice gives the same bytes, whatever the number of threads.
///
/// # Errors
/// Unreadable sources, sources that change while they are read, non-finite weights (by tensor, row and column), rule sets that place
/// nothing, regions above the limit, a full disk, a wish to stop.
pub fn pack(
    source: &Path,
    output: &Path,
    options: &PackOptions,
    mut progress: impl FnMut(PackProgress<'_>),
) -> Result<PackReport, WeightsError> {
    let (start, cpu_start) = (Instant::now(), cpu_seconds());
    let checkpoint = Checkpoint::open(source, &options.extra_sources)?;
    let rules = match &options.rules {
        Some(rules) => {
            rules.check()?;
            rules.clone()
        }
        None => RuleSet::detect(checkpoint.tensors().map(|tensor| tensor.name.as_str())),
    };
    let plan = PackPlan::new(
        checkpoint.tensors().map(|tensor| (tensor.name.as_str(), &tensor.dtype, tensor.shape.as_slice())),
        &rules,
    )?;
    plan.check_limit(options.region_limit)?;
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let writer = ArtefactWriter::create(output, metadata(&checkpoint, &plan, &rules, options))?;
    let total_bytes = checkpoint.tensors().map(|tensor| tensor.bytes).sum();
    let (sender, receiver) = sync_channel(WRITE_QUEUE);
    let (ran, written) = std::thread::scope(|scope| {
        let writing = scope.spawn(move || write_all(writer, &receiver));
        let mut packer = Packer {
            checkpoint: &checkpoint,
            sender,
            threads,
            done_bytes: 0,
            total_bytes,
            late_scales: Vec::new(),
            stop: options.stop,
        };
        let ran = packer.run(&plan, &options.extra_tensors, &mut progress);
        drop(packer);
        (ran, writing.join().expect("writing does not panic"))
    });
    // The writer's own error is the cause where its queue was closed.
    let summary = match (ran, written) {
        (Ok(()), written) => written?,
        (Err(Stopped::Failed(error)), _) | (Err(Stopped::WriterGone), Err(error)) => return Err(error),
        (Err(Stopped::WriterGone), Ok(_)) => unreachable!("the writer only stops early with an error"),
    };
    progress(PackProgress { tensor: "", done_bytes: total_bytes, total_bytes });
    let elapsed = start.elapsed().as_secs_f64();
    let extra = options.extra_tensors.iter().map(|(spec, bytes)| (spec, bytes.len() as u64));
    Ok(PackReport {
        output: output.display().to_string(),
        fingerprint: summary.fingerprint,
        rules: rules.name,
        sources: checkpoint.files().map(|path| path.display().to_string()).collect(),
        source_bytes: total_bytes,
        file_bytes: summary.file_bytes,
        parameters: checkpoint.tensors().map(SourceTensor::elements).sum(),
        quantised_elements: plan.quantised_elements(),
        regions: plan.regions().len(),
        largest_region_bytes: plan.regions().iter().map(|region| region.bytes).max().unwrap_or(0),
        memory: memory_classes(plan.stored().chain(extra)),
        padded: plan.padded().map(str::to_string).collect(),
        unmatched: plan.unmatched.clone(),
        threads,
        elapsed_ms: elapsed * 1e3,
        cpu_ms: (cpu_seconds() - cpu_start) * 1e3,
        source_mb_per_s: total_bytes as f64 / 1e6 / elapsed,
        peak_resident_bytes: memory::peak_resident_bytes(),
    })
}

/// Processor time of this process so far, in seconds.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What the artefact records about its making. Paths are left out, so the same model gives the same bytes anywhere.
fn metadata(
    checkpoint: &Checkpoint,
    plan: &PackPlan,
    rules: &RuleSet,
    options: &PackOptions,
) -> serde_json::Map<String, serde_json::Value> {
    let mut metadata = serde_json::Map::new();
    metadata.insert("packer".into(), format!("trefoil-weights {}", env!("CARGO_PKG_VERSION")).into());
    metadata.insert("rules".into(), rules.name.clone().into());
    let names = checkpoint.files().filter_map(Path::file_name).map(|name| name.to_string_lossy().into_owned());
    metadata.insert("sources".into(), names.collect::<Vec<_>>().into());
    if let Some(config) = checkpoint.config() {
        metadata.insert("config".into(), config.clone());
    }
    if plan.tensors().any(|tensor| tensor.spec.class == TensorClass::Adapter) {
        let number = |key: &str| checkpoint.config()?.get(key)?.as_f64();
        let configured = number("lora_alpha").zip(number("lora_rank")).map(|(alpha, rank)| alpha / rank);
        let scaling = options.adapter_scaling.or(configured.filter(|scaling| scaling.is_finite())).unwrap_or(2.0);
        metadata.insert("adapter_scaling".into(), scaling.into());
    }
    metadata.extend(options.metadata.clone());
    metadata
}

/// Why packing stopped.
enum Stopped {
    /// For a reason of its own.
    Failed(WeightsError),
    /// Because the writing thread ended, which has the reason.
    WriterGone,
}

impl From<WeightsError> for Stopped {
    fn from(error: WeightsError) -> Stopped {
        Stopped::Failed(error)
    }
}

/// What the writing thread is told.
enum Order {
    Section(SectionName),
    Tensor(TensorSpec, u64),
    Codes(Vec<i8>),
    Bytes(Vec<u8>),
    Finish,
}

/// The writing thread: hashes and writes in the order given. Without a final order nothing is renamed into place.
fn write_all(mut writer: ArtefactWriter, orders: &Receiver<Order>) -> Result<WriteSummary, WeightsError> {
    for order in orders {
        match order {
            Order::Section(name) => writer.begin_section(&name)?,
            Order::Tensor(spec, bytes) => writer.begin_tensor(spec, bytes)?,
            Order::Codes(codes) => writer.write(code_bytes(&codes))?,
            Order::Bytes(bytes) => writer.write(&bytes)?,
            Order::Finish => return writer.finish(),
        }
    }
    // The packing thread gave up; it reports why.
    Ok(WriteSummary { file_bytes: 0, fingerprint: String::new() })
}

/// The packing side.
struct Packer<'a> {
    checkpoint: &'a Checkpoint,
    sender: SyncSender<Order>,
    threads: usize,
    done_bytes: u64,
    total_bytes: u64,
    /// Scales of matrices whose own section must not hold them; they fill the section `scales`.
    late_scales: Vec<(TensorSpec, Vec<f32>)>,
    stop: Option<&'static AtomicBool>,
}

impl Packer<'_> {
    fn run(
        &mut self,
        plan: &PackPlan,
        extra: &[(TensorSpec, Vec<u8>)],
        progress: &mut impl FnMut(PackProgress<'_>),
    ) -> Result<(), Stopped> {
        for region in plan.regions() {
            self.send(Order::Section(SectionName::Region { block: region.block, label: Some(region.label.clone()) }))?;
            for tensor in &region.tensors {
                self.tensor(tensor, progress)?;
            }
        }
        // Scales come last because matrices of any class add to them.
        let classes =
            TensorClass::ALL.into_iter().filter(|class| *class != TensorClass::Scales).chain([TensorClass::Scales]);
        for class in classes {
            let mut outside = plan.outside().iter().filter(|tensor| tensor.spec.class == class).peekable();
            let late = if class == TensorClass::Scales { std::mem::take(&mut self.late_scales) } else { Vec::new() };
            let mut extra = extra.iter().filter(|(spec, _)| spec.class == class).peekable();
            if outside.peek().is_none() && extra.peek().is_none() && late.is_empty() {
                continue;
            }
            self.send(Order::Section(SectionName::Class(class)))?;
            for tensor in outside {
                self.tensor(tensor, progress)?;
            }
            for (spec, scales) in late {
                self.f32_tensor(spec, &scales)?;
            }
            for (spec, bytes) in extra {
                self.send(Order::Tensor(spec.clone(), bytes.len() as u64))?;
                self.send(Order::Bytes(bytes.clone()))?;
            }
        }
        // What was read belongs together only if nobody wrote meanwhile.
        self.checkpoint.check_unchanged()?;
        self.send(Order::Finish)
    }

    /// The next window of a tensor, unless packing is to stop.
    fn window(&self, source: &SourceTensor, start: u64, len: u64) -> Result<TensorWindow, Stopped> {
        if self.stop.is_some_and(|stop| stop.load(Ordering::Relaxed)) {
            return Err(WeightsError::Stopped.into());
        }
        Ok(self.checkpoint.window(source, start, len)?)
    }

    fn tensor(&mut self, planned: &PlannedTensor, progress: &mut impl FnMut(PackProgress<'_>)) -> Result<(), Stopped> {
        progress(PackProgress { tensor: &planned.source, done_bytes: self.done_bytes, total_bytes: self.total_bytes });
        let source = self.checkpoint.tensor(&planned.source).ok_or_else(|| WeightsError::Tensor {
            tensor: planned.source.clone(),
            reason: "the checkpoint lost it".to_string(),
        })?;
        self.send(Order::Tensor(planned.spec.clone(), planned.bytes))?;
        if planned.place == Placement::Plain {
            self.plain(planned, source)?;
        } else {
            let scales = self.matrix(source)?;
            if let Some(spec) = planned.scale.clone() {
                if spec.class == TensorClass::Scales {
                    self.late_scales.push((spec, scales));
                } else {
                    self.f32_tensor(spec, &scales)?;
                }
            }
        }
        self.done_bytes += source.bytes;
        Ok(())
    }

    /// Quantises a matrix window by window and returns its scales.
    fn matrix(&self, source: &SourceTensor) -> Result<Vec<f32>, Stopped> {
        let (&[d_out, d_in], SourceType::Float(dtype)) = (source.shape.as_slice(), &source.dtype) else {
            let reason = "the plan only quantises floating-point matrices".to_string();
            return Err(WeightsError::Tensor { tensor: source.name.clone(), reason }.into());
        };
        let (d_in, d_out) = (d_in as usize, d_out as usize);
        let whole = TileShape::new(d_in, d_out).ok_or_else(|| WeightsError::Tensor {
            tensor: source.name.clone(),
            reason: format!("a {d_in}×{d_out} matrix cannot be tiled"),
        })?;
        // A column of W is a row of the file, so a run of tile columns is a contiguous window of it.
        let row_bytes = d_in * dtype.bytes();
        let per_window = (WINDOW_BYTES / (TILE * row_bytes)).max(1);
        let mut scales = vec![1f32; whole.padded_out()];
        for (number, scales) in scales.chunks_mut(per_window * TILE).enumerate() {
            let first = number * per_window * TILE;
            let count = scales.len().min(d_out - first);
            let window = self.window(source, (first * row_bytes) as u64, (count * row_bytes) as u64)?;
            let shape = TileShape { d_in, d_out: count };
            let matrix = MatrixSource::new(&source.name, window.bytes(), *dtype, shape, Orientation::OutIn)?;
            let mut codes = vec![0i8; shape.bytes()];
            quantise_tile_columns(&matrix, 0, &mut codes, scales, self.threads)
                .map_err(|error| in_whole_matrix(error, first, d_out))?;
            self.send(Order::Codes(codes))?;
        }
        Ok(scales)
    }

    /// Copies a tensor, widening floats to `f32` and padding a bias to its matrix.
    fn plain(&self, planned: &PlannedTensor, source: &SourceTensor) -> Result<(), Stopped> {
        let mut at = 0;
        let mut values = Vec::new();
        while at < source.bytes {
            let len = (source.bytes - at).min(PLAIN_WINDOW_BYTES);
            let window = self.window(source, at, len)?;
            let bytes = match &source.dtype {
                SourceType::Raw { .. } => window.bytes().to_vec(),
                SourceType::Float(dtype) => {
                    values.resize(len as usize / dtype.bytes(), 0f32);
                    dtype.decode(window.bytes(), &mut values);
                    if let Some(wrong) = values.iter().position(|value| !value.is_finite()) {
                        return Err(WeightsError::NonFinitePlain {
                            tensor: source.name.clone(),
                            value: values[wrong],
                            index: at / dtype.bytes() as u64 + wrong as u64,
                            shape: source.shape.clone(),
                        }
                        .into());
                    }
                    values.iter().flat_map(|value| value.to_le_bytes()).collect()
                }
            };
            self.send(Order::Bytes(bytes))?;
            at += len;
        }
        let padding = planned.spec.padded_shape.iter().product::<u64>() - planned.spec.shape.iter().product::<u64>();
        if padding > 0 {
            self.send(Order::Bytes(vec![0; padding as usize * size_of::<f32>()]))?;
        }
        Ok(())
    }

    fn f32_tensor(&self, spec: TensorSpec, values: &[f32]) -> Result<(), Stopped> {
        self.send(Order::Tensor(spec, size_of_val(values) as u64))?;
        self.send(Order::Bytes(values.iter().flat_map(|value| value.to_le_bytes()).collect()))
    }

    fn send(&self, order: Order) -> Result<(), Stopped> {
        self.sender.send(order).map_err(|_| Stopped::WriterGone)
    }
}

/// Shifts a window's column to the column of the whole matrix.
fn in_whole_matrix(error: WeightsError, first: usize, columns: usize) -> WeightsError {
    match error {
        WeightsError::NonFinite { tensor, value, row, column, d_in, .. } => {
            WeightsError::NonFinite { tensor, value, row, column: column + first as u64, d_in, d_out: columns as u64 }
        }
        other => other,
    }
}
