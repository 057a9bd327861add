//! Packs a random checkpoint of true DCM-Wan2.1-1.3B sizes and prints memory classes, speed and peak memory.
//!
//! ```text
//! cargo run --release -p trefoil-weights --example pack_dcm -- [bf16|f16|f32] [FOLDER]
//! ```
//!
//! The checkpoint (3.1 or 6.2 GB) and the artefact (1.7 GB) are written to FOLDER (default: the system's temporary folder)
//! and removed. The checkpoint is written in small pieces, so that what is measured is the memory of packing.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_weights::shapes::WanSizes;
use trefoil_weights::{Artefact, PackOptions, memory, pack, render_info};

const MIB: f64 = 1_048_576.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dtype = arguments.first().map_or("bf16", String::as_str);
    let folder = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    let folder = tempfile::tempdir_in(folder)?;
    let source = folder.path().join("diffusion_pytorch_model.safetensors");
    let start = Instant::now();
    write_checkpoint(&source, dtype)?;
    println!(
        "checkpoint: {dtype}, {} bytes, written in {:.1} s",
        source.metadata()?.len(),
        start.elapsed().as_secs_f64()
    );

    memory::reset_peak();
    let before = memory::peak_resident_bytes();
    let output = folder.path().join("dcm.trefoil");
    let report = pack(&source, &output, &PackOptions::default(), |_| ())?;
    let artefact = Artefact::open(&output)?;
    println!("{}", render_info(&artefact.info(), false));
    println!(
        "packed {:.1} M parameters in {:.2} s on {} threads: {:.0} MB/s of {dtype} source; {:.2} s of processor time, {:.0} MB/s of it",
        report.parameters as f64 / 1e6,
        report.elapsed_ms / 1e3,
        report.threads,
        report.source_mb_per_s,
        report.cpu_ms / 1e3,
        report.source_bytes as f64 / 1e3 / report.cpu_ms
    );
    let mib =
        |bytes: Option<u64>| bytes.map_or_else(|| "unknown".into(), |bytes| format!("{:.1} MiB", bytes as f64 / MIB));
    println!(
        "peak resident memory while packing {} (before: {}); the largest tensor has {:.1} MiB in the source",
        mib(report.peak_resident_bytes),
        mib(before),
        f64::from(6 * 1536 * 1536) * if dtype == "f32" { 4.0 } else { 2.0 } / MIB
    );
    let start = Instant::now();
    artefact.verify()?;
    let seconds = start.elapsed().as_secs_f64();
    println!(
        "verified {} bytes in {seconds:.2} s: {:.0} MB/s",
        report.file_bytes,
        report.file_bytes as f64 / 1e6 / seconds
    );
    Ok(())
}

/// A safetensors file of pseudo-random weights (uniform, about the spread of trained ones), tensor after tensor.
fn write_checkpoint(path: &Path, dtype: &str) -> Result<(), Box<dyn std::error::Error>> {
    let (name, size) = match dtype {
        "bf16" => ("BF16", 2),
        "f16" => ("F16", 2),
        "f32" => ("F32", 4),
        other => return Err(format!("`{other}` is not bf16, f16 or f32").into()),
    };
    let tensors = WanSizes::DCM_1_3B.tensors();
    let mut header = serde_json::Map::new();
    let mut end = 0u64;
    for (tensor, shape) in &tensors {
        let start = end;
        end += shape.iter().product::<u64>() * size;
        header
            .insert(tensor.clone(), serde_json::json!({ "dtype": name, "shape": shape, "data_offsets": [start, end] }));
    }
    let header = serde_json::to_vec(&header)?;
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    for _ in 0..end / size {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let value = ((state >> 40) as f32 / 16_777_216.0 - 0.5) * 0.1;
        match size {
            4 => file.write_all(&value.to_le_bytes())?,
            _ if name == "BF16" => file.write_all(&half::bf16::from_f32(value).to_le_bytes())?,
            _ => file.write_all(&half::f16::from_f32(value).to_le_bytes())?,
        }
    }
    file.flush()?;
    Ok(())
}
