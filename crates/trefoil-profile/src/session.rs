//! One profiling session: workers, journal, progress, and the making of records.

use crate::client::{CallError, WorkerSlot};
use crate::clock::{load_average, now_utc};
use crate::journal::{Journal, hex, journal_key};
use crate::options::Estimator;
use crate::prepare::PreparedModel;
use crate::protocol::{Answer, Failure, Item, ItemResult, Job, Sampling};
use crate::tolerance::Leniency;
use crate::{ProfileError, ProfileOptions, Progress, cache};
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use trefoil_core::{
    Conditions, DataType, Machine, Measurement, MeasurementId, OperatorGraph, OperatorId, Origin, Outcome, Profile,
    Subject, Unit, UnitAddress,
};
use trefoil_onnx::Extracted;
use trefoil_units::{CompileOptions, SubModel};

/// Node types whose results are random, so that nothing can be compared.
const RANDOM: &[&str] =
    &["Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"];

/// Everything a session works with.
pub(crate) struct Session<'a> {
    pub(crate) model: &'a PreparedModel,
    pub(crate) options: &'a ProfileOptions,
    pub(crate) machine: Machine,
    pub(crate) estimator: Estimator,
    /// What a reader of the profile should know, in the order it was found.
    pub(crate) notes: Vec<String>,
    /// Measurements that stayed noisy after a second try.
    pub(crate) noisy: usize,
    /// Noisy measurements that were taken again.
    pub(crate) repeated: usize,
    /// Results that differ from the trace and agree with the reference unit on the same operators alone.
    pub(crate) second_opinions: usize,
    journal: Journal,
    slots: BTreeMap<String, WorkerSlot>,
    numbers: HashMap<(String, Vec<UnitAddress>), u32>,
    progress: &'a mut dyn FnMut(Progress),
    stop: &'a AtomicBool,
}

impl<'a> Session<'a> {
    pub(crate) fn new(
        model: &'a PreparedModel,
        options: &'a ProfileOptions,
        profile: &Profile,
        progress: &'a mut dyn FnMut(Progress),
        stop: &'a AtomicBool,
    ) -> Result<Self, ProfileError> {
        let mut numbers = HashMap::new();
        for measurement in &profile.measurements {
            *numbers.entry((measurement.subject.key(), measurement.units.clone())).or_insert(0) += 1;
        }
        Ok(Self {
            model,
            options,
            machine: profile.machine.clone(),
            estimator: Estimator::new(0),
            notes: Vec::new(),
            noisy: 0,
            repeated: 0,
            second_opinions: 0,
            journal: Journal::open(&cache::journal_path(&options.cache_dir))?,
            slots: BTreeMap::new(),
            numbers,
            progress,
            stop,
        })
    }

    /// Notes something once.
    pub(crate) fn note(&mut self, text: String) {
        if !self.notes.contains(&text) {
            self.notes.push(text);
        }
    }

    /// Has a job done by the worker of that name. The inner result is the finding.
    pub(crate) fn call(
        &mut self,
        slot: &str,
        job: &Job,
        limit: Duration,
    ) -> Result<Result<Answer, Failure>, ProfileError> {
        let launcher = &self.options.launcher;
        let slot = self.slots.entry(slot.to_owned()).or_insert_with(|| WorkerSlot::new(launcher.clone()));
        match slot.call(job, limit, self.stop) {
            Ok(answer) => Ok(Ok(answer)),
            Err(CallError::Failure(failure)) => Ok(Err(failure)),
            Err(CallError::Interrupted) => {
                let (done, total) = self.estimator.counts();
                Err(ProfileError::Interrupted { done, total })
            }
            Err(CallError::Fatal(error)) => Err(error),
        }
    }

    /// Ends the worker of that name.
    pub(crate) fn retire(&mut self, slot: &str) {
        self.slots.remove(slot);
    }

