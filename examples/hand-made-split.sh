#!/usr/bin/env bash
# Profiles a small model on two units, prices a split made by hand, times it against each single unit, and checks the result.
set -euo pipefail
cd "$(dirname "$0")/.."
trefoil=$PWD/target/release/trefoil
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export TREFOIL_CACHE=$work/cache

"$trefoil" make-model small.onnx
"$trefoil" profile small.onnx -u rten:CPU -u rten:CPU@0 --quick --no-refine -o profile.json >/dev/null

# First half on one core, the rest on all cores.
count=$("$trefoil" inspect small.onnx --json | grep -c '"signature"')
{
  echo '{'
  for ((index = 0; index < count; index++)); do
    [ "$index" -lt $((count / 2)) ] && unit=rten:CPU@0 || unit=rten:CPU
    [ "$index" -eq $((count - 1)) ] && comma= || comma=,
    echo "  \"$index\": \"$unit\"$comma"
  done
  echo '}'
} >split.json

"$trefoil" plan profile.json --import split.json -o plan.json
"$trefoil" run small.onnx --profile profile.json --plan plan.json --quick --rounds 2 --verify
