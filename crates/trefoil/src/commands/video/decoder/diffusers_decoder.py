"""Decodes a latent with diffusers' AutoencoderKLWan and prints times and memory as JSON. Started by `trefoil bench decoder`."""

import argparse
import glob
import json
import os
import resource
import time


def cores_of(text):
    """`0-3,7` as a set."""
    cores = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="print the versions and end")
    parser.add_argument("--weights", help="folder with config.json and *.safetensors")
    parser.add_argument("--latent", help="safetensors file with `latent`")
    parser.add_argument("--frames", help="where to write `frames`")
    parser.add_argument("--cores", default="")
    return parser.parse_args()


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main():
    options = arguments()
    cores = cores_of(options.cores)
    if cores:
        # Before torch starts threads: they inherit it.
        os.sched_setaffinity(0, cores)
        os.environ["OMP_NUM_THREADS"] = str(len(cores))
    import diffusers
    import torch
    from diffusers import AutoencoderKLWan
    from safetensors.torch import load_file, save_file

    version = f"diffusers {diffusers.__version__}, torch {torch.__version__}"
    if options.check:
        print(json.dumps(version))
        return
    torch.set_num_threads(max(1, len(cores)))
    latent = load_file(options.latent)["latent"]
    before = resident_bytes()
    with open(os.path.join(options.weights, "config.json")) as file:
        config = json.load(file)
    with torch.device("meta"):
        vae = AutoencoderKLWan.from_config(config)
    del vae.encoder, vae.quant_conv
    expected = vae.state_dict()
    weights = {}
    for path in glob.glob(os.path.join(options.weights, "*.safetensors")):
        for name, tensor in load_file(path).items():
            if name in expected:
                # A norm's gain may be stored without its trailing ones.
                weights[name] = tensor.float().reshape(expected[name].shape)
    vae.load_state_dict(weights, strict=True, assign=True)
    vae.eval()
    del weights
    shape = (1, -1, 1, 1, 1)
    mean, deviation = (torch.tensor(vae.config[key]).view(shape) for key in ("latents_mean", "latents_std"))
    latent = latent * deviation + mean
    seconds = []
    decode_frame = vae.decoder.forward

    def timed(*positional, **named):
        start = time.perf_counter()
        result = decode_frame(*positional, **named)
        seconds.append(time.perf_counter() - start)
        return result

    vae.decoder.forward = timed
    # The peak of loading is not what is compared; where the kernel does not let it be reset, it counts.
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pass
    with torch.inference_mode():
        start = time.perf_counter()
        frames = vae.decode(latent).sample
        total = time.perf_counter() - start
    with open("/proc/self/status") as file:
        peak = next((int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:")), peak_bytes())
    save_file({"frames": frames.float().contiguous()}, options.frames)
    result = {
        "frame_seconds": seconds,
        "seconds": total,
        "peak_bytes": peak,
        "before_bytes": before,
        "predicted_bytes": None,
        "version": version,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
