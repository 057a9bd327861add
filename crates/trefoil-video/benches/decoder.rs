//! The decoder at its public size on random weights: `cargo bench -p trefoil-video --bench decoder`.
//!
//! Prints seconds of the first and of a later latent frame, operations a second, and memory predicted and held, at 240 × 416
//! pixels on one core and on two; with `TREFOIL_LONG_TESTS=1` at 480 × 832 too. The time of a frame does not depend on the
//! values, so random weights measure as trained ones do.

use std::io::Write as _;
use std::path::Path;
use std::time::Instant;
use trefoil_kernels::Kernels;
use trefoil_video::vae::{Latent, VaeConfig, VaeDecoder};
use trefoil_weights::memory::peak_resident_bytes;

/// A tensor to be written.
type Entry = (String, Vec<usize>);

/// Names and shapes of the decoder of `config`, in diffusers' names.
fn entries(config: &VaeConfig) -> Vec<Entry> {
    let mut entries = Vec::new();
    let mut conv = |stem: &str, shape: &[usize]| {
        entries.push((format!("{stem}.weight"), shape.to_vec()));
        entries.push((format!("{stem}.bias"), vec![shape[0]]));
    };
    let middle = config.base_dim * config.dim_mult[config.dim_mult.len() - 1];
    conv("post_quant_conv", &[config.z_dim, config.z_dim, 1, 1, 1]);
    conv("decoder.conv_in", &[middle, config.z_dim, 3, 3, 3]);
    conv("decoder.mid_block.attentions.0.to_qkv", &[3 * middle, middle, 1, 1]);
    conv("decoder.mid_block.attentions.0.proj", &[middle, middle, 1, 1]);
    let mut residuals: Vec<(String, usize, usize)> =
        (0..2).map(|block| (format!("decoder.mid_block.resnets.{block}"), middle, middle)).collect();
    let levels = config.dim_mult.len();
    let mut inputs = middle;
    for level in 0..levels {
        let channels = config.base_dim * config.dim_mult[levels - 1 - level];
        for block in 0..=config.num_res_blocks {
            let inputs = if block == 0 { inputs } else { channels };
            residuals.push((format!("decoder.up_blocks.{level}.resnets.{block}"), inputs, channels));
        }
        let stem = format!("decoder.up_blocks.{level}.upsamplers.0");
        if level + 1 < levels {
            conv(&format!("{stem}.resample.1"), &[channels / 2, channels, 3, 3]);
            if config.temporal_downsample[levels - 2 - level] {
                conv(&format!("{stem}.time_conv"), &[2 * channels, channels, 3, 1, 1]);
            }
        }
        inputs = channels / 2;
    }
    conv("decoder.conv_out", &[3, config.base_dim, 3, 3, 3]);
    for (stem, inputs, outputs) in &residuals {
        conv(&format!("{stem}.conv1"), &[*outputs, *inputs, 3, 3, 3]);
        conv(&format!("{stem}.conv2"), &[*outputs, *outputs, 3, 3, 3]);
        if inputs != outputs {
            conv(&format!("{stem}.conv_shortcut"), &[*outputs, *inputs, 1, 1, 1]);
        }
    }
    for (stem, inputs, outputs) in &residuals {
        entries.push((format!("{stem}.norm1.gamma"), vec![*inputs]));
        entries.push((format!("{stem}.norm2.gamma"), vec![*outputs]));
    }
    entries.push(("decoder.mid_block.attentions.0.norm.gamma".to_string(), vec![middle]));
    entries.push(("decoder.norm_out.gamma".to_string(), vec![config.base_dim]));
    entries
}

/// Writes random bf16 weights whose layers keep the size of their input.
fn write_checkpoint(path: &Path, config: &VaeConfig) -> std::io::Result<usize> {
    let entries = entries(config);
    let mut header = serde_json::Map::new();
    let mut end = 0;
    for (name, shape) in &entries {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        let entry = serde_json::json!({ "dtype": "BF16", "shape": shape, "data_offsets": [start, end] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header)?;
    let mut out = std::io::BufWriter::new(std::fs::File::create(path)?);
    out.write_all(&(header.len() as u64).to_le_bytes())?;
    out.write_all(&header)?;
    let mut state = 1u32;
    for (name, shape) in &entries {
        let fan: usize = shape[1..].iter().product();
        for _ in 0..shape.iter().product::<usize>() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let uniform = (state >> 8) as f32 / 8_388_608.0 - 1.0;
            let value = if name.ends_with("gamma") { 1.0 } else { uniform * (3.0 / fan.max(1) as f32).sqrt() };
            out.write_all(&((value.to_bits() >> 16) as u16).to_le_bytes())?;
        }
    }
    out.flush()?;
    Ok(entries.len())
}

fn main() {
    // Cargo passes `--bench`; a listing or a test run of all benches should not take a minute.
    if std::env::args().any(|argument| argument == "--list" || argument == "--test") {
        return;
    }
    let scratch = tempfile::tempdir().expect("a temporary folder");
    let path = scratch.path().join("vae.safetensors");
    let config = VaeConfig::default();
    let tensors = write_checkpoint(&path, &config).expect("space for 150 MB");
    let start = Instant::now();
    let decoder = VaeDecoder::open(&path).expect("the checkpoint just written");
    println!("{tensors} tensors read and packed in {:.1} s", start.elapsed().as_secs_f64());
    let mut sizes = vec![(30, 52)];
    if std::env::var_os("TREFOIL_LONG_TESTS").is_some() {
        sizes.push((60, 104));
    }
    for (height, width) in sizes {
        for cores in [&[0usize][..], &[0, 1]] {
            let kernels = match Kernels::best(cores) {
                Ok(kernels) => kernels,
                Err(error) => {
                    eprintln!("skipped: cores {cores:?} ({error})");
                    continue;
                }
            };
            let values =
                (0..config.z_dim * 3 * height * width).map(|at| ((at * 37 % 101) as f32 - 50.0) / 40.0).collect();
            let latent = Latent::new(config.z_dim, 3, height, width, values).expect("extents fit");
            let memory = decoder.memory(height, width, cores.len()).expect("a legal size");
            let mut session = decoder.session(height, width).expect("a legal size");
            let mut times = Vec::new();
            for frame in 0..latent.frames() {
                let start = Instant::now();
                session.push(&kernels, &latent, frame).expect("the latent fits");
                times.push(start.elapsed().as_secs_f64());
            }
            let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
            println!(
                "{}×{} on {} core(s), {}: first latent frame {:.2} s, later {:.2} s and {:.2} s; memory predicted {:.0} MiB (weights {:.0}, history {:.0}, working {:.0}), peak of the process so far {:.0} MiB",
                height * config.spatial_scale(),
                width * config.spatial_scale(),
                cores.len(),
                kernels.isa(),
                times[0],
                times[1],
                times[2],
                mib(memory.total()),
                mib(memory.weights),
                mib(memory.history),
                mib(memory.working),
                peak_resident_bytes().map_or(f64::NAN, |bytes| mib(bytes as usize)),
            );
        }
    }
}
