//! The file format under damage: every changed byte is found, named where possible, and never a panic.

mod common;

use common::{random, tiny_wan, write_safetensors};
use proptest::prelude::*;
use sha2::{Digest as _, Sha256};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use tempfile::TempDir;
use trefoil_weights::artefact::StoredType;
use trefoil_weights::{
    Artefact, ArtefactWriter, PackOptions, SectionName, TensorClass, TensorSpec, WeightsError, pack, render_info,
};

/// The bytes of a small valid artefact.
fn valid() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().join("model.safetensors");
        write_safetensors(&source, &tiny_wan());
        let output = folder.path().join("model.trefoil");
        pack(&source, &output, &PackOptions::default(), |_| ()).unwrap();
        std::fs::read(output).unwrap()
    })
}

fn write(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.trefoil");
    std::fs::write(&path, bytes).unwrap();
    (folder, path)
}

fn check(path: &Path) -> Result<(), WeightsError> {
    Artefact::open(path)?.verify()
}

fn error_of(bytes: &[u8]) -> String {
    let (_folder, path) = write(bytes);
    let error = check(&path).unwrap_err().to_string();
    assert!(!error.contains('\n'), "{error}");
    error
}

/// Replaces the index and makes all checksums fit again: what a hostile writer could do.
fn with_index(change: impl FnOnce(&mut serde_json::Value)) -> Vec<u8> {
    let bytes = valid();
    let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    let start = long(24) as usize;
    let mut index: serde_json::Value = serde_json::from_slice(&bytes[start..]).unwrap();
    change(&mut index);
    let text = serde_json::to_vec(&index).unwrap();
    let mut changed = bytes[..start].to_vec();
    changed[16..24].copy_from_slice(&((start + text.len()) as u64).to_le_bytes());
    changed[32..40].copy_from_slice(&(text.len() as u64).to_le_bytes());
    changed[48..80].copy_from_slice(&Sha256::digest(&text));
    fix_header(&mut changed);
    changed.extend(text);
    changed
}

fn fix_header(bytes: &mut [u8]) {
    let checksum = Sha256::digest(&bytes[..80]);
    bytes[80..112].copy_from_slice(&checksum);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn any_flipped_bits_are_detected(at in any::<prop::sample::Index>(), flip in 1u8..) {
        let mut bytes = valid().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= flip;
        let (_folder, path) = write(&bytes);
        prop_assert!(check(&path).is_err(), "byte {at}");
    }

    #[test]
    fn flips_in_header_and_index_are_detected_on_opening(at in any::<prop::sample::Index>(), flip in 1u8.., header in any::<bool>()) {
        let mut bytes = valid().to_vec();
        let start = u64::from_le_bytes(bytes[24..32].try_into().unwrap()) as usize;
        let at = if header { at.index(112) } else { start + at.index(bytes.len() - start) };
        bytes[at] ^= flip;
        let (_folder, path) = write(&bytes);
        prop_assert!(Artefact::open(&path).is_err(), "byte {at}");
    }

    #[test]
    fn any_truncation_or_extension_is_detected(at in any::<prop::sample::Index>(), more in prop::collection::vec(any::<u8>(), 1..100)) {
        let bytes = valid();
        let (_folder, path) = write(&bytes[..at.index(bytes.len())]);
        prop_assert!(Artefact::open(&path).is_err());
        let (_folder, path) = write(&[bytes, &more].concat());
        prop_assert!(Artefact::open(&path).is_err());
    }

    #[test]
    fn arbitrary_files_are_foreign(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let (_folder, path) = write(&bytes);
        let refused = matches!(Artefact::open(&path), Err(WeightsError::Foreign { .. }));
        prop_assert!(refused);
    }

    /// With valid checksums, any number in the index may be anything: opening either refuses or all views are in bounds.
    #[test]
    fn hostile_numbers_in_the_index_never_panic(
        entry in any::<prop::sample::Index>(),
        field in prop::sample::select(vec!["offset", "bytes", "section", "shape", "padded_shape", "section.offset", "section.bytes", "section.block", "dtype", "layout"]),
        number in prop_oneof![Just(0u64), Just(1), Just(127), Just(128), Just(65_536), Just(u64::MAX), Just(u64::MAX - 127), Just(1 << 63), any::<u64>()],
    ) {
        let bytes = with_index(|index| {
            let list = if field.starts_with("section.") { "sections" } else { "tensors" };
            let entries = index[list].as_array_mut().unwrap();
            let at = entry.index(entries.len());
            let field = field.trim_start_matches("section.");
            entries[at][field] = match field {
                "shape" | "padded_shape" => serde_json::json!([number, number]),
                "dtype" => ["f32", "i8", "i64", "strange"][number as usize % 4].into(),
                "layout" => ["tile32", "row-major", "x"][number as usize % 3].into(),
                _ => number.into(),
            };
        });
        let (_folder, path) = write(&bytes);
        if let Ok(artefact) = Artefact::open(&path) {
            for tensor in artefact.tensors() {
                let view = artefact.tensor(&tensor.spec.name).unwrap();
                prop_assert_eq!(view.bytes.len() as u64, tensor.bytes);
                let _ = view.f32_values();
                let _ = artefact.matrix(&tensor.spec.name);
            }
            for block in artefact.blocks() {
                artefact.region(block).unwrap();
            }
            render_info(&artefact.info(), true);
            let _ = artefact.verify();
        }
    }
}

