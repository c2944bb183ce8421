"""plan against what real loads allocate."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedkv.attention.backend import choose
from pagedkv.cache.pool import KVPool
from pagedkv.cli.plan import _read
from pagedkv.errors import BackendUnavailable, InvalidRequest
from pagedkv.insight.plan import (
    ITEM_BYTES,
    plan_memory,
    pool_bytes,
    requests_that_fit,
    token_bytes,
    waste_rows,
    weight_bytes,
)
from pagedkv.model.load import load_model, read_config

QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def native() -> None:
    """These figures are of the native decoder."""
    try:
        choose("native", "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("kv_dtype", sorted(ITEM_BYTES))
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_block_takes_what_the_pool_gives_it(tiny_model: Callable[..., Path], kv_dtype: str, family: str) -> None:
    config = read_config(tiny_model(family))
    shape = (config.num_layers, config.num_kv_heads, 16, config.head_dim)
    assert 16 * token_bytes(config, kv_dtype) == KVPool.block_bytes(*shape, kv_cache_dtype=kv_dtype)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("dtype", "quantization"), [("float32", None), ("bfloat16", None), ("bfloat16", "int8"), ("bfloat16", "int4")]
)
def test_weights_take_what_they_take_once_loaded(
    tiny_model: Callable[..., Path], family: str, dtype: str, quantization: str | None
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
    directory = tiny_model(family, **sizes, num_key_value_heads=2)
    loaded = load_model(directory, dtype=dtype, device="cpu", quantization=quantization)
    assert weight_bytes(read_config(directory), dtype, quantization=quantization) == loaded.weight_bytes


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("quantization", [None, "none", "int8"])
def test_a_gguf_files_own_bits_are_counted(quantization: str | None) -> None:
    config, dtype, types = _read("smollm2-135m", "bfloat16")
    loaded = load_model("smollm2-135m", dtype=dtype, device="cpu", quantization=quantization)
    assert weight_bytes(config, dtype, quantization=quantization, types=types) == loaded.weight_bytes


def run(model: str, kv_dtype: str, pool: int) -> dict[str, int]:
    script = Path(__file__).with_name("plan_run.py")
    command = [sys.executable, str(script), model, kv_dtype, str(pool)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    figures: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return figures


@pytest.mark.usefixtures("native")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize(
    ("model", "kv_dtype"), [("smollm2", "bfloat16"), ("smollm2", "int8_per_token_head"), ("qwen3-0.6b", "auto")]
)
def test_prediction_agrees_with_a_real_load(tiny_model: Callable[..., Path], model: str, kv_dtype: str) -> None:
    # Four of the 28 layers: every size is the model's own, and the file stays at 440 MB.
    source: Any = "smollm2-135m" if model == "smollm2" else tiny_model("qwen3", num_hidden_layers=4, **QWEN3_06B)
    config, dtype, types = _read(str(source), "bfloat16")
    weights = weight_bytes(config, dtype, types=types)
    plan = plan_memory(config, weights + (300 << 20), weights=weights, dtype=dtype, kv_dtype=kv_dtype)
    found = run(str(source), kv_dtype, plan.memory - plan.weight_bytes - plan.activation_bytes)
    assert found["num_blocks"] == plan.num_blocks
    assert found["pool_bytes"] == plan.num_blocks * plan.block_bytes
    assert found["weight_bytes"] == plan.weight_bytes
    touched = 2048 // 16 * plan.block_bytes
    assert found["growth"] == pytest.approx(plan.weight_bytes + touched + plan.activation_bytes, rel=0.1)


def test_requests_fit_in_turn_until_one_does_not() -> None:
    assert requests_that_fit([16, 32], 3, 16) == 2
    assert requests_that_fit([16, 32], 8, 16) == 5
    assert requests_that_fit([17], 5, 16) == 2


def test_memory_for_so_many_requests_at_a_time(tiny_model: Callable[..., Path]) -> None:
    config = read_config(tiny_model())
    plan = plan_memory(config, 1 << 30, weights=0, dtype="float32", lengths=[16, 32])
    assert pool_bytes([16, 32], 3, plan) == (1 + 2 + 1) * plan.block_bytes
    assert plan.requests is not None
    assert pool_bytes([16, 32], plan.requests, plan) <= plan.num_blocks * plan.block_bytes


def test_waste_of_each_block_size() -> None:
    rows = waste_rows([10, 20], per_token=100, sizes=(1, 16))
    assert [(row.block_size, row.wasted_bytes, row.table_entries) for row in rows] == [(1, 0, 30), (16, 1800, 3)]
    assert rows[1].utilization == pytest.approx(30 / 48)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"memory": 1000}, "no room for one block"),
        ({"block_size": 0}, "block_size is 0"),
        ({"kv_dtype": "int3"}, "'int3' is none of auto"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tiny_model: Callable[..., Path], asked: dict[str, Any], complaint: str
) -> None:
    config = read_config(tiny_model())
    with pytest.raises(InvalidRequest, match=complaint):
        plan_memory(config, **{"memory": 1 << 30, "weights": 0, "dtype": "float32", **asked})
