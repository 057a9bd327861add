//! Packing small checkpoints end to end: contents against direct quantisation, layouts of files, and what is refused.

mod common;

use common::{Tensor, bf16_tensor, f16_tensor, f32_tensor, random, tiny_wan, values, write_safetensors};
use std::path::{Path, PathBuf};
use trefoil_weights::artefact::StoredType;
use trefoil_weights::{Artefact, PackOptions, PackReport, RuleSet, TensorClass, TensorSpec, WeightsError, pack};

fn pack_tensors(
    folder: &Path,
    tensors: &[Tensor],
    options: &PackOptions,
) -> Result<(Artefact, PackReport), WeightsError> {
    let source = folder.join("model.safetensors");
    write_safetensors(&source, tensors);
    let output = folder.join("model.trefoil");
    let report = pack(&source, &output, options, |_| ())?;
    let artefact = Artefact::open(&output)?;
    artefact.verify()?;
    Ok((artefact, report))
}

/// What equation 1 says about one element of a stored [out, in] tensor.
fn oracle(values: &[f32], inputs: usize, row: usize, column: usize) -> (i8, f32) {
    let weights = &values[column * inputs..(column + 1) * inputs];
    let scale = weights.iter().fold(0f32, |largest, value| largest.max(value.abs())) / 127.0;
    ((weights[row] / scale).round_ties_even().clamp(-127.0, 127.0) as i8, scale)
}

#[test]
fn every_element_of_a_padded_model_is_where_and_what_the_equations_say() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tiny_wan();
    let (artefact, report) = pack_tensors(folder.path(), &tensors, &PackOptions::default()).unwrap();
    assert_eq!(report.unmatched, Vec::<String>::new());
    assert_eq!(report.parameters, tensors.iter().map(|tensor| tensor.shape.iter().product::<u64>()).sum::<u64>());
    for tensor in &tensors {
        let stored = artefact.tensor(&tensor.name).unwrap();
        let want = values(&tensor.name, tensor.shape.iter().product::<u64>() as usize);
        let is_matrix = tensor.name.contains("blocks") && tensor.shape.len() == 2;
        if !is_matrix {
            let have = stored.f32_values().unwrap();
            assert_eq!(have[..want.len()], want, "{}", tensor.name);
            assert!(have[want.len()..].iter().all(|&value| value == 0.0));
            continue;
        }
        let (outputs, inputs) = (tensor.shape[0] as usize, tensor.shape[1] as usize);
        let matrix = artefact.matrix(&tensor.name).unwrap();
        assert_eq!((matrix.shape.d_in, matrix.shape.d_out), (inputs, outputs));
        assert_eq!(
            stored.record.spec.padded_shape,
            [inputs.next_multiple_of(32) as u64, outputs.next_multiple_of(32) as u64]
        );
        for column in 0..matrix.shape.padded_out() {
            for row in 0..matrix.shape.padded_in() {
                let code = matrix.codes[matrix.shape.offset(row, column)];
                if row < inputs && column < outputs {
                    let (want_code, want_scale) = oracle(&want, inputs, row, column);
                    assert_eq!(
                        (code, matrix.scales[column].to_bits()),
                        (want_code, want_scale.to_bits()),
                        "{} {row} {column}",
                        tensor.name
                    );
                } else {
                    assert_eq!(code, 0);
                }
            }
            assert!(column < outputs || matrix.scales[column].to_bits() == 1f32.to_bits());
        }
    }
    // A bias is padded to the columns of its matrix and knows it.
    let bias = artefact.tensor("blocks.0.attn1.to_q.bias").unwrap();
    assert_eq!(bias.record.spec.owner.as_deref(), Some("blocks.0.attn1.to_q.weight"));
    assert_eq!((bias.record.spec.shape[0], bias.record.spec.padded_shape[0]), (40, 64));
    assert!(report.padded.contains(&"blocks.0.attn1.to_q.weight".to_string()));
}

