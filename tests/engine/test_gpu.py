"""What the engine adds on a GPU, as far as a CPU can tell: the runner without graphs, and copies of blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.pool import KVPool
from pagedkv.config import EngineConfig
from pagedkv.engine.gpu import DevicePool, gpu_runner
from pagedkv.model.load import load_model

DISJOINT = [BlockCopy(1, 4), BlockCopy(1, 0), BlockCopy(2, 5)]
CHAINED = [BlockCopy(1, 4), BlockCopy(4, 0)]


@pytest.mark.parametrize("copies", [DISJOINT, CHAINED, []])
@pytest.mark.parametrize("kind", ["auto", "int8_per_token_head"])
def test_blocks_are_copied_as_the_pool_copies_them(copies: list[BlockCopy], kind: str) -> None:
    pytest.importorskip("triton")
    pools = [KVPool(6, 2, 1, 4, 8, kv_cache_dtype=kind) for _ in range(2)]
    filling = torch.randint(0, 100, pools[0].data.shape, generator=torch.Generator().manual_seed(0))
    for pool in pools:
        pool.data.copy_(filling)
        if pool.scales is not None:
            pool.scales.copy_(filling[..., 0])
    DevicePool(pools[0]).copy_blocks(copies)
    pools[1].copy_blocks(copies)
    assert torch.equal(pools[0].data, pools[1].data)
    if pools[0].scales is not None and pools[1].scales is not None:
        assert torch.equal(pools[0].scales, pools[1].scales)


def test_the_runner_of_a_gpu_is_put_together(tiny_model: Callable[..., Path]) -> None:
    """Without graphs, which need a GPU; over Triton's interpreter."""
    pytest.importorskip("triton")
    loaded = load_model(tiny_model("llama"), attention_backend="triton", device="cpu")
    config = EngineConfig.from_kwargs(model="tiny", enforce_eager=True, max_num_seqs=2)
    pool = KVPool(8, 2, 2, 16, 16)
    runner = gpu_runner(config, loaded.model, loaded.config, pool, KVCacheManager(8, 16), max_model_len=64)
    assert runner.model is loaded.model
    assert runner.pool.k_pool is pool.k_pool