    /// Takes a measurement, or takes it from the journal, and appends it to the profile.
    pub(crate) fn record(
        &mut self,
        profile: &mut Profile,
        subject: &Subject,
        units: &[&Unit],
        class: &str,
        label: &str,
        measure: impl FnOnce(&mut Self) -> Result<Outcome, ProfileError>,
    ) -> Result<Outcome, ProfileError> {
        let key = journal_key(&self.machine, class, subject, units);
        let addresses: Vec<_> = units.iter().map(|unit| unit.address.clone()).collect();
        (self.progress)(self.estimator.progress(label.to_owned()));
        if !self.options.fresh
            && let Some(known) = self.journal.get(&key)
        {
            let mut measurement = known.clone();
            measurement.id = self.next_id(subject, &addresses);
            let outcome = measurement.outcome.clone();
            profile.measurements.push(measurement);
            self.estimator.remembered();
            return Ok(outcome);
        }
        let began = Instant::now();
        let load = load_average();
        let outcome = measure(self)?;
        let measurement = self.measurement(subject, units, outcome.clone(), load);
        self.estimator.measured(began.elapsed());
        // A time-out or a memory limit may be the machine's mood: it counts now, but is tried again next time.
        let moody = matches!(&outcome, Outcome::Failed { stage, .. } if stage == "timeout" || stage == "limit");
        if !moody {
            self.journal.put(&key, &measurement)?;
        }
        profile.measurements.push(measurement);
        Ok(outcome)
    }

    /// A record with the next number, under the session's conditions.
    pub(crate) fn measurement(
        &mut self,
        subject: &Subject,
        units: &[&Unit],
        outcome: Outcome,
        load: Option<f64>,
    ) -> Measurement {
        let sampling = match subject {
            Subject::Transfer { .. } | Subject::Slowdown { .. } => self.options.pair_sampling(),
            _ => self.options.sampling(),
        };
        self.measurement_sampled(subject, units, outcome, load, sampling, false)
    }

    /// Fails when the caller raised its flag.
    pub(crate) fn interrupted(&self) -> Result<(), ProfileError> {
        if self.stop.load(std::sync::atomic::Ordering::Relaxed) {
            let (done, total) = self.estimator.counts();
            return Err(ProfileError::Interrupted { done, total });
        }
        Ok(())
    }

    /// Shows what is being done.
    pub(crate) fn step(&mut self, what: &str) {
        (self.progress)(self.estimator.progress(what.to_owned()));
    }

    /// As [`Session::measurement`], for samples that were taken with other care than usual.
    pub(crate) fn measurement_sampled(
        &mut self,
        subject: &Subject,
        units: &[&Unit],
        outcome: Outcome,
        load: Option<f64>,
        sampling: Sampling,
        fresh_process: bool,
    ) -> Measurement {
        let addresses: Vec<_> = units.iter().map(|unit| unit.address.clone()).collect();
        let mut versions = BTreeMap::new();
        for unit in units {
            let backend = &unit.address.backend;
            if let Some(version) = self.machine.versions.get(backend) {
                versions.insert(backend.clone(), version.clone());
            }
        }
        Measurement {
            id: self.next_id(subject, &addresses),
            subject: subject.clone(),
            units: addresses,
            origin: if units.iter().any(|unit| unit.simulated) { Origin::Simulated } else { Origin::Measured },
            outcome,
            conditions: Conditions {
                warmup: sampling.warmup,
                runs: sampling.runs,
                cap_ms: Some(sampling.cap_ms),
                load,
                denormals_flushed: true,
                fresh_process,
            },
            versions,
            taken_at: now_utc(),
        }
    }

    pub(crate) fn next_id(&mut self, subject: &Subject, units: &[UnitAddress]) -> MeasurementId {
        let number = self.numbers.entry((subject.key(), units.to_vec())).or_insert(0);
        let id = MeasurementId::new(subject, units, *number);
        *number += 1;
        id
    }