#[test]
fn threads_and_repetition_do_not_change_a_byte() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    // One matrix of several windows, so that windows and threads split it.
    let mut tensors = tiny_wan();
    tensors.push(random("blocks.0.attn1.to_q.extra.weight", &[8, 8]));
    tensors.push(random("blocks.5.ffn.net.0.proj.weight", &[1500, 2100]));
    write_safetensors(&source, &tensors);
    let bytes = |threads: usize| {
        let output = folder.path().join(format!("{threads}.trefoil"));
        pack(&source, &output, &PackOptions { threads, ..PackOptions::default() }, |_| ()).unwrap();
        std::fs::read(output).unwrap()
    };
    let one = bytes(1);
    assert_eq!(one, bytes(3));
    assert_eq!(one, bytes(1));
    let artefact = Artefact::open(folder.path().join("1.trefoil")).unwrap();
    let matrix = artefact.matrix("blocks.5.ffn.net.0.proj.weight").unwrap();
    let want = values("blocks.5.ffn.net.0.proj.weight", 1500 * 2100);
    for (row, column) in [(0, 0), (2099, 1499), (1049, 1023), (7, 992), (2099, 1024)] {
        let (code, scale) = oracle(&want, 2100, row, column);
        assert_eq!(
            (matrix.codes[matrix.shape.offset(row, column)], matrix.scales[column]),
            (code, scale),
            "{row} {column}"
        );
    }
}

#[test]
fn half_precision_checkpoints_are_widened_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let name = "blocks.0.attn1.to_q.weight";
    let exact: Vec<f32> = values(name, 64 * 33)
        .iter()
        .map(|&value| half::bf16::from_f32(half::f16::from_f32(value).to_f32()).to_f32())
        .collect();
    let mut regions = Vec::new();
    for tensor in
        [f32_tensor(name, &[64, 33], &exact), bf16_tensor(name, &[64, 33], &exact), f16_tensor(name, &[64, 33], &exact)]
    {
        let (artefact, _) = pack_tensors(folder.path(), &[tensor], &PackOptions::default()).unwrap();
        regions.push((
            artefact.region(0).unwrap().bytes.to_vec(),
            artefact.tensor("blocks.0.attn1.to_q.weight.scale").unwrap().bytes.to_vec(),
        ));
    }
    assert_eq!(regions[0], regions[1]);
    assert_eq!(regions[0], regions[2]);
}

fn index_of(entries: &[(&str, &str)]) -> String {
    let map: serde_json::Map<String, serde_json::Value> =
        entries.iter().map(|(tensor, file)| ((*tensor).to_string(), (*file).into())).collect();
    serde_json::json!({ "metadata": {}, "weight_map": map }).to_string()
}

#[test]
fn sharded_checkpoints_are_read_through_their_index() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = tiny_wan();
    let (whole, _) = pack_tensors(folder.path(), &tensors, &PackOptions::default()).unwrap();
    let shards = folder.path().join("pipeline/transformer");
    std::fs::create_dir_all(&shards).unwrap();
    let (mut first, mut second) = (Vec::new(), Vec::new());
    let mut entries = Vec::new();
    for (number, tensor) in tiny_wan().into_iter().enumerate() {
        let (file, list) = if number % 3 == 0 { ("a.safetensors", &mut first) } else { ("b.safetensors", &mut second) };
        entries.push((tensor.name.clone(), file));
        list.push(tensor);
    }
    write_safetensors(&shards.join("a.safetensors"), &first);
    write_safetensors(&shards.join("b.safetensors"), &second);
    let entries: Vec<(&str, &str)> = entries.iter().map(|(tensor, file)| (tensor.as_str(), *file)).collect();
    let index = shards.join("model.safetensors.index.json");
    std::fs::write(&index, index_of(&entries)).unwrap();
    for source in [folder.path().join("pipeline"), shards.clone(), index.clone()] {
        let output = folder.path().join("sharded.trefoil");
        pack(&source, &output, &PackOptions::default(), |_| ()).unwrap();
        let sharded = Artefact::open(&output).unwrap();
        for tensor in whole.tensors() {
            assert_eq!(
                sharded.tensor(&tensor.spec.name).unwrap().bytes,
                whole.tensor(&tensor.spec.name).unwrap().bytes
            );
        }
    }
    for (name, file, want) in [
        ("blocks.0.attn1.to_q.weight", "../a.safetensors", "not a plain file name"),
        ("blocks.0.attn1.to_q.weight", "/etc/passwd", "not a plain file name"),
        ("blocks.9.missing.weight", "a.safetensors", "missing although"),
        ("blocks.0.attn1.to_q.weight", "c.safetensors", "cannot open"),
    ] {
        std::fs::write(&index, index_of(&[(name, file)])).unwrap();
        let error =
            pack(&index, &folder.path().join("x.trefoil"), &PackOptions::default(), |_| ()).unwrap_err().to_string();
        assert!(error.contains(want), "wanted `{want}` in `{error}`");
    }
}

