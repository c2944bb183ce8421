"""What the engine adds on a GPU: recorded decode steps, shared prefixes read once, block copies in one launch.

Used where the attention backend is Triton's. Everything else (scheduler, cache, sampler) is the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from pagedkv.attention.shared_prefix import PrefixCost
from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.pool import KVPool
from pagedkv.config import EngineConfig
from pagedkv.engine.graphs import CudaRecorder, GraphedModel
from pagedkv.engine.runner import Model, ModelRunner
from pagedkv.engine.sharing import PrefixSharing
from pagedkv.model.config import ModelConfig


class DevicePool:
    """A KVPool as the runner sees it, whose blocks are copied by ``attention/triton_copy.py``."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.k_pool, self.v_pool = pool.k_pool, pool.v_pool
        self.k_scale, self.v_scale = pool.k_scale, pool.v_scale

    def copy_blocks(self, copies: Seq[BlockCopy]) -> None:
        """All layers, and the scales. Copies that must follow one another go the pool's own way, one by one."""
        from pagedkv.attention.triton_copy import copy_blocks

        blocks = {copy.source for copy in copies} | {copy.destination for copy in copies}
        if len(blocks) < len({copy.source for copy in copies}) + len(copies):
            self._pool.copy_blocks(copies)
            return
        copy_blocks(self._pool.data, copies)
        if self._pool.scales is not None:
            copy_blocks(self._pool.scales, copies)


def gpu_runner(
    config: EngineConfig, model: Model, shape: ModelConfig, pool: KVPool, manager: KVCacheManager, max_model_len: int
) -> ModelRunner:
    """The runner of ``model`` on a GPU. Records its decode steps unless ``config.enforce_eager``."""
    max_num_seqs = config.scheduler.max_num_seqs
    token_bytes = pool.bytes_per_block // (shape.num_layers * pool.block_size)
    cost = PrefixCost(token_bytes, part_bytes_per_seq=4 * shape.num_heads * (shape.head_dim + 1))
    device_pool = DevicePool(pool)
    if not config.enforce_eager:
        model = GraphedModel(
            model,
            device_pool,
            CudaRecorder(torch.device(model.device)),
            max_num_seqs=max_num_seqs,
            block_size=pool.block_size,
            max_model_len=max_model_len,
            share_prefixes=True,
        )
    return ModelRunner(model, device_pool, manager, max_num_seqs, PrefixSharing(manager, cost, model.device))
