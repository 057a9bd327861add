//! Engines from the command line: models in the form that each path needs, activation scales, cuts from rates.

use super::keep_going;
use crate::cli::{CutArg, EngineArgs, SecondArgs};
use crate::error::CliError;
use std::path::Path;
use std::sync::Arc;
use trefoil_kernels::Kernels;
use trefoil_plan::stream::{VideoRates, one_cut};
use trefoil_video::engine::{EngineKind, is_on_cores};
use trefoil_video::process::{ProcessEngine, ProcessStatus, SharedModel, WorkerCommand};
use trefoil_video::rates::{EngineRate, RateOptions, measure};
use trefoil_video::sampler::experts_by_threshold;
use trefoil_video::{
    Calibration, CalibrationClip, Clip, EngineSpec, Lane, Model, NumericPath, Tensor, VideoError, open_reference,
};
use trefoil_weights::Artefact;

/// Opens an artefact and compares every checksum, so that damage is a message and not a wrong video.
fn open_verified(path: &Path) -> Result<Model, CliError> {
    let artefact = Artefact::open(path)?;
    artefact.verify()?;
    Ok(Model::from_artefact(artefact)?)
}

/// The model of a command: one artefact, or two joined; every checksum compared.
pub fn open_model(artefact: &Path, second: &SecondArgs) -> Result<Model, CliError> {
    let other = second.second.as_deref().map(open_verified).transpose()?;
    join(open_verified(artefact)?, other, second)
}

/// The unquantised weights of the same.
fn open_unquantised(artefact: &Path, second: &SecondArgs, checkpoint: Option<&Path>) -> Result<Model, CliError> {
    let reference = |path: &Path| -> Result<Model, CliError> { Ok(open_reference(&Model::open(path)?, checkpoint)?) };
    join(reference(artefact)?, second.second.as_deref().map(reference).transpose()?, second)
}

fn join(first: Model, second: Option<Model>, args: &SecondArgs) -> Result<Model, CliError> {
    let (Some(second), Some(switch)) = (second, args.switch_timestep) else { return Ok(first) };
    check_switch(args)?;
    let mut sampler = first.sampler().clone();
    let low_noise = first.record().experts.len();
    for (expert, is_low) in sampler.experts.iter_mut().zip(experts_by_threshold(&sampler.timesteps, switch)) {
        if is_low == 1 {
            *expert = low_noise;
        }
    }
    Ok(first.joined(second, sampler)?)
}

/// Refuses what is no timestep.
fn check_switch(args: &SecondArgs) -> Result<(), CliError> {
    match args.switch_timestep {
        Some(switch) if !switch.is_finite() => {
            Err(CliError::Usage(format!("--switch-timestep {switch} is no timestep")))
        }
        _ => Ok(()),
    }
}

/// Engines ready to run, and what a reader of the result should know.
pub struct OpenLanes {
    /// One or two.
    pub lanes: Vec<Lane>,
    /// Their specifications.
    pub specs: Vec<EngineSpec>,
    /// Their paths.
    pub paths: Vec<NumericPath>,
    /// Kept for further lanes.
    pub models: Models,
    /// Where engines are processes of their own: one for each lane.
    pub processes: Vec<Arc<ProcessStatus>>,
    /// What was done without being asked.
    pub notes: Vec<String>,
}

impl OpenLanes {
    /// The engines in the other order, each with its path.
    pub fn reverse(&mut self) {
        self.lanes.reverse();
        self.specs.reverse();
        self.paths.reverse();
        self.processes.reverse();
    }
}

/// The weights in every form that the paths need.
pub struct Models {
    packed: Arc<Model>,
    reference: Option<Arc<Model>>,
    calibration: Option<Arc<Calibration>>,
    /// Where engines are processes of their own: how one is started, and what it is given.
    workers: Option<(WorkerCommand, Arc<SharedModel>)>,
}

impl Models {
    /// The artefact's model.
    pub fn packed(&self) -> &Arc<Model> {
        &self.packed
    }

    /// Activation scales, where a path needs them.
    pub fn calibration(&self) -> Option<&Arc<Calibration>> {
        self.calibration.as_ref()
    }

    /// An engine on a path, in this process or in one of its own.
    pub fn lane(&self, spec: &EngineSpec, path: NumericPath) -> Result<Lane, VideoError> {
        Ok(self.start(spec, path)?.0)
    }

