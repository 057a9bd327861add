//! The cut: anywhere in the trajectory, between two engines, and `w8a8` has the same bits.

mod support;

use std::sync::Arc;
use support::{SmallModel, bits, errors, kernels, kernels_on, read, shared};
use trefoil_kernels::{Isa, Kernels, Pool};
use trefoil_video::{
    Calibration, CalibrationClip, Clip, DenoiseReport, Lane, Model, NumericPath, Tensor, VideoError, VideoPackOptions,
    denoise, open_reference, pack_video,
};

struct Setup {
    model: Arc<Model>,
    calibration: Arc<Calibration>,
    noise: Tensor,
    text: Tensor,
}

impl Setup {
    fn small() -> (SmallModel, Setup) {
        let small = SmallModel::new();
        let model = Arc::new(Model::open(&small.packed()).unwrap());
        let (noise, text) = (small.noise.clone(), small.text.clone());
        let setup = Setup::of(model, noise, text);
        (small, setup)
    }

    fn of(model: Arc<Model>, noise: Tensor, text: Tensor) -> Setup {
        let clip = CalibrationClip { noise: &noise, text: &text, negative: None };
        let calibration = Calibration::observe(&model, &kernels(), &[clip], &mut |_, _| Ok(())).unwrap();
        Setup { model, calibration: Arc::new(calibration), noise, text }
    }

    fn lane(&self, kernels: &Arc<Kernels>, path: NumericPath) -> Lane {
        Lane::cpu("cpu".to_string(), Arc::clone(kernels), &self.model, path, Some(&self.calibration)).unwrap()
    }

    fn run(&self, lanes: &mut [Lane], cut: usize) -> (Vec<f32>, DenoiseReport) {
        let clip = Clip::new(lanes[0].host_mut(), &self.model, &self.noise, &self.text, None).unwrap();
        let mut state = clip.start(&self.noise).unwrap();
        let report = denoise(lanes, &clip, &mut state, cut, &mut |_| Ok(())).unwrap();
        (state.latent().to_vec(), report)
    }

    fn blocks(&self) -> usize {
        self.model.config().layers * self.model.sampler().steps()
    }
}

#[test]
fn w8a8_has_the_same_bits_for_every_cut() {
    let (_folder, setup) = Setup::small();
    let blocks = setup.blocks();
    assert_eq!(blocks, 12);
    let (want, alone) = setup.run(&mut [setup.lane(&kernels(), NumericPath::W8a8)], 0);
    assert!(alone.handoffs.is_empty() && want.iter().all(|value| value.is_finite()));
    let mut lanes = [0, 1].map(|core| setup.lane(&kernels_on(core), NumericPath::W8a8));
    let tokens = 2 * 3 * 4;
    for cut in 0..=blocks {
        let (latent, report) = setup.run(&mut lanes, cut);
        assert!(bits(&latent) == bits(&want), "cut {cut} changes bits");
        let counts: Vec<usize> = report.lanes.iter().map(|lane| lane.blocks).collect();
        if cut == 0 || cut == blocks {
            assert_eq!((counts, report.handoffs.len()), (vec![blocks], 0), "cut {cut}");
            continue;
        }
        assert_eq!((counts, report.handoffs.len()), (vec![cut, blocks - cut], 1), "cut {cut}");
        let handoff = report.handoffs[0];
        let hidden = if cut % 3 == 0 { 0 } else { tokens * 64 * 4 };
        assert_eq!(
            (handoff.at, handoff.hidden_bytes, handoff.latent_bytes, handoff.extra_bytes),
            (cut, hidden, tokens * 16 * 4, 0)
        );
    }
}

