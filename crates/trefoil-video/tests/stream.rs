//! Streams: every clip is made once, with the bits it would have alone, in one stage or two.

mod support;

use std::sync::{Arc, Mutex};
use support::{Random, SmallModel, bits, kernels, kernels_on};
use trefoil_video::rates::{RateOptions, measure};
use trefoil_video::stream::{
    Denoised, LastStageOn, Observed, StreamItem, StreamReport, Work, measure_last_stage, run_data_parallel,
    run_data_parallel_with, run_stream, run_stream_reporting,
};
use trefoil_video::{Clip, Lane, Model, NumericPath, VideoError, denoise};

fn items(small: &SmallModel, count: usize) -> Vec<StreamItem> {
    let mut random = Random::new(20);
    (0..count)
        .map(|number| StreamItem {
            number,
            noise: random.tensor("noise", &[4, 1, 4, 6], 1.0),
            text: random.tensor("text", &[10, small.config.text_dim], 1.0),
            negative: None,
        })
        .collect()
}

fn lane(model: &Arc<Model>, core: usize) -> Lane {
    Lane::cpu(format!("cpu@{core}"), kernels_on(core), model, NumericPath::W8a16, None).unwrap()
}

/// Each clip on its own.
fn alone(model: &Arc<Model>, items: &[StreamItem]) -> Vec<Vec<u32>> {
    let mut lanes = [Lane::cpu("cpu".to_string(), kernels(), model, NumericPath::W8a16, None).unwrap()];
    items
        .iter()
        .map(|item| {
            let clip = Clip::new(lanes[0].host_mut(), model, &item.noise, &item.text, None).unwrap();
            let mut state = clip.start(&item.noise).unwrap();
            denoise(&mut lanes, &clip, &mut state, 0, &mut |_| Ok(())).unwrap();
            bits(state.latent())
        })
        .collect()
}

#[test]
fn clips_of_a_stream_are_those_made_alone() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let items = items(&small, 5);
    let want = alone(&model, &items);
    let check = |report: &StreamReport, results: &Mutex<Vec<(usize, Vec<u32>)>>, lanes: usize| {
        let mut results = std::mem::take(&mut *results.lock().unwrap());
        results.sort();
        assert_eq!(results.len(), 5);
        for (number, latent) in results {
            assert!(latent == want[number], "clip {number} on {lanes} lanes");
        }
        assert!(report.period_ms.unwrap() > 0.0 && report.fill_ms.unwrap() > 0.0 && report.blocks == 12);
        assert_eq!(report.idle.as_ref().unwrap().len(), lanes);
        assert!(report.clips.iter().all(|clip| clip.latency_ms() > 0.0));
        assert_eq!(report.attainment(f64::MAX), Some(1.0));
    };
    let results = Mutex::new(Vec::new());
    for count in [1, 2] {
        let mut lanes: Vec<Lane> = (0..count).map(|core| lane(&model, core)).collect();
        // A cut that moves from clip to clip: inside a step, at its end, nothing or everything before it.
        let cuts = Mutex::new([5, 6, 0, 12, 7].into_iter());
        let mut seen = Vec::new();
        let mut cut = |observed: &Observed, blocks: usize| {
            assert_eq!(blocks, 12);
            seen.push(observed.first_ms.is_some());
            cuts.lock().unwrap().next().unwrap()
        };
        let mut finish = |number: usize, _: &Clip, state: &trefoil_video::ClipState| {
            results.lock().unwrap().push((number, bits(state.latent())));
            Ok(())
        };
        let report = run_stream(&mut lanes, items.iter().cloned(), &mut cut, &mut finish, &|_, _| Ok(())).unwrap();
        check(&report, &results, count);
        if count == 2 {
            let cuts: Vec<usize> = report.clips.iter().map(|clip| clip.cut).collect();
            assert_eq!((cuts, report.handoffs), (vec![5, 6, 0, 12, 7], 3));
            assert!(!seen[0] && seen[1..].iter().all(|seen| *seen), "rates are observed from the first clip on");
        }
    }
    let mut lanes = [lane(&model, 0), lane(&model, 1)];
    let finish = |number: usize, _: &Clip, state: &trefoil_video::ClipState| {
        results.lock().unwrap().push((number, bits(state.latent())));
        Ok(())
    };
    let report = run_data_parallel(&mut lanes, items.iter().cloned(), &finish, &|_, _| Ok(())).unwrap();
    check(&report, &results, 2);
    // The last stage on the second lane alone: clips of the first are ended there, between blocks or behind them.
    let ended = Mutex::new(Vec::new());
    let finish = |done: &Denoised<'_>| {
        ended.lock().unwrap().push(done.lane);
        results.lock().unwrap().push((done.number, bits(done.state.latent())));
        Ok(())
    };
    let items = || items.iter().cloned();
    let report = run_data_parallel_with(&mut lanes, items(), LastStageOn::Last, &finish, &|_, _| Ok(())).unwrap();
    check(&report, &results, 2);
    assert_eq!(*ended.lock().unwrap(), [1; 5]);
    let blocks = |lane: usize| -> usize {
        report.spans.iter().filter(|span| span.lane == lane && span.work == Work::Blocks).map(|span| span.blocks).sum()
    };
    assert_eq!(blocks(0) + blocks(1), 5 * 12);
    assert!(report.spans.iter().all(|span| span.lane == 1 || span.work == Work::Blocks));
    for lane in 0..2 {
        let mut spans: Vec<_> = report.spans.iter().filter(|span| span.lane == lane).collect();
        spans.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
        assert!(spans.windows(2).all(|pair| pair[0].end_ms <= pair[1].start_ms), "a lane does one thing at a time");
    }
    // What stops either lane stops both.
    for stage in ["blocks", "last"] {
        let finish = |_: &Denoised<'_>| match stage {
            "last" => Err(VideoError::Interrupted { done: 0, blocks: 0 }),
            _ => Ok(()),
        };
        let watch = |number: usize, _: &trefoil_video::Event<'_>| match (stage, number) {
            ("blocks", 1) => Err(VideoError::Interrupted { done: 0, blocks: 0 }),
            _ => Ok(()),
        };
        let stopped = run_data_parallel_with(&mut lanes, items(), LastStageOn::Last, &finish, &watch);
        assert!(matches!(stopped, Err(VideoError::Interrupted { .. })), "{stage}");
    }
}