#[test]
fn errors_say_what_is_wrong_with_the_file() {
    let bytes = valid();
    assert!(error_of(&[]).contains("it is empty"));
    assert!(error_of(b"PK\x03\x04 archive").contains("zip or PyTorch"));
    assert!(error_of(b"GGUF\x03\x00\x00\x00").contains("GGUF"));
    assert!(error_of(b"\x10\x00\x00\x00\x00\x00\x00\x00{\"a\":1}").contains("safetensors checkpoint"));
    let cut = |bytes: &[u8]| error_of(bytes).split_once(" is truncated: ").expect("what is wrong").1.to_owned();
    assert_eq!(cut(&bytes[..50]), "the header alone needs 65536 bytes, 50 are there; copy or pack it again");
    for there in [112, 30_000, 70_000, bytes.len() - 1] {
        let wanted = format!("the file needs {} bytes, {there} are there; copy or pack it again", bytes.len());
        assert_eq!(cut(&bytes[..there]), wanted);
    }
    let appended = error_of(&[bytes, b"x"].concat());
    let wanted = format!("has {} bytes, and by its header the file has {}: something", bytes.len() + 1, bytes.len());
    assert!(appended.contains(&wanted), "{appended}");

    let mut newer = bytes.to_vec();
    newer[8] = 2;
    assert!(error_of(&newer).contains("artefact of version 2, this trefoil reads version 1; update trefoil"));

    let mut header = bytes.to_vec();
    header[20] ^= 1;
    assert!(error_of(&header).contains("section `header`"));
    let mut padding = bytes.to_vec();
    padding[5000] = 1;
    assert!(error_of(&padding).contains("section `header`: its padding"));
    let mut flags = bytes.to_vec();
    flags[40] = 1;
    fix_header(&mut flags);
    assert!(error_of(&flags).contains("flags"));

    let (_folder, path) = write(bytes);
    let artefact = Artefact::open(&path).unwrap();
    for section in artefact.sections() {
        // First byte, last byte, and the padding behind it where there is any.
        for at in [section.offset, section.offset + section.bytes - 1, section.offset + section.padded_bytes() - 1] {
            let mut damaged = bytes.to_vec();
            damaged[at as usize] ^= 0x40;
            let error = error_of(&damaged);
            assert!(error.contains(&format!("section `{}`", section.name)), "{at}: {error}");
        }
    }
    assert!(artefact.region(9).unwrap_err().to_string().contains("2 regions, blocks 0 to 1"));
    assert!(
        artefact
            .tensor("attn1.to_q.weight")
            .unwrap_err()
            .to_string()
            .contains("did you mean blocks.0.attn1.to_q.weight")
    );
    assert!(artefact.tensor("zzz").unwrap_err().to_string().contains("weights info"));
    assert!(artefact.matrix("scale_shift_table").unwrap_err().to_string().contains("not a tiled matrix"));
    assert!(artefact.tensor("blocks.0.attn1.to_q.weight").unwrap().f32_values().is_err());
}

#[test]
fn an_index_that_contradicts_itself_is_refused() {
    let refuse = |change: fn(&mut serde_json::Value), want: &str| {
        let error = error_of(&with_index(change));
        assert!(error.contains("section `index`") && error.contains(want), "wanted `{want}` in `{error}`");
    };
    refuse(|index| index["format"] = "x".into(), "format is `x`");
    refuse(|index| index["tensors"][1]["name"] = index["tensors"][0]["name"].clone(), "two tensors are named");
    refuse(|index| index["tensors"][1]["offset"] = 0.into(), "does not fit section");
    refuse(|index| index["tensors"][1]["offset"] = 4097.into(), "does not fit section");
    refuse(|index| index["tensors"][0]["section"] = 99.into(), "section number 99");
    refuse(|index| index["tensors"][0]["block"] = 1.into(), "lies in section");
    refuse(|index| index["tensors"][0]["padded_shape"] = serde_json::json!([128, 64]), "does not have");
    refuse(|index| index["tensors"][0]["shape"] = serde_json::json!([1, 2, 3]), "do not go together");
    refuse(|index| index["tensors"][0]["shape"] = serde_json::json!([20, 40]), "no tiled INT8 matrix");
    refuse(|index| index["sections"][1]["block"] = 0.into(), "two regions");
    refuse(|index| index["sections"][0]["offset"] = 0.into(), "starts at 0");
    refuse(|index| index["sections"][0]["bytes"] = u64::MAX.into(), "reaches past the index");
    refuse(|index| index["sections"][0]["sha256"] = "zz".into(), "no checksum");
    refuse(|index| index["tensors"] = 3.into(), "not the JSON");
    // A field that a later writer adds is no reason to refuse.
    let (_folder, path) = write(&with_index(|index| index["tensors"][0]["mood"] = "good".into()));
    check(&path).unwrap();
}

