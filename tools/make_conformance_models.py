#!/usr/bin/env python3
"""Writes the conformance suite's models: crates/trefoil-units/testdata/conformance/*.onnx with inputs and outputs in *.npz.

Needs `onnx` and `numpy`. The expected outputs are computed here in plain numpy at double precision, by definition and
without any runtime, so that no backend is its own judge. The files are committed; run this again only to add a case.

Npz keys are `in_<name>` and `out_<name>`, in graph order.
"""

import math
import pathlib
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FOLDER = pathlib.Path(__file__).resolve().parent.parent / "crates/trefoil-units/testdata/conformance"
RNG = np.random.default_rng(20)
CODES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.bool_): TensorProto.BOOL,
}
written = []


def info(name, array):
    return helper.make_tensor_value_info(name, CODES[array.dtype], array.shape)


def floats(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def case(name, nodes, inputs, outputs, constants=None, opset=17, external=None):
    """Checks and writes one model. `external` is (file name, whether to state offset and length)."""
    inputs = {key: np.asarray(value) for key, value in inputs.items()}
    outputs = {key: np.asarray(value) for key, value in outputs.items()}
    nodes = nodes if isinstance(nodes, list) else [nodes]
    graph = helper.make_graph(
        nodes,
        name,
        [info(key, value) for key, value in inputs.items()],
        [info(key, value) for key, value in outputs.items()],
        [numpy_helper.from_array(np.asarray(value), key) for key, value in (constants or {}).items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], producer_name="trefoil")
    model.ir_version = 9 if opset >= 20 else 8
    onnx.checker.check_model(model, full_check=True)
    if external:
        file, stated = external
        data = b""
        for tensor in model.graph.initializer:
            raw = tensor.raw_data
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            entries = {"location": file}
            if stated:
                entries |= {"offset": str(len(data)), "length": str(len(raw))}
            for key, value in entries.items():
                entry = tensor.external_data.add()
                entry.key, entry.value = key, value
            data += raw
        (FOLDER / file).write_bytes(data)
    (FOLDER / f"{name}.onnx").write_bytes(model.SerializeToString(deterministic=True))
    arrays = {f"in_{key}": value for key, value in inputs.items()}
    arrays |= {f"out_{key}": value for key, value in outputs.items()}
    np.savez(FOLDER / f"{name}.npz", **arrays)
    written.append(name)


def node(kind, inputs, outputs, **attributes):
    return helper.make_node(kind, inputs, outputs, **attributes)


def f32(array):
    return np.asarray(array, dtype=np.float32)


def wide(array):
    return np.asarray(array, dtype=np.float64)


def conv(x, w, b, pads, strides, dilations, groups):
    """Convolution by definition, any number of spatial axes."""
    x, w = wide(x), wide(w)
    rank = x.ndim - 2
    pad = [(0, 0), (0, 0)] + [(pads[axis], pads[axis + rank]) for axis in range(rank)]
    x = np.pad(x, pad)
    out_size = [
        (x.shape[2 + a] - dilations[a] * (w.shape[2 + a] - 1) - 1) // strides[a] + 1 for a in range(rank)
    ]
    out = np.zeros((x.shape[0], w.shape[0], *out_size))
    per_group_in, per_group_out = w.shape[1], w.shape[0] // groups
    for image in range(x.shape[0]):
        for channel in range(w.shape[0]):
            first = channel // per_group_out * per_group_in
            for place in np.ndindex(*out_size):
                total = 0.0
                for tap in np.ndindex(*w.shape[2:]):
                    at = tuple(place[a] * strides[a] + tap[a] * dilations[a] for a in range(rank))
                    for inner in range(per_group_in):
                        total += x[(image, first + inner, *at)] * w[(channel, inner, *tap)]
                out[(image, channel, *place)] = total + (0.0 if b is None else float(b[channel]))
    return f32(out)


def pool(x, kernel, strides, pads, reduce):
    """Pooling by definition over the elements that are not padding."""
    x = wide(x)
    height = (x.shape[2] + pads[0] + pads[2] - kernel[0]) // strides[0] + 1
    width = (x.shape[3] + pads[1] + pads[3] - kernel[1]) // strides[1] + 1
    out = np.zeros((x.shape[0], x.shape[1], height, width))
    for image, channel, row, column in np.ndindex(*out.shape):
        window = [
            x[image, channel, r, c]
            for r in range(row * strides[0] - pads[0], row * strides[0] - pads[0] + kernel[0])
            for c in range(column * strides[1] - pads[1], column * strides[1] - pads[1] + kernel[1])
            if 0 <= r < x.shape[2] and 0 <= c < x.shape[3]
        ]
        out[image, channel, row, column] = reduce(window)
    return f32(out)


def softmax(x, axis):
    e = np.exp(wide(x) - wide(x).max(axis=axis, keepdims=True))
    return f32(e / e.sum(axis=axis, keepdims=True))


def dft(x, axis, onesided=False, inverse=False):
    """The DFT as a sum, over the last axis' (real[, imaginary]) pairs."""
    z = wide(x[..., 0]) + (1j * wide(x[..., 1]) if x.shape[-1] == 2 else 0)
    length = z.shape[axis]
    bins = length // 2 + 1 if onesided else length
    sign = 1 if inverse else -1
    matrix = np.exp(sign * 2j * math.pi * np.outer(np.arange(bins), np.arange(length)) / length)
    out = np.moveaxis(np.tensordot(matrix, np.moveaxis(z, axis, 0), axes=(1, 0)), 0, axis)
    if inverse:
        out = out / length
    return f32(np.stack([out.real, out.imag], axis=-1))


def quantise(x, scale, zero, low, high):
    return np.clip(np.rint(wide(x) / wide(scale)) + wide(zero), low, high)


def elementwise():
    x, y = floats(2, 3, 4), floats(4)
    case("add_broadcast", node("Add", ["x", "y"], ["z"]), {"x": x, "y": y}, {"z": f32(wide(x) + y)})
    x, y = floats(3, 1), floats(1, 5)
    case("mul_broadcast", node("Mul", ["x", "y"], ["z"]), {"x": x, "y": y}, {"z": f32(wide(x) * y)})
    x, y = np.float32(1.5), np.float32(-0.25)
    case("add_scalars", node("Add", ["x", "y"], ["z"]), {"x": x, "y": y}, {"z": np.float32(1.25)})
    x = floats(3, 4, 5)
    case("relu", node("Relu", ["x"], ["y"]), {"x": x}, {"y": np.maximum(x, 0)})
    case("sigmoid", node("Sigmoid", ["x"], ["y"]), {"x": x * 4}, {"y": f32(1 / (1 + np.exp(-wide(x * 4))))})
    case("erf", node("Erf", ["x"], ["y"]), {"x": x}, {"y": f32(np.vectorize(math.erf)(wide(x)))})
    case("softmax_middle", node("Softmax", ["x"], ["y"], axis=1), {"x": x}, {"y": softmax(x, 1)})
    case("softmax_last", node("Softmax", ["x"], ["y"], axis=-1), {"x": x * 9}, {"y": softmax(x * 9, -1)})
    condition = RNG.random((3, 1, 5)) < 0.5
    a, b = floats(3, 4, 5), floats(4, 5)
    case(
        "where",
        node("Where", ["c", "a", "b"], ["y"]),
        {"c": condition, "a": a, "b": b},
        {"y": np.where(condition, a, b)},
    )
    x = np.zeros((0, 4), np.float32)
    case("relu_of_nothing", node("Relu", ["x"], ["y"]), {"x": x}, {"y": x})
    x = np.array([np.nan, np.inf, -np.inf, 1.0], np.float32)
    case("add_not_finite", node("Add", ["x", "x"], ["y"]), {"x": x}, {"y": x + x})
    # A node that bears the name of a value is legal, and so is an operator chain whose middle has a graph output.
    x = floats(6)
    chain = [
        helper.make_node("Relu", ["x"], ["y"], name="z"),
        helper.make_node("Neg", ["y"], ["z"], name="y"),
    ]
    case("names_collide", chain, {"x": x}, {"y": np.maximum(x, 0), "z": -np.maximum(x, 0)})


def linear():
    a, b = floats(5, 7), floats(7, 3)
    case("matmul", node("MatMul", ["a", "b"], ["y"]), {"a": a, "b": b}, {"y": f32(wide(a) @ wide(b))})
    a, w = floats(2, 3, 4, 5), floats(5, 6)
    product = f32(wide(a) @ wide(w))
    case("matmul_batched", node("MatMul", ["a", "w"], ["y"]), {"a": a}, {"y": product}, {"w": w})
    # Sizes that fill more than one tile of any blocked kernel, and are no multiple of one.
    a, w = floats(67, 129), floats(129, 95)
    case("matmul_odd_sizes", node("MatMul", ["a", "w"], ["y"]), {"a": a}, {"y": f32(wide(a) @ wide(w))}, {"w": w})
    a, b, c = floats(4, 3), floats(5, 4), floats(1, 5)
    y = 0.25 * (wide(a).T @ wide(b).T) + 0.35 * wide(c)
    gemm = node("Gemm", ["a", "b", "c"], ["y"], alpha=0.25, beta=0.35, transA=1, transB=1)
    case("gemm", gemm, {"a": a}, {"y": f32(y)}, {"b": b, "c": c})
    a, w = floats(3, 8), floats(8, 4)
    y = f32(wide(a) @ wide(w))
    matmul = node("MatMul", ["a", "w"], ["y"])
    case("external_plain", matmul, {"a": a}, {"y": y}, {"w": w}, external=("external_plain.onnx.data", True))
    case("external_bare", matmul, {"a": a}, {"y": y}, {"w": w}, external=("external_bare.weights", False))


def convolutions():
    def conv_case(name, x, w, b, pads, strides=None, dilations=None, groups=1):
        rank = x.ndim - 2
        strides, dilations = strides or [1] * rank, dilations or [1] * rank
        kind = node(
            "Conv",
            ["x", "w"] + (["b"] if b is not None else []),
            ["y"],
            pads=pads,
            strides=strides,
            dilations=dilations,
            group=groups,
        )
        constants = {"w": w} | ({"b": b} if b is not None else {})
        case(name, kind, {"x": x}, {"y": conv(x, w, b, pads, strides, dilations, groups)}, constants)

    conv_case("conv_3x3", floats(1, 3, 9, 8), floats(5, 3, 3, 3), floats(5), [1, 1, 1, 1], [2, 1])
    conv_case("conv_1x1", floats(2, 4, 5, 5), floats(6, 4, 1, 1), None, [0, 0, 0, 0])
    conv_case("conv_depthwise", floats(1, 6, 7, 7), floats(6, 1, 3, 3), floats(6), [1, 1, 1, 1], groups=6)
    conv_case("conv_grouped", floats(1, 6, 6, 6), floats(4, 3, 3, 3), floats(4), [0, 0, 0, 0], groups=2)
    conv_case("conv_dilated", floats(1, 2, 9, 9), floats(3, 2, 3, 3), None, [2, 2, 2, 2], dilations=[2, 2])
    conv_case("conv_1d_causal", floats(1, 4, 12), floats(4, 1, 4), floats(4), [3, 0], groups=4)
    # Two thirds of the weights denormal, as trained models have them: neither wrong nor slow.
    w = floats(4, 3, 3, 3)
    w[RNG.random(w.shape) < 0.66] *= np.float32(1e-40)
    conv_case("conv_denormal_weights", floats(1, 3, 8, 8), w, floats(4), [1, 1, 1, 1])
    x = floats(1, 2, 7, 6)
    maximum = node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    case("maxpool", maximum, {"x": x}, {"y": pool(x, [3, 3], [2, 2], [1, 1, 1, 1], max)})
    average = node("AveragePool", ["x"], ["y"], kernel_shape=[3, 2], strides=[1, 2], pads=[1, 0, 1, 0])
    mean = pool(x, [3, 2], [1, 2], [1, 0, 1, 0], lambda window: sum(window) / len(window))
    case("averagepool", average, {"x": x}, {"y": mean})


def reductions():
    x, scale, bias = floats(2, 5, 8), floats(8), floats(8)
    mean = wide(x).mean(-1, keepdims=True)
    variance = ((wide(x) - mean) ** 2).mean(-1, keepdims=True)
    y = (wide(x) - mean) / np.sqrt(variance + 1e-5) * scale + bias
    kind = node("LayerNormalization", ["x", "scale", "bias"], ["y"], axis=-1, epsilon=1e-5)
    case("layer_normalization", kind, {"x": x}, {"y": f32(y)}, {"scale": scale, "bias": bias})
    x = floats(3, 4, 5)
    kind = node("ReduceMean", ["x", "axes"], ["y"], keepdims=0)
    case("reduce_mean", kind, {"x": x}, {"y": f32(wide(x).mean(axis=(0, 2)))}, {"axes": np.array([0, 2])}, opset=18)
    for name, axis, exclusive, reverse in [
        ("cumsum_last", 2, 0, 0),
        ("cumsum_middle", 1, 0, 0),
        ("cumsum_exclusive_reverse", 2, 1, 1),
    ]:
        y = wide(x)
        y = np.flip(y, axis) if reverse else y
        total = np.cumsum(y, axis)
        total = total - y if exclusive else total
        total = np.flip(total, axis) if reverse else total
        kind = node("CumSum", ["x", "axis"], ["y"], exclusive=exclusive, reverse=reverse)
        case(name, kind, {"x": x}, {"y": f32(total)}, {"axis": np.array(axis)})
    x = RNG.permutation(20).reshape(4, 5).astype(np.float32)
    order = np.argsort(-x, axis=1)[:, :3]
    kind = node("TopK", ["x", "k"], ["values", "indices"], axis=1)
    case(
        "topk",
        kind,
        {"x": x},
        {"values": np.take_along_axis(x, order, 1), "indices": order.astype(np.int64)},
        {"k": np.array([3])},
    )


def movement():
    x = floats(2, 3, 4)
    case("transpose", node("Transpose", ["x"], ["y"], perm=[2, 0, 1]), {"x": x}, {"y": x.transpose(2, 0, 1).copy()})
    case("reshape", node("Reshape", ["x", "s"], ["y"]), {"x": x}, {"y": x.reshape(4, 6)}, {"s": np.array([4, -1])})
    y = floats(2, 5, 4)
    case(
        "concat", node("Concat", ["x", "y"], ["z"], axis=1), {"x": x, "y": y}, {"z": np.concatenate([x, y], axis=1)}
    )
    x = floats(6, 7)
    bounds = {
        "starts": np.array([1, -1]),
        "ends": np.array([100, -7]),
        "axes": np.array([0, 1]),
        "steps": np.array([2, -2]),
    }
    kind = node("Slice", ["x", "starts", "ends", "axes", "steps"], ["y"])
    case("slice_backwards", kind, {"x": x}, {"y": x[1:100:2, -1:-7:-2].copy()}, bounds)
    indices = np.array([[0, -1], [3, 2]], np.int64)
    for axis in [0, 1]:
        kind = node("Gather", ["x", "i"], ["y"], axis=axis)
        case(f"gather_axis{axis}", kind, {"x": x, "i": indices}, {"y": np.take(x, indices, axis=axis)})
    case("split", node("Split", ["x"], ["a", "b"], axis=0), {"x": x}, {"a": x[:3].copy(), "b": x[3:].copy()}, opset=13)


def types():
    x = np.array([[1.7, -1.7, 0.0], [250.0, -3.2, 7.5]], np.float32)
    case("cast_f32_i32", node("Cast", ["x"], ["y"], to=TensorProto.INT32), {"x": x}, {"y": x.astype(np.int32)})
    x = np.array([0.0, 0.5, -2.0, 1.0], np.float32)
    case("cast_f32_bool", node("Cast", ["x"], ["y"], to=TensorProto.BOOL), {"x": x}, {"y": x != 0})
    x = np.array([3, -9, 2**31 - 1], np.int64)
    case("cast_i64_f32", node("Cast", ["x"], ["y"], to=TensorProto.FLOAT), {"x": x}, {"y": x.astype(np.float32)})
    a, b = np.array([2, -5, 40], np.int64), np.array([3, 5, 2], np.int64)
    case("add_i64", node("Add", ["a", "b"], ["y"]), {"a": a, "b": b}, {"y": a + b})
    big = np.array([3_000_000_000, -3_000_000_001, 5], np.int64)
    case("add_i64_large", node("Add", ["a", "b"], ["y"]), {"a": big, "b": b}, {"y": big + b})
    # Larger than i32 only inside the model: the ports look harmless.
    kind = [node("Mul", ["a", "w"], ["p"]), node("Div", ["p", "w"], ["y"])]
    case("i64_large_inside", kind, {"a": a}, {"y": a}, {"w": np.array([2_000_000_011])})
    a, b = np.array([2, -5, 40], np.int32), np.array([3, 5, 2], np.int32)
    case("mul_i32", node("Mul", ["a", "b"], ["y"]), {"a": a, "b": b}, {"y": a * b})
    x = RNG.integers(0, 256, (3, 4)).astype(np.uint8)
    case("transpose_u8", node("Transpose", ["x"], ["y"], perm=[1, 0]), {"x": x}, {"y": x.T.copy()})
    x = x.astype(np.int8)
    case("transpose_i8", node("Transpose", ["x"], ["y"], perm=[1, 0]), {"x": x}, {"y": x.T.copy()})
    a, b = RNG.random((3, 4)) < 0.5, RNG.random((3, 4)) < 0.5
    kind = [node("And", ["a", "b"], ["c"]), node("Not", ["c"], ["y"])]
    case("bool_logic", kind, {"a": a, "b": b}, {"y": ~(a & b)})
    a, w = floats(4, 6).astype(np.float16), floats(6, 5).astype(np.float16)
    case("matmul_f16", node("MatMul", ["a", "w"], ["y"]), {"a": a}, {"y": (wide(a) @ wide(w)).astype(np.float16)}, {"w": w})
    a, b = RNG.standard_normal(5), RNG.standard_normal(5)
    case("add_f64", node("Add", ["a", "b"], ["y"]), {"a": a, "b": b}, {"y": a + b})


def quantised():
    x = floats(2, 3, 4) * 3
    scale, zero = np.float32(0.05), np.uint8(120)
    kind = node("QuantizeLinear", ["x", "s", "z"], ["y"])
    case("quantize_u8", kind, {"x": x}, {"y": quantise(x, scale, zero, 0, 255).astype(np.uint8)}, {"s": scale, "z": zero})
    q = RNG.integers(-128, 128, (2, 3, 4)).astype(np.int8)
    scales, zeros = np.array([0.1, 0.5, 2.0], np.float32), np.zeros(3, np.int8)
    kind = node("DequantizeLinear", ["x", "s", "z"], ["y"], axis=1)
    case("dequantize_i8_axis", kind, {"x": q}, {"y": f32(wide(q) * wide(scales)[:, None])}, {"s": scales, "z": zeros})
    a, w = RNG.integers(0, 256, (4, 9)).astype(np.uint8), RNG.integers(-128, 128, (9, 5)).astype(np.int8)
    za, zw = np.uint8(117), np.int8(3)
    product = (a.astype(np.int64) - int(za)) @ (w.astype(np.int64) - int(zw))
    kind = node("MatMulInteger", ["a", "w", "za", "zw"], ["y"])
    case("matmul_integer", kind, {"a": a}, {"y": product.astype(np.int32)}, {"w": w, "za": za, "zw": zw})
    sa, sw, sy, zy = np.float32(0.02), np.float32(0.03), np.float32(0.9), np.uint8(128)
    y = quantise(product * float(sa) * float(sw), sy, zy, 0, 255).astype(np.uint8)
    kind = node("QLinearMatMul", ["a", "sa", "za", "w", "sw", "zw", "sy", "zy"], ["y"])
    constants = {"sa": sa, "za": za, "w": w, "sw": sw, "zw": zw, "sy": sy, "zy": zy}
    case("qlinear_matmul", kind, {"a": a}, {"y": y}, constants)
    # Quantised weights between float tensors, as exporters write them.
    x, w = floats(3, 8), RNG.integers(-127, 128, (8, 4)).astype(np.int8)
    kind = [node("DequantizeLinear", ["w", "s", "z"], ["d"], axis=1), node("MatMul", ["x", "d"], ["y"])]
    scales = np.array([0.01, 0.02, 0.005, 0.03], np.float32)
    y = f32(wide(x) @ (wide(w) * wide(scales)))
    case("qdq_weights", kind, {"x": x}, {"y": y}, {"w": w, "s": scales, "z": np.zeros(4, np.int8)})


def control_flow():
    # y = x, then four times y = y * 2 + w, where w is captured from outside; every y is a scan output.
    x, w = floats(3), floats(3)
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["go_on"]),
            node("Mul", ["y_in", "two"], ["doubled"]),
            node("Add", ["doubled", "w"], ["y_out"]),
            node("Identity", ["y_out"], ["scan"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("iteration", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y_in", TensorProto.FLOAT, [3]),
        ],
        [
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("y_out", TensorProto.FLOAT, [3]),
            helper.make_tensor_value_info("scan", TensorProto.FLOAT, [3]),
        ],
        [numpy_helper.from_array(np.float32(2), "two")],
    )
    steps, y = [], wide(x)
    for _ in range(4):
        y = y * 2 + w
        steps.append(y)
    kind = node("Loop", ["count", "start", "x"], ["y", "all"], body=body)
    constants = {"count": np.array(4), "start": np.array(True)}
    case("loop", kind, {"x": x, "w": w}, {"y": f32(y), "all": f32(np.stack(steps))}, constants)

    def branch(name, kind):
        return helper.make_graph(
            [node(kind, ["x"], [name])], name, [], [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3])]
        )

    choose = node("If", ["c"], ["y"], then_branch=branch("then", "Neg"), else_branch=branch("other", "Abs"))
    for name, condition, y in [("if_true", True, -x), ("if_false", False, abs(x))]:
        case(name, choose, {"c": np.array(condition), "x": x}, {"y": y})


