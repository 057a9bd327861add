# Shared by ./demo, ./test and .ci/run: makes the project-local Python environment and finds Rust. Sourced, not run.
# Everything it does is printed; everything is skipped when already done, so re-running is safe and quick.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

say() { printf '==> %s\n' "$*"; }
warn() { printf 'note: %s\n' "$*" >&2; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; elif command -v sudo >/dev/null; then sudo "$@"; else
    warn "not root and no sudo: cannot run: $*"; return 1; fi
}

# apt_install PACKAGE...: installs the missing ones; fails quietly off Debian.
apt_install() {
  command -v apt-get >/dev/null || { warn "no apt-get here; install by hand: $*"; return 1; }
  local missing=() package
  for package in "$@"; do dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package"); done
  [ ${#missing[@]} = 0 ] && return 0
  say "installing system packages: ${missing[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

need_rust() {
  command -v cargo >/dev/null || [ ! -f "$HOME/.cargo/env" ] || . "$HOME/.cargo/env"
  command -v cargo >/dev/null || { echo "error: cargo is not on PATH; install Rust 1.95 or newer from rustup.rs" >&2; exit 1; }
  # A C linker is all that cargo needs besides itself.
  command -v cc >/dev/null || apt_install gcc libc6-dev
}

# setup_python requirements-file stamp-name: a pinned environment in .venv. Returns 1 (with a reason) when there is no Python.
setup_python() {
  local requirements=$1 stamp=.venv/.stamp-$2
  if ! command -v python3 >/dev/null; then warn "no python3: OpenVINO, ONNX Runtime and the trained models are left out"; return 1; fi
  if [ -f "$stamp" ] && cmp -s "$requirements" "$stamp"; then return 0; fi
  if [ ! -x .venv/bin/python ]; then
    say "making .venv"
    python3 -m venv .venv 2>/dev/null || { rm -rf .venv; apt_install python3-venv && python3 -m venv .venv; } ||
      { warn "python3 -m venv failed: OpenVINO, ONNX Runtime and the trained models are left out"; return 1; }
  fi
  say "installing pinned wheels from $requirements into .venv"
  # --no-deps: every wheel that is really needed is listed and pinned; nothing else comes along.
  if .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r "$requirements"; then
    cp "$requirements" "$stamp"
  else
    warn "pip could not install $requirements (see above): what is missing is left out"; return 1
  fi
}
