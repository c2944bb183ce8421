"""The NEON kernels, cross-compiled and run under an emulator; and the stand-alone checks as they are built here."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_the_neon_kernels_under_an_emulator(system_tool: Callable[[str, str], str]) -> None:
    compiler = system_tool("aarch64-linux-gnu-g++", "apt-get install g++-aarch64-linux-gnu")
    emulator = system_tool("qemu-aarch64|qemu-aarch64-static", "apt-get install qemu-user")
    cmake = shutil.which("cmake", path=f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("cmake is not installed: pip install cmake")
    build = ROOT / "build" / "aarch64"  # kept, so that only changed files are compiled again
    configure = [cmake, "-S", str(ROOT / "csrc" / "check"), "-B", str(build), "-DCMAKE_SYSTEM_NAME=Linux",
                 "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={compiler}"]  # fmt: skip
    for command in (configure, [cmake, "--build", str(build), "--parallel", "2"]):
        done = subprocess.run(command, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    done = subprocess.run([emulator, str(build / "pagedkv_check"), "neon"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "neon" in done.stdout
    assert "all checks passed" in done.stdout
