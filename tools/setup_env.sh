#!/usr/bin/env bash
# Makes $VENV and installs gpupipe into it in editable form, with torch and the GPU packages that fit this machine.
# Usage: tools/setup_env.sh [EXTRAS]   (comma separated; settings come from the environment, see the head of the Makefile)
set -euo pipefail
cd "$(dirname "$0")/.."

extras=${1:-}
venv=${VENV:-.venv}
torch=${TORCH:?the version of torch to install, see the Makefile}

say() { printf 'setup: %s\n' "$*" >&2; }

# A name on PATH is not enough: version managers leave shims of interpreters that they do not have.
usable() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    if usable "$PYTHON"; then echo "$PYTHON"; return; fi
    say "PYTHON=$PYTHON is not a Python >= 3.11 that has the modules venv and ensurepip"; exit 1
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    if usable "$candidate"; then echo "$candidate"; return; fi
  done
  say "no Python >= 3.11 with the modules venv and ensurepip was found."
  say "What to do: install one (on Debian and Ubuntu: python3 and python3-venv) or name one: make PYTHON=/path/to/python3 ..."
  exit 1
}

# cuda13, cuda12 or none: by what the driver can run, since that is what limits the choice.
find_gpu() {
  local cuda
  cuda=$(nvidia-smi 2>/dev/null | sed -nE 's/.*CUDA( [A-Z]+)? Version: *([0-9]+).*/\2/p' | head -n 1) || true
  case "$cuda" in
    "") echo none ;;
    12) echo cuda12 ;;
    [0-9] | 1[01]) say "this driver runs CUDA $cuda; NVDEC and the kernels need CUDA 12 or newer: using the CPU"; echo none ;;
    *) echo cuda13 ;;
  esac
}

install_torch() {
  if "$venv/bin/python" -c 'import torch' 2>/dev/null; then return; fi
  if [ -n "${TORCH_INDEX:-}" ]; then
    pip_install --index-url "$TORCH_INDEX" "torch==$torch"
  elif [ "$gpu" = none ] && pip_install "torch==$torch+cpu" 2>/dev/null; then
    :
  else
    if [ "$gpu" = none ] && [ "$(uname -s)" = Linux ]; then
      say "no CPU build of torch $torch is in reach of pip: installing the default build, which on x86-64 is a download of"
      say "several GB. To avoid that, stop here and set TORCH_INDEX to the address of PyTorch's CPU wheel index."
    elif [ "$gpu" = cuda12 ]; then
      say "this driver runs CUDA 12; if the default build of torch $torch turns out to need CUDA 13, run 'make clean' and set"
      say "TORCH_INDEX to the address of PyTorch's CUDA 12 wheel index."
    fi
    pip_install "torch==$torch"
  fi
}

pip_install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@"; }

if ! usable "$venv/bin/python"; then
  python=$(find_python)
  say "making $venv with $("$python" --version)"
  "$python" -m venv --clear "$venv"
fi
gpu=${GPU:-auto}
[ "$gpu" != auto ] || gpu=$(find_gpu)
case "$gpu" in
  none | cuda12 | cuda13) ;;
  *) say "GPU=$gpu is not one of auto, none, cuda12, cuda13"; exit 1 ;;
esac
say "GPU packages: $gpu; extras: ${extras:-none}"
install_torch
[ "$gpu" = none ] || extras="$gpu${extras:+,$extras}"
# A CPU build of torch brings no Triton. The oldest one that we serve is the one to test with: what it compiles, later ones
# compile too, but not the other way round. Its interpreter needs a NumPy of its day.
oldest=()
if [ "$gpu" = none ] && [ "$(uname -s)" = Linux ] && [[ ",$extras," == *,dev,* ]]; then oldest=("triton~=3.6.0" "numpy<2.4"); fi
pip_install --editable ".${extras:+[$extras]}" ${oldest[@]+"${oldest[@]}"}
