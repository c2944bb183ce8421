"""How large the pool is, and how long a sequence may get."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.config import CacheConfig, EngineConfig, SchedulerConfig
from pagedkv.engine.sizing import MOST_CPU_BYTES, Memory, available_memory, gpu_memory, plan_pool
from pagedkv.errors import InvalidRequest

GIB = 2**30
PLENTY = Memory(4 * GIB, "4 GiB")


def config(**values: object) -> EngineConfig:
    return EngineConfig.from_kwargs(model="x", **values)


def test_the_smallest_of_memory_and_need() -> None:
    few = plan_pool(config(max_num_seqs=2, max_model_len=100), trained_len=8192, block_bytes=1000, memory=PLENTY)
    assert (few.num_blocks, few.max_model_len, few.note) == (2 * 7, 100, "")
    many = plan_pool(config(max_model_len=8192), trained_len=8192, block_bytes=2**20, memory=Memory(GIB, "a quarter"))
    assert many.num_blocks == 1024


def test_given_bytes_and_given_blocks_are_kept() -> None:
    given = plan_pool(
        config(kv_cache_memory_bytes=2**20, max_num_seqs=1, max_model_len=32),
        trained_len=64,
        block_bytes=1024,
        memory=PLENTY,
    )
    assert given.num_blocks == 1024
    override = plan_pool(
        config(num_gpu_blocks_override=7), trained_len=64, block_bytes=10**12, memory=Memory(0, "none")
    )
    assert override.num_blocks == 7


def test_a_length_left_out_is_lowered_and_said_and_a_given_one_is_an_error_with_both_numbers() -> None:
    lowered = plan_pool(config(num_gpu_blocks_override=8), trained_len=8192, block_bytes=1, memory=PLENTY)
    assert lowered.max_model_len == 128
    assert "8192" in lowered.note
    assert "128" in lowered.note
    with pytest.raises(InvalidRequest, match=r"1000 tokens.*128"):
        plan_pool(config(num_gpu_blocks_override=8, max_model_len=1000), trained_len=8192, block_bytes=1, memory=PLENTY)
    with pytest.raises(InvalidRequest, match=r"9000.*8192"):
        plan_pool(config(max_model_len=9000), trained_len=8192, block_bytes=1, memory=PLENTY)


def test_without_chunked_prefill_a_sequence_fits_in_a_step() -> None:
    off = {"enable_chunked_prefill": False, "max_num_batched_tokens": 512}
    assert plan_pool(config(**off), trained_len=8192, block_bytes=1, memory=PLENTY).max_model_len == 512
    with pytest.raises(InvalidRequest, match=r"1024.*512"):
        plan_pool(config(max_model_len=1024, **off), trained_len=8192, block_bytes=1, memory=PLENTY)


def test_a_pool_without_room_for_a_block_is_an_error() -> None:
    with pytest.raises(InvalidRequest, match=r"100 bytes.*1000"):
        plan_pool(config(kv_cache_memory_bytes=100), trained_len=64, block_bytes=1000, memory=PLENTY)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_memory_is_the_machine_s_or_the_cgroup_s_where_that_is_less(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    assert available_memory(proc, groups) == 8 * GIB
    write(proc / "self" / "cgroup", "0::/system/pod\n")
    write(groups / "system" / "memory.max", f"{6 * GIB}\n")
    write(groups / "system" / "memory.current", f"{4 * GIB}\n")
    write(groups / "system" / "pod" / "memory.max", "max\n")
    write(groups / "system" / "pod" / "memory.current", f"{GIB}\n")
    assert available_memory(proc, groups) == 2 * GIB
    write(groups / "memory" / "memory.limit_in_bytes", "9223372036854771712\n")
    write(groups / "memory" / "memory.usage_in_bytes", "5\n")
    assert available_memory(proc, groups) == 2 * GIB
    write(groups / "memory" / "memory.limit_in_bytes", f"{GIB}\n")
    write(groups / "memory" / "memory.usage_in_bytes", f"{2 * GIB}\n")
    assert available_memory(proc, groups) == 0


def test_a_gpu_leaves_room_for_weights_and_activations() -> None:
    assert gpu_memory(0.9, free=60 * GIB, total=80 * GIB, activation_bytes=2 * GIB).num_bytes == 50 * GIB
    assert gpu_memory(0.1, free=60 * GIB, total=80 * GIB, activation_bytes=2 * GIB).num_bytes == 0
    assert MOST_CPU_BYTES == 4 * GIB


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"block_size": 0}, "block_size"),
        ({"block_size": 257}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype"),
        ({"kv_cache_memory_bytes": "2GiB"}, "kv_cache_memory_bytes"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 128}, "max_num_batched_tokens"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
        ({"eviction_policy": "random"}, "eviction_policy"),
        ({"dtype": "float8"}, "dtype"),
        ({"seed": -1}, "seed"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"tokenizer": ""}, "tokenizer"),
    ],
)
def test_a_bad_value_is_named(values: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        config(**values)
    assert caught.value.field == field
    assert field in str(caught.value)


def test_an_unknown_keyword_is_a_type_error_and_foreign_code_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        config(max_num_sequences=4)
    with pytest.raises(InvalidRequest, match="no code that comes with a model"):
        config(trust_remote_code=True)
    assert config(trust_remote_code=False) == EngineConfig("x", cache=CacheConfig(), scheduler=SchedulerConfig())