    /// As [`Models::lane`], with what others may know of its process where it has one.
    pub fn start(
        &self,
        spec: &EngineSpec,
        path: NumericPath,
    ) -> Result<(Lane, Option<Arc<ProcessStatus>>), VideoError> {
        match &self.workers {
            None => Ok((Lane::open(spec, self.of(path), path, self.calibration.as_ref())?, None)),
            Some((command, shared)) => {
                let (lane, status) = ProcessEngine::lane(command, spec, path, shared, self.of(path))?;
                Ok((lane, Some(status)))
            }
        }
    }

    /// The same with the weights of another artefact with the same contents: a copy that has its own pages.
    pub fn with_artefact(&self, artefact: &Path) -> Result<Models, CliError> {
        let packed = Arc::new(open_verified(artefact)?);
        let workers = match &self.workers {
            None => None,
            Some((command, _)) => {
                let shared = SharedModel::new(&packed, None, self.calibration.clone())?;
                Some((command.clone(), Arc::new(shared)))
            }
        };
        Ok(Models { packed, reference: self.reference.clone(), calibration: self.calibration.clone(), workers })
    }

    /// The weights that a path computes with.
    fn of(&self, path: NumericPath) -> &Arc<Model> {
        match (path, &self.reference) {
            (NumericPath::F32, Some(reference)) => reference,
            _ => &self.packed,
        }
    }

    /// The baseline that divides every block between two engines of different kinds; `cpu_share` of the columns are the CPU's.
    pub fn hetero_tensor(&self, specs: &[EngineSpec; 2], cpu_share: f64) -> Result<Lane, VideoError> {
        Lane::hetero_tensor(specs, cpu_share, &self.packed, self.calibration.as_ref())
    }
}

/// The engines that a command names, refused before anything is made where they cannot run: cores that are not there, paths that an engine
/// lacks, two that one process cannot have.
pub fn engines_of(args: &EngineArgs, in_processes: bool) -> Result<Vec<EngineSpec>, CliError> {
    check_switch(&args.second)?;
    let specs = args.engines.to_vec();
    let allowed = trefoil_units::allowed_cores();
    for spec in &specs {
        if let Some(core) = spec.cores.iter().find(|&&core| !allowed.contains(&(core as u32))) {
            let have = trefoil_units::cores_text(allowed);
            return Err(CliError::Usage(format!(
                "{spec}: core {core} is not among those that this process may use ({have})"
            )));
        }
    }
    let paths = resolve_paths(&specs, &args.path)?;
    for (spec, path) in specs.iter().zip(paths) {
        if spec.kind == EngineKind::OpenCl && path != NumericPath::W8a8 {
            let reason = format!("its kernels are those of w8a8, not of {path}; give it --path w8a8");
            return Err(VideoError::Engine { engine: spec.to_string(), reason }.into());
        }
    }
    if let ([one, other], false) = (specs.as_slice(), in_processes)
        && share_a_driver(one, other)?
    {
        return Err(CliError::Usage(format!(
            "{one} and {other}: the driver's threads belong to a process and have one set of cores; give each a process of its own (--processes)"
        )));
    }
    Ok(specs)
}

/// Whether one process cannot have both: a CPU device's threads belong to the process and are on one engine's cores.
pub fn share_a_driver(one: &EngineSpec, other: &EngineSpec) -> Result<bool, VideoError> {
    let are_devices = [one, other].iter().all(|engine| engine.kind == EngineKind::OpenCl);
    Ok(are_devices && one.resolved_cores() != other.resolved_cores() && is_on_cores(one)? && is_on_cores(other)?)
}

/// Refuses a cut outside the trajectory.
pub fn check_cut(cut: CutArg, model: &Model) -> Result<(), CliError> {
    let blocks = super::blocks(model);
    match cut {
        CutArg::At(cut) if cut > blocks => Err(VideoError::Cut { cut, blocks }.into()),
        _ => Ok(()),
    }
}

/// Opens the engines of `args` in this process; see [`open_in`].
pub fn open(
    artefact: &Path,
    args: &EngineArgs,
    clip: (&Tensor, &Tensor, Option<&Tensor>),
) -> Result<OpenLanes, CliError> {
    open_in(artefact, args, clip, false)
}

