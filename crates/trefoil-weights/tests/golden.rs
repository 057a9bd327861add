//! Codes, scales and tile bytes against the reference checkpoint, in all three layouts.

mod common;

use std::path::Path;
use trefoil_weights::checkpoint::Checkpoint;
use trefoil_weights::tile::detile;
use trefoil_weights::{Artefact, PackOptions, TensorClass, pack};

fn pack_golden(folder: &Path, name: &str, output: &Path) -> Artefact {
    let report = pack(&folder.join(name), output, &PackOptions::default(), |_| ()).unwrap();
    assert_eq!((report.rules.as_str(), report.regions), ("wan", 4));
    assert_eq!(report.unmatched, Vec::<String>::new());
    let artefact = Artefact::open(output).unwrap();
    artefact.verify().unwrap();
    artefact
}

#[test]
fn block_zero_is_bit_equal_to_the_reference() {
    let Some(folder) = common::golden() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let reference = Checkpoint::open(&folder.join("dit_a.int8.safetensors"), &[]).unwrap();
    let bytes_of = |name: String| {
        let tensor = reference.tensor(&name).unwrap_or_else(|| panic!("no {name}"));
        reference.window(tensor, 0, tensor.bytes).unwrap().bytes().to_vec()
    };
    for layout in ["dit_a.diffusers.safetensors", "dit_a.dcm.safetensors", "dit_a.wan_orig.safetensors"] {
        let artefact = pack_golden(&folder, layout, &scratch.path().join(layout));
        let mut compared = 0;
        for tensor in artefact.region(0).unwrap().tensors {
            let name = &tensor.spec.name;
            let matrix = artefact.matrix(name).unwrap();
            let as_bytes = |codes: &[i8]| codes.iter().map(|&code| code as u8).collect::<Vec<u8>>();
            assert_eq!(as_bytes(matrix.codes), bytes_of(format!("{name}.tiled")), "{layout} {name} tiled");
            // The reference's plain codes are [out, in]; ours are W = [in, out].
            let (rows, columns) = (matrix.shape.d_in, matrix.shape.d_out);
            let codes = detile(matrix.codes, matrix.shape);
            let transposed: Vec<i8> = (0..columns)
                .flat_map(|column| (0..rows).map(move |row| (row, column)))
                .map(|(row, column)| codes[row * columns + column])
                .collect();
            assert_eq!(as_bytes(&transposed), bytes_of(format!("{name}.q")), "{layout} {name} codes");
            let scales: Vec<u8> = matrix.scales.iter().flat_map(|scale| scale.to_le_bytes()).collect();
            assert_eq!(scales, bytes_of(format!("{name}.scale")), "{layout} {name} scales");
            compared += 1;
        }
        assert_eq!(compared, 10, "{layout}");
    }
}

#[test]
fn every_layout_gives_the_same_regions_and_only_dcm_has_an_adapter() {
    let Some(folder) = common::golden() else { return };
    let scratch = tempfile::tempdir().unwrap();
    let [dcm, diffusers, original] = ["dcm", "diffusers", "wan_orig"]
        .map(|layout| pack_golden(&folder, &format!("dit_a.{layout}.safetensors"), &scratch.path().join(layout)));
    for block in 0..4 {
        let region = dcm.region(block).unwrap();
        for other in [&diffusers, &original] {
            assert_eq!(region.bytes, other.region(block).unwrap().bytes);
            let names = |artefact: &Artefact| {
                artefact
                    .region(block)
                    .unwrap()
                    .tensors
                    .iter()
                    .map(|tensor| tensor.spec.name.clone())
                    .collect::<Vec<_>>()
            };
            assert_eq!(names(&dcm), names(other));
        }
    }
    let names = |artefact: &Artefact| {
        let mut names: Vec<String> = artefact.tensors().iter().map(|tensor| tensor.spec.name.clone()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&diffusers), names(&original));
    // Values of unquantised tensors agree under their common names, which checks the norm swap.
    for tensor in diffusers.tensors() {
        assert_eq!(
            diffusers.tensor(&tensor.spec.name).unwrap().bytes,
            original.tensor(&tensor.spec.name).unwrap().bytes,
            "{}",
            tensor.spec.name
        );
    }
    let adapters = |artefact: &Artefact| {
        artefact.tensors().iter().filter(|tensor| tensor.spec.class == TensorClass::Adapter).count()
    };
    assert_eq!((adapters(&dcm), adapters(&diffusers)), (4 * 8 * 2 * 2, 0));
    assert_eq!(dcm.metadata()["adapter_scaling"], 2.0);
    assert_eq!(dcm.metadata()["config"]["ffn_dim"], 320);
    let factor = dcm.matrix("blocks.1.attn2.to_k.lora_A.weight").unwrap();
    assert_eq!((factor.shape.d_in, factor.shape.d_out), (128, 32));
    let record = dcm.tensor("blocks.1.attn2.to_k.lora_A.weight").unwrap().record;
    assert_eq!(record.spec.owner.as_deref(), Some("blocks.1.attn2.to_k.weight"));
    assert_eq!(record.spec.source.as_deref(), Some("blocks.1.attn2.to_k.lora_A.lora1.weight"));
}
