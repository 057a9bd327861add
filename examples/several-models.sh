#!/usr/bin/env bash
# Two models at once: in rounds, then at fixed rates with deadlines; against one after the other, both at once and one per core.
set -euo pipefail
cd "$(dirname "$0")/.."
trefoil=$PWD/target/release/trefoil
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TREFOIL_CACHE=$work/cache

"$trefoil" make-model first.onnx
cp first.onnx second.onnx
"$trefoil" run first.onnx second.onnx -u rten:CPU --quick --rounds 2 --duration 500ms
"$trefoil" run first.onnx second.onnx -u rten:CPU --quick --rounds 2 --duration 500ms --rate 30,5 --deadline-ms 20,100
