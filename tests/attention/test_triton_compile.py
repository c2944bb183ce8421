"""The kernels compiled for GPUs that are not here: no register is spilled, shared memory fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_every_kernel_fits_sm_80_sm_90_and_gfx942(repository: Path, tmp_path: Path) -> None:
    """In a process of its own: TRITON_INTERPRET acts when the kernels are defined.

    Here one variant per kernel and path; ``bench/triton_resources.py --all`` compiles them all.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    table = tmp_path / "table.json"
    command = [sys.executable, repository / "bench/triton_resources.py", "--json", table]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(table.read_text())
    kernels = {
        "decode_kernel",
        "merge_kernel",
        "prefill_kernel",
        "shared_prefix_kernel",
        "write_kv_kernel",
        "copy_blocks_kernel",
    }
    for target in ("sm_80", "sm_90", "gfx942"):
        assert {row["kernel"] for row in rows if row["target"] == target} == kernels
    assert all(row["spilled"] == 0 and row["registers"] > 0 and row["shared"] <= row["limit"] for row in rows)
