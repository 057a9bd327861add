//! Packs a random checkpoint of true DCM-Wan2.1-1.3B sizes and prints memory classes, speed and peak memory.
//!
//! ```text
//! cargo run --release -p trefoil-weights --example pack_dcm -- [bf16|f16|f32] [FOLDER]
//! ```
//!
//! The checkpoint (3.1 or 6.2 GB) and the artefact (1.7 GB) are written to FOLDER (default: the system's temporary folder)
//! and removed; without room for them nothing is written. The checkpoint is written in small pieces, so that what is measured is
//! the memory of packing.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::time::Instant;
use trefoil_weights::shapes::WanSizes;
use trefoil_weights::{Artefact, Info, PackOptions, TensorClass, memory, pack, render_info};

const MIB: f64 = 1_048_576.0;

/// An upper bound of the artefact.
const ARTEFACT_BYTES: u64 = 1_800_000_000;

type Failure = Box<dyn std::error::Error>;

fn main() -> std::process::ExitCode {
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let dtype = arguments.first().map_or("bf16", String::as_str);
    let folder = arguments.get(1).map_or_else(std::env::temp_dir, PathBuf::from);
    check_space(&folder, dtype)?;
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
    let info = artefact.info();
    println!("{}", render_info(&info, false));
    print_published(&info);
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

/// The paper's memory classes beside those of the artefact (HeteroVDiff 6.3).
fn print_published(info: &Info) {
    let memory = &info.memory;
    println!("memory class (MiB)                     published      packed");
    for (name, published, packed) in [
        ("attention base", 541.4, memory.attention_base_with_biases),
        ("feed-forward", 787.5, memory.ffn),
        ("scales", 2.6, memory.scales),
        ("rank-128 factors", 91.5, memory.factors),
        ("all four", 1423.0, memory.paper_total),
        ("a block with its factors", 47.3, info.largest_region_bytes + factors_of_a_block(info)),
    ] {
        println!("  {name:<36}{published:>9.1}{:>12.1}", packed as f64 / MIB);
    }
    println!();
}

/// INT8 factors of block 0; their scales, which belong to no block, are not in the paper's figure.
fn factors_of_a_block(info: &Info) -> u64 {
    let is_factor = |class, block| class == TensorClass::Adapter && block == Some(0);
    info.tensors
        .iter()
        .filter(|tensor| is_factor(tensor.spec.class, tensor.spec.block))
        .map(|tensor| tensor.bytes)
        .sum()
}

/// One line when the folder's file system cannot hold both files.
fn check_space(folder: &Path, dtype: &str) -> Result<(), Failure> {
    let elements: u64 = WanSizes::DCM_1_3B.tensors().iter().map(|(_, shape)| shape.iter().product::<u64>()).sum();
    let needed = elements * type_of(dtype)?.1 + ARTEFACT_BYTES;
    let room = rustix::fs::statvfs(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let free = room.f_bavail * room.f_frsize;
    if free < needed {
        return Err(format!(
            "{} has {:.1} GB free, a {dtype} checkpoint and its artefact need {:.1}: name another folder",
            folder.display(),
            free as f64 / 1e9,
            needed as f64 / 1e9
        )
        .into());
    }
    Ok(())
}

/// Name in safetensors, bytes of an element.
fn type_of(dtype: &str) -> Result<(&'static str, u64), Failure> {
    match dtype {
        "bf16" => Ok(("BF16", 2)),
        "f16" => Ok(("F16", 2)),
        "f32" => Ok(("F32", 4)),
        other => Err(format!("`{other}` is not bf16, f16 or f32").into()),
    }
}

/// A safetensors file of pseudo-random weights (uniform, about the spread of trained ones), tensor after tensor.
fn write_checkpoint(path: &Path, dtype: &str) -> Result<(), Failure> {
    let (name, size) = type_of(dtype)?;
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
