//! The Hexagon kernels, built with clang and run under qemu-hexagon where the tools are there, against the scalar kernel.

mod support;

use std::io::{Read, Write};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use support::{Random, bits, tiled, view};
use trefoil_kernels::{
    ActivationScale, Codes, Epilogue, GemmSink, Isa, Kernels, Operands, Pool, Rows, RowsMut, Workspace,
};
use trefoil_weights::quantise::Quantised;

const COMPILER: &str = "clang-19";
const EMULATOR: &str = "qemu-hexagon";
const SCALE: f32 = 0.02;
const OUT_SCALE: f32 = 0.25;

fn runs(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Builds the program, or says why not.
fn build() -> Option<PathBuf> {
    for program in [COMPILER, "ld.lld-19", EMULATOR] {
        if !runs(program) {
            eprintln!("skipped: no {program} (apt-get install clang-19 lld-19 qemu-user)");
            return None;
        }
    }
    let sources = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("hexagon");
    let program = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!(
        "hexagon-check-{}-{:?}",
        std::process::id(),
        std::thread::current().id()
    ));
    let build = Command::new(COMPILER)
        .args(["--target=hexagon-unknown-none-elf", "-mcpu=hexagonv68", "-mhvx=v68", "-mhvx-length=128B"])
        .args(["-std=c11", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"])
        .args(["-ffreestanding", "-fno-builtin", "-nostdlib", "-static", "-fuse-ld=lld", "-Wl,-e,_start"])
        .args(["gemm_hvx.c", "gemm_hmx_model.c", "epilogue.c", "check.c"].map(|name| sources.join(name)))
        .arg("-o")
        .arg(&program)
        .output()
        .expect("the compiler runs");
    assert!(build.status.success(), "{}", String::from_utf8_lossy(&build.stderr));
    Some(program)
}

/// A product with padding in every direction, and what the CPU gives.
struct Problem {
    rows: usize,
    stride: usize,
    weights: Quantised,
    bias: Vec<f32>,
    input: Vec<i8>,
}

impl Problem {
    fn random(random: &mut Random) -> Problem {
        let [rows, d_in, d_out] = [40, 200, 150].map(|most| 1 + random.bits() as usize % most);
        let weights = tiled(&random.normals(d_in * d_out, 0.1), d_in, d_out);
        let stride = weights.shape.padded_in() + 4 * (random.bits() as usize % 3);
        // What lies in the padding of the input does not matter.
        let input = random.codes(rows * stride);
        Problem { rows, stride, bias: random.normals(d_out, 0.5), weights, input }
    }

    fn message(&self) -> Vec<u8> {
        let shape = self.weights.shape;
        let mut message = Vec::new();
        for number in [self.rows, self.stride, shape.padded_in(), shape.padded_out()] {
            message.extend((number as u32).to_le_bytes());
        }
        // The kernels know whole tiles only: padded columns have a scale of 1 and no bias.
        let padded = |values: &[f32], fill: f32| {
            let mut values = values[..shape.d_out].to_vec();
            values.resize(shape.padded_out(), fill);
            values
        };
        let floats =
            [vec![SCALE, 1.0 / OUT_SCALE], padded(&self.weights.scales, 1.0), padded(&self.bias, 0.0)].concat();
        message.extend(floats.iter().flat_map(|value| value.to_le_bytes()));
        message.extend(self.weights.codes.iter().chain(&self.input).map(|&code| code as u8));
        message
    }

    fn answer_len(&self) -> usize {
        self.rows * self.weights.shape.padded_out() * 13
    }

    /// Compares an answer with the address formula and with the scalar kernel.
    fn check(&self, answer: &[u8]) {
        let shape = self.weights.shape;
        let (columns, rows) = (shape.padded_out(), self.rows);
        let (words, codes) = answer.split_at(rows * columns * 12);
        let words: Vec<u32> = words.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word)).collect();
        let [hvx, hmx_model, floats] = [0, 1, 2].map(|part| &words[part * rows * columns..][..rows * columns]);
        for row in 0..rows {
            for column in 0..columns {
                let sum: i32 = (0..shape.padded_in())
                    .map(|i| {
                        i32::from(self.input[row * self.stride + i])
                            * i32::from(self.weights.codes[shape.offset(i, column)])
                    })
                    .sum();
                let at = row * columns + column;
                assert_eq!(hvx[at] as i32, sum, "HVX at {row}, {column} of {shape:?}");
                assert_eq!(hmx_model[at] as i32, sum, "the HMX model at {row}, {column} of {shape:?}");
            }
        }
        let kernels = Kernels::new(Isa::Scalar, Pool::on_caller()).unwrap();
        let input = Codes {
            codes: Rows::new("input", &self.input, rows, shape.d_in, self.stride).unwrap(),
            scale: ActivationScale::Tensor(SCALE),
        };
        let epilogue = Epilogue { bias: Some(&self.bias), ..Epilogue::default() };
        let (mut want, mut want_codes) = (vec![0f32; rows * shape.d_out], vec![0i8; rows * columns]);
        let workspace = &mut Workspace::new();
        let out = RowsMut::dense("out", &mut want, rows, shape.d_out).unwrap();
        let sink = GemmSink::F32 { out, operands: Operands::F32 };
        kernels.gemm_w8a8(&input, &view(&self.weights), &epilogue, sink, workspace).unwrap();
        let out = RowsMut::new("out", &mut want_codes, rows, shape.d_out, columns).unwrap();
        let sink = GemmSink::Codes { out, scale: OUT_SCALE };
        kernels.gemm_w8a8(&input, &view(&self.weights), &epilogue, sink, workspace).unwrap();
        for row in 0..rows {
            let at = row * columns..row * columns + shape.d_out;
            assert_eq!(floats[at.clone()], bits(&want[row * shape.d_out..][..shape.d_out]), "floats of row {row}");
            assert!(
                codes[at.clone()].iter().map(|&code| code as i8).eq(want_codes[at].iter().copied()),
                "codes of row {row}"
            );
        }
    }
}

