"""Which backend runs: by name without fallback, by itself with one line in the log; one OpenMP runtime."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from native_isa import ISAS, NATIVE

from pagedkv.attention import backend
from pagedkv.attention.native import NativeAttention
from pagedkv.cache.slots import physical_slot
from pagedkv.errors import BackendUnavailable


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True,
                          text=True, timeout=100)  # fmt: skip


def test_a_backend_asked_for_by_name_is_never_replaced() -> None:
    with pytest.raises(BackendUnavailable, match="unknown"):
        backend.choose("flash")
    with pytest.raises(BackendUnavailable, match="runs on the CPU"):
        backend.choose("native", "cuda")
    assert backend.choose("reference").name == "reference"
    assert backend.choose("native").exact
    assert isinstance(backend.choose("auto", "cpu"), NativeAttention)
    assert backend.choose("auto", "meta").name == "reference"


def test_without_the_extension_the_reference_runs_and_says_so_once() -> None:
    code = """
import logging; logging.basicConfig(format="%(levelname)s %(message)s")
import torch
from pagedkv.attention.backend import choose
from pagedkv.errors import BackendUnavailable
assert choose("auto").name == choose("auto").name == "reference"
try:
    choose("native")
except BackendUnavailable as error:
    print(error)
"""
    done = python(code, PAGEDKV_NATIVE="0")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("attention backend: reference, which is slow") == 1
    assert "PAGEDKV_NATIVE=0" in done.stdout


def test_an_instruction_set_can_be_forced_and_a_wrong_one_is_an_error() -> None:
    code = """
import torch
from pagedkv.attention.native import NativeAttention
print(NativeAttention().instruction_set)
"""
    done = python(code, PAGEDKV_ISA="generic")
    assert (done.returncode, done.stdout.strip()) == (0, "generic"), done.stderr
    done = python(code, PAGEDKV_ISA="sse9")
    assert done.returncode != 0
    assert "sse9" in done.stderr
    assert "avx512bf16" in done.stderr
    with pytest.raises(RuntimeError, match="unknown"):
        NATIVE.force_instruction_set("nonsense")
    assert "generic" in ISAS


def test_one_openmp_runtime_is_loaded() -> None:
    code = """
import torch
from pagedkv.attention.native import extension
native = extension()
data = torch.ones(1 << 20)
torch.set_num_threads(2)
native.read_stream(data.data_ptr(), data.nbytes)
lines = open("/proc/self/maps").read().split()
print(len({path for path in lines if "/" in path and any(name in path for name in ("libgomp", "libomp", "libiomp"))}))
"""
    done = python(code)
    assert (done.returncode, done.stdout.strip()) == (0, "1"), done.stderr


def test_physical_slot_is_the_same_in_both_languages() -> None:
    assert NATIVE.physical_slot([5, 1, 7], 9, 4) == physical_slot([5, 1, 7], 9, 4) == (7, 1)
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        block_size = int(torch.randint(1, 257, (1,), generator=random))
        table = torch.randint(0, 2**31 - 1, (int(torch.randint(1, 50, (1,), generator=random)),), generator=random)
        position = int(torch.randint(0, block_size * len(table), (1,), generator=random))
        assert NATIVE.physical_slot(table.tolist(), position, block_size) == physical_slot(
            table.tolist(), position, block_size
        )
    for position in (-1, 12):
        with pytest.raises(IndexError):
            NATIVE.physical_slot([5, 1, 7], position, 4)
