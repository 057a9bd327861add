//! Engines in processes of their own: the same bits, one copy of the weights, and workers that are killed.

mod support;

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use support::{Random, SmallModel, bits, kernels};
use trefoil_video::engine::{EngineSpec, allowed_cores};
use trefoil_video::process::{Worker, WorkerCommand, WorkerEvent, WorkerSetup, denoise_in_workers};
use trefoil_video::sampler::Solver;
use trefoil_video::{
    Calibration, CalibrationClip, Clip, Event, Lane, Model, NumericPath, Sampler, Tensor, VideoError, denoise,
};

fn command() -> WorkerCommand {
    WorkerCommand { program: PathBuf::from(env!("CARGO_BIN_EXE_trefoil-video-worker")), arguments: Vec::new() }
}

/// An engine on the `number`-th core of this machine, or the first where there are fewer.
fn spec(number: usize) -> EngineSpec {
    let cores = allowed_cores();
    EngineSpec::cpu(&[*cores.get(number).unwrap_or(&cores[0])])
}

/// A model, a clip, and what denoising it in this process gives.
struct Case {
    small: SmallModel,
    artefact: PathBuf,
    model: Arc<Model>,
    calibration: Arc<Calibration>,
    negative: Option<Tensor>,
}

impl Case {
    fn new(sampler: Option<Sampler>) -> Case {
        let small = SmallModel::new();
        let artefact = small.packed();
        let mut model = Model::open(&artefact).unwrap();
        let negative = sampler.as_ref().map(|_| Random::new(9).tensor("negative", &[1, 20, 24], 1.0));
        if let Some(sampler) = sampler {
            model = model.with_sampler(sampler).unwrap();
        }
        let model = Arc::new(model);
        let clip = CalibrationClip { noise: &small.noise, text: &small.text, negative: negative.as_ref() };
        let calibration = Calibration::observe(&model, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap();
        Case { small, artefact, model, calibration: Arc::new(calibration), negative }
    }

    /// The latent after every step, in this process.
    fn here(&self, path: NumericPath) -> Vec<Vec<f32>> {
        let mut lanes = [Lane::cpu("cpu".to_string(), kernels(), &self.model, path, Some(&self.calibration)).unwrap()];
        let clip =
            Clip::new(lanes[0].host_mut(), &self.model, &self.small.noise, &self.small.text, self.negative.as_ref())
                .unwrap();
        let mut state = clip.start(&self.small.noise).unwrap();
        let mut latents = Vec::new();
        denoise(&mut lanes, &clip, &mut state, 0, &mut |event| {
            if let Event::Step { latent, .. } = event {
                latents.push(clip.unpatchify(latent));
            }
            Ok(())
        })
        .unwrap();
        latents
    }

    fn setup(&self) -> Arc<WorkerSetup> {
        let calibration = Some(Arc::clone(&self.calibration));
        let (noise, text) = (&self.small.noise, &self.small.text);
        Arc::new(WorkerSetup::new(&self.model, None, calibration, noise, text, self.negative.as_ref()).unwrap())
    }

    fn workers(setup: &Arc<WorkerSetup>, paths: &[NumericPath]) -> Vec<Worker> {
        paths
            .iter()
            .enumerate()
            .map(|(number, &path)| Worker::start(&command(), &spec(number), path, setup).unwrap())
            .collect()
    }
}

fn same(got: &[Vec<f32>], want: &[Vec<f32>], what: &str) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(bits(got) == bits(want), "{what}: the latent of step {step} differs");
    }
}