    /// Measures one item; a noisy result is taken again once and the calmer of the two stands.
    pub(crate) fn time_item(
        &mut self,
        item: &Item,
        sampling: Sampling,
        limit: Duration,
    ) -> Result<Result<ItemResult, Failure>, ProfileError> {
        let slot = item.unit.address.to_string();
        let job = Job::Measure { items: vec![item.clone()], sampling };
        let mut best = match single(self.call(&slot, &job, limit)?) {
            Ok(result) => result,
            Err(failure) => return Ok(Err(failure)),
        };
        if is_noisy(&best) && !is_wrong(&best) {
            self.repeated += 1;
            if let Ok(again) = single(self.call(&slot, &job, limit)?)
                && spread(&again) < spread(&best)
            {
                best = again;
            }
            self.noisy += usize::from(is_noisy(&best));
        }
        Ok(Ok(best))
    }

    /// Measures an extracted set of operators on a unit. A result that differs from the trace gets a second opinion.
    ///
    /// The traced run may keep more precision between nodes than their types say (ONNX Runtime leaves out casts between
    /// f16 nodes), and a sine of a large argument then comes out differently from its traced, rounded input. So what
    /// differs is compared once more, with the reference unit running just these operators on their traced inputs.
    /// Wrong is what differs from both.
    pub(crate) fn time_checked(
        &mut self,
        extracted: &Extracted,
        item: &Item,
        limit: Duration,
    ) -> Result<Result<ItemResult, Failure>, ProfileError> {
        let sampling = self.options.sampling();
        let first = self.time_item(item, sampling, limit)?;
        if !first.as_ref().is_ok_and(is_wrong) {
            return Ok(first);
        }
        for address in self.model.reference.units.keys() {
            let Some(store) = self.opinion(extracted, address, limit)? else { continue };
            let mut item = item.clone();
            item.stores.insert(0, store);
            let again = self.time_item(&item, sampling, limit)?;
            if again.as_ref().is_ok_and(|result| !is_wrong(result)) {
                self.second_opinions += 1;
                return Ok(again);
            }
        }
        Ok(first)
    }

    /// What a reference unit computes for just this sub-model, as a tensor store; `None` if it does not run there.
    fn opinion(
        &mut self,
        extracted: &Extracted,
        address: &str,
        limit: Duration,
    ) -> Result<Option<PathBuf>, ProfileError> {
        let Ok(unit) = address
            .parse()
            .map_err(ProfileError::from)
            .and_then(|address| trefoil_units::resolve(&address).map_err(ProfileError::from))
        else {
            return Ok(None);
        };
        // Sub-models are named by what is in them, so the store's name tells what it answers.
        let into = extracted.path.with_extension(format!("{}.tensors", address.replace([':', '/'], "-")));
        if crate::TraceStore::open(&into).is_ok() {
            return Ok(Some(into));
        }
        let mut item = self.item(extracted, &unit, None, false);
        item.options.reference = true;
        let job = Job::Evaluate { item, into: into.clone() };
        let answer = self.call(&format!("{address} as reference"), &job, limit)?;
        Ok(matches!(answer, Ok(Answer::Evaluated)).then_some(into))
    }

    /// An item for a sub-model on a unit, with the trace as inputs and reference.
    pub(crate) fn item(&self, extracted: &Extracted, unit: &Unit, leniency: Option<Leniency>, warm: bool) -> Item {
        Item {
            model: sub_model(extracted),
            unit: unit.clone(),
            options: CompileOptions {
                cache: warm.then(|| cache::compiled_path(&self.options.cache_dir)),
                ..CompileOptions::default()
            },
            stores: vec![self.model.trace.folder().to_owned()],
            compare: leniency,
            keep: None,
        }
    }

    /// Where sub-models of this session's granularity are extracted to.
    pub(crate) fn segments_dir(&self) -> PathBuf {
        self.model.segments_dir(self.options.granularity)
    }

