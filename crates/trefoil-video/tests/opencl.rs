//! The OpenCL engine: the CPU's bits for every cut, order and process model, on the artefact as it lies.

#[path = "support/opencl.rs"]
mod devices;
mod support;

use devices::{core, cpu, is_there, opencl, turn};
use std::path::PathBuf;
use std::sync::Arc;
use support::{Random, SmallModel, bits, kernels};
use trefoil_kernels::opencl::{Device, DeviceKind, Kernels};
use trefoil_video::dit::Host;
use trefoil_video::engine::{EngineSpec, OpenClEngine};
use trefoil_video::process::{Worker, WorkerCommand, WorkerEvent, WorkerSetup, denoise_in_workers};
use trefoil_video::sampler::Solver;
use trefoil_video::{Calibration, CalibrationClip, Clip, Event, Lane, Model, NumericPath, Sampler, Tensor, denoise};

/// A model, a clip, and how to denoise it.
struct Case {
    small: SmallModel,
    model: Arc<Model>,
    calibration: Arc<Calibration>,
    negative: Option<Tensor>,
}

impl Case {
    fn new(sampler: Option<Sampler>) -> Case {
        let small = SmallModel::new();
        let mut model = Model::open(&small.packed()).unwrap();
        let negative = sampler.as_ref().map(|_| Random::new(9).tensor("negative", &[1, 20, 24], 1.0));
        if let Some(sampler) = sampler {
            model = model.with_sampler(sampler).unwrap();
        }
        let model = Arc::new(model);
        let clip = CalibrationClip { noise: &small.noise, text: &small.text, negative: negative.as_ref() };
        let calibration = Calibration::observe(&model, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap();
        Case { small, model, calibration: Arc::new(calibration), negative }
    }

    /// Two experts, guidance, and a solver with a history.
    fn guided() -> Case {
        let mut sampler = Sampler::shifted(Solver::UniPc, 3, 3.0, 4.0).unwrap();
        sampler.experts = vec![0, 1, 1];
        Case::new(Some(sampler))
    }

    fn lane(&self, spec: &EngineSpec) -> Lane {
        Lane::open(spec, &self.model, NumericPath::W8a8, Some(&self.calibration)).unwrap()
    }

    fn blocks(&self) -> usize {
        let sampler = self.model.sampler();
        self.model.config().layers * sampler.steps() * sampler.branches()
    }

    /// The latent after every step.
    fn run(&self, lanes: &mut [Lane], cut: usize) -> Vec<Vec<u32>> {
        let (noise, text) = (&self.small.noise, &self.small.text);
        let clip = Clip::new(lanes[0].host_mut(), &self.model, noise, text, self.negative.as_ref()).unwrap();
        let mut state = clip.start(noise).unwrap();
        let mut latents = Vec::new();
        denoise(lanes, &clip, &mut state, cut, &mut |event| {
            if let Event::Step { latent, .. } = event {
                latents.push(bits(&clip.unpatchify(latent)));
            }
            Ok(())
        })
        .unwrap();
        latents
    }

    /// The latents of the CPU engine.
    fn wanted(&self) -> Vec<Vec<u32>> {
        self.run(&mut [self.lane(&cpu(0))], 0)
    }
}

#[test]
fn every_cut_in_either_order_has_the_bits_of_the_cpu() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    for case in [Case::new(None), Case::guided()] {
        let want = case.wanted();
        let mut lanes = [case.lane(&cpu(0)), case.lane(&opencl(1))];
        for cut in 0..=case.blocks() {
            assert!(case.run(&mut lanes, cut) == want, "cpu then opencl, cut {cut}");
            lanes.reverse();
            assert!(case.run(&mut lanes, cut) == want, "opencl then cpu, cut {cut}");
            lanes.reverse();
        }
        assert_eq!(lanes[1].engine().path(), NumericPath::W8a8);
        assert_eq!(lanes[1].engine().cores(), [core(1)]);
        let notes = lanes[1].engine().notes();
        assert!(notes[0].contains("opencl@") && notes[0].contains("kernels"), "{notes:?}");
        assert!(lanes[1].scratch_bytes() > 0);
    }
}

