//! A lane's thread that panics ends what it was part of with an error; nobody waits for it.

mod support;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use support::{Random, SmallModel, kernels};
use trefoil_video::dit::Host;
use trefoil_video::engine::Engine;
use trefoil_video::rates::{RateOptions, measure};
use trefoil_video::schedule::Piece;
use trefoil_video::stream::{LastStageOn, StreamItem, measure_last_stage, run_data_parallel_with, run_stream};
use trefoil_video::{Clip, Lane, Model, NumericPath, Tensor, VideoError};

/// Computes nothing, and panics at one of its calls.
struct Fragile {
    calls: AtomicUsize,
    panics_at: usize,
    /// Where the first call waits for the other engine's, so that both have a clip.
    meeting: Option<Arc<Barrier>>,
}

impl Engine for Fragile {
    fn name(&self) -> &'static str {
        "fragile"
    }

    fn path(&self) -> NumericPath {
        NumericPath::W8a16
    }

    fn cores(&self) -> &[usize] {
        &[]
    }

    fn run_blocks(&mut self, _: &Clip, _: &Piece, _: &mut [f32]) -> Result<(), VideoError> {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(meeting) = self.meeting.as_ref().filter(|_| call == 0) {
            meeting.wait();
        }
        assert!(call != self.panics_at, "call {call} fails as planned");
        Ok(())
    }

    fn scratch_bytes(&self) -> usize {
        0
    }
}

fn lane(model: &Arc<Model>, panics_at: usize) -> Lane {
    meeting_lane(model, panics_at, None)
}

fn meeting_lane(model: &Arc<Model>, panics_at: usize, meeting: Option<Arc<Barrier>>) -> Lane {
    let engine = Fragile { calls: AtomicUsize::new(0), panics_at, meeting };
    Lane::new(Box::new(engine), Host::new(kernels()), Arc::clone(model))
}

fn inputs(small: &SmallModel) -> (Tensor, Tensor) {
    let mut random = Random::new(3);
    (random.tensor("noise", &[4, 1, 4, 6], 1.0), random.tensor("text", &[10, small.config.text_dim], 1.0))
}

const SOLO: RateOptions = RateOptions { samples: 6, warm_up: 2 };
/// Calls of an engine that is timed alone.
const ALONE: usize = 8;

#[test]
fn rates_end_with_an_error_when_a_lane_panics() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let (noise, text) = inputs(&small);
    // The first lane, the second; at its first block beside the other, in the warm-up, among the samples.
    for which in [0, 1] {
        for call in [0, 1, 5] {
            let panics_at = |lane: usize| if lane == which { ALONE + call } else { usize::MAX };
            let mut lanes = [lane(&model, panics_at(0)), lane(&model, panics_at(1))];
            let clip = Clip::new(lanes[0].host_mut(), &model, &noise, &text, None).unwrap();
            let error = measure(&mut lanes, &clip, &noise, SOLO, &|| Ok(())).unwrap_err().to_string();
            let told = format!("a thread panicked (call {} fails as planned)", ALONE + call);
            assert!(error.contains(&told) && !error.contains('\n'), "{error}");
        }
    }
    let mut lanes = [lane(&model, usize::MAX), lane(&model, usize::MAX)];
    let clip = Clip::new(lanes[0].host_mut(), &model, &noise, &text, None).unwrap();
    assert_eq!(measure(&mut lanes, &clip, &noise, SOLO, &|| Ok(())).unwrap().len(), 2);
}

#[test]
fn the_last_stage_is_not_timed_beside_an_engine_that_panics() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let (noise, text) = inputs(&small);
    let mut beside = lane(&model, 1);
    let clip = Clip::new(beside.host_mut(), &model, &noise, &text, None).unwrap();
    let mut stage = || Ok(1.0);
    let error = measure_last_stage(&mut stage, Some((&mut beside, &clip, &noise)), &|| Ok(())).unwrap_err();
    assert!(error.to_string().contains("a thread panicked (call 1 fails as planned)"), "{error}");
    // The other way round the panic goes on in the caller, once the engine's thread has ended.
    let mut beside = lane(&model, usize::MAX);
    let mut calls = 0;
    let mut stage = || {
        calls += 1;
        assert!(calls <= 5, "the stage fails beside the engine");
        Ok(1.0)
    };
    let run = std::panic::AssertUnwindSafe(|| {
        measure_last_stage(&mut stage, Some((&mut beside, &clip, &noise)), &|| Ok(())).map(drop)
    });
    assert!(std::panic::catch_unwind(run).is_err());
}

#[test]
fn a_stream_ends_when_a_lane_or_its_last_stage_panics() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let (noise, text) = inputs(&small);
    let items = || (0..8).map(|number| StreamItem { number, noise: noise.clone(), text: text.clone(), negative: None });
    let lanes = |which: usize| [0, 1].map(|at| lane(&model, if at == which { 20 } else { usize::MAX }));
    let error = run_stream(&mut lanes(0), items(), &mut |_, _| 6, &mut |_, _, _| Ok(()), &|_, _| Ok(())).unwrap_err();
    assert!(error.to_string().contains("call 20 fails as planned"), "{error}");
    // The second lane is the caller's thread.
    let second = std::panic::AssertUnwindSafe(|| {
        run_stream(&mut lanes(1), items(), &mut |_, _| 6, &mut |_, _, _| Ok(()), &|_, _| Ok(())).map(drop)
    });
    assert!(std::panic::catch_unwind(second).is_err());
    for which in [0, 1] {
        for on in [LastStageOn::Each, LastStageOn::Last] {
            let meeting = Arc::new(Barrier::new(2));
            let mut lanes = [0, 1]
                .map(|at| meeting_lane(&model, if at == which { 5 } else { usize::MAX }, Some(Arc::clone(&meeting))));
            let ended = run_data_parallel_with(&mut lanes, items(), on, &|_| Ok(()), &|_, _| Ok(()));
            let error = ended.unwrap_err().to_string();
            assert!(error.contains("call 5 fails as planned"), "{error}");
        }
    }
}