    /// Extracts a set of operators; the error is a finding.
    pub(crate) fn extract(&self, graph: &OperatorGraph, set: &BTreeSet<OperatorId>) -> Result<Extracted, Failure> {
        self.model
            .prepared
            .extract(graph, set, &self.segments_dir())
            .map_err(|error| Failure::new("extract", &error.to_string()))
    }
}

/// The one item's fate in an answer to [`Job::Measure`].
fn single(answer: Result<Answer, Failure>) -> Result<ItemResult, Failure> {
    match answer? {
        Answer::Measured { items } => items
            .into_iter()
            .next()
            .ok_or_else(|| Failure::new("run", "the worker answered about no item"))?
            .into_result(),
        _ => Err(unexpected()),
    }
}

/// An answer of another kind than asked for: a bug, told as a finding.
pub(crate) fn unexpected() -> Failure {
    Failure::new("run", "the worker answered something else than it was asked")
}

fn is_wrong(result: &ItemResult) -> bool {
    result.deviation.as_ref().is_some_and(|deviation| deviation.wrong.is_some())
}

fn spread(result: &ItemResult) -> f64 {
    result.timing.total.map_or(0.0, |samples| samples.spread())
}

fn is_noisy(result: &ItemResult) -> bool {
    result.timing.total.is_some_and(|samples| samples.count > 4)
        && spread(result) > trefoil_core::measurement::NOISY_SPREAD
}

/// As the backends want it.
pub(crate) fn sub_model(extracted: &Extracted) -> SubModel {
    SubModel { path: extracted.path.clone(), inputs: extracted.inputs.clone(), outputs: extracted.outputs.clone() }
}

/// An outcome from what a worker said about an item.
pub(crate) fn outcome_of(result: Result<ItemResult, Failure>) -> Outcome {
    match result {
        Err(failure) => Outcome::Failed { stage: failure.stage, reason: failure.reason },
        Ok(ItemResult { deviation: Some(deviation), .. }) if deviation.wrong.is_some() => Outcome::Wrong {
            error_to_peak: deviation.error_to_peak,
            tolerance: deviation.tolerance,
            reason: deviation.wrong.unwrap_or_default(),
        },
        Ok(result) => Outcome::Ok {
            timing: result.timing,
            error_to_peak: result.deviation.map(|deviation| deviation.error_to_peak),
            nodes: Vec::new(),
        },
    }
}

/// What the comparison of a set of operators on a unit may forgive; `None` when it holds something random.
pub(crate) fn leniency_for(graph: &OperatorGraph, set: &BTreeSet<OperatorId>, unit: &Unit) -> Option<Leniency> {
    let kinds: Vec<&str> = set.iter().map(|&id| graph.operator(id).kind.as_str()).collect();
    if kinds.iter().any(|kind| is_random(kind)) {
        return None;
    }
    let half = set.iter().any(|&id| {
        let operator = graph.operator(id);
        operator.inputs.iter().chain(&operator.outputs).any(|&t| graph.tensor(t).dtype == DataType::F16)
    });
    Some(Leniency::of_kinds(kinds, unit.address.precision).with_half(half))
}

/// Text that tells groupings of one model apart: records that name operators by number hold for one grouping only, and
/// groups read from a backend's profiling may differ from one run to the next.
pub(crate) fn grouping_key(graph: &OperatorGraph) -> String {
    let mut hash = Sha256::new();
    for operator in &graph.operators {
        hash.update((operator.nodes.len() as u64).to_le_bytes());
        operator.nodes.iter().for_each(|node| hash.update(node.to_le_bytes()));
    }
    hex(&hash.finalize()[..8])
}

/// Whether an operator kind holds a random node.
pub(crate) fn is_random(kind: &str) -> bool {
    kind.split('+').any(|node| RANDOM.contains(&node))
}
