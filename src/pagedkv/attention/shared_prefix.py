"""Which sequences of a decode batch read the same leading blocks, and whether reading those once pays. Plain integers.

Tables alone decide: two sequences share a block when their tables name the same one at the same place and at every
place before it. Each sequence ends in exactly one group; where prefixes nest (a system prompt, then a document) the
cut that saves most is taken. Cost: the tables are sorted once, then O(1) per sequence and level of nesting, plus the
comparison of the blocks that are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MAX_LEVELS = 8  # of nested prefixes that the search looks into


@dataclass(frozen=True)
class PrefixGroup:
    """Sequences (by their number in the batch) whose first ``num_blocks`` table entries are the same."""

    members: tuple[int, ...]
    num_blocks: int

    @property
    def blocks_saved(self) -> int:
        """Block reads that one common reading spares."""
        return (len(self.members) - 1) * self.num_blocks


@dataclass(frozen=True)
class PrefixCost:
    """What decides whether a shared reading pays, per layer.

    bytes_per_token      K and V of one position in one layer, all KV heads, scales included
    part_bytes_per_seq   float32 parts and log-sum-exps of all query heads that one sequence writes per split
    launch_bytes         what the device reads while one more kernel starts: bandwidth times launch time
    """

    bytes_per_token: int
    part_bytes_per_seq: int
    launch_bytes: int = 12_000_000  # nominal: 4 TB/s for 3 microseconds

    def pays(self, groups: Sequence[PrefixGroup], block_size: int, num_splits: int = 1) -> bool:
        """Bytes saved against the two launches more (shared part, merge) and the parts that every sequence writes."""
        saved = sum(group.blocks_saved for group in groups) * block_size * self.bytes_per_token
        num_seqs = sum(len(group.members) for group in groups)
        return saved > 2 * self.launch_bytes + 2 * num_seqs * num_splits * self.part_bytes_per_seq


def find_groups(tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_size: int) -> list[PrefixGroup]:
    """Groups that cover the batch; a sequence that shares nothing is a group of its own with num_blocks 0.

    Only blocks that are full in every member count: num_blocks * block_size <= seq_lens[i].
    """
    used = [tuple(table[: length // block_size]) for table, length in zip(tables, seq_lens, strict=True)]
    order = sorted(range(len(used)), key=lambda seq: used[seq])
    groups: list[PrefixGroup] = []
    for _, cluster in groupby(order, key=lambda seq: used[seq][:1]):
        groups += _best_cut(list(cluster), used)
    return groups


def _best_cut(order: list[int], used: list[tuple[int, ...]], levels: int = MAX_LEVELS) -> list[PrefixGroup]:
    """The groups of ``order`` (sorted by table) that save most: all at their common depth, or each branch by itself."""
    depth = _common(used[order[0]], used[order[-1]]) if len(order) > 1 else 0  # sorted, so the ends differ most
    whole = PrefixGroup(tuple(order), depth)
    if len(order) <= 2 or levels == 0:
        return [whole] if depth else [PrefixGroup((seq,), 0) for seq in order]
    branches: list[PrefixGroup] = []
    for branch, cluster in groupby(order, key=lambda seq: used[seq][depth : depth + 1]):
        members = list(cluster)
        if not branch:  # these end where the branches part
            branches.append(PrefixGroup(tuple(members), depth if len(members) > 1 else 0))
        elif len(members) == len(order):
            return [whole]
        else:
            branches += _best_cut(members, used, levels - 1)
    return branches if sum(group.blocks_saved for group in branches) > whole.blocks_saved else [whole]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Leading entries that are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