#[test]
fn an_adapter_in_a_file_of_its_own_joins_its_base() {
    let folder = tempfile::tempdir().unwrap();
    let (adapter, base): (Vec<Tensor>, Vec<Tensor>) =
        tiny_wan().into_iter().partition(|tensor| tensor.name.contains("lora"));
    let lora = folder.path().join("lora.safetensors");
    write_safetensors(&lora, &adapter);
    let options = PackOptions { extra_sources: vec![lora], adapter_scaling: Some(0.5), ..PackOptions::default() };
    let (artefact, report) = pack_tensors(folder.path(), &base, &options).unwrap();
    assert_eq!(report.sources.len(), 2);
    assert_eq!(artefact.metadata()["adapter_scaling"], 0.5);
    assert_eq!(artefact.tensor("blocks.1.attn2.to_v.lora_B.weight").unwrap().record.spec.class, TensorClass::Adapter);
    let twice = PackOptions { extra_sources: vec![folder.path().join("model.safetensors")], ..PackOptions::default() };
    let error = pack_tensors(folder.path(), &base, &twice).unwrap_err().to_string();
    assert!(error.contains("is also in"), "{error}");
}

#[test]
fn generic_models_are_grouped_by_block_and_stacks_stay_apart() {
    let folder = tempfile::tempdir().unwrap();
    let tensors = [
        random("encoder.layers.0.attn.q.weight", &[32, 32]),
        random("encoder.layers.1.mlp.fc.weight", &[64, 32]),
        random("decoder.layers.0.attn.q.weight", &[32, 32]),
        random("decoder.layers.0.conv.weight", &[4, 4, 3]),
        random("token_embed.weight", &[100, 32]),
        Tensor { name: "steps".into(), dtype: "I64", shape: vec![2], bytes: vec![1; 16] },
        Tensor { name: "flags".into(), dtype: "BOOL", shape: vec![3], bytes: vec![1, 0, 1] },
    ];
    let (artefact, report) = pack_tensors(folder.path(), &tensors, &PackOptions::default()).unwrap();
    assert_eq!(report.rules, "generic");
    let info = artefact.info();
    let labels: Vec<_> = info.regions.iter().map(|region| (region.block, region.label.clone().unwrap())).collect();
    assert_eq!(
        labels,
        [(0, "decoder.layers.0".into()), (1, "encoder.layers.0".into()), (2, "encoder.layers.1".into())]
    );
    assert_eq!(artefact.tensor("steps").unwrap().record.spec.dtype, StoredType::I64);
    assert_eq!(artefact.tensor("flags").unwrap().record.spec.dtype, StoredType::Opaque("bool".into()));
    assert_eq!(artefact.tensor("token_embed.weight").unwrap().record.spec.class, TensorClass::Embedder);
    assert_eq!(artefact.tensor("encoder.layers.1.mlp.fc.weight").unwrap().record.spec.class, TensorClass::Ffn);
}

fn refuse(tensors: &[Tensor], options: &PackOptions) -> String {
    let folder = tempfile::tempdir().unwrap();
    let error = pack_tensors(folder.path(), tensors, options).unwrap_err().to_string();
    let left: Vec<PathBuf> = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(left, [folder.path().join("model.safetensors")], "a failed pack leaves nothing behind");
    assert!(!error.contains('\n') && error.starts_with(|first: char| first.is_lowercase()), "{error}");
    error
}

