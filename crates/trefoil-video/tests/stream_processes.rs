//! Streams on engines in processes of their own: the clips of an undisturbed run, whoever kills the workers and whenever.

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use support::{Random, SmallModel, bits, kernels};
use trefoil_video::engine::{EngineSpec, allowed_cores};
use trefoil_video::process::{ProcessEngine, ProcessStatus, SharedModel, WorkerCommand};
use trefoil_video::sampler::Solver;
use trefoil_video::stream::{Denoised, StreamItem, StreamReport, run_stream_reporting};
use trefoil_video::{Calibration, CalibrationClip, Event, Lane, Model, NumericPath, Sampler, VideoError};

fn command() -> WorkerCommand {
    WorkerCommand { program: PathBuf::from(env!("CARGO_BIN_EXE_trefoil-video-worker")), arguments: Vec::new() }
}

/// An engine on the `number`-th core of this machine, or the first where there are fewer.
fn spec(number: usize) -> EngineSpec {
    let cores = allowed_cores();
    EngineSpec::cpu(&[*cores.get(number).unwrap_or(&cores[0])])
}

struct Case {
    artefact: PathBuf,
    model: Arc<Model>,
    shared: Arc<SharedModel>,
    calibration: Arc<Calibration>,
    items: Vec<StreamItem>,
    _small: SmallModel,
}

type Latents = BTreeMap<usize, Vec<u32>>;

impl Case {
    /// `clips` clips; with a sampler that has guidance, each with a text for the other branch.
    fn new(clips: usize, sampler: Option<Sampler>) -> Case {
        let small = SmallModel::new();
        let artefact = small.packed();
        let mut model = Model::open(&artefact).unwrap();
        if let Some(sampler) = sampler {
            model = model.with_sampler(sampler).unwrap();
        }
        let model = Arc::new(model);
        let mut random = Random::new(20);
        let items: Vec<StreamItem> = (0..clips)
            .map(|number| StreamItem {
                number,
                noise: random.tensor("noise", &[4, 1, 4, 6], 1.0),
                text: random.tensor("text", &[10, small.config.text_dim], 1.0),
                negative: (model.sampler().branches() > 1)
                    .then(|| random.tensor("negative", &[7, small.config.text_dim], 1.0)),
            })
            .collect();
        let first = &items[0];
        let clip = CalibrationClip { noise: &first.noise, text: &first.text, negative: first.negative.as_ref() };
        let calibration = Arc::new(Calibration::observe(&model, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap());
        let shared = Arc::new(SharedModel::new(&model, None, Some(Arc::clone(&calibration))).unwrap());
        Case { artefact, model, shared, calibration, items, _small: small }
    }

    fn lanes_here(&self, paths: &[NumericPath]) -> Vec<Lane> {
        let open = |(number, &path): (usize, &NumericPath)| {
            Lane::open(&spec(number), &self.model, path, Some(&self.calibration)).unwrap()
        };
        paths.iter().enumerate().map(open).collect()
    }

    fn lanes_in_processes(&self, paths: &[NumericPath]) -> (Vec<Lane>, Vec<Arc<ProcessStatus>>) {
        let start = |(number, &path): (usize, &NumericPath)| {
            ProcessEngine::lane(&command(), &spec(number), path, &self.shared, &self.model).unwrap()
        };
        paths.iter().enumerate().map(start).unzip()
    }

    /// All clips, cut at `cut`; `watch` sees every block.
    fn run(
        &self,
        lanes: &mut [Lane],
        cut: usize,
        watch: &(dyn Fn(usize, usize) + Sync),
    ) -> (StreamReport, Option<VideoError>, Latents) {
        let mut latents = Latents::new();
        let mut finish = |done: &Denoised<'_>| {
            let before = latents.insert(done.number, bits(&done.clip.unpatchify(done.state.latent())));
            assert!(before.is_none(), "clip {} twice", done.number);
            Ok(())
        };
        let watch = |number: usize, event: &Event<'_>| {
            if let Event::Blocks { done, .. } = event {
                watch(number, *done);
            }
            Ok(())
        };
        let items = self.items.iter().cloned();
        let (report, stopped) = run_stream_reporting(lanes, items, &mut |_, _| cut, &mut finish, &watch);
        (report, stopped, latents)
    }
}