#[test]
fn workers_give_the_bits_of_one_process_for_every_cut() {
    let case = Case::new(None);
    let setup = case.setup();
    let blocks = setup.trajectory().blocks();
    for path in [NumericPath::W8a8, NumericPath::W8a16] {
        let want = case.here(path);
        let mut workers = Case::workers(&setup, &[path, path]);
        for cut in 0..=blocks {
            let (report, latents) = denoise_in_workers(&mut workers, &setup, cut, &mut |_| Ok(())).unwrap();
            same(&latents, &want, &format!("{path} cut {cut}"));
            let crossed = usize::from(cut > 0 && cut < blocks);
            assert_eq!((report.handoffs.len(), report.lanes.len()), (crossed, 1 + crossed));
        }
        // Both map the artefact itself, region by region: the kernel keeps one copy of a file's pages.
        let about = std::fs::metadata(&case.artefact).unwrap();
        for worker in &workers {
            match trefoil_weights::memory::mapping_usage(worker.pid(), about.dev(), about.ino()) {
                Some(usage) => assert!(usage.mappings > case.model.config().layers, "{usage:?}"),
                None => eprintln!("skipped: smaps of process {} cannot be read", worker.pid()),
            }
        }
    }
}

#[test]
fn the_unquantised_path_runs_in_workers_too() {
    let case = Case::new(None);
    let setup = case.setup();
    let reference = Arc::new(trefoil_video::open_reference(&case.model, None).unwrap());
    let other = Case { model: reference, ..Case::new(None) };
    let want = other.here(NumericPath::F32);
    let mut workers = Case::workers(&setup, &[NumericPath::F32]);
    let (_, latents) = denoise_in_workers(&mut workers, &setup, 0, &mut |_| Ok(())).unwrap();
    same(&latents, &want, "f32");
}

#[test]
fn guidance_and_a_history_cross_between_workers() {
    let mut sampler = Sampler::shifted(Solver::UniPc, 3, 3.0, 4.0).unwrap();
    sampler.experts = vec![0, 1, 1];
    let case = Case::new(Some(sampler));
    let setup = case.setup();
    let want = case.here(NumericPath::W8a8);
    let mut workers = Case::workers(&setup, &[NumericPath::W8a8; 2]);
    for cut in [1, 4, 6, 10, 14, 18] {
        let (_, latents) = denoise_in_workers(&mut workers, &setup, cut, &mut |_| Ok(())).unwrap();
        same(&latents, &want, &format!("cut {cut}"));
    }
}

#[test]
fn a_killed_worker_is_started_again_and_nothing_changes() {
    let case = Case::new(None);
    let setup = case.setup();
    let want = case.here(NumericPath::W8a8);
    let mut workers = Case::workers(&setup, &[NumericPath::W8a8; 2]);
    // Every place of the trajectory, in either worker.
    for victim in [1, 2, 4, 5, 6, 8, 11, 12] {
        let mut killed = false;
        let mut died = 0;
        let (_, latents) = denoise_in_workers(&mut workers, &setup, 5, &mut |event| {
            match event {
                WorkerEvent::Blocks { done, pid, .. } if *done == victim && !killed => {
                    killed = true;
                    let pid = rustix::process::Pid::from_raw(*pid as i32).unwrap();
                    rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
                }
                WorkerEvent::Died { .. } => died += 1,
                _ => {}
            }
            Ok(())
        })
        .unwrap();
        same(&latents, &want, &format!("killed at {victim}"));
        // At its last block a worker may have answered before it died; then it is found dead in the next round.
        assert!(killed && died <= 2, "killed at {victim}: died {died} times");
    }
    let restarts: u32 = workers.iter().map(Worker::restarts).sum();
    assert!(restarts >= 6, "{restarts}");
}

