"""Copy-on-write on a GPU: whole blocks of the block-contiguous pool, all layers at once, in one launch.

A block's K and V of every layer are one run of bytes, and so are its scales, so a copy is words from here to there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from pagedkv.attention.triton_launch import Launch
from pagedkv.errors import InvalidRequest

WORDS = 1024  # copied by one program


@triton.jit
def copy_blocks_kernel(data, copies, num_words, block_stride, WORDS: tl.constexpr):
    """Grid (copies, ceil(num_words / WORDS)). copies [n, 2] int64: source, destination. Strides and words alike."""
    source = tl.load(copies + tl.program_id(0) * 2)
    destination = tl.load(copies + tl.program_id(0) * 2 + 1)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    mask = words < num_words
    tl.store(
        data + destination * block_stride + words, tl.load(data + source * block_stride + words, mask=mask), mask=mask
    )


def copy_blocks(data: torch.Tensor, copies: Sequence[tuple[int, int]]) -> None:
    """Copy block ``source`` onto block ``destination`` for each (source, destination) of ``copies``.

    data  [num_blocks, ...], contiguous: a pool's data, or its scales.
    All copies run side by side, so a destination must be no source and be named once; InvalidRequest otherwise, and
    for an id outside the pool. Nothing is copied then.
    """
    if not copies:
        return
    sources, destinations = {source for source, _ in copies}, [destination for _, destination in copies]
    if len(set(destinations)) < len(destinations) or not sources.isdisjoint(destinations):
        raise InvalidRequest("a block is the destination of two copies, or source and destination", field="copies")
    ids = [*sources, *destinations]
    if min(ids) < 0 or max(ids) >= data.shape[0]:
        raise InvalidRequest(
            f"block ids reach from {min(ids)} to {max(ids)}; the pool has {data.shape[0]} blocks", field="copies"
        )
    if not data.is_contiguous():
        raise InvalidRequest("the pool is not contiguous: its blocks are not single runs of bytes", field="data")
    pairs = torch.tensor(list(copies), dtype=torch.int64, pin_memory=data.is_cuda).to(data.device, non_blocking=True)
    copy_launch(data, pairs).run()


def copy_launch(data: torch.Tensor, copies: torch.Tensor) -> Launch:
    """The launch for copies [n, 2] int64 on the pool's device, which ``copy_blocks`` has checked."""
    words = _as_words(data)
    arguments = {
        "data": words,
        "copies": copies,
        "num_words": words.shape[1],
        "block_stride": words.stride(0),
        "WORDS": WORDS,
    }
    return Launch(copy_blocks_kernel, (copies.shape[0], triton.cdiv(words.shape[1], WORDS)), arguments)


def _as_words(data: torch.Tensor) -> torch.Tensor:
    """The same memory as [num_blocks, words] of the widest integer that a block is a multiple of."""
    rows = data.view(data.shape[0], -1).view(torch.uint8)
    for word in (torch.int64, torch.int32, torch.int16):
        if rows.shape[1] % word.itemsize == 0 and rows.data_ptr() % word.itemsize == 0:
            return rows.view(word)
    return rows