#[test]
fn a_stream_that_stops_keeps_what_is_finished() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    for stage in ["first", "last"] {
        let mut finished = Vec::new();
        let mut finish = |number: usize, _: &Clip, _: &trefoil_video::ClipState| {
            if stage == "last" && number == 2 {
                return Err(VideoError::Interrupted { done: 0, blocks: 0 });
            }
            finished.push(number);
            Ok(())
        };
        let watch = |number: usize, event: &trefoil_video::Event<'_>| match event {
            trefoil_video::Event::Blocks { done: 3, .. } if stage == "first" && number == 3 => {
                Err(VideoError::Interrupted { done: 3, blocks: 12 })
            }
            _ => Ok(()),
        };
        let mut lanes = [lane(&model, 0), lane(&model, 1)];
        let stopped = run_stream(&mut lanes, items(&small, 6).into_iter(), &mut |_, _| 6, &mut finish, &watch);
        assert!(matches!(stopped, Err(VideoError::Interrupted { .. })));
        assert_eq!(finished, if stage == "first" { vec![0, 1, 2] } else { vec![0, 1] });
    }
}

#[test]
fn a_stream_that_stops_tells_what_it_did() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let mut lanes = [lane(&model, 0), lane(&model, 1)];
    let mut finish = |done: &trefoil_video::stream::Denoised<'_>| {
        assert_eq!((done.cut, done.lane), (5, 1));
        match done.number {
            2 => Err(VideoError::Interrupted { done: 12, blocks: 12 }),
            _ => Ok(()),
        }
    };
    let (report, stopped) =
        run_stream_reporting(&mut lanes, items(&small, 6).into_iter(), &mut |_, _| 5, &mut finish, &|_, _| Ok(()));
    assert!(matches!(stopped, Some(VideoError::Interrupted { .. })));
    assert_eq!(report.clips.iter().map(|clip| clip.item).collect::<Vec<_>>(), [0, 1]);
    assert!(report.period_ms.is_some() && report.handoffs == 2);
    let spans = |work: Work| report.spans.iter().filter(|span| span.lane == 1 && span.work == work).count();
    assert_eq!((spans(Work::Blocks), spans(Work::Last)), (3, 2), "the third clip never got to its end");
    assert!(report.observed().first_ms.is_some() && report.observed().last_stage_ms.is_some());
}