#[test]
fn hvx_and_the_hmx_model_give_the_integers_and_bits_of_the_scalar_kernel() {
    let Some(program) = build() else { return };
    let random = &mut Random::new(21);
    let problems: Vec<Problem> = (0..16).map(|_| Problem::random(random)).collect();
    let mut child = Command::new(EMULATOR)
        .args(["-cpu", "v67"])
        .arg(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the emulator runs");
    let (mut to, mut from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let message: Vec<u8> = problems.iter().flat_map(Problem::message).collect();
    let writer = std::thread::spawn(move || to.write_all(&message));
    let mut answers = Vec::new();
    from.read_to_end(&mut answers).unwrap();
    writer.join().unwrap().unwrap();
    assert!(child.wait().unwrap().success());
    assert_eq!(answers.len(), problems.iter().map(Problem::answer_len).sum::<usize>());
    let mut rest = &answers[..];
    for problem in &problems {
        let (answer, tail) = rest.split_at(problem.answer_len());
        problem.check(answer);
        rest = tail;
    }
    println!("HVX: {} products; HMX: the same by the software model", problems.len());
    std::fs::remove_file(program).unwrap();
}

#[test]
fn a_problem_that_does_not_fit_is_refused() {
    let Some(program) = build() else { return };
    let mut child = Command::new(EMULATOR)
        .args(["-cpu", "v67"])
        .arg(&program)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .expect("the emulator runs");
    // A reduction of 33 inputs is no whole tile.
    let header: Vec<u8> = [1u32, 64, 33, 32, 0, 0].iter().flat_map(|number| number.to_le_bytes()).collect();
    child.stdin.take().unwrap().write_all(&header).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(2));
    std::fs::remove_file(program).unwrap();
}
