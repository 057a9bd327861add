//! `trefoil bench video`: the configurations table. Configurations take turns, round by round, over the same clips; rates, cuts, deadlines and
//! memory are measured in the same run.

mod configuration;
mod cuts;
mod last_stage;
mod measured;
mod memory;
mod report;

use super::blocks;
use super::lanes::{self, OpenLanes};
use super::memory as needs;
use crate::cli::{BenchVideoArgs, EngineArgs, RandomModel, SecondArgs};
use crate::context::ProgressLine;
use crate::error::CliError;
use configuration::{Bench, Configuration, Kind};
use last_stage::LastStage;
use measured::Measured;
use report::Outcome;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use trefoil_video::engine::{EngineKind, EngineList, Shape, allowed_cores, is_on_cores};
use trefoil_video::rates::{random_inputs, shape_for_tokens};
use trefoil_video::{EngineSpec, Model, NumericPath, Sampler, VideoPackOptions, pack_video};

/// Most clips and rounds.
const MOST: usize = 1000;

/// Runs the command.
pub fn run(args: &BenchVideoArgs) -> Result<(), CliError> {
    let begun = Instant::now();
    check(args)?;
    let engines = EngineArgs {
        engines: engines(args)?,
        path: args.path.clone(),
        checkpoint: None,
        second: SecondArgs { second: None, switch_timestep: None },
    };
    if lanes::engines_of(&engines, args.processes)?.len() != 2 {
        return Err(CliError::Usage(
            "the benchmark needs two engines, like --engines cpu@0,cpu@1 or cpu@0,opencl@1".to_owned(),
        ));
    }
    let space = tempfile::tempdir().map_err(|source| CliError::File {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let progress = ProgressLine::new("bench video", args.json);
    progress.step("the model");
    let (artefact, origin) = match &args.artefact {
        Some(artefact) => (artefact.clone(), "given"),
        None => (random_artefact(args, space.path())?, "random weights"),
    };
    let model = Model::open(&artefact)?;
    if model.sampler().branches() > 1 {
        return Err(CliError::Usage(
            "the benchmark takes no model with guidance; pack with a sampler of guidance 1".to_owned(),
        ));
    }
    needs::check_random(&engines, args.processes, (&model, &artefact), [args.tokens, args.text_rows])?;
    let config = model.config().clone();
    let count = blocks(&model);
    drop(model);
    let shape = shape_for_tokens(&config, args.tokens);
    let (noise, text) = random_inputs(&config, shape, args.text_rows);
    let last_stage = LastStage::of(args, space.path())?;
    let mut open = lanes::open_in(&artefact, &engines, (&noise, &text, None), args.processes)?;
    progress.step("rates");
    let measured = Measured::of(&mut open.lanes, &open.specs, &last_stage, (&noise, &text))?;
    // Every configuration opens its own.
    open.lanes.clear();
    open.processes.clear();
    let copy = space.path().join("copy.trefoil");
    std::fs::copy(&artefact, &copy).map_err(|source| CliError::File { action: "write", path: copy.clone(), source })?;
    let second = open.models.with_artefact(&copy)?;
    let bench = Bench {
        models: &open.models,
        second: &second,
        artefacts: [artefact.clone(), copy],
        last_stage: &last_stage,
        noise: &noise,
        text: &text,
        clips: args.clips,
        blocks: count,
    };
    let chosen = cuts::choose(&measured)?;
    let mut configurations = configurations(args, &open, &measured, &chosen)?;
    for round in 0..args.rounds {
        let step = |what: &str| progress.step(&format!("round {} of {}: {what}", round + 1, args.rounds));
        let again = if round == 0 {
            None
        } else {
            step("rates");
            let (mut lanes, _processes) = bench.open_pair(&open)?;
            Some(Measured::of(&mut lanes, &open.specs, &last_stage, (&noise, &text))?)
        };
        let measured = again.as_ref().unwrap_or(&measured);
        for configuration in &mut configurations {
            step(&configuration.name);
            configuration.predict(&bench, measured, &open.specs)?;
            configuration.round(&bench)?;
        }
    }
    drop(progress);
    let outcome = Outcome {
        args,
        configurations: &configurations,
        measured: &measured,
        chosen: &chosen,
        last_stage: &last_stage,
        specs: &open.specs,
        artefact: &artefact,
        model: origin,
        notes: &open.notes,
        seconds: begun.elapsed().as_secs_f64(),
    };
    outcome.tell()
}

/// What can be refused before anything is made.
fn check(args: &BenchVideoArgs) -> Result<(), CliError> {
    for (name, value) in [("--clips", args.clips), ("--rounds", args.rounds), ("--layers", args.layers)] {
        if value == 0 || value > MOST {
            return Err(CliError::Usage(format!("{name} {value}; it must lie in 1..={MOST}")));
        }
    }
    if args.clips < 2 {
        return Err(CliError::Usage("a stream needs at least 2 --clips".to_owned()));
    }
    match args.hetero_tensor_ms {
        Some(ms) if !(0.0..=1e7).contains(&ms) => {
            Err(CliError::Usage(format!("--hetero-tensor-ms {ms} is no time of a block")))
        }
        _ => Ok(()),
    }
}

/// The first two cores, unless told.
fn engines(args: &BenchVideoArgs) -> Result<EngineList, CliError> {
    if let Some(engines) = &args.engines {
        return Ok(engines.clone());
    }
    match allowed_cores().as_slice() {
        [first, second, ..] => Ok(EngineList([first, second].map(|&core| EngineSpec::cpu(&[core])).to_vec())),
        _ => Err(CliError::Usage("two engines need two cores; this process may use one".to_owned())),
    }
}

/// Packs a model with random weights: DCM's six steps, its detail expert from the fourth.
fn random_artefact(args: &BenchVideoArgs, folder: &Path) -> Result<PathBuf, CliError> {
    let (config, rank) = match args.model {
        RandomModel::Small => (trefoil_video::synthetic::small(args.layers), 16),
        RandomModel::Wan13b => (trefoil_video::synthetic::wan_1_3b(args.layers), 128),
    };
    trefoil_video::synthetic::write_checkpoint(folder, &config, rank, 1)?;
    let output = folder.join("random.trefoil");
    let options = VideoPackOptions { sampler: Some(Sampler::dcm()), ..VideoPackOptions::default() };
    pack_video(folder, &output, &options, |_| {})?;
    Ok(output)
}

/// Each engine alone, one engine on all their cores, data-parallel, hetero-tensor, and a pipeline for every cut that was chosen.
fn configurations(
    args: &BenchVideoArgs,
    open: &OpenLanes,
    measured: &Measured,
    chosen: &[cuts::Chosen],
) -> Result<Vec<Configuration>, CliError> {
    let (specs, paths) = (open.specs.as_slice(), open.paths.as_slice());
    let both: Vec<(EngineSpec, NumericPath)> = specs.iter().cloned().zip(paths.iter().copied()).collect();
    let mut all = Vec::new();
    for engine in &both {
        all.push(Configuration::new(format!("{} alone", engine.0), Kind::Single, vec![engine.clone()]));
    }
    for (spec, path) in on_all_cores(specs, paths)? {
        let name = format!("{spec} alone, {path}");
        all.push(Configuration::new(name, Kind::Single, vec![(spec, path)]));
    }
    all.push(Configuration::new("data-parallel".to_owned(), Kind::DataParallel, both.clone()));
    if let Some((cpu_share, shape)) = hetero_tensor(args, specs, paths, measured)? {
        let name = format!("hetero-tensor, {:.0}% of the columns on the CPU", cpu_share * 100.0);
        all.push(Configuration::new(name, Kind::HeteroTensor { cpu_share, shape }, both.clone()));
    }
    for choice in chosen {
        let cut = choice.expected.cut as usize;
        if let Some(same) = all.iter_mut().find(|configuration| configuration.kind == Kind::Pipeline(cut)) {
            same.chosen.push(choice.clone());
            continue;
        }
        let name = format!("pipeline, cut {cut}");
        let mut configuration = Configuration::new(name, Kind::Pipeline(cut), both.clone());
        configuration.chosen.push(choice.clone());
        all.push(configuration);
    }
    Ok(all)
}

/// The CPU's share of every layer's columns that lets both engines end together, where a CPU and an OpenCL engine run on `w8a8` (bits do
/// not depend on who computes a column there), and what a block is slowed to. Slowed engines make no block together unless it is said what
/// that takes.
fn hetero_tensor(
    args: &BenchVideoArgs,
    specs: &[EngineSpec],
    paths: &[NumericPath],
    measured: &Measured,
) -> Result<Option<(f64, Option<Shape>)>, CliError> {
    let shape = args.hetero_tensor_ms.map(|ms| Duration::from_secs_f64(ms / 1e3));
    let of = |kind| specs.iter().position(|spec| spec.kind == kind);
    let possible = of(EngineKind::Cpu).zip(of(EngineKind::OpenCl));
    let Some((cpu, opencl)) = possible.filter(|_| paths.iter().all(|path| *path == NumericPath::W8a8)) else {
        return match shape {
            None => Ok(None),
            Some(_) => Err(CliError::Usage(
                "--hetero-tensor-ms needs a cpu and an opencl engine on w8a8, which divide every layer".to_owned(),
            )),
        };
    };
    if shape.is_none() && specs.iter().any(|spec| spec.shape.is_some()) {
        return Ok(None);
    }
    let [cpu, opencl] = [cpu, opencl].map(|lane| measured.lanes[lane].engine.pipeline_ms());
    Ok(Some((opencl / (cpu + opencl), shape.map(|time| Shape { solo: time, corun: time }))))
}

/// Each different engine on the cores of both, where it computes on cores at all. A shaped one stands for hardware that has no more.
fn on_all_cores(specs: &[EngineSpec], paths: &[NumericPath]) -> Result<Vec<(EngineSpec, NumericPath)>, CliError> {
    let mut cores: Vec<usize> = specs.iter().flat_map(EngineSpec::resolved_cores).collect();
    cores.sort_unstable();
    let mut all: Vec<(EngineSpec, NumericPath)> = Vec::new();
    if specs.iter().any(|spec| spec.shape.is_some()) {
        return Ok(all);
    }
    for (spec, &path) in specs.iter().zip(paths) {
        let candidate = (spec.on(&cores), path);
        if is_on_cores(spec)? && !all.contains(&candidate) {
            all.push(candidate);
        }
    }
    Ok(all)
}
