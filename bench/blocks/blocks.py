"""One transformer block of Wan2.1-1.3B in Trefoil (w8a8), diffusers (f32), and OpenVINO (f32, INT8 weights, static W8A8 through nncf).

All have the same random weights. Engines take turns, round by round; each is a process bound to the cores that are compared. Prints a Markdown
table with times (median, and the range of the rounds) and the ratio to Trefoil. Started by bench/blocks/run.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
# Widths of the released model; 512 text rows of 4096 become 512 × 1536 before the blocks.
CONFIG = {"heads": 12, "head_dim": 128, "ffn": 8960, "text_dim": 4096, "text_rows": 512, "frame": [30, 52]}
# One step of one block, so that a clip is the block that is timed.
SAMPLER = {"solver": "euler", "sigmas": [1.0, 0.0], "timesteps": [1000], "guidance": 1.0}
PEERS = ["diffusers f32", "OpenVINO f32", "OpenVINO INT8 weights", "OpenVINO static W8A8"]
OURS = "Trefoil w8a8"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trefoil", required=True)
    parser.add_argument("--tokens", default="1560,7800", help="tokens of a clip, multiples of 1560")
    parser.add_argument("--cores", default="", help="cores to use, like 0,1; all that this process may use by default")
    parser.add_argument("--rounds", type=int, default=0, help="rounds of every size (4 of the smallest, 2 of others by default)")
    parser.add_argument("--peers", default=",".join(PEERS[:1] + PEERS[2:]), help=f"peers to run: {', '.join(PEERS)}")
    parser.add_argument("--json", help="where to write all times")
    return parser.parse_args()


def cores_text(cores):
    """As trefoil writes cores: 0-1 or 0+2."""
    first, last = cores[0], cores[-1]
    if len(cores) == 1:
        return str(first)
    return f"{first}-{last}" if cores == list(range(first, last + 1)) else "+".join(map(str, cores))


class Peer:
    """A peer in a process of its own that waits for orders."""

    def __init__(self, name, cores, folder):
        self.name, self.cores = name, cores
        environment = dict(os.environ, OMP_NUM_THREADS=str(len(cores)), OMP_WAIT_POLICY="PASSIVE")
        command = [sys.executable, os.path.join(HERE, "peers.py"), name, ",".join(map(str, cores)), folder]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, tokens, runs):
        """Milliseconds of `runs` blocks."""
        self.process.stdin.write(f"{tokens} {runs}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} on cores {self.cores} ended without an answer")
        return json.loads(line)

    def end(self):
        self.process.stdin.close()
        self.process.wait()


class Trefoil:
    """A block of ours, measured by `trefoil video rates` in a new process each time."""

    def __init__(self, program, artefact, cores):
        self.name, self.cores = OURS, cores
        self.command = [program, "video", "rates", artefact, "--path", "w8a8", "--engines", f"cpu@{cores_text(cores)}"]

    def ask(self, tokens, runs):
        command = self.command + ["--tokens", str(tokens), "--samples", str(max(1, runs)), "--json"]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rate = json.loads(done.stdout)["engines"][0]["solo_ms"]
        return {"ms": [rate["median"]] * runs if runs else []}

    def end(self):
        pass


def pack(program, folder):
    """The block's weights as our artefact, with activation scales found on random text and noise, as the peers' are."""
    import torch
    from safetensors.torch import save_file

    with open(os.path.join(folder, "sampler.json"), "w") as file:
        json.dump(SAMPLER, file)
    artefact = os.path.join(folder, "block.trefoil")
    quiet = {"check": True, "stdout": subprocess.DEVNULL}
    subprocess.run(
        [program, "video", "pack", os.path.join(folder, "transformer"), "--sampler", os.path.join(folder, "sampler.json"), "-o", artefact],
        **quiet,
    )
    torch.manual_seed(1)
    inputs = os.path.join(folder, "inputs.safetensors")
    save_file({"noise": torch.randn(1, 16, 1, 60, 104), "text": torch.randn(1, CONFIG["text_rows"], CONFIG["text_dim"])}, inputs)
    subprocess.run(
        [program, "video", "calibrate", artefact, "--noise", f"{inputs}:noise", "--text", f"{inputs}:text"], **quiet
    )
    return artefact


def machine():
    name = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), platform.processor())
    return f"{name}, {time.strftime('%Y-%m-%d')}"


def main():
    options = arguments()
    allowed = sorted(os.sched_getaffinity(0))
    cores = [int(core) for core in options.cores.split(",") if core] or allowed
    if not set(cores) <= set(allowed):
        raise SystemExit(f"cores {cores} are not all among those that this process may use ({allowed})")
    sizes = [int(tokens) for tokens in options.tokens.split(",")]
    frame = CONFIG["frame"][0] * CONFIG["frame"][1]
    if any(tokens <= 0 or tokens % frame for tokens in sizes):
        raise SystemExit(f"--tokens are multiples of {frame}, one latent frame of 832×480")
    peers = [peer for peer in options.peers.split(",") if peer]
    if unknown := [peer for peer in peers if peer not in PEERS]:
        raise SystemExit(f"unknown peer {unknown[0]}; choose from {', '.join(PEERS)}")
    if not os.path.exists(options.trefoil):
        raise SystemExit(f"{options.trefoil} is not there; ./demo or ./test builds it")
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Weights and OpenVINO's models are made once, on all cores.
        command = [sys.executable, os.path.join(HERE, "peers.py"), "make", ",".join(map(str, cores)), folder]
        made = subprocess.run(command + [json.dumps(CONFIG | {"sizes": sizes})], capture_output=True, text=True)
        if made.returncode:
            # Otherwise it is progress bars.
            raise SystemExit(f"the peers' models could not be made:\n{made.stderr}")
        versions = json.loads(made.stdout)
        artefact = pack(options.trefoil, folder)
        print(f"made everything in {time.monotonic() - begun:.0f} s", file=sys.stderr)
        sets = [cores[:1]] if len(cores) == 1 else [cores[:1], cores]
        times = {}
        for these in sets:
            engines = [Trefoil(options.trefoil, artefact, these)] + [Peer(peer, these, folder) for peer in peers]
            for tokens in sizes:
                rounds = options.rounds or (4 if tokens == min(sizes) else 2)
                for engine in engines[1:]:
                    # Compiles the model for this size; the first size also runs once, which is not counted.
                    engine.ask(tokens, 1 if tokens == sizes[0] else 0)
                for _ in range(rounds):
                    for engine in engines:
                        key = (tokens, len(these), engine.name)
                        times.setdefault(key, []).extend(engine.ask(tokens, 1)["ms"])
                print(f"{tokens} tokens on {len(these)} core(s), {time.monotonic() - begun:.0f} s", file=sys.stderr)
            for engine in engines:
                engine.end()
    print(f"one block, {machine()}; {', '.join(versions.values())}\n")
    print("| tokens | cores | engine | time per block | range | rounds | time / Trefoil |")
    print("|--:|--:|---|--:|--:|--:|--:|")
    for (tokens, count, name), values in sorted(times.items(), key=lambda row: row[0][:2]):
        ours = statistics.median(times[tokens, count, OURS])
        median = statistics.median(values)
        span = f"{min(values):.0f}–{max(values):.0f}"
        print(f"| {tokens} | {count} | {name} | {median:.0f} ms | {span} | {len(values)} | {median / ours:.2f}× |")
    print(f"\n{time.monotonic() - begun:.0f} s for all of it", file=sys.stderr)
    if options.json:
        rows = [{"tokens": tokens, "cores": count, "engine": name, "ms": values} for (tokens, count, name), values in times.items()]
        with open(options.json + ".partial", "w") as file:
            json.dump({"versions": versions, "machine": machine(), "rows": rows}, file, indent=1)
        os.replace(options.json + ".partial", options.json)


if __name__ == "__main__":
    main()