#[test]
fn bad_models_are_refused_by_name_and_leave_nothing_behind() {
    let name = "blocks.0.attn1.to_q.weight";
    // Row 700 of the file is column 700 of W; it lies in a later window than the first.
    let mut wrong = values(name, 3000 * 1200);
    wrong[2900 * 1200 + 17] = f32::NEG_INFINITY;
    assert_eq!(
        refuse(&[f32_tensor(name, &[3000, 1200], &wrong)], &PackOptions::default()),
        "tensor `blocks.0.attn1.to_q.weight` holds -inf at row 17, column 2900 of its 1200×3000 matrix (input × output); the checkpoint is \
         damaged or not finished, pack a finite one"
    );
    let good = random(name, &[32, 32]);
    let bias = f32_tensor("blocks.0.attn1.to_q.bias", &[2], &[0.0, f32::NAN]);
    assert!(
        refuse(&[good, bias], &PackOptions::default())
            .contains("`blocks.0.attn1.to_q.bias` [2] holds NaN at flat index 1")
    );
    let double = Tensor { name: name.into(), dtype: "F64", shape: vec![1, 1], bytes: vec![0; 8] };
    assert!(refuse(&[double], &PackOptions::default()).contains("f64 [1, 1] cannot be quantised"));
    let empty = Tensor { name: name.into(), dtype: "F32", shape: vec![0, 4], bytes: vec![] };
    assert!(refuse(&[empty], &PackOptions::default()).contains("[0, 4] is no matrix"));
    assert!(
        refuse(&[random("lonely", &[4])], &PackOptions::default())
            .contains("no tensor of the checkpoint belongs into a region")
    );
    let limit = PackOptions { region_limit: Some(1023), ..PackOptions::default() };
    assert!(refuse(&[random(name, &[32, 32])], &limit).contains("needs 1024 bytes, above the limit of 1023"));
    let twins = [random(name, &[32, 32]), random("blocks.0.self_attn.q.weight", &[32, 32])];
    assert!(refuse(&twins, &PackOptions::default()).contains("both become `blocks.0.attn1.to_q.weight`"));
    let rules = RuleSet { name: "mine".into(), renames: vec![], rules: vec![] };
    assert!(
        refuse(&[random(name, &[32, 32])], &PackOptions { rules: Some(rules), ..PackOptions::default() })
            .contains("`mine`")
    );
    // A tensor that the caller adds twice stops the writing thread; its error arrives.
    let spec = TensorSpec::plain("sigmas", TensorClass::Step, StoredType::F32, &[1]);
    let twice =
        PackOptions { extra_tensors: vec![(spec.clone(), vec![0; 4]), (spec, vec![0; 4])], ..PackOptions::default() };
    assert!(refuse(&[random(name, &[32, 32])], &twice).contains("`sigmas` was written already"));
}

#[test]
fn files_that_are_no_checkpoints_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("x.trefoil");
    let refuse = |source: &Path| pack(source, &output, &PackOptions::default(), |_| ()).unwrap_err().to_string();
    let path = folder.path().join("model.safetensors");
    assert!(refuse(&path).contains("cannot open"));
    assert!(refuse(folder.path()).contains("no .safetensors file"));
    std::fs::write(folder.path().join("model.pth"), b"PK").unwrap();
    assert!(refuse(&folder.path().join("model.pth")).contains("not a state dictionary of PyTorch"));
    std::fs::write(&path, b"").unwrap();
    assert!(refuse(&path).contains("0 bytes"));
    write_safetensors(&path, &tiny_wan());
    let bytes = std::fs::read(&path).unwrap();
    for end in [7, 8, 100, bytes.len() - 1] {
        std::fs::write(&path, &bytes[..end]).unwrap();
        assert!(refuse(&path).contains("safetensors"), "{end}");
    }
    std::fs::write(&path, [u64::MAX.to_le_bytes().as_slice(), b"{}"].concat()).unwrap();
    assert!(refuse(&path).contains("not a valid safetensors file"));
    write_safetensors(&path, &tiny_wan());
    write_safetensors(&folder.path().join("other.safetensors"), &tiny_wan());
    assert!(refuse(folder.path()).contains("several safetensors files"));
    assert!(!output.exists());
}