#[test]
fn every_variant_and_grouping_has_the_bits_of_the_cpu() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let case = Case::new(None);
    let want = case.wanted();
    for info in Device::list().unwrap().iter().filter(|info| info.unfit.is_none()) {
        let device = Device::open(info.index, None).unwrap();
        for &variant in &info.variants {
            let on_device = Kernels::new(&device, variant, None).unwrap();
            let engine =
                OpenClEngine::on(on_device, "x".to_string(), &case.model, Some(&case.calibration), vec![core(0)])
                    .unwrap();
            assert_eq!(engine.variant(), variant);
            let lane = Lane::new(Box::new(engine), Host::new(kernels()), Arc::clone(&case.model));
            let mut lanes = [lane.with_blocks_per_call(3), case.lane(&cpu(0)).with_blocks_per_call(2)];
            for cut in [12, 7, 0] {
                assert!(case.run(&mut lanes, cut) == want, "{variant}, cut {cut}");
            }
        }
    }
}

#[test]
fn clips_of_other_sizes_and_texts_follow_each_other() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let mut case = Case::new(None);
    let mut lane = [case.lane(&opencl(0))];
    // Larger, smaller, the same size with another text, and the first again: nothing of a clip stays.
    let mut random = Random::new(5);
    for shape in [[1, 4, 2, 6, 8], [1, 4, 3, 8, 8], [1, 4, 1, 2, 4], [1, 4, 1, 2, 4], [1, 4, 2, 6, 8]] {
        case.small.noise = random.tensor("noise", &shape, 1.0);
        case.small.text = random.tensor("text", &[1, 20, 24], 1.0);
        assert!(case.run(&mut lane, 0) == case.wanted(), "{shape:?}");
    }
}

#[test]
fn a_block_divided_between_two_engines_has_the_bits_of_one() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    for case in [Case::new(None), Case::guided()] {
        let want = case.wanted();
        let specs = [opencl(1), cpu(0)];
        for share in [0.0, 0.3, 0.5, 0.9, 1.0] {
            let lane = Lane::hetero_tensor(&specs, share, &case.model, Some(&case.calibration)).unwrap();
            assert!(case.run(&mut [lane], 0) == want, "{share} of the columns on the CPU");
        }
        // As the second half of a pipeline it goes on from the CPU's state.
        let lane = Lane::hetero_tensor(&specs, 0.5, &case.model, Some(&case.calibration)).unwrap();
        assert!(case.run(&mut [case.lane(&cpu(0)), lane], 5) == want);
        let two = [cpu(0), cpu(1)];
        let error = Lane::hetero_tensor(&two, 0.5, &case.model, Some(&case.calibration)).err().unwrap().to_string();
        assert!(error.contains("a cpu and an opencl engine"), "{error}");
    }
}

fn command() -> WorkerCommand {
    WorkerCommand { program: PathBuf::from(env!("CARGO_BIN_EXE_trefoil-video-worker")), arguments: Vec::new() }
}

fn setup(case: &Case) -> Arc<WorkerSetup> {
    let calibration = Some(Arc::clone(&case.calibration));
    let (noise, text) = (&case.small.noise, &case.small.text);
    Arc::new(WorkerSetup::new(&case.model, None, calibration, noise, text, case.negative.as_ref()).unwrap())
}

fn workers(setup: &Arc<WorkerSetup>, specs: &[EngineSpec]) -> Vec<Worker> {
    specs.iter().map(|spec| Worker::start(&command(), spec, NumericPath::W8a8, setup).unwrap()).collect()
}

/// The latents of workers.
fn in_workers(workers: &mut [Worker], setup: &WorkerSetup, cut: usize) -> Vec<Vec<u32>> {
    let (_, latents) = denoise_in_workers(workers, setup, cut, &mut |_| Ok(())).unwrap();
    latents.iter().map(|latent| bits(latent)).collect()
}