def transforms():
    x = floats(2, 12, 1)
    case("dft_two_sided", node("DFT", ["x"], ["y"], axis=1), {"x": x}, {"y": dft(x, 1)})
    case("dft_one_sided", node("DFT", ["x"], ["y"], axis=1, onesided=1), {"x": x}, {"y": dft(x, 1, onesided=True)})
    z = floats(2, 10, 2)
    case("dft_complex", node("DFT", ["x"], ["y"], axis=1), {"x": z}, {"y": dft(z, 1)})
    case("dft_inverse", node("DFT", ["x"], ["y"], axis=1, inverse=1), {"x": z}, {"y": dft(z, 1, inverse=True)})
    z = floats(3, 4, 5, 2)
    for axis in [0, 1]:
        kind = node("DFT", ["x", "", "axis"], ["y"])
        case(f"dft20_axis{axis}", kind, {"x": z}, {"y": dft(z, axis)}, {"axis": np.array(axis)}, opset=20)


def special():
    """Models for checks that are not about an operator's numbers."""
    # 1e-20 · 1e-20 is denormal; so is 1e-40, which times 1e30 is not. Flushed, both products are 0.
    x = np.array([1e-20, 1e-40] * 8, np.float32)
    w = np.array([1e-20, 1e30] * 8, np.float32)
    case("denormals_flushed", node("Mul", ["x", "w"], ["y"]), {"x": x}, {"y": np.zeros(16, np.float32)}, {"w": w})


def main():
    FOLDER.mkdir(parents=True, exist_ok=True)
    for group in [
        elementwise, linear, convolutions, reductions, movement, types, quantised, control_flow, transforms, special,
    ]:
        group()
    sizes = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{len(written)} models, {sizes} bytes in {FOLDER}")


if __name__ == "__main__":
    sys.exit(main())
