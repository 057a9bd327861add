//! The NEON kernels, cross-compiled and run under qemu-user where the tools are there.

use std::path::PathBuf;
use std::process::Command;

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

#[test]
fn neon_gives_the_same_bits_under_emulation() {
    if cfg!(target_arch = "aarch64") {
        eprintln!("skipped: this processor runs the NEON kernels itself, in the other tests");
        return;
    }
    for program in [LINKER, EMULATOR] {
        if !runs(program) {
            eprintln!("skipped: no {program} (apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)");
            return;
        }
    }
    let library = Command::new("rustc").args(["--print", "target-libdir", "--target", TARGET]).output();
    let has_target = library.is_ok_and(|output| {
        PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
            .read_dir()
            .is_ok_and(|mut entries| entries.next().is_some())
    });
    if !has_target {
        eprintln!("skipped: no Rust target {TARGET} (rustup target add {TARGET})");
        return;
    }
    // A target directory of its own: the one of this test run is locked.
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("emulated");
    let build = Command::new(env!("CARGO"))
        .args([
            "build",
            "--release",
            "--quiet",
            "-p",
            "trefoil-kernels",
            "--no-default-features",
            "--bin",
            "trefoil-kernels-check",
            "--target",
            TARGET,
        ])
        .arg("--target-dir")
        .arg(&folder)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(build.status.success(), "{}", String::from_utf8_lossy(&build.stderr));
    let program = folder.join(TARGET).join("release/trefoil-kernels-check");
    let output = Command::new(EMULATOR)
        .args(["-cpu", "max", "-L", "/usr/aarch64-linux-gnu"])
        .arg(&program)
        .output()
        .expect("the emulator runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    println!("{text}");
    let lines: Vec<&str> = text.lines().collect();
    // The constant of tests/block.rs: x86 and Arm give the same bits for a whole block.
    let want = "mismatches 0 block 0x4abe14aa413703e8";
    assert_eq!(lines, ["scalar", "neon-dotprod", "neon-i8mm"].map(|isa| format!("{isa} {want}")), "{text}");
}