/// An engine keeps keys and values of the text from step to step; nothing of them may reach the next clip.
#[test]
fn a_lane_that_ran_another_text_gives_the_same_bits() {
    let (_folder, setup) = Setup::small();
    let mut text = setup.text.clone();
    text.values.reverse();
    let (model, calibration) = (Arc::clone(&setup.model), Arc::clone(&setup.calibration));
    let other = Setup { model, calibration, noise: setup.noise.clone(), text };
    let fresh = [&setup, &other].map(|setup| setup.run(&mut [setup.lane(&kernels(), NumericPath::W8a8)], 0).0);
    assert!(bits(&fresh[0]) != bits(&fresh[1]), "the text matters");
    let mut lanes = [setup.lane(&kernels(), NumericPath::W8a8)];
    for which in [0, 1, 0] {
        let (latent, _) = [&setup, &other][which].run(&mut lanes, 0);
        assert!(bits(&latent) == bits(&fresh[which]), "text {which} after another");
    }
}

#[test]
fn w8a8_has_the_same_bits_on_every_instruction_set_and_grouping() {
    let (_folder, setup) = Setup::small();
    let (want, _) = setup.run(&mut [setup.lane(&kernels(), NumericPath::W8a8)], 0);
    // The host computes in f32 with the best instruction set, so only the engine's own is varied.
    for isa in Isa::available() {
        let kernels_of = |isa| Arc::new(Kernels::new(isa, Pool::on_caller()).unwrap());
        let engine = trefoil_video::engine::CpuEngine::int8(
            isa.name().to_string(),
            Arc::clone(&setup.model),
            Arc::clone(&setup.calibration),
            kernels_of(isa),
        )
        .unwrap();
        let host = trefoil_video::dit::Host::new(kernels());
        let other = Lane::new(Box::new(engine), host, Arc::clone(&setup.model)).with_blocks_per_call(3);
        let mut lanes = [other, setup.lane(&kernels(), NumericPath::W8a8).with_blocks_per_call(2)];
        for cut in [0, 1, 5, 6, 11, 12] {
            let (latent, _) = setup.run(&mut lanes, cut);
            assert!(bits(&latent) == bits(&want), "{} with cut {cut} changes bits", isa.name());
        }
    }
}

#[test]
fn other_paths_and_mixtures_stay_within_tolerance_for_every_cut() {
    let (folder, setup) = Setup::small();
    let reference = Arc::new(open_reference(&setup.model, None).unwrap());
    let exact_lane = |kernels: &Arc<Kernels>| {
        Lane::cpu("cpu".to_string(), Arc::clone(kernels), &reference, NumericPath::F32, None).unwrap()
    };
    let (exact, _) = setup.run(&mut [exact_lane(&kernels())], 0);
    let (w8a16, _) = setup.run(&mut [setup.lane(&kernels(), NumericPath::W8a16)], 0);
    let (quantised, _) = errors(&w8a16, &exact);
    assert!(quantised < 3e-2, "w8a16 against f32: {quantised:e}");
    let (first, second) = (kernels_on(0), kernels_on(1));
    for cut in 0..=setup.blocks() {
        let (latent, _) = setup.run(&mut [exact_lane(&first), exact_lane(&second)], cut);
        assert!(errors(&latent, &exact).0 < 1e-6, "f32 cut {cut}");
        let mut lanes = [&first, &second].map(|kernels| setup.lane(kernels, NumericPath::W8a16));
        let (latent, _) = setup.run(&mut lanes, cut);
        assert!(errors(&latent, &w8a16).0 < 1e-5, "w8a16 cut {cut}");
        // The paper's pair: INT8 before the cut, FP16 operands behind it.
        let mut lanes = [setup.lane(&first, NumericPath::W8a8), setup.lane(&second, NumericPath::W8a16)];
        let (latent, report) = setup.run(&mut lanes, cut);
        assert!(errors(&latent, &exact).0 < 6e-2, "mixed cut {cut}: {:e}", errors(&latent, &exact).0);
        if cut > 0 {
            assert_eq!(report.lanes[0].path, NumericPath::W8a8);
        }
    }
    drop(folder);
}