fn kill(status: &ProcessStatus) -> bool {
    let Some(pid) = status.pid().and_then(|pid| rustix::process::Pid::from_raw(pid as i32)) else { return false };
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).is_ok()
}

#[test]
fn workers_make_the_clips_of_one_process_from_one_copy_of_the_weights() {
    let case = Case::new(3, None);
    let paths = [NumericPath::W8a8, NumericPath::W8a16];
    let (_, stopped, want) = case.run(&mut case.lanes_here(&paths), 7, &|_, _| {});
    assert!(stopped.is_none() && want.len() == 3);
    let (mut lanes, status) = case.lanes_in_processes(&paths);
    let (report, stopped, got) = case.run(&mut lanes, 7, &|_, _| {});
    assert!(stopped.is_none() && got == want);
    assert_eq!((report.clips.len(), report.handoffs, report.blocks), (3, 3, 12));
    assert!(status.iter().all(|status| status.deaths().is_empty()));
    // Both map the artefact itself, region by region: the kernel keeps one copy of a file's pages.
    let about = std::fs::metadata(&case.artefact).unwrap();
    for status in &status {
        match trefoil_weights::memory::mapping_usage(status.pid().unwrap(), about.dev(), about.ino()) {
            Some(usage) => {
                assert!(usage.mappings > case.model.config().layers, "{usage:?}");
                assert!(usage.proportional <= usage.resident, "{usage:?}");
            }
            None => eprintln!("skipped: smaps cannot be read"),
        }
    }
}

#[test]
fn guidance_and_a_history_run_in_streams_of_processes() {
    let mut sampler = Sampler::shifted(Solver::UniPc, 3, 3.0, 4.0).unwrap();
    sampler.experts = vec![0, 1, 1];
    let case = Case::new(2, Some(sampler));
    for (path, cut) in [(NumericPath::W8a8, 4), (NumericPath::W8a8, 11), (NumericPath::W8a16, 9)] {
        let (_, stopped, want) = case.run(&mut case.lanes_here(&[path]), 0, &|_, _| {});
        assert!(stopped.is_none());
        let (report, stopped, got) = case.run(&mut case.lanes_here(&[path; 2]), cut, &|_, _| {});
        assert!(stopped.is_none() && got == want && report.blocks == 18, "{path} cut {cut}");
        let (_, stopped, got) = case.run(&mut case.lanes_in_processes(&[path; 2]).0, cut, &|_, _| {});
        assert!(stopped.is_none() && got == want, "{path} cut {cut} in processes");
    }
}