#[test]
fn the_last_stage_is_timed_alone_and_beside_blocks() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let item = items(&small, 1).remove(0);
    let mut lane = lane(&model, 0);
    let clip = Clip::new(lane.host_mut(), &model, &item.noise, &item.text, None).unwrap();
    let mut calls = 0;
    let mut stage = || {
        calls += 1;
        Ok(f64::from(calls))
    };
    let alone = measure_last_stage(&mut stage, None, &|| Ok(())).unwrap();
    assert_eq!((alone.corun_ms, alone.solo_ms.count, Some(alone.pipeline_ms())), (None, 5, Some(3.0)));
    let both = measure_last_stage(&mut stage, Some((&mut lane, &clip, &item.noise)), &|| Ok(())).unwrap();
    assert_eq!((both.solo_ms.median, both.pipeline_ms()), (8.0, 13.0));
    // An engine beside it that fails ends the measurement.
    let stop = || Err(VideoError::Interrupted { done: 0, blocks: 12 });
    assert!(measure_last_stage(&mut stage, Some((&mut lane, &clip, &item.noise)), &stop).is_err());
}

#[test]
fn rates_are_measured_alone_and_together_and_errors_end_them() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let item = items(&small, 1).remove(0);
    let mut lanes = [lane(&model, 0), lane(&model, 1)];
    let clip = Clip::new(lanes[0].host_mut(), &model, &item.noise, &item.text, None).unwrap();
    let options = RateOptions { samples: 5, warm_up: 1 };
    let rates = measure(&mut lanes, &clip, &item.noise, options, &|| Ok(())).unwrap();
    assert_eq!(rates.len(), 2);
    for rate in &rates {
        assert_eq!((rate.solo_ms.count, rate.path), (5, NumericPath::W8a16));
        assert!(rate.solo_ms.median > 0.0 && rate.corun_ms.as_ref().is_some_and(|corun| corun.count >= 1));
        assert!(rate.slowdown().unwrap() > 0.0 && rate.pipeline_ms() > 0.0);
    }
    let calls = std::sync::atomic::AtomicUsize::new(0);
    let stop = || match calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
        20.. => Err(VideoError::Interrupted { done: 0, blocks: 12 }),
        _ => Ok(()),
    };
    assert!(measure(&mut lanes, &clip, &item.noise, RateOptions { samples: 50, warm_up: 0 }, &stop).is_err());
}

/// A clip whose latent becomes NaN costs no other clip, on either lane and in both forms of the stream.
#[test]
fn a_clip_that_becomes_nan_is_left_out_and_told() {
    let small = SmallModel::new();
    let model = Arc::new(Model::open(&small.packed()).unwrap());
    let mut items = items(&small, 4);
    let want = alone(&model, &items);
    items[1].noise.values[3] = 3e38;
    for (count, cut) in [(1, 12), (2, 12), (2, 2), (2, 0)] {
        let mut lanes: Vec<Lane> = (0..count).map(|core| lane(&model, core)).collect();
        let mut made = Vec::new();
        let mut finish = |done: &Denoised<'_>| {
            made.push((done.number, bits(done.state.latent())));
            Ok(())
        };
        let (report, stopped) =
            run_stream_reporting(&mut lanes, items.iter().cloned(), &mut |_, _| cut, &mut finish, &|_, _| Ok(()));
        assert!(stopped.is_none(), "{stopped:?}");
        let others: Vec<(usize, Vec<u32>)> = [0, 2, 3].map(|number| (number, want[number].clone())).into();
        assert!(made == others, "{count} lanes, cut {cut}");
        assert_eq!(report.failed.len(), 1);
        assert!(report.failed[0].item == 1 && report.failed[0].reason.contains("the latent after step"));
        let error =
            run_stream(&mut lanes, items.iter().cloned(), &mut |_, _| cut, &mut |_, _, _| Ok(()), &|_, _| Ok(()));
        assert!(error.unwrap_err().to_string().starts_with("clip 2: "));
    }
}
