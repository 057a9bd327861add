#!/usr/bin/env bash
# Plans for a machine that is not here: a described SoC with CPU, GPU and NPU. Every number is labelled simulated.
set -euo pipefail
cd "$(dirname "$0")/.."
trefoil=$PWD/target/release/trefoil
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TREFOIL_CACHE=$work/cache

"$trefoil" make-model small.onnx
soc=sim:lunar-lake
"$trefoil" profile small.onnx -u $soc/CPU -u $soc/GPU -u $soc/NPU -o profile.json >/dev/null
for objective in latency energy; do
  "$trefoil" plan profile.json --method sequential --objective $objective
done
"$trefoil" explain profile.json --method sequential 0
