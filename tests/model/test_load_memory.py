"""A load needs the packed weights and little beside them: the file is let go of layer by layer."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("pagedkv._native")
pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads Linux's /proc")

MIB = 1 << 20
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}


def figures(model: str, quantization: str) -> tuple[float, float]:
    """What the process grew by at most, and the packed weights, in MiB."""
    script = Path(__file__).with_name("load_memory.py")
    done = subprocess.run([sys.executable, str(script), model, quantization], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return found["growth"] / MIB, found["weight_bytes"] / MIB


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_gguf_file_does_not_stay(quantization: str) -> None:
    growth, weights = figures("smollm2-135m", quantization)  # 77 MiB in its file, 256 or 95 packed
    assert weights < growth < weights + 64


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_a_safetensors_file_and_the_temporaries_of_rounding_do_not_stay(
    tiny_model: Callable[..., Path], quantization: str
) -> None:
    directory = tiny_model(num_hidden_layers=8, **SIZES)  # 128 MiB of float32, 64 or 18 packed
    growth, weights = figures(str(directory), quantization)
    assert weights < growth < weights + 48