#[test]
fn w8a8_has_the_same_bits_for_every_cut_of_the_reference_model() {
    let Some(golden) = shared("golden") else { return };
    let space = tempfile::tempdir().unwrap();
    let output = space.path().join("c.trefoil");
    pack_video(&golden.join("dit_c.dcm.safetensors"), &output, &VideoPackOptions::default(), |_| {}).unwrap();
    let model = Arc::new(Model::open(&output).unwrap());
    let io = golden.join("dit_c.io.safetensors");
    let setup = Setup::of(model, read(&io, "noise"), read(&io, "text_embeds"));
    let (want, _) = setup.run(&mut [setup.lane(&kernels(), NumericPath::W8a8)], 0);
    let mut lanes = [0, 1].map(|core| setup.lane(&kernels_on(core), NumericPath::W8a8));
    for cut in 0..=setup.blocks() {
        let (latent, _) = setup.run(&mut lanes, cut);
        assert!(bits(&latent) == bits(&want), "cut {cut} changes bits");
    }
}

#[test]
fn guidance_and_unipc_are_cut_anywhere_too() {
    let small = SmallModel::new();
    let packed = Model::open(&small.packed()).unwrap();
    let mut sampler = trefoil_video::Sampler::shifted(trefoil_video::sampler::Solver::UniPc, 3, 3.0, 4.0).unwrap();
    sampler.experts = vec![0, 1, 1];
    let model = Arc::new(packed.with_sampler(sampler).unwrap());
    let negative = support::Random::new(9).tensor("negative", &[1, 20, 24], 1.0);
    let run = |lanes: &mut [Lane], cut: usize| {
        let clip = Clip::new(lanes[0].host_mut(), &model, &small.noise, &small.text, Some(&negative)).unwrap();
        assert_eq!(clip.trajectory().blocks(), 3 * 2 * 3);
        let mut state = clip.start(&small.noise).unwrap();
        let report = denoise(lanes, &clip, &mut state, cut, &mut |_| Ok(())).unwrap();
        (state.latent().to_vec(), report)
    };
    let lane = || Lane::cpu("cpu".to_string(), kernels(), &model, NumericPath::W8a16, None).unwrap();
    let (want, _) = run(&mut [lane()], 0);
    for cut in 0..=18 {
        let (latent, report) = run(&mut [lane(), lane()], cut);
        assert!(bits(&latent) == bits(&want), "cut {cut}");
        if cut == 10 {
            assert!(report.handoffs[0].extra_bytes > 0);
        }
    }
    let mut lane = lane();
    let error = Clip::new(lane.host_mut(), &model, &small.noise, &small.text, None).unwrap_err().to_string();
    assert!(error.contains("guidance 4"), "{error}");
}

#[test]
fn cuts_and_states_that_do_not_fit_are_refused() {
    let (_folder, setup) = Setup::small();
    let mut lanes = [setup.lane(&kernels(), NumericPath::W8a8)];
    let clip = Clip::new(lanes[0].host_mut(), &setup.model, &setup.noise, &setup.text, None).unwrap();
    let mut state = clip.start(&setup.noise).unwrap();
    let error = denoise(&mut lanes, &clip, &mut state, 13, &mut |_| Ok(())).unwrap_err();
    assert_eq!(error.to_string(), "cut 13 does not lie in 0..=12: the trajectory has 12 block executions");
    assert!(trefoil_video::ClipState::resume(&clip, 2, &[0.0; 4], &[0.0; 4]).is_err());
    // A watcher stops a run between two blocks; the state says where.
    let stop = denoise(&mut lanes, &clip, &mut state, 0, &mut |event| match event {
        trefoil_video::Event::Blocks { done: 4, .. } => Err(VideoError::Interrupted { done: 4, blocks: 12 }),
        _ => Ok(()),
    });
    assert_eq!(stop.unwrap_err().to_string(), "interrupted after 4 of 12 block executions");
    assert_eq!(state.next(), 4);
    denoise(&mut lanes, &clip, &mut state, 0, &mut |_| Ok(())).unwrap();
    let (want, _) = setup.run(&mut lanes, 0);
    assert!(bits(state.latent()) == bits(&want), "an interrupted clip goes on to the same bits");
}
