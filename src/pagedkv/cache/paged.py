"""PagedKVCache: block tables and their tensors behind one interface, the one the chapter uses.

A KVCacheManager whose copies are carried out at once, plus ``set_batch`` / ``update``: the protocol by which a plain
decoder stores new K and V and gets back the history to attend to. ``update`` gathers that history into a contiguous
tensor, which is readable and slow; the engine reads through the block table instead (``paged_attention``) and uses
the pool directly.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from pagedkv.cache.manager import BlockCopy, KVCacheManager
from pagedkv.cache.pool import KVPool
from pagedkv.errors import InvalidRequest


class PagedKVCache(KVCacheManager):
    """Sequences over a pool of KV blocks.

    k_pool, v_pool:  lists indexed by layer, views [num_blocks, kv_heads, block_size, head_dim]
    block_tables:    int32 [B, W], the tables of the current batch, padded with 0 to the longest
    The other attributes are those of KVCacheManager; ``pool`` is the KVPool.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        kv_cache_dtype: str = "auto",
    ) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = KVPool(
            num_blocks,
            layers,
            kv_heads,
            block_size,
            head_dim,
            dtype=dtype,
            device=device,
            kv_cache_dtype=kv_cache_dtype,
        )
        self.k_pool, self.v_pool = self.pool.k_pool, self.pool.v_pool
        self.k_scale, self.v_scale = self.pool.k_scale, self.pool.v_scale
        self.batch: list[Hashable] = []
        self.block_tables = torch.zeros((0, 0), dtype=torch.int32, device=device)

    def reserve(self, seq: Hashable, new_tokens: int) -> list[BlockCopy]:
        """As KVCacheManager.reserve, and the copies are done: they are returned for information only."""
        copies = super().reserve(seq, new_tokens)
        self.pool.copy_blocks(copies)
        return copies

    def set_batch(self, seqs: Sequence[Hashable]) -> None:
        """Names the sequences of the next forward pass, in order; their room is reserved."""
        tables = [self._table(seq) for seq in seqs]
        width = max((len(table) for table in tables), default=0)
        padded = [[*table, *[0] * (width - len(table))] for table in tables]
        self.block_tables = torch.tensor(padded, dtype=torch.int32, device=self.pool.device).reshape(-1, width)
        self.batch = list(seqs)

    def update(
        self,
        layer: int,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        rows: Sequence[int] | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stores new K and V of one layer and returns the history of each sequence.

        k, v:       [B, kv_heads, T, head_dim]
        positions:  [T] (the same for every row) or [B, T]; a negative position is padding and is not stored
        rows:       which sequences of the batch the B rows are; all of them, in order, if left out

        Returns keys and values [B, kv_heads, span, head_dim] in the cache's dtype and ``logical = arange(span)``,
        span = highest position + 1; what lies beyond a row's own last position is zero. The last layer's update
        commits the lengths. Raises InvalidRequest, before anything is written, for a position that is not reserved
        or lies in a block that other sequences (or the prefix cache) hold as well.
        """
        chosen = list(range(len(self.batch))) if rows is None else [int(row) for row in rows]
        where = positions.to(self.pool.device)
        where = where.expand(len(chosen), -1) if where.dim() == 1 else where
        if k.shape != v.shape or k.shape[0] != len(chosen) or where.shape != (k.shape[0], k.shape[2]):
            raise InvalidRequest(
                f"k {tuple(k.shape)}, v {tuple(v.shape)} and positions {tuple(positions.shape)} "
                f"do not fit {len(chosen)} rows of the batch",
                field="positions",
            )
        if layer == 0:
            self.set_batch(self.batch)  # room may have been reserved since
            self._check_writable([self.batch[row] for row in chosen], where)
        tables = self.block_tables[torch.as_tensor(chosen, dtype=torch.int64, device=self.pool.device)].long()
        ends = where.amax(1) + 1 if where.shape[1] else where.new_zeros(len(chosen))
        block = tables.gather(1, where.clamp(min=0) // self.block_size)
        slots = torch.where(where < 0, -1, block * self.block_size + where % self.block_size)
        flat = (k.shape[0] * k.shape[2], k.shape[1], k.shape[3])
        self.pool.write(layer, k.transpose(1, 2).reshape(flat), v.transpose(1, 2).reshape(flat), slots.reshape(-1))
        if layer == self.pool.num_layers - 1:
            for row, end in zip(chosen, ends.tolist(), strict=True):
                self.lengths[self.batch[row]] = max(self.lengths[self.batch[row]], int(end))
        return self._gather(layer, tables, ends)

    def _gather(
        self, layer: int, tables: torch.Tensor, ends: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """History of each row: blocks [B, W] -> [B, kv_heads, span, head_dim], zeros from ``ends`` on."""
        span = int(ends.max()) if len(ends) else 0
        tables = tables[:, : self.blocks_needed(span)]
        logical = torch.arange(span, device=self.pool.device)
        beyond = (logical >= ends[:, None])[:, None, :, None]
        rows, width = tables.shape
        gathered = []
        for blocks in self.pool.read(layer, tables.reshape(-1)):
            heads, size, head_dim = blocks.shape[1:]
            run = blocks.reshape(rows, width, heads, size, head_dim).permute(0, 2, 1, 3, 4)
            run = run.reshape(rows, heads, width * size, head_dim)[:, :, :span]
            gathered.append(run.masked_fill(beyond, 0.0))
        return gathered[0], gathered[1], logical

    def _check_writable(self, seqs: list[Hashable], positions: torch.Tensor) -> None:
        for seq, row in zip(seqs, positions.tolist(), strict=True):
            table = self._table(seq)
            for position in row:
                if position >= len(table) * self.block_size:
                    raise InvalidRequest(f"position {position} of {seq!r} is not reserved", field="positions")
                if position >= 0 and self.allocator.refs[table[position // self.block_size]] > 1:
                    raise InvalidRequest(
                        f"position {position} of {seq!r} lies in a shared block; reserve copies it first",
                        field="positions",
                    )
