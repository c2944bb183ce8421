#!/usr/bin/env bash
# Makes the environment that every other target of the Makefile uses. Reads its settings from there
# (PYTHON, VENV, TORCH, TORCH_INDEX, TRITON, MODEL_PACKAGE, PAGEDKV_NATIVE, STAMP); run it through `make setup`.
set -euo pipefail

stop() {
  printf 'set-up cannot go on: %s\n' "$1" >&2
  exit 1
}

say() { printf '\033[1m%s\033[0m\n' "$1"; }
[ -t 1 ] || say() { printf '%s\n' "$1"; }

# ---- what the machine must bring --------------------------------------------------------------------------------
command -v "$PYTHON" >/dev/null || stop "no $PYTHON here. Install Python 3.10 or later (Debian: apt-get install python3), or name one: make PYTHON=..."
"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || stop "$("$PYTHON" --version) is too old; Python 3.10 or later is needed"
"$PYTHON" -c 'import venv, ensurepip' 2>/dev/null || stop "$PYTHON has no venv or ensurepip. Debian: apt-get install python3-venv"

if [ "$PAGEDKV_NATIVE" != 0 ]; then
  without="or install without the native kernels: make PAGEDKV_NATIVE=0"
  header=$("$PYTHON" -c 'import os, sysconfig; print(os.path.join(sysconfig.get_paths()["include"], "Python.h"))')
  [ -f "$header" ] || stop "no $header. Debian: apt-get install python3-dev, $without"
  compiler=${CXX:-c++}
  command -v "${compiler%% *}" >/dev/null || stop "no C++ compiler ($compiler). Debian: apt-get install g++, $without"
  probe=$(mktemp -d)
  trap 'rm -rf "$probe"' EXIT
  printf '#include <optional>\n#include <omp.h>\nint main() { std::optional<int> n = omp_get_max_threads(); return n ? 0 : 1; }\n' >"$probe/probe.cpp"
  $compiler -std=c++17 -fopenmp "$probe/probe.cpp" -o "$probe/probe" 2>"$probe/log" ||
    stop "$compiler does not build a C++17 program with OpenMP. Debian: apt-get install g++, $without
$(head -n 5 "$probe/log")"
fi

# ---- the environment --------------------------------------------------------------------------------------------
[ -x "$VENV/bin/python" ] || { say "making $VENV with $("$PYTHON" --version)"; "$PYTHON" -m venv "$VENV"; }
rm -f "$VENV"/.set-up-*
python="$VENV/bin/python"
pip() { "$python" -m pip --disable-pip-version-check install --quiet "$@"; }
torch_pip=pip
if [ -t 1 ]; then torch_pip="$python -m pip --disable-pip-version-check install"; fi  # a CUDA build is 2-3 GB: show it coming

say "installing $TORCH"
pip --constraint constraints.txt pip
$torch_pip --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH"
"$python" - <<'PY'
import importlib.metadata as metadata
from pathlib import Path

size = sum(Path(f.locate()).stat().st_size for f in metadata.files("torch") or [] if Path(f.locate()).is_file())
version = metadata.version("torch")
build = version.partition("+")[2] or ("CUDA" if any(d.startswith("nvidia") for d in metadata.requires("torch") or []) else "CPU")
others = [d for d in metadata.distributions() if (d.metadata["Name"] or "").startswith("nvidia-")]
size += sum(Path(f.locate()).stat().st_size for d in others for f in d.files or [] if Path(f.locate()).is_file())
print(f"torch {version}: the {build} build, {size / 2**20:,.0f} MiB" + (f" with {len(others)} CUDA packages" if others else ""))
PY

say "installing the pinned dependencies"
pip --constraint constraints.txt --group build
say "building pagedkv$([ "$PAGEDKV_NATIVE" = 0 ] && echo ' without native kernels' || echo ' and its native kernels')"
pip --constraint constraints.txt --group dev --no-build-isolation --editable '.[server,structured,plot]'

# A CUDA build of torch brought its own Triton; elsewhere the kernels run in Triton's interpreter, for the tests.
if [ "$(uname -s)" = Linux ] && ! "$python" -m pip show --quiet triton 2>/dev/null; then pip "$TRITON"; fi

say "installing the default model ($MODEL_PACKAGE)"
pip --no-deps "$MODEL_PACKAGE"

touch "$STAMP"
say "set-up done: $("$VENV/bin/pagedkv" --version)"
