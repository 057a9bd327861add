#!/usr/bin/env bash
# Linked stages: a text encoder, a vision encoder, a prefix and ten steps of a denoiser, planned and run as one (pi05.json).
set -euo pipefail
cd "$(dirname "$0")/.."
if [ ! -d ../shared/models/zoo_tiny ]; then
  echo "skipped: no ../shared/models beside the repository"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target/release/trefoil run examples/pi05.json -u rten:CPU --quick --rounds 2 --duration 500ms --cache "$work/cache" --output "$work/actions.npz"