#[test]
fn an_owner_can_stop_and_workers_say_what_is_wrong() {
    let case = Case::new(None);
    let setup = case.setup();
    let mut workers = Case::workers(&setup, &[NumericPath::W8a8]);
    let stopped = denoise_in_workers(&mut workers, &setup, 0, &mut |event| match event {
        WorkerEvent::Blocks { done: 3, .. } => Err(VideoError::Interrupted { done: 3, blocks: 12 }),
        _ => Ok(()),
    });
    assert_eq!(stopped.unwrap_err().to_string(), "interrupted after 3 of 12 block executions");
    let error =
        Worker::start(&command(), &EngineSpec::cpu(&[4000]), NumericPath::W8a8, &setup).unwrap_err().to_string();
    assert!(error.starts_with("engine `cpu@4000`: ") && !error.contains('\n'), "{error}");
    let nowhere = WorkerCommand { program: PathBuf::from("/nowhere/at/all"), arguments: Vec::new() };
    let error = Worker::start(&nowhere, &spec(0), NumericPath::W8a8, &setup).unwrap_err().to_string();
    assert!(error.contains("cannot start /nowhere/at/all"), "{error}");
    for (script, want) in [
        ("exit 0", "its process ended before it was ready (exit code 0)"),
        ("exit 3", "its process ended before it was ready (exit code 3)"),
        ("kill -SEGV $$", "its process ended before it was ready (killed by signal 11)"),
    ] {
        let error = Worker::start(&shell(script), &spec(0), NumericPath::W8a8, &setup).unwrap_err().to_string();
        assert!(error.contains(want) && !error.contains('\n'), "{script}: {error}");
    }
}

#[test]
fn a_worker_takes_orders_from_its_owner_alone() {
    use std::io::{Read as _, Write as _};
    use std::process::{Command, Stdio};
    let worker = |input: Stdio| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_trefoil-video-worker"));
        let child = command.stdin(input).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        move || {
            let output = child.wait_with_output().unwrap();
            (output.status.code(), String::from_utf8(output.stderr).unwrap())
        }
    };
    let started_by_hand = "error: a video worker is started by trefoil itself (its standard input is no socket)\n";
    assert_eq!(worker(Stdio::null())(), (Some(1), started_by_hand.to_owned()));
    // A socket that somebody else uses.
    let (mut ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let end = worker(Stdio::from(std::os::fd::OwnedFd::from(theirs)));
    ours.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // It may close its end before all of it is read.
    let _ = ours.read_to_end(&mut answer);
    let answer = String::from_utf8_lossy(&answer);
    let (code, told) = end();
    let said = format!("{answer}{told}");
    assert!(code == Some(1) && said.contains("somebody else than its owner speaks on its socket"), "{said}");
    // An owner that goes at once is no error.
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    drop(ours);
    assert_eq!(worker(Stdio::from(std::os::fd::OwnedFd::from(theirs)))(), (Some(0), String::new()));
}

/// A worker that is a line of shell.
fn shell(script: &str) -> WorkerCommand {
    WorkerCommand { program: PathBuf::from("/bin/sh"), arguments: vec!["-c".into(), script.into()] }
}

#[test]
fn a_worker_that_dies_whenever_it_is_set_up_ends_the_clip_and_says_why() {
    let case = Case::new(None);
    let setup = case.setup();
    let folder = tempfile::tempdir().unwrap();
    // It starts as ever until the mark is there, and ends at once from then on.
    let mark = folder.path().join("mark");
    let worker = env!("CARGO_BIN_EXE_trefoil-video-worker");
    let command = shell(&format!("[ -e '{}' ] && kill -KILL $$; exec '{worker}'", mark.display()));
    let mut workers = [Worker::start(&command, &spec(0), NumericPath::W8a8, &setup).unwrap()];
    let mut reasons = Vec::new();
    let error = denoise_in_workers(&mut workers, &setup, 0, &mut |event| {
        match event {
            WorkerEvent::Blocks { done: 3, pid, .. } => {
                std::fs::write(&mark, b"").unwrap();
                let pid = rustix::process::Pid::from_raw(*pid as i32).unwrap();
                rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
            }
            WorkerEvent::Died { reason, .. } => reasons.push(reason.clone()),
            _ => {}
        }
        Ok(())
    });
    let message = error.unwrap_err().to_string();
    assert!(message.contains("times in a row (killed by signal 9); the system's log says"), "{message}");
    assert!(message.starts_with("engine `cpu@") && !message.contains('\n'), "{message}");
    assert_eq!(reasons[0], "killed by signal 15");
    assert!(reasons.len() > 20 && reasons[1..].iter().all(|reason| reason == "killed by signal 9"), "{reasons:?}");
}
