"""KVPool: the memory of all blocks, as one tensor.

Owns:    the K and V of every block and, for quantised formats, their scales. Knows blocks and slots, no sequence.
Layout:  data [num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]: a block is one contiguous run of
         bytes for all layers, so copying, off-loading, saving or sending it is one move. Within a block and layer the
         order is heads, then tokens ("HND"). ``k_pool[layer]`` and ``v_pool[layer]`` are strided views; never call
         ``.contiguous()`` on them, it would copy the pool.
Content: slots that were never written hold anything, NaN included. Memory is touched when it is first written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from pagedkv.cache.manager import BlockCopy
from pagedkv.cache.pages import advise_huge_pages
from pagedkv.errors import InvalidRequest

_STORED_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int8_per_token_head": torch.int8,
}
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


class KVPool:
    """K and V of ``num_blocks`` blocks.

    dtype:           of the model; what ``read`` returns
    kv_cache_dtype:  "auto" (as ``dtype``), "bfloat16", "float16", "float32", or a quantised format with one float32
                     scale per token and KV head: "int8_per_token_head" (scale = largest magnitude / 127) and
                     "fp8_e4m3" (/ 448)
    k_pool, v_pool:  lists indexed by layer, views [num_blocks, num_kv_heads, block_size, head_dim]
    scales:          [num_blocks, num_layers, 2, num_kv_heads, block_size] float32, or None
    k_scale, v_scale: lists indexed by layer, views [num_blocks, num_kv_heads, block_size], or None in each place
    layout:          "plain": the order above
    """

    layout = "plain"

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_cache_dtype: str = "auto",
    ) -> None:
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        names = ("num_blocks", "num_layers", "2", "num_kv_heads", "block_size", "head_dim")
        for name, size in zip(names, shape, strict=True):
            if size < 1:
                raise InvalidRequest(f"{name} is {size}; at least 1 is needed", field=name)
        if kv_cache_dtype != "auto" and kv_cache_dtype not in _STORED_DTYPES:
            known = ", ".join(["auto", *_STORED_DTYPES])
            raise InvalidRequest(f"kv_cache_dtype is {kv_cache_dtype!r}; known are {known}", field="kv_cache_dtype")
        self.num_blocks, self.num_layers, self.num_kv_heads = num_blocks, num_layers, num_kv_heads
        self.block_size, self.head_dim = block_size, head_dim
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        stored = _STORED_DTYPES.get(kv_cache_dtype, dtype)
        self.data = torch.empty(shape, dtype=stored, device=device)
        if self.data.device.type == "cpu":
            advise_huge_pages(self.data.data_ptr(), self.data.nbytes)
        self.scales = torch.empty(shape[:-1], dtype=torch.float32, device=device) if stored in _LARGEST else None
        layers = range(num_layers)
        self.k_pool = [self.data[:, layer, 0] for layer in layers]
        self.v_pool = [self.data[:, layer, 1] for layer in layers]
        self.k_scale = [None if self.scales is None else self.scales[:, layer, 0] for layer in layers]
        self.v_scale = [None if self.scales is None else self.scales[:, layer, 1] for layer in layers]

    @staticmethod
    def block_bytes(
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        kv_cache_dtype: str = "auto",
    ) -> int:
        """Bytes of one block, scales included, without making a pool."""
        stored = _STORED_DTYPES.get(kv_cache_dtype, dtype)
        per_token = head_dim * stored.itemsize + (torch.float32.itemsize if stored in _LARGEST else 0)
        return math.prod((num_layers, 2, num_kv_heads, block_size, per_token))

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, scales included."""
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, scales included."""
        return self.nbytes // self.num_blocks

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copies whole blocks, all layers and scales, in the order given: a later copy sees what earlier ones did."""
        copies = list(copies)
        tensors = [self.data] if self.scales is None else [self.data, self.scales]
        sources, destinations = [c.source for c in copies], [c.destination for c in copies]
        apart = len({*sources, *destinations}) == len(set(sources)) + len(destinations)
        if apart and len(copies) > 1 and self.device.type != "cpu":
            read = torch.tensor(sources, device=self.device)
            write = torch.tensor(destinations, device=self.device)
            for tensor in tensors:
                tensor[write] = tensor[read]
            return
        for source, destination in copies:
            for tensor in tensors:
                tensor[destination].copy_(tensor[source])

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Stores k, v [T, num_kv_heads, head_dim] at slots [T] (block * block_size + offset; negative: skip)."""
        kept = slot_mapping >= 0
        slots = slot_mapping[kept]
        block, offset = slots // self.block_size, slots % self.block_size
        pairs = ((self.k_pool, self.k_scale, k), (self.v_pool, self.v_scale, v))
        for pools, scales, new in pairs:
            stored, scale = self._quantise(new[kept])
            pools[layer][block, :, offset] = stored
            target = scales[layer]
            if target is not None and scale is not None:
                target[block, :, offset] = scale

    def read(self, layer: int, blocks: Sequence[int] | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of these blocks in ``dtype``, each [len(blocks), num_kv_heads, block_size, head_dim]; a copy."""
        index = torch.as_tensor(blocks, dtype=torch.int64, device=self.device)
        k, v = (
            self._dequantise(pools[layer][index], scales[layer], index)
            for pools, scales in ((self.k_pool, self.k_scale), (self.v_pool, self.v_scale))
        )
        return k, v

    def _quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[T, H, D] -> what is stored and its scales [T, H]; the rule of every ``write_kv`` backend."""
        stored = self.data.dtype
        if stored not in _LARGEST:
            return values.to(stored), None
        largest, limit = 3.4e38, _LARGEST[stored]  # limit * (largest / limit) stays finite
        values = values.float().clamp(-largest, largest)
        top = values.abs().amax(-1)
        factor = torch.where(top > 0, limit / top, 0.0)
        factor = factor.masked_fill(factor == float("inf"), 0.0)  # a subnormal row is stored as zeros
        scaled = (values * factor[..., None]).nan_to_num(0.0).clamp(-limit, limit)
        return (scaled.round() if stored == torch.int8 else scaled).to(stored), top / limit

    def _dequantise(self, stored: torch.Tensor, scale: torch.Tensor | None, index: torch.Tensor) -> torch.Tensor:
        if scale is None:
            return stored.to(self.dtype)
        return (stored.float() * scale[index][..., None]).to(self.dtype)
