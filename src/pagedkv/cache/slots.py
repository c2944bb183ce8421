"""Where a position lives. ``csrc/block.hpp`` is the same arithmetic for the kernels; a test compares the two."""

from __future__ import annotations

from collections.abc import Sequence


def physical_slot(table: Sequence[int], position: int, block_size: int) -> tuple[int, int]:
    """The (block, offset) of ``position`` in a sequence with this block table.

    For blocks of 4 and the table [5, 1, 7], position 9 is logical block 2: block 7, offset 1.
    Raises IndexError for a position that the table does not reach; negative positions included,
    which Python's own indexing would take from the other end.
    """
    if not 0 <= position < len(table) * block_size:
        raise IndexError(f"position {position} is outside a table of {len(table)} blocks of {block_size}")
    return table[position // block_size], position % block_size
