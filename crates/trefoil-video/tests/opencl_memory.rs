//! The OpenCL engine keeps no copy of the weights. A process of its own, so that nothing else changes its memory.

#[path = "support/opencl.rs"]
mod devices;

use devices::{core, is_there, turn};
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use trefoil_kernels::opencl::{Device, Kernels};
use trefoil_kernels::{Isa, Pool};
use trefoil_video::dit::Host;
use trefoil_video::engine::OpenClEngine;
use trefoil_video::rates::random_inputs;
use trefoil_video::schedule::Piece;
use trefoil_video::synthetic::write_checkpoint;
use trefoil_video::{
    Calibration, CalibrationClip, Clip, DitConfig, Engine as _, Model, Sampler, VideoPackOptions, pack_video,
};
use trefoil_weights::memory::mapping_usage;

/// This process's own memory (`RssAnon`) in bytes: pages of files are not in it.
fn own_bytes() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    line.split_whitespace().next()?.parse::<usize>().ok().map(|kib| kib * 1024)
}

#[test]
fn weights_are_used_where_the_artefact_lies() {
    let _turn = turn();
    if !is_there() {
        return;
    }
    let config =
        DitConfig { layers: 6, heads: 6, head_dim: 64, ffn: 1536, channels: 4, text_dim: 32, frequency: 32, eps: 1e-6 };
    let folder = tempfile::tempdir().unwrap();
    write_checkpoint(folder.path(), &config, 8, 1).unwrap();
    let artefact = folder.path().join("a.trefoil");
    let options = VideoPackOptions { sampler: Some(Sampler::dcm()), ..VideoPackOptions::default() };
    pack_video(folder.path(), &artefact, &options, |_| {}).unwrap();
    let model = Arc::new(Model::open(&artefact).unwrap());
    let (noise, text) = random_inputs(&config, [4, 1, 8, 8], 8);
    let cpu = Arc::new(trefoil_kernels::Kernels::new(Isa::best(), Pool::on_caller()).unwrap());
    let clip = CalibrationClip { noise: &noise, text: &text, negative: None };
    let calibration = Arc::new(Calibration::observe(&model, &cpu, &[clip], &mut |_, _| Ok(())).unwrap());
    let mut host = Host::new(cpu);
    let clip = Clip::new(&mut host, &model, &noise, &text, None).unwrap();
    let weights: u64 =
        model.artefact().unwrap().section_bytes().filter(|(s, _)| s.block.is_some()).map(|(s, _)| s.bytes).sum();
    assert!(weights > 14_000_000, "{weights} bytes");
    for info in Device::list().unwrap().iter().filter(|info| info.unfit.is_none() && info.unified_memory) {
        let kernels = Kernels::best(&Device::open(info.index, None).unwrap(), None).unwrap();
        let mut engine = OpenClEngine::on(kernels, "x".to_string(), &model, Some(&calibration), vec![core(0)]).unwrap();
        assert_eq!(engine.weights().shared(), (0, 0));
        let mut hidden = vec![0.1f32; clip.tokens() * clip.width()];
        let piece = |step, blocks| Piece { step, branch: 0, blocks };
        // Both experts, so that everything is compiled and scratch has grown.
        engine.run_blocks(&clip, &piece(0, 0..1), &mut hidden).unwrap();
        engine.run_blocks(&clip, &piece(5, 0..1), &mut hidden).unwrap();
        let (before, scratch) = (own_bytes(), engine.scratch_bytes());
        engine.run_blocks(&clip, &piece(0, 0..6), &mut hidden).unwrap();
        engine.run_blocks(&clip, &piece(5, 0..6), &mut hidden).unwrap();
        assert_eq!(engine.scratch_bytes(), scratch);
        if let (Some(before), Some(after)) = (before, own_bytes()) {
            println!("{weights} bytes of weights, own memory {before} before the last five blocks, {after} after");
            // A converted copy of five blocks would be 12 MB.
            assert!(after < before + (2 << 20), "{before} bytes before, {after} after");
        }
        // Every region, and what else blocks need, in buffers over the mapping; the file is mapped once.
        let (pieces, bytes) = engine.weights().shared();
        assert!(pieces >= 6 + 4 && bytes as u64 >= weights, "{pieces} pieces, {bytes} bytes");
        let about = std::fs::metadata(&artefact).unwrap();
        match mapping_usage(std::process::id(), about.dev(), about.ino()) {
            Some(usage) => assert!(usage.mappings == 1 && usage.resident <= about.len() + 4096, "{usage:?}"),
            None => eprintln!("skipped: smaps cannot be read"),
        }
    }
}
