//! What backends are known to do wrong. Every line must fail as listed: one that starts to pass fails the suite, so
//! that the table stays true. Library versions are
//! those that the lines were checked with.

/// One known deviation.
pub struct Deviation {
    /// Backend, or backend and device.
    pub backend: &'static str,
    /// Name of the check, such as `own/dft_one_sided`.
    pub check: &'static str,
    /// What happens, in a few words.
    pub reason: &'static str,
    /// Part of the message that the check fails with.
    pub says: &'static str,
}

const fn deviation(backend: &'static str, check: &'static str, reason: &'static str, says: &'static str) -> Deviation {
    Deviation { backend, check, reason, says }
}

/// The table.
pub const DEVIATIONS: &[Deviation] = &[
    // WebGPU execution provider 0.4.0 of ONNX Runtime 1.32.0, on SwiftShader
    deviation(
        "ort:WebGPU",
        "own/matmul_f16",
        "its f16 MatMul needs a shader feature that SwiftShader lacks",
        "GenerateSourceCode",
    ),
    deviation(
        "ort:WebGPU",
        "lifetime/one unit from two threads",
        "two sessions on two threads of one process crash it (an executor drives a unit from one thread); checks after this one do not run",
        "the process ended in the middle",
    ),
    // rten 0.27.0
    deviation("rten", "own/add_f64", "computes f64 in f32", "off by"),
    deviation(
        "rten",
        "own/add_i64_large",
        "computes i64 in i32; an input outside is refused",
        "rten computes i64 in i32",
    ),
    deviation("rten", "own/i64_large_inside", "computes i64 in i32; silently wrong inside the model", "off by"),
    deviation("rten", "own/cast_f32_bool", "Cast to bool truncates: 0.5 becomes false; silently wrong", "off by"),
    deviation("rten", "own/qlinear_matmul", "has no QLinearMatMul", "QLinearMatMul operator not supported"),
    deviation(
        "rten",
        "onnx/qlinearmatmul_2D_uint8_float32",
        "has no QLinearMatMul",
        "QLinearMatMul operator not supported",
    ),
    deviation("rten", "onnx/qlinearconv", "has no QLinearConv", "QLinearConv operator not supported"),
    deviation("rten", "onnx/scan9_sum", "has no Scan", "Scan operator not supported"),
    deviation("rten", "onnx/causal_conv_with_state_basic", "has no CausalConvWithState", "CausalConvWithState"),
    deviation(
        "rten",
        "onnx/averagepool_2d_default",
        "AveragePool needs `strides`, which ONNX lets default",
        "strides len does not match",
    ),
    deviation(
        "rten",
        "onnx/maxpool_2d_default",
        "MaxPool needs `strides`, which ONNX lets default",
        "strides len does not match",
    ),
    deviation(
        "rten",
        "onnx/convtranspose",
        "ConvTranspose needs `strides`, which ONNX lets default",
        "expected 2 stride values",
    ),
    deviation(
        "rten",
        "onnx/layer_normalization_default_axis",
        "LayerNormalization has no outputs Mean and InvStdDev",
        "unsupported output: Mean",
    ),
    deviation(
        "rten",
        "onnx/quantizelinear_axis",
        "QuantizeLinear needs `axis`, which ONNX lets default",
        "does not match size of quantization axis",
    ),
    // OpenVINO 2026.4.1, CPU plugin
    deviation("openvino", "own/add_f64", "computes f64 in f32", "off by"),
    deviation("openvino", "own/add_i64_large", "computes i64 in i32; silently wrong", "off by"),
    deviation("openvino", "own/i64_large_inside", "computes i64 in i32; silently wrong", "off by"),
    deviation("openvino", "ports/large integers are right or refused", "computes i64 in i32; silently wrong", "off by"),
    deviation("openvino", "own/dft20_axis0", "DFT-20 ignores its axis input; silently wrong", "off by"),
    deviation("openvino", "own/dft_one_sided", "one-sided DFT has a rank too many", "it has f32 [2, 7, 1, 2]"),
    deviation("openvino", "onnx/dft_rfft", "one-sided DFT has a rank too many", "it has f32 [1, 6, 10, 1, 2]"),
    deviation("openvino", "onnx/dft_rfft_opset19", "one-sided DFT has a rank too many", "it has f32 [1, 6, 10, 1, 2]"),
    deviation("openvino", "onnx/dft_irfft", "inverse one-sided DFT has a rank too few", "it has f32 [1, 10, 10]"),
    deviation("openvino", "onnx/causal_conv_with_state_basic", "has no CausalConvWithState", "CausalConvWithState"),
    // ONNX Runtime 1.32.0
    deviation("ort", "onnx/quantizelinear_axis", "has no QuantizeLinear of opset 28", "QuantizeLinear(28)"),
    deviation("ort", "onnx/dequantizelinear_axis", "has no DequantizeLinear of opset 28", "DequantizeLinear(28)"),
];

/// The entry of a check on a unit, if there is one: an entry of the unit's device (`ort:WebGPU`) counts before one of its
/// backend.
pub fn of(unit: &str, check: &str) -> Option<&'static Deviation> {
    let backend = unit.split(':').next().unwrap_or_default();
    let device = unit.split(['@', '+']).next().unwrap_or_default();
    let find = |name: &str| DEVIATIONS.iter().find(|entry| entry.backend == name && entry.check == check);
    find(device).or_else(|| find(backend))
}
