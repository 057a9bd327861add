#!/usr/bin/env bash
# Trefoil as a library: crates/trefoil-run/examples/session.rs plans a small model for the embedded backend and runs it.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
TREFOIL_CACHE=$work/cache cargo run --release --quiet -p trefoil-run --example session
