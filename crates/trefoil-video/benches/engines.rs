//! A block at the true 1.3B shapes on random weights, on every engine: `cargo bench -p trefoil-video --bench engines`.
//!
//! Prints milliseconds of one block execution on `w8a8` (1,560 tokens, 512 text rows), without and with the rank-128 adapter, on one core
//! and on all. Engines take turns, round by round, on the same cores. Times do not depend on the values.

use std::sync::Arc;
use std::time::Instant;
use trefoil_core::Samples;
use trefoil_kernels::Kernels;
use trefoil_video::engine::{EngineSpec, allowed_cores};
use trefoil_video::rates::{random_inputs, shape_for_tokens};
use trefoil_video::sampler::Solver;
use trefoil_video::schedule::Piece;
use trefoil_video::synthetic::{wan_1_3b, write_checkpoint};
use trefoil_video::{
    Calibration, CalibrationClip, Clip, Lane, Model, NumericPath, Sampler, VideoError, VideoPackOptions, pack_video,
};

const TOKENS: usize = 1560;
const TEXT_ROWS: usize = 512;
const ROUNDS: usize = 7;

fn main() -> Result<(), VideoError> {
    let folder = tempfile::tempdir().map_err(|source| VideoError::Io {
        action: "create",
        path: std::env::temp_dir(),
        source,
    })?;
    let config = wan_1_3b(1);
    write_checkpoint(folder.path(), &config, 128, 1)?;
    let artefact = folder.path().join("random.trefoil");
    let mut sampler = Sampler::shifted(Solver::Euler, 2, 3.0, 1.0)?;
    sampler.experts = vec![0, 1];
    let options = VideoPackOptions { sampler: Some(sampler), ..VideoPackOptions::default() };
    pack_video(folder.path(), &artefact, &options, |_| {})?;
    let model = Arc::new(Model::open(&artefact)?);
    let (noise, text) = random_inputs(&config, shape_for_tokens(&config, TOKENS), TEXT_ROWS);
    let cores = allowed_cores();
    let all = Arc::new(Kernels::best(&cores)?);
    let clip = CalibrationClip { noise: &noise, text: &text, negative: None };
    let calibration = Arc::new(Calibration::observe(&model, &all, &[clip], &mut |_, _| Ok(()))?);
    let gflop = 2.0 * config.block_macs(TOKENS, TEXT_ROWS) as f64 / 1e9;
    println!("{TOKENS} tokens, {TEXT_ROWS} text rows, {gflop:.1} GFLOP a block without adapters");
    for cores in [&cores[..1], &cores[..]] {
        let mut engines: Vec<(String, Lane)> = Vec::new();
        for spec in [EngineSpec::cpu(cores), EngineSpec::opencl(cores)] {
            match Lane::open(&spec, &model, NumericPath::W8a8, Some(&calibration)) {
                Ok(lane) => {
                    for note in lane.engine().notes() {
                        println!("{note}");
                    }
                    engines.push((spec.to_string(), lane));
                }
                Err(error) => println!("skipped: {error}"),
            }
        }
        measure(&mut engines, &model, (&noise, &text), gflop)?;
    }
    if let [first, second, ..] = cores.as_slice() {
        let pair = [EngineSpec::cpu(&[*first]), EngineSpec::opencl(&[*second])];
        match Lane::hetero_tensor(&pair, 0.5, &model, Some(&calibration)) {
            Ok(lane) => {
                let name = format!("hetero-tensor {}", lane.engine().name());
                measure(&mut [(name, lane)], &model, (&noise, &text), gflop)?;
            }
            Err(error) => println!("skipped: {error}"),
        }
    }
    Ok(())
}

/// Runs the block on each engine in turn.
fn measure(
    engines: &mut [(String, Lane)],
    model: &Arc<Model>,
    (noise, text): (&trefoil_video::Tensor, &trefoil_video::Tensor),
    gflop: f64,
) -> Result<(), VideoError> {
    let Some((_, first)) = engines.first_mut() else { return Ok(()) };
    let clip = Clip::new(first.host_mut(), model, noise, text, None)?;
    let start = vec![0.1f32; clip.tokens() * clip.width()];
    for (step, expert) in ["base", "adapter"].into_iter().enumerate() {
        let mut times = vec![Vec::new(); engines.len()];
        for round in 0..=ROUNDS {
            for ((_, lane), times) in engines.iter_mut().zip(&mut times) {
                let (piece, mut hidden) = (Piece { step, branch: 0, blocks: 0..1 }, start.clone());
                let begun = Instant::now();
                lane.engine_mut().run_blocks(&clip, &piece, &mut hidden)?;
                // The first round compiles and grows scratch.
                if round > 0 {
                    times.push(begun.elapsed().as_secs_f64() * 1e3);
                }
            }
        }
        for ((name, lane), mut times) in engines.iter().zip(times) {
            if let Some(samples) = Samples::from_values(&mut times) {
                println!(
                    "{name:>34} {expert:>8}: {:7.1} ms ({:.1} to {:.1}, n {}), {:.0} GOPS, scratch {:.1} MiB",
                    samples.median,
                    samples.p10,
                    samples.p90,
                    samples.count,
                    gflop / samples.median * 1e3,
                    lane.scratch_bytes() as f64 / f64::from(1 << 20)
                );
            }
        }
    }
    Ok(())
}