/// Opens the engines of `args`, in processes of their own where that is asked for; this process then opens none of them, as two engines may
/// be what one process cannot have (PoCL on different cores). Where `w8a8` is asked for and the artefact has no activation scales, they are found on the clip
/// itself and said so.
pub fn open_in(
    artefact: &Path,
    args: &EngineArgs,
    (noise, text, negative): (&Tensor, &Tensor, Option<&Tensor>),
    in_processes: bool,
) -> Result<OpenLanes, CliError> {
    let specs = engines_of(args, in_processes)?;
    let paths = resolve_paths(&specs, &args.path)?;
    let packed = Arc::new(open_model(artefact, &args.second)?);
    let mut notes = Vec::new();
    let reference = if paths.contains(&NumericPath::F32) {
        Some(Arc::new(open_unquantised(artefact, &args.second, args.checkpoint.as_deref())?))
    } else {
        None
    };
    let calibration = if paths.contains(&NumericPath::W8a8) {
        Some(Arc::new(stored_or_observed(&packed, &specs[0], (noise, text, negative), &mut notes)?))
    } else {
        None
    };
    let workers = if in_processes {
        let shared = SharedModel::new(&packed, args.checkpoint.clone(), calibration.as_ref().map(Arc::clone))?;
        Some((WorkerCommand::this_program(&["video-worker"])?, Arc::new(shared)))
    } else {
        None
    };
    let models = Models { packed, reference, calibration, workers };
    let mut open = OpenLanes { lanes: Vec::new(), specs, paths, models, processes: Vec::new(), notes };
    for (spec, &path) in open.specs.iter().zip(&open.paths) {
        let (lane, status) = open.models.start(spec, path)?;
        open.lanes.push(lane);
        open.processes.extend(status);
    }
    let told: Vec<String> = open.lanes.iter().flat_map(|lane| lane.engine().notes()).collect();
    open.notes.extend(told);
    Ok(open)
}

/// The path of each engine: as given, one for all or one each; without any the one that all of them have.
pub fn resolve_paths(specs: &[EngineSpec], given: &[NumericPath]) -> Result<Vec<NumericPath>, CliError> {
    match given {
        [] if specs.iter().any(|spec| spec.kind == EngineKind::OpenCl) => Ok(vec![NumericPath::W8a8; specs.len()]),
        [] => Ok(vec![NumericPath::W8a16; specs.len()]),
        [one] => Ok(vec![*one; specs.len()]),
        each if each.len() == specs.len() => Ok(each.to_vec()),
        each => Err(CliError::Usage(format!(
            "{} paths for {} engines; give one for all or one each",
            each.len(),
            specs.len()
        ))),
    }
}

/// The artefact's activation scales, or those of this clip, which is then said.
fn stored_or_observed(
    packed: &Arc<Model>,
    spec: &EngineSpec,
    (noise, text, negative): (&Tensor, &Tensor, Option<&Tensor>),
    notes: &mut Vec<String>,
) -> Result<Calibration, CliError> {
    if let Some(calibration) = Calibration::of(packed)? {
        calibration.check(packed)?;
        return Ok(calibration);
    }
    notes.push(
        "no activation scales are stored; w8a8 runs with scales found on this very clip (`trefoil video calibrate` stores some)"
            .to_owned(),
    );
    let kernels = Arc::new(Kernels::best(&spec.resolved_cores()).map_err(VideoError::from)?);
    let clip = CalibrationClip { noise, text, negative };
    Ok(Calibration::observe(packed, &kernels, &[clip], &mut keep_going)?)
}

/// The cut asked for, or the one that measured rates give. `decoder_ms` is the last stage on the second engine.
pub fn choose_cut(
    cut: CutArg,
    lanes: &mut [Lane],
    clip: &Clip,
    noise: &Tensor,
    decoder_ms: f64,
) -> Result<(usize, Option<Vec<EngineRate>>), CliError> {
    let blocks = clip.trajectory().blocks();
    match (cut, lanes.len()) {
        (CutArg::At(_), 1) => Err(CliError::Usage("--cut needs two engines, like --engines cpu@0,cpu@1".to_owned())),
        (CutArg::Auto, 1) => Ok((blocks, None)),
        (CutArg::At(cut), _) if cut > blocks => Err(VideoError::Cut { cut, blocks }.into()),
        (CutArg::At(cut), _) => Ok((cut, None)),
        (CutArg::Auto, _) => {
            let options = RateOptions { samples: 4, warm_up: 1 };
            let rates = measure(lanes, clip, noise, options, &|| keep_going(0, blocks))?;
            let cut = planned_cut(&rates, blocks, decoder_ms, EngineRate::pipeline_ms)?;
            Ok((cut.cut as usize, Some(rates)))
        }
    }
}

/// HeteroVDiff 4.3 with one of the rates that were measured.
pub fn planned_cut(
    rates: &[EngineRate],
    blocks: usize,
    decoder_ms: f64,
    of: fn(&EngineRate) -> f64,
) -> Result<trefoil_plan::stream::Cut, CliError> {
    let [first, second] = rates else {
        return Err(CliError::Usage("a cut needs two engines".to_owned()));
    };
    Ok(one_cut(VideoRates { first: of(first), second: of(second), decoder: decoder_ms }, blocks as u32)?)
}