#[test]
fn regions_are_aligned_contiguous_and_hold_only_base_weights() {
    let (_folder, path) = write(valid());
    let artefact = Artefact::open(&path).unwrap();
    for block in artefact.blocks() {
        let region = artefact.region(block).unwrap();
        assert!(region.section.offset.is_multiple_of(65_536));
        assert_eq!(region.tensors.iter().map(|tensor| tensor.bytes).sum::<u64>(), region.bytes.len() as u64);
        assert!(
            region
                .tensors
                .iter()
                .all(|tensor| matches!(tensor.spec.class, TensorClass::AttentionBase | TensorClass::Ffn))
        );
    }
    for tensor in artefact.tensors() {
        let view = artefact.tensor(&tensor.spec.name).unwrap();
        assert!(view.bytes.as_ptr().addr().is_multiple_of(128), "{}", tensor.spec.name);
    }
}

#[test]
fn the_writer_refuses_malformed_sequences_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let output = folder.path().join("a.trefoil");
    let spec = |name: &str| TensorSpec::plain(name, TensorClass::Other, StoredType::U8, &[3]);
    let class = SectionName::Class(TensorClass::Other);
    let region = SectionName::Region { block: 1, label: None };
    let fail = |steps: &dyn Fn(&mut ArtefactWriter) -> Result<(), WeightsError>, want: &str| {
        let mut writer = ArtefactWriter::create(&output, serde_json::Map::new()).unwrap();
        let error = steps(&mut writer).and_then(|()| writer.finish().map(drop)).unwrap_err().to_string();
        assert!(error.contains(want), "wanted `{want}` in `{error}`");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    };
    fail(&|writer| writer.tensor(spec("a"), &[1, 2, 3]), "before any section");
    fail(&|writer| writer.write(&[1]), "before any tensor");
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.tensor(spec("a"), &[1, 2])
        },
        "does not have 2 bytes",
    );
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.begin_tensor(spec("a"), 3)?;
            writer.write(&[1, 2, 3, 4])
        },
        "where 3 were missing",
    );
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.begin_tensor(spec("a"), 3)?;
            writer.write(&[1])
        },
        "2 bytes of the last tensor are missing",
    );
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.begin_tensor(spec("a"), 3)?;
            writer.begin_tensor(spec("b"), 3)
        },
        "are missing",
    );
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.tensor(spec("a"), &[1, 2, 3])?;
            writer.tensor(spec("a"), &[1, 2, 3])
        },
        "written already",
    );
    fail(
        &|writer| {
            writer.begin_section(&class)?;
            writer.begin_section(&class)
        },
        "written already",
    );
    fail(
        &|writer| {
            writer.begin_section(&region)?;
            writer.begin_section(&region)
        },
        "already has a region",
    );
    fail(
        &|writer| {
            writer.begin_section(&region)?;
            writer.tensor(spec("a"), &[1, 2, 3])
        },
        "does not belong into region 1",
    );
    // An artefact of nothing is legal, and so is replacing one.
    for _ in 0..2 {
        ArtefactWriter::create(&output, serde_json::Map::new()).unwrap().finish().unwrap();
        check(&output).unwrap();
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn the_text_of_info_adds_up() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("model.safetensors");
    let mut tensors = tiny_wan();
    tensors.push(random("mystery", &[3]));
    write_safetensors(&source, &tensors);
    let output = folder.path().join("model.trefoil");
    pack(&source, &output, &PackOptions::default(), |_| ()).unwrap();
    let artefact = Artefact::open(&output).unwrap();
    let mut info = artefact.info();
    assert_eq!(
        info.classes.iter().map(|class| class.bytes).sum::<u64>(),
        info.tensors.iter().map(|tensor| tensor.bytes).sum::<u64>()
    );
    assert_eq!(
        info.memory.paper_total + info.memory.uncounted,
        info.classes.iter().map(|class| class.bytes).sum::<u64>()
    );
    info.path = "model.trefoil".into();
    info.fingerprint = "[fingerprint]".into();
    insta::assert_snapshot!(render_info(&info, false));
    let json = serde_json::to_value(&info).unwrap();
    assert_eq!(json["classes"][0]["class"], "attention-base");
    assert_eq!(json["tensors"][0]["layout"], "tile32");
    assert!(render_info(&info, true).contains("blocks.0.attn1.to_q.weight.scale"));
}
