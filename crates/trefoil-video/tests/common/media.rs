//! What the tests of decoder, encoder and files share.
#![allow(dead_code, reason = "every test uses a part of it")]

use std::path::{Path, PathBuf};
use trefoil_kernels::Kernels;
use trefoil_weights::checkpoint::{Checkpoint, SourceType};

fn shared(folder: &str, probe: &str) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared").join(folder);
    if folder.join(probe).exists() {
        return Some(folder);
    }
    eprintln!("skipped: no {} beside the repository", folder.display());
    None
}

/// Tensors of the public implementations, or `None` with a message.
pub fn golden() -> Option<PathBuf> {
    shared("golden", "MANIFEST.json")
}

/// The small trained model, or `None` with a message.
pub fn demo_model() -> Option<PathBuf> {
    shared("demo-model", "model_index.json")
}

pub fn kernels() -> Kernels {
    Kernels::new(trefoil_kernels::Isa::best(), trefoil_kernels::Pool::on_caller()).unwrap()
}

/// Shape and values of a float tensor.
pub fn tensor(path: &Path, name: &str) -> (Vec<usize>, Vec<f32>) {
    let checkpoint = Checkpoint::open(path, &[]).unwrap();
    let tensor = checkpoint.tensor(name).unwrap_or_else(|| panic!("no {name} in {}", path.display()));
    let SourceType::Float(dtype) = &tensor.dtype else { panic!("{name} is {:?}", tensor.dtype) };
    let mut values = vec![0f32; tensor.elements() as usize];
    dtype.decode(checkpoint.window(tensor, 0, tensor.bytes).unwrap().bytes(), &mut values);
    (tensor.shape.iter().map(|&side| side as usize).collect(), values)
}

/// Values of an i32 tensor.
pub fn integers(path: &Path, name: &str) -> Vec<i32> {
    let bytes = raw(path, name);
    bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect()
}

/// Bytes of a tensor.
pub fn raw(path: &Path, name: &str) -> Vec<u8> {
    let checkpoint = Checkpoint::open(path, &[]).unwrap();
    let tensor = checkpoint.tensor(name).unwrap_or_else(|| panic!("no {name} in {}", path.display()));
    checkpoint.window(tensor, 0, tensor.bytes).unwrap().bytes().to_vec()
}

/// Root mean square of the difference over that of the expected values, and the largest difference.
pub fn errors(got: &[f32], want: &[f32]) -> (f64, f64) {
    assert_eq!(got.len(), want.len());
    let (mut square, mut reference, mut largest) = (0f64, 0f64, 0f64);
    for (&got, &want) in got.iter().zip(want) {
        let difference = f64::from(got) - f64::from(want);
        assert!(difference.is_finite(), "{got} {want}");
        square += difference * difference;
        reference += f64::from(want) * f64::from(want);
        largest = largest.max(difference.abs());
    }
    ((square / reference).sqrt(), largest)
}

/// Writes a safetensors file of f32 tensors.
pub fn write_safetensors(path: &Path, tensors: &[(String, Vec<usize>, Vec<f32>)]) {
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    for (name, shape, values) in tensors {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let start = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let entry = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    std::fs::write(path, file).unwrap();
}
