#!/usr/bin/env bash
# csrc with the address and undefined-behaviour sanitizers, and every kernel check run under them.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
cmake -S csrc/check -B build/sanitize -G Ninja -DPAGEDKV_SANITIZE=ON >/dev/null
cmake --build build/sanitize
OMP_NUM_THREADS=2 build/sanitize/pagedkv_check