#[test]
fn progress_reaches_the_total_and_extra_tensors_arrive() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    write_safetensors(&source, &tiny_wan());
    let spec = TensorSpec::plain("sigmas", TensorClass::Step, StoredType::F32, &[2]);
    let mut metadata = serde_json::Map::new();
    metadata.insert("schedule".into(), serde_json::json!([1000, 992]));
    let options = PackOptions {
        extra_tensors: vec![(spec, vec![0, 0, 128, 63, 0, 0, 0, 0])],
        metadata,
        ..PackOptions::default()
    };
    let mut last = (0, 0);
    let output = folder.path().join("a.trefoil");
    pack(&source, &output, &options, |progress| {
        assert!(progress.done_bytes >= last.0);
        last = (progress.done_bytes, progress.total_bytes);
    })
    .unwrap();
    assert!(last.0 == last.1 && last.1 > 0);
    let artefact = Artefact::open(&output).unwrap();
    assert_eq!(artefact.tensor("sigmas").unwrap().f32_values().unwrap(), [1.0, 0.0]);
    assert_eq!(artefact.metadata()["schedule"][1], 992);

    // Later knowledge joins in a copy; what was there keeps its bytes.
    let scale = TensorSpec::plain("blocks.0.activation_scales", TensorClass::Step, StoredType::F32, &[1]);
    let note = TensorSpec::plain("note", TensorClass::Other, StoredType::U8, &[2]);
    let calibrated = folder.path().join("b.trefoil");
    let mut metadata = serde_json::Map::new();
    metadata.insert("calibrated".into(), true.into());
    artefact.extended(&calibrated, &[(scale, vec![0, 0, 0, 64]), (note, vec![7, 8])], metadata).unwrap();
    let second = Artefact::open(&calibrated).unwrap();
    second.verify().unwrap();
    assert_ne!(second.fingerprint(), artefact.fingerprint());
    assert_eq!(second.tensor("blocks.0.activation_scales").unwrap().f32_values().unwrap(), [2.0]);
    assert_eq!(second.tensor("note").unwrap().bytes, [7, 8]);
    assert_eq!((&second.metadata()["calibrated"], &second.metadata()["schedule"][0]), (&true.into(), &1000.into()));
    for tensor in artefact.tensors() {
        assert_eq!(second.tensor(&tensor.spec.name).unwrap().bytes, artefact.tensor(&tensor.spec.name).unwrap().bytes);
    }
}

#[test]
fn packing_needs_less_memory_than_one_large_tensor() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    // A sparse file: 256 MiB of zero weights and 128 MiB of a zero embedder, which cost no disk.
    let (matrix, embedder) = (256u64 << 20, 128u64 << 20);
    let header = serde_json::json!({
        "blocks.0.ffn.fc1.weight": { "dtype": "F32", "shape": [8192, 8192], "data_offsets": [0, matrix] },
        "embed.weight": { "dtype": "BF16", "shape": [8192, 8192], "data_offsets": [matrix, matrix + embedder] },
    });
    let header = serde_json::to_vec(&header).unwrap();
    std::fs::write(&source, [(header.len() as u64).to_le_bytes().as_slice(), &header].concat()).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&source).unwrap();
    file.set_len(8 + header.len() as u64 + matrix + embedder).unwrap();
    let output = folder.path().join("model.trefoil");
    // In a process of its own, because other tests of this one have a peak too.
    let helper = std::process::Command::new(env!("CARGO_BIN_EXE_trefoil-weights-helper"))
        .args(["pack".as_ref(), source.as_os_str(), output.as_os_str()])
        .output()
        .unwrap();
    assert!(helper.status.success(), "{}", String::from_utf8_lossy(&helper.stderr));
    let peak: u64 = String::from_utf8_lossy(&helper.stdout).trim().parse().unwrap();
    eprintln!("packing 384 MiB, largest tensor 256 MiB: peak {:.1} MiB", peak as f64 / f64::from(1 << 20));
    if peak == 0 {
        eprintln!("skipped: the kernel does not tell VmHWM");
        return;
    }
    assert!(peak < 64 << 20, "{peak} bytes");
    let artefact = Artefact::open(&output).unwrap();
    assert_eq!(artefact.matrix("blocks.0.ffn.fc1.weight").unwrap().scales[8191].to_bits(), 1f32.to_bits());
}
