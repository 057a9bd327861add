//! What the integration tests share: small random checkpoints, reference files, error measures.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use trefoil_kernels::{Isa, Kernels, Pool};
use trefoil_video::tensors::write_tensors;
use trefoil_video::{DitConfig, Tensor, TensorPath, VideoPackOptions};

/// A small deterministic generator.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 32) as u32
    }

    /// Roughly normal with standard deviation 1: a sum of four uniforms.
    pub fn normal(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| (self.bits() >> 8) as f32 / 16_777_216.0 - 0.5).sum();
        sum * 1.732
    }

    pub fn tensor(&mut self, name: &str, shape: &[usize], deviation: f32) -> Tensor {
        let len = shape.iter().product();
        Tensor::new(name, shape, (0..len).map(|_| self.normal() * deviation).collect()).unwrap()
    }
}

/// Two heads, three blocks, four latent channels.
pub fn small_config() -> DitConfig {
    DitConfig { layers: 3, heads: 2, head_dim: 32, ffn: 96, channels: 4, text_dim: 24, frequency: 32, eps: 1e-6 }
}

/// `config.json` in diffusers' spelling.
pub fn config_json(config: &DitConfig, rank: usize) -> String {
    format!(
        r#"{{"_class_name":"WanTransformer3DModel","patch_size":[1,2,2],"num_attention_heads":{},"attention_head_dim":{},"in_channels":{},"out_channels":{},"text_dim":{},"freq_dim":{},"ffn_dim":{},"num_layers":{},"cross_attn_norm":true,"qk_norm":"rms_norm_across_heads","eps":1e-6,"lora_rank":{rank},"lora_alpha":{}}}"#,
        config.heads,
        config.head_dim,
        config.channels,
        config.channels,
        config.text_dim,
        config.frequency,
        config.ffn,
        config.layers,
        2 * rank
    )
}

/// Random tensors of a dual-expert (`rank` > 0) or plain checkpoint.
pub fn random_tensors(config: &DitConfig, rank: usize, seed: u64) -> Vec<(String, Tensor)> {
    let mut random = Random::new(seed);
    config
        .sizes(rank)
        .tensors()
        .into_iter()
        .map(|(name, shape)| {
            let shape: Vec<usize> = shape.iter().map(|&side| side as usize).collect();
            let inputs: usize = shape[1..].iter().product();
            let deviation = match () {
                () if name.contains("norm") && name.ends_with("weight") => 0.1,
                () if name.ends_with("bias") => 0.1,
                () if name.ends_with("table") => 0.2,
                () => 1.0 / (inputs as f32).sqrt(),
            };
            let mut tensor = random.tensor(&name, &shape, deviation);
            if name.contains("norm") && name.ends_with("weight") {
                tensor.values.iter_mut().for_each(|gain| *gain += 1.0);
            }
            (name, tensor)
        })
        .collect()
}

/// A sampler file with four steps that switches experts after the second.
pub const SAMPLER: &str = r#"{"sigmas":[1.0,0.9,0.7,0.4,0.0],"timesteps":[1000,900,700,400],"experts":["semantic","semantic","detail","detail"]}"#;

/// A pipeline folder with a random dual-expert model.
pub struct SmallModel {
    pub folder: tempfile::TempDir,
    pub config: DitConfig,
    pub noise: Tensor,
    pub text: Tensor,
}

impl SmallModel {
    pub fn new() -> SmallModel {
        let config = small_config();
        let folder = tempfile::tempdir().unwrap();
        let (transformer, scheduler) = (folder.path().join("transformer"), folder.path().join("scheduler"));
        std::fs::create_dir_all(&transformer).unwrap();
        std::fs::create_dir_all(&scheduler).unwrap();
        std::fs::write(transformer.join("config.json"), config_json(&config, 8)).unwrap();
        std::fs::write(scheduler.join("sampler.json"), SAMPLER).unwrap();
        let weights = transformer.join("diffusion_pytorch_model.safetensors");
        write_tensors(&weights, &random_tensors(&config, 8, 1)).unwrap();
        let mut random = Random::new(2);
        SmallModel {
            noise: random.tensor("noise", &[1, 4, 2, 6, 8], 1.0),
            text: random.tensor("text", &[1, 20, 24], 1.0),
            folder,
            config,
        }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Packs into `small.trefoil` beside it.
    pub fn packed(&self) -> PathBuf {
        let output = self.path().join("small.trefoil");
        trefoil_video::pack_video(self.path(), &output, &VideoPackOptions::default(), |_| {}).unwrap();
        output
    }
}

/// Kernels in the calling thread.
pub fn kernels() -> Arc<Kernels> {
    Arc::new(Kernels::new(Isa::best(), Pool::on_caller()).unwrap())
}

/// Kernels pinned to one core each; in the caller where this machine has fewer.
pub fn kernels_on(core: usize) -> Arc<Kernels> {
    match Pool::pinned(&[core]) {
        Ok(pool) => Arc::new(Kernels::new(Isa::best(), pool).unwrap()),
        Err(error) => {
            eprintln!("skipped: a core of its own ({error})");
            kernels()
        }
    }
}

/// A folder beside the repository, or `None` with a message.
pub fn shared(name: &str) -> Option<PathBuf> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(name);
    if !folder.is_dir() {
        eprintln!("skipped: {} is not there", folder.display());
        return None;
    }
    Some(folder)
}

pub fn read(file: &Path, key: &str) -> Tensor {
    TensorPath { file: file.to_path_buf(), key: key.to_string() }.read().unwrap()
}

/// Root mean square of the difference over that of the expected values, and the largest difference.
pub fn errors(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let (mut square, mut reference, mut largest) = (0f64, 0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        let difference = f64::from(got) - f64::from(want);
        square += difference * difference;
        reference += f64::from(want) * f64::from(want);
        largest = largest.max(difference.abs());
    }
    ((square / reference).sqrt(), largest)
}

/// Cosine of the angle between two vectors, and the peak signal-to-noise ratio in decibels (peak: the range of `want`).
pub fn cosine_and_psnr(got: &[f32], want: &[f32]) -> (f64, f64) {
    let (mut dot, mut a, mut b, mut square) = (0f64, 0f64, 0f64, 0f64);
    let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
    for (&got, &want) in got.iter().zip(want) {
        let (got, want) = (f64::from(got), f64::from(want));
        dot += got * want;
        a += got * got;
        b += want * want;
        square += (got - want) * (got - want);
        low = low.min(want);
        high = high.max(want);
    }
    (dot / (a * b).sqrt(), 10.0 * ((high - low).powi(2) / (square / want.len() as f64)).log10())
}

pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