#[test]
fn processes_have_the_same_bits_for_every_cut_and_pair() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let case = Case::new(None);
    let (want, setup) = (case.wanted(), setup(&case));
    for pair in [[cpu(0), opencl(1)], [opencl(0), cpu(1)], [opencl(0), opencl(1)]] {
        let mut workers = workers(&setup, &pair);
        for cut in 0..=case.blocks() {
            assert!(in_workers(&mut workers, &setup, cut) == want, "{} then {}, cut {cut}", pair[0], pair[1]);
        }
        for (worker, spec) in workers.iter().zip(&pair) {
            if let Some(bound) = driver_threads(worker.pid()) {
                assert!(bound.iter().all(|cores| *cores == spec.cores[0].to_string()), "{spec}: {bound:?}");
            }
        }
    }
    let case = Case::guided();
    let (want, setup) = (case.wanted(), self::setup(&case));
    let mut workers = workers(&setup, &[opencl(0), cpu(1)]);
    for cut in [1, 4, 10, 17] {
        assert!(in_workers(&mut workers, &setup, cut) == want, "guidance, cut {cut}");
    }
}

/// Cores that each of the OpenCL driver's threads in a process may use; `None` where the device is no CPU.
fn driver_threads(pid: u32) -> Option<Vec<String>> {
    let kind = Device::list().ok()?.first()?.kind;
    if kind != DeviceKind::Cpu || !cfg!(target_os = "linux") {
        return None;
    }
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().filter_map(Result::ok);
    let text = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    Some(
        tasks
            .filter(|task| text(task.path().join("comm")).trim() == "trefoil-opencl")
            .map(|task| {
                let status = text(task.path().join("status"));
                let line = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
                line.unwrap_or_default().trim().to_string()
            })
            .collect(),
    )
}

#[test]
fn a_killed_opencl_worker_is_started_again_and_nothing_changes() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let case = Case::new(None);
    let (want, setup) = (case.wanted(), setup(&case));
    let mut workers = workers(&setup, &[opencl(0), cpu(1)]);
    let mut killed = false;
    let (_, latents) = denoise_in_workers(&mut workers, &setup, 8, &mut |event| {
        if let WorkerEvent::Blocks { done: 4, pid, .. } = event
            && !killed
        {
            killed = true;
            let pid = rustix::process::Pid::from_raw(*pid as i32).unwrap();
            rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        }
        Ok(())
    })
    .unwrap();
    assert!(latents.iter().map(|latent| bits(latent)).eq(want));
    assert_eq!((killed, workers[0].restarts()), (true, 1));
}

#[test]
fn what_the_engine_cannot_do_is_one_line() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let case = Case::new(None);
    let fails = |spec: &str, path, calibration: Option<&Arc<Calibration>>, want: &str| {
        let opened = Lane::open(&spec.parse().unwrap(), &case.model, path, calibration);
        let error = opened.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains(want) && !error.contains('\n'), "{spec}: `{error}`, not `{want}`");
    };
    let calibration = Some(&case.calibration);
    fails(
        "opencl@0",
        NumericPath::W8a16,
        calibration,
        "engine `opencl@0`: its kernels are those of w8a8, not of w8a16",
    );
    fails("opencl@0", NumericPath::F32, calibration, "give it --path w8a8");
    fails("opencl@0", NumericPath::W8a8, None, "w8a8 needs activation scales");
    fails("opencl:99@0", NumericPath::W8a8, calibration, "there is no OpenCL device `99`; the devices are 0 (");
    fails("opencl:no such name@0", NumericPath::W8a8, calibration, "there is no OpenCL device `no such name`");
    fails("opencl@1000", NumericPath::W8a8, calibration, "1000");
    let held = case.lane(&opencl(0));
    if core(1) != core(0) {
        let spec = opencl(1).to_string();
        fails(&spec, NumericPath::W8a8, calibration, "give each a process of its own (--processes)");
    }
    drop(held);
    // A worker says the same, once.
    let spec: EngineSpec = "opencl:99@0".parse().unwrap();
    let error = Worker::start(&command(), &spec, NumericPath::W8a8, &setup(&case)).unwrap_err().to_string();
    assert!(error.starts_with("engine `opencl:99@0`: there is no OpenCL device"), "{error}");
}