#[test]
fn killed_workers_lose_no_clip_and_change_none() {
    let rounds = if std::env::var_os("TREFOIL_LONG_TESTS").is_some() { 20 } else { 4 };
    let case = Case::new(10, None);
    let paths = [NumericPath::W8a8; 2];
    let (_, _, want) = case.run(&mut case.lanes_here(&paths), 7, &|_, _| {});
    let (mut lanes, status) = case.lanes_in_processes(&paths);
    let mut random = 0x9e37_79b9_u32;
    let mut draw = move |below: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (random >> 8) % below
    };
    for round in 0..rounds {
        let before: usize = status.iter().map(|status| status.deaths().len()).sum();
        let killed = AtomicUsize::new(0);
        let is_over = AtomicBool::new(false);
        // Behind blocks that were drawn; in every other round at moments that were drawn, which may lie inside a block, a restart
        // or the passing of descriptors.
        let marks: Vec<(usize, usize, usize)> =
            (0..3).map(|_| (draw(10) as usize, 1 + draw(11) as usize, draw(2) as usize)).collect();
        let moments: Vec<(u32, usize)> = (0..3).map(|_| (draw(30_000), draw(2) as usize)).collect();
        let (stopped, got) = std::thread::scope(|scope| {
            if round % 2 == 1 {
                scope.spawn(|| {
                    for &(microseconds, victim) in &moments {
                        std::thread::sleep(Duration::from_micros(u64::from(microseconds)));
                        if !is_over.load(Ordering::Acquire) {
                            killed.fetch_add(usize::from(kill(&status[victim])), Ordering::AcqRel);
                        }
                    }
                });
            }
            let (_, stopped, got) = case.run(&mut lanes, 7, &|clip, done| {
                for &(_, _, victim) in marks.iter().filter(|mark| round % 2 == 0 && (mark.0, mark.1) == (clip, done)) {
                    killed.fetch_add(usize::from(kill(&status[victim])), Ordering::AcqRel);
                }
            });
            is_over.store(true, Ordering::Release);
            (stopped, got)
        });
        assert!(stopped.is_none(), "round {round}: {stopped:?}");
        assert!(got == want, "round {round}: all ten clips, with the same bits");
        let deaths: usize = status.iter().map(|status| status.deaths().len()).sum();
        assert!(round % 2 == 1 || deaths > before, "round {round}: somebody was killed");
        assert!(deaths - before <= killed.load(Ordering::Acquire) + 1, "round {round}: nobody died of itself");
    }
    let reasons: Vec<String> = status.iter().flat_map(|status| status.deaths()).map(|death| death.reason).collect();
    assert!(reasons.iter().any(|reason| reason == "killed by signal 9"), "{reasons:?}");
}

#[test]
fn a_worker_that_dies_again_and_again_is_an_error_and_finished_clips_stay() {
    let case = Case::new(4, None);
    let folder = tempfile::tempdir().unwrap();
    // A worker that starts as ever until the mark is there, and ends at once from then on.
    let mark = folder.path().join("mark");
    let script =
        format!("[ -e '{}' ] && exit 3; exec '{}'", mark.display(), env!("CARGO_BIN_EXE_trefoil-video-worker"));
    let command = WorkerCommand { program: PathBuf::from("/bin/sh"), arguments: vec!["-c".into(), script.into()] };
    let start = |number: usize| {
        ProcessEngine::lane(&command, &spec(number), NumericPath::W8a16, &case.shared, &case.model).unwrap()
    };
    let (mut lanes, status): (Vec<Lane>, Vec<Arc<ProcessStatus>>) = (0..2).map(start).unzip();
    let (_, stopped, latents) = case.run(&mut lanes, 7, &|clip, done| {
        if (clip, done) == (2, 1) {
            std::fs::write(&mark, b"").unwrap();
            assert!(kill(&status[0]));
        }
    });
    let message = stopped.expect("it cannot succeed").to_string();
    assert!(message.contains("its process died 5 times at block 1 of step 0 (exit code 3); "), "{message}");
    assert!(message.contains("engine `cpu@") && !message.contains('\n'), "{message}");
    let reasons: Vec<String> = status[0].deaths().into_iter().map(|death| death.reason).collect();
    assert_eq!((reasons.len(), reasons[0].as_str(), status[0].pid()), (5, "killed by signal 9", None));
    assert!(reasons[1..].iter().all(|reason| reason == "exit code 3"), "{reasons:?}");
    assert_eq!(latents.keys().copied().collect::<Vec<_>>(), [0, 1], "clips before it are finished");
}

#[test]
fn what_a_worker_refuses_is_told() {
    let case = Case::new(1, None);
    let start = |spec: &EngineSpec, command: &WorkerCommand| {
        ProcessEngine::start(command, spec, NumericPath::W8a8, &case.shared).unwrap_err().to_string()
    };
    let error = start(&EngineSpec::cpu(&[4000]), &command());
    assert!(error.starts_with("engine `cpu@4000`: ") && !error.contains('\n'), "{error}");
    let nowhere = WorkerCommand { program: PathBuf::from("/nowhere/at/all"), arguments: Vec::new() };
    assert!(start(&spec(0), &nowhere).contains("cannot start /nowhere/at/all"));
}
