#!/usr/bin/env python3
"""Says in words what the demo's models answered, from the .npz files that Trefoil wrote.

usage: demo_read.py OUT_DIR
"""
import json
import os
import sys

import numpy as np


def metadata(path, key):
    """One entry of an ONNX file's metadata_props (field 14 of ModelProto: a message of key = 1, value = 2)."""
    data = open(path, "rb").read()

    def fields(start, end):
        while start < end:
            tag, start = varint(start)
            if tag & 7 == 2:
                length, start = varint(start)
                yield tag >> 3, start, start + length
                start += length
            elif tag & 7 == 0:
                _, start = varint(start)
            else:
                start += 8 if tag & 7 == 1 else 4

    def varint(at):
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value, at

    for number, start, end in fields(0, len(data)):
        if number == 14:
            entry = {n: data[s:e].decode() for n, s, e in fields(start, end)}
            if entry.get(1) == key:
                return entry.get(2, "")
    return None


def text(logits, characters):
    """Greedy CTC: best class per column, repeats merged, blank (0) dropped."""
    alphabet = [""] + characters + [" "]
    best = logits[0].argmax(-1)
    kept = [c for i, c in enumerate(best) if c != 0 and (i == 0 or c != best[i - 1])]
    return "".join(alphabet[c] for c in kept)


def main():
    out = sys.argv[1]
    for row in open(os.path.join(out, "models.tsv")).read().splitlines():
        name, model, _, _ = row.split("\t")
        answer = os.path.join(out, name + ".out.npz")
        if not os.path.exists(answer):
            continue
        result = np.load(answer)
        first = result[result.files[0]]
        if name == "ocr-detection":
            rows = (first[0, 0] > 0.3).any(axis=1)
            lines = int(np.count_nonzero(rows[1:] & ~rows[:-1]) + rows[0])
            print(f"{name}: {lines} lines of text found on page.png")
        elif name == "ocr-recognition":
            print(f"{name}: line.png reads “{text(first, metadata(model, 'character').splitlines())}”")
        elif name == "file-type":
            labels = json.load(open(os.path.join(os.path.dirname(model), "config.min.json")))["target_labels_space"]
            print(f"{name}: README.md is “{labels[int(first[0].argmax())]}” ({first[0].max():.0%})")
        elif name == "voice":
            print(f"{name}: the synthesised vowel is speech with probability {float(first.reshape(-1)[0]):.2f}")


if __name__ == "__main__":
    main()
