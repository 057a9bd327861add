#!/usr/bin/env python3
"""Makes real inputs for the demo's trained models, as .npz files keyed by the models' input names.

usage: demo_inputs.py OUT_DIR SITE_PACKAGES
Writes OUT_DIR/models.tsv: one line a model: name, model file, --shape argument (or -), input file; and OUT_DIR/others.tsv, the same
for trained models of these packages that the demo leaves out and bench/all-models takes.

The page that the text detector sees is drawn here with Pillow's own font; the recogniser sees one line cut out of that page; the
file-type model sees this project's README; the voice model sees 32 ms of a synthesised vowel (a stand-in for speech, and said so).
"""
import os
import sys

import numpy as np
from PIL import Image, ImageDraw, ImageFont

LINES = ["Trefoil runs one network on", "CPU, GPU and NPU at once.", "Where, why, and what it costs."]


def page(width, height, lines, size):
    """An RGB page with dark text on a slightly uneven light ground, as a photographed page has."""
    gradient = np.linspace(0, 18, width)[None, :] + np.linspace(0, 12, height)[:, None]
    noise = np.random.default_rng(7).normal(0, 2.0, (height, width))
    ground = np.clip(238 - gradient + noise, 0, 255).astype(np.uint8)
    image = Image.fromarray(np.repeat(ground[:, :, None], 3, axis=2))
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(size=size)
    for row, line in enumerate(lines):
        draw.text((24, 30 + row * int(size * 2.2)), line, fill=(25, 25, 40), font=font)
    return image


def normalised(image):
    """BGR, scaled to [-1, 1], channels first, with a batch axis: what the PP-OCR models were trained on."""
    pixels = np.asarray(image, np.float32)[:, :, ::-1] / 255.0
    return np.ascontiguousarray(((pixels - 0.5) / 0.5).transpose(2, 0, 1)[None])


def vowel(samples=576, rate=16000):
    """A voiced /a/: a 120 Hz pulse train shaped by three formants."""
    time = np.arange(samples + 2000) / rate
    source = sum(np.sin(2 * np.pi * 120 * k * time) / k for k in range(1, 40))
    spectrum = np.fft.rfft(source)
    frequency = np.fft.rfftfreq(len(source), 1 / rate)
    shape = sum(1 / (1 + ((frequency - centre) / width) ** 2) for centre, width in [(730, 60), (1090, 70), (2440, 120)])
    sound = np.fft.irfft(spectrum * shape, len(source))[1000 : 1000 + samples]
    return (0.3 * sound / np.abs(sound).max()).astype(np.float32)[None]


def file_bytes(path, each=1024, padding=256):
    """First and last 1,024 bytes of a file without surrounding white space, padded with 256: magika's features."""
    content = open(path, "rb").read()
    begin, end = content[:4096].lstrip()[:each], content[-4096:].rstrip()[-each:]
    tokens = list(begin) + [padding] * (each - len(begin)) + [padding] * (each - len(end)) + list(end)
    return np.array([tokens], np.int32)


def main():
    out, site = sys.argv[1:3]
    os.makedirs(out, exist_ok=True)
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    image = page(640, 320, LINES, 34)
    image.save(os.path.join(out, "page.png"))
    line = image.crop((12, 16, 616, 84)).resize((424, 48), Image.BILINEAR)
    line.save(os.path.join(out, "line.png"))
    table = [
        ("ocr-detection", "rapidocr/models/PP-OCRv6_det_small.onnx", {"x": normalised(image)}),
        ("ocr-recognition", "rapidocr/models/PP-OCRv6_rec_small.onnx", {"x": normalised(line)}),
        ("file-type", "magika/models/standard_v3_3/model.onnx", {"bytes": file_bytes(os.path.join(root, "README.md"))}),
        ("voice", "silero_vad/data/silero_vad_openvino_16k.onnx",
         {"input": vowel(), "state": np.zeros((2, 1, 128), np.float32)}),
    ]
    others = [
        ("text-direction", "rapidocr/models/ch_ppocr_mobile_v2.0_cls_mobile.onnx",
         {"x": normalised(line.resize((192, 48), Image.BILINEAR))}),
        ("voice-sequence", "silero_vad/data/silero_vad_16k_sequence.onnx", 
         {"input": vowel(4 * 576).reshape(4, 576), "h": np.zeros((1, 1, 128), np.float32), "c": np.zeros((1, 1, 128), np.float32)}),
        # Its If asks for the sample rate; with another rate it wants another window.
        ("voice-if", "silero_vad/data/silero_vad.onnx",
         {"input": vowel(), "state": np.zeros((2, 1, 128), np.float32), "sr": np.array(16000, np.int64)}),
    ]
    write_table(out, site, "models.tsv", table)
    write_table(out, site, "others.tsv", others)


def write_table(out, site, file_name, table):
    """One .npz a model and one line a model in OUT_DIR/file_name."""
    rows = []
    for name, model, tensors in table:
        path = os.path.join(site, model)
        if not os.path.exists(path):
            print(f"note: {model} is not installed; left out", file=sys.stderr)
            continue
        np.savez_compressed(os.path.join(out, name + ".npz"), **tensors)
        shapes = ";".join(f"{key}={','.join(map(str, value.shape))}" for key, value in tensors.items() if value.shape)
        rows.append("\t".join([name, path, shapes, os.path.join(out, name + ".npz")]))
    with open(os.path.join(out, file_name), "w") as file:
        file.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
