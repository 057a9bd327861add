//! `trefoil video generate` with the small trained model of `testdata`.

mod common;

use common::{Workspace, json};
use std::fs;
use std::path::PathBuf;

const PROMPT: &str = "a red circle moves left over a dark background";

fn model() -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../testdata/demo-model").display().to_string()
}

/// What the command tells, and the bytes of the file it wrote.
fn generate(space: &Workspace, output: &str, more: &[&str]) -> (serde_json::Value, Vec<u8>) {
    let model = model();
    let arguments = ["video", "generate", &model, PROMPT, "-o", output, "--seed", "7", "--json"];
    let told = json(&space.output(arguments.into_iter().chain(more.iter().copied())));
    (told, fs::read(space.path(output)).unwrap())
}

#[test]
fn a_prompt_becomes_a_clip_and_a_seed_means_one_clip() {
    let space = Workspace::new();
    let (told, first) = generate(&space, "a.safetensors", &[]);
    assert_eq!(
        (told["frames"].as_u64(), told["width"].as_u64(), told["blocks"].as_u64()),
        (Some(17), Some(64), Some(36))
    );
    assert_eq!(told["warning"], serde_json::Value::Null, "{told}");
    let (_, again) = generate(&space, "b.safetensors", &[]);
    assert_eq!(first, again);
    let model = model();
    space.run(["video", "generate", &model, PROMPT, "-o", "c.safetensors", "--seed", "8"]);
    assert_ne!(first, fs::read(space.path("c.safetensors")).unwrap());
    for (name, magic) in [("clip.mp4", &b"ftyp"[..]), ("clip.png", b"\x89PNG"), ("clip.gif", b"GIF8")] {
        let (_, bytes) = generate(&space, name, &["--contact-sheet", "sheet.png"]);
        assert!(bytes.windows(4).take(8).any(|window| window == magic), "{name}");
        assert!(fs::read(space.path("sheet.png")).unwrap().starts_with(b"\x89PNG"));
    }
}

#[test]
fn on_w8a8_the_cut_does_not_change_a_bit_of_the_frames() {
    if std::thread::available_parallelism().is_ok_and(|cores| cores.get() < 2) {
        eprintln!("skipped: two engines need cores 0 and 1");
        return;
    }
    let space = Workspace::new();
    let frames = |bytes: &[u8]| {
        // The header tells the plan, which differs; what follows are the values.
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[8 + header..].to_vec()
    };
    let (_, alone) = generate(&space, "alone.safetensors", &["--path", "w8a8"]);
    for cut in ["0", "13", "18", "36"] {
        let name = format!("cut{cut}.safetensors");
        let (told, bytes) = generate(&space, &name, &["--path", "w8a8", "--engines", "cpu@0,cpu@1", "--cut", cut]);
        assert_eq!(told["cut"].as_u64(), cut.parse().ok());
        assert_eq!(frames(&alone), frames(&bytes), "cut {cut}");
    }
}

#[test]
fn what_cannot_be_generated_is_told_in_one_line_and_leaves_nothing() {
    let space = Workspace::new();
    let model = model();
    let fails = |arguments: &[&str]| {
        let all = ["video", "generate"].into_iter().chain(arguments.iter().copied());
        let message = space.fails(all, 2);
        assert!(!space.path("clip.png").exists(), "nothing is half-written");
        message
    };
    assert!(fails(&["nowhere", PROMPT, "-o", "clip.png"]).contains("nowhere"));
    assert!(fails(&[&model, "", "-o", "clip.png"]).contains("no text"));
    assert!(fails(&[&model, &"x".repeat(70_000), "-o", "clip.png"]).contains("70000 bytes are more than 65536"));
    assert!(fails(&[&model, PROMPT, "-o", "/dev/full/clip.png"]).contains("/dev/full"));
    assert!(fails(&[&model, PROMPT, "-o", "clip.png", "--size", "65x64"]).contains("multiples of 16"));
    assert!(fails(&[&model, PROMPT, "-o", "clip.png", "--frames", "18"]).contains("17 or 21"));
    assert!(fails(&[&model, PROMPT, "-o", "clip.xyz"]).contains(".xyz"));
    assert!(fails(&[&model, PROMPT, "-o", "no/such/folder/clip.png"]).contains("no/such/folder"));
    assert!(fails(&[&model, PROMPT, "-o", "clip.png", "--engines", "cpu@4000"]).contains("core 4000 is not among"));
    assert!(fails(&[&model, PROMPT, "-o", "clip.png", "--cut", "3"]).contains("--cut needs two engines"));
    let large = ["--size", "8192x8192", "--frames", "400001"];
    let message = fails(&[&[&model, PROMPT, "-o", "clip.png"][..], &large].concat());
    assert!(message.contains("needs at least ") && message.contains("of memory (decoder"), "{message}");
}
