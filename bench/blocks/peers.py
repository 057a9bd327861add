"""The peers of bench/blocks: makes the block's weights and OpenVINO's models, or is one peer that waits for orders.

    peers.py make CORES FOLDER CONFIG   → transformer/ (diffusers layout), OpenVINO's models, inputs of every size; prints the versions
    peers.py NAME CORES FOLDER          reads "TOKENS RUNS" lines and answers with milliseconds
"""

import json
import os
import sys
import time


def bind(text):
    """To these cores, before any library starts threads: they inherit it."""
    cores = {int(core) for core in text.split(",")}
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    return len(cores)


def block_of(transformer):
    """The first block as plain operators with the numbers of diffusers': its rotary positions write into slices, which OpenVINO would run as
    slow scatters."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    class Block(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def attention(self, attention, x, context, positions):
            query = attention.norm_q(attention.to_q(x))
            key = attention.norm_k(attention.to_k(context))
            value = attention.to_v(context)
            query, key, value = (state.unflatten(2, (attention.heads, -1)) for state in (query, key, value))
            if positions is not None:
                query, key = (rotate(state, *positions) for state in (query, key))
            query, key, value = (state.transpose(1, 2) for state in (query, key, value))
            mixed = scaled_dot_product_attention(query, key, value)
            return attention.to_out[0](mixed.transpose(1, 2).flatten(2))

        def forward(self, x, context, modulation, cos, sin):
            block = self.block
            rows = (block.scale_shift_table + modulation).chunk(6, dim=1)
            normed = block.norm1(x) * (1 + rows[1]) + rows[0]
            x = x + self.attention(block.attn1, normed, normed, (cos, sin)) * rows[2]
            x = x + self.attention(block.attn2, block.norm2(x), context, None)
            normed = block.norm3(x) * (1 + rows[4]) + rows[3]
            return x + block.ffn(normed) * rows[5]

    def rotate(state, cos, sin):
        even, odd = state.unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    return Block(transformer.blocks[0]).eval()


def inputs(transformer, config, tokens):
    """Random inputs of a clip of `tokens` tokens: hidden state, text, modulation, and the positions of its grid."""
    import torch

    torch.manual_seed(tokens)
    width = config["heads"] * config["head_dim"]
    rows, columns = config["frame"]
    frames = tokens // (rows * columns)
    grid = (1, 16, frames, 2 * rows, 2 * columns) if frames else (1, 16, 1, 2, 2 * tokens)
    cos, sin = transformer.rope(torch.zeros(grid))
    return torch.randn(1, tokens, width), torch.randn(1, config["text_rows"], width), 0.1 * torch.randn(1, 6, width), cos, sin


def halves(positions):
    """Rotary tables with one entry for a pair, as `block_of` takes them."""
    cos, sin = positions
    return tuple(table.copy() if hasattr(table, "copy") else table.contiguous() for table in (cos[..., 0::2], sin[..., 1::2]))


def make(folder, config, threads):
    import diffusers
    import nncf
    import numpy
    import openvino
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    transformer = diffusers.WanTransformer3DModel(
        num_attention_heads=config["heads"], attention_head_dim=config["head_dim"], ffn_dim=config["ffn"],
        text_dim=config["text_dim"], num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
    ).eval()
    transformer.save_pretrained(os.path.join(folder, "transformer"))
    for tokens in config["sizes"]:
        names = ("x", "context", "modulation", "cos", "sin")
        arrays = (tensor.numpy() for tensor in inputs(transformer, config, tokens))
        numpy.savez(os.path.join(folder, f"{tokens}.npz"), **dict(zip(names, arrays)))
    block = block_of(transformer)
    with torch.inference_mode():
        x, context, modulation, cos, sin = inputs(transformer, config, 130)
        want = transformer.blocks[0](x, context, modulation, (cos, sin))
        example = (x, context, modulation, *halves((cos, sin)))
        difference = float((block(*example) - want).abs().max())
        assert difference < 1e-4, f"the block as plain operators is {difference} off diffusers'"
        model = openvino.convert_model(block, example_input=example)
        feature = config["head_dim"] // 2
        model.reshape({
            0: [1, -1, x.shape[2]], 1: list(context.shape), 2: list(modulation.shape),
            3: [1, -1, 1, feature], 4: [1, -1, 1, feature],
        })
        arrays = [tensor.numpy() for tensor in example]
        samples = []
        for seed in range(2):
            torch.manual_seed(seed)
            samples.append([torch.randn_like(tensor).numpy() if index < 2 else array for index, (tensor, array) in enumerate(zip(example, arrays))])
        xml = lambda name: os.path.join(folder, f"{name}.xml")
        openvino.save_model(model, xml("OpenVINO f32"), compress_to_fp16=False)
        read = lambda: openvino.Core().read_model(xml("OpenVINO f32"))
        weights = nncf.compress_weights(read(), mode=nncf.CompressWeightsMode.INT8_SYM)
        openvino.save_model(weights, xml("OpenVINO INT8 weights"), compress_to_fp16=False)
        static = nncf.quantize(read(), nncf.Dataset(samples), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(samples))
        openvino.save_model(static, xml("OpenVINO static W8A8"), compress_to_fp16=False)
    cosines = {}
    for name in ("OpenVINO f32", "OpenVINO INT8 weights", "OpenVINO static W8A8"):
        compiled = openvino.Core().compile_model(xml(name), "CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"})
        got = torch.from_numpy(compiled(arrays)[0])
        cosines[name] = float(torch.nn.functional.cosine_similarity(got.flatten() - x.flatten(), want.flatten() - x.flatten(), dim=0))
    # What a block adds to its input, against diffusers' f32: a model that computes something else is no peer.
    assert min(cosines.values()) > 0.99, cosines
    versions = {module.__name__: f"{module.__name__} {module.__version__.split('-')[0]}" for module in (torch, diffusers, openvino, nncf)}
    versions["cosines"] = "cosine of what the block adds against diffusers f32: " + ", ".join(f"{name} {value:.4f}" for name, value in cosines.items())
    return versions


def torch_peer(folder, threads):
    import numpy
    import torch
    from diffusers import WanTransformer3DModel

    torch.set_num_threads(threads)
    folder_of_weights = os.path.join(folder, "transformer")
    block = WanTransformer3DModel.from_pretrained(folder_of_weights, torch_dtype=torch.float32).eval().blocks[0]

    def prepare(tokens):
        arrays = numpy.load(os.path.join(folder, f"{tokens}.npz"))
        x, context, modulation, cos, sin = (torch.from_numpy(arrays[name]) for name in arrays.files)

        def run():
            with torch.inference_mode():
                return block(x, context, modulation, (cos, sin))

        return run

    return prepare


def openvino_peer(name, folder, threads):
    import numpy
    import openvino

    core = openvino.Core()
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_PRECISION_HINT": "f32"}

    def prepare(tokens):
        stored = numpy.load(os.path.join(folder, f"{tokens}.npz"))
        x, context, modulation, cos, sin = (stored[name] for name in stored.files)
        arrays = [x, context, modulation, *halves((cos, sin))]
        model = core.read_model(os.path.join(folder, f"{name}.xml"))
        model.reshape({index: list(array.shape) for index, array in enumerate(arrays)})
        request = core.compile_model(model, "CPU", settings).create_infer_request()
        for index, array in enumerate(arrays):
            request.set_input_tensor(index, openvino.Tensor(array, shared_memory=True))

        def run():
            # The request reads these arrays where they lie, so they live as long as it does.
            assert len(arrays) == 5
            request.infer()

        return run

    return prepare


def serve(name, folder, threads, answers):
    prepare = torch_peer(folder, threads) if name == "diffusers f32" else openvino_peer(name, folder, threads)
    known, run = None, None
    for line in sys.stdin:
        tokens, runs = map(int, line.split())
        if tokens != known:
            known, run = tokens, prepare(tokens)
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        answers.write(json.dumps({"ms": times}) + "\n")
        answers.flush()


def main():
    name, cores, folder = sys.argv[1:4]
    threads = bind(cores)
    # Libraries print to standard output as they like; answers have it for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if name == "make":
        answers.write(json.dumps(make(folder, json.loads(sys.argv[4]), threads)))
        answers.close()
    else:
        serve(name, folder, threads, answers)


if __name__ == "__main__":
    main()
