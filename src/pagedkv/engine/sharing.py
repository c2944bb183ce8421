"""Decode steps on a GPU whose sequences begin with the same blocks: found once, read once for all of them.

The groups of a batch stay right as long as its sequences are the same ones: a sequence's first tokens never change, so
neither does what the shared blocks hold. They are looked for again only when a sequence joins or leaves. (The CPU
kernels find shared blocks themselves.)
"""

from __future__ import annotations

from collections.abc import Hashable

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import PrefixCost, SharedPrefixes, find_groups
from pagedkv.cache.manager import KVCacheManager
from pagedkv.engine.plan import StepPlan


class PrefixSharing:
    """Puts ``SharedPrefixes`` into ``batch.plans`` of the decode steps for which ``cost`` says that it pays."""

    def __init__(self, manager: KVCacheManager, cost: PrefixCost, device: torch.device | str) -> None:
        self._manager = manager
        self._cost = cost
        self._device = device
        self._ids: tuple[Hashable, ...] = ()
        self._prefixes: SharedPrefixes | None = None

    def add(self, plan: StepPlan, batch: AttentionBatch) -> None:
        """``batch``: of ``plan``, its sequences in the same order. Reads the block tables if these are new."""
        if batch.max_query_len != 1 or batch.num_seqs != len(plan.chunks):
            return
        ids = tuple(plan.chunks)
        if ids != self._ids:
            self._ids, self._prefixes = ids, self._find(plan)
        if self._prefixes is not None:
            batch.plans[SharedPrefixes] = self._prefixes

    def _find(self, plan: StepPlan) -> SharedPrefixes | None:
        tables = [self._manager.tables[name] for name in plan.chunks]
        written = [chunk.start for chunk in plan.chunks.values()]
        block_size = self._manager.block_size
        groups = find_groups(tables, written, block_size)
        if not self._cost.pays(groups, block_size):
            return None
        return SharedPrefixes.build(groups, block_size, self._device)
