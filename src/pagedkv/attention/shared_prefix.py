"""Which sequences of a decode batch read the same leading blocks, and whether reading those once pays.

Tables alone decide: two sequences share a block when their tables name the same one at the same place and at every
place before it. Each sequence ends in exactly one group; where prefixes nest (a system prompt, then a document) the
cut that saves most is taken. Cost: the tables are sorted once, then O(1) per sequence and level of nesting, plus the
comparison of the blocks that are shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import torch

from pagedkv.errors import InvalidRequest

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


@dataclass(frozen=True)
class SharedPrefixes:
    """Groups of a decode batch on the device. Put into ``batch.plans[SharedPrefixes]``, every layer uses them.

    group_start int32 [G + 1], members int32 [B], shared_lens int32 [B] (positions), longest: the longest of those
    """

    group_start: torch.Tensor
    members: torch.Tensor
    shared_lens: torch.Tensor
    longest: int

    @classmethod
    def build(cls, groups: list[PrefixGroup], block_size: int, device: torch.device | str) -> SharedPrefixes:
        """From groups that together name each sequence of the batch once; InvalidRequest otherwise."""
        members = [seq for group in groups for seq in group.members]
        if sorted(members) != list(range(len(members))):
            raise InvalidRequest("the groups must name each sequence of the batch once", field="groups")
        starts, lens = [0], [0] * len(members)
        for group in groups:
            starts.append(starts[-1] + len(group.members))
            for seq in group.members:
                lens[seq] = group.num_blocks * block_size

        def tensor(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device)

        return cls(tensor(starts), tensor(members), tensor(lens), longest=max(lens, default=0))


def find_groups(tables: Sequence[Sequence[int]], seq_lens: Sequence[int], block_size: int) -> list[PrefixGroup]:
    """Groups that cover the batch; a sequence that shares nothing is a group of its own with num_blocks 0.

    Only blocks that are full in every member count: num_blocks * block_size <= seq_lens[i].
    """
    used = [tuple(table[: length // block_size]) for table, length in zip(tables, seq_lens, strict=True)]
    order = sorted(range(len(used)), key=lambda seq: used[seq])
    cut = _cut(tuple(order), used, 0, MAX_LEVELS, {})
    alone = [PrefixGroup((seq,), 0) for group in cut.groups if len(group.members) == 1 for seq in group.members]
    shared = [group for group in cut.groups if len(group.members) > 1]
    return [*shared, *alone, *(PrefixGroup((seq,), 0) for seq in cut.left)]


class _Cut(NamedTuple):
    """Sequences below one place of the tree of prefixes: ``left`` read the group above, ``groups`` read their own.

    saved: blocks that are read for all members, less what the groups themselves read.
    """

    saved: int
    groups: tuple[PrefixGroup, ...]
    left: tuple[int, ...]


def _cut(
    order: tuple[int, ...], used: list[tuple[int, ...]], above: int, levels: int, known: dict[tuple[int, ...], _Cut]
) -> _Cut:
    """The best cut of ``order`` (sorted by table) when a group above them reads ``above`` blocks already.

    A group at their common depth costs that depth once and serves whoever is not served better further down; so each
    branch is cut twice, with the group and without, and the better sum wins.
    """
    depth = _common(used[order[0]], used[order[-1]]) if order else 0  # sorted, so the ends differ most
    if len(order) < 2 or depth == above > 0:
        return _Cut(above * len(order), (), order)
    key = (*order[:1], len(order), above)
    if key not in known:
        branches = [tuple(cluster) for _, cluster in groupby(order, key=lambda seq: used[seq][depth : depth + 1])]
        if levels == 0 or len(branches) == 1:
            branches = [(seq,) for seq in order]
        below = [_cut(branch, used, depth, levels - 1, known) for branch in branches]
        opened = _Cut(sum(cut.saved for cut in below) - depth, tuple(g for cut in below for g in cut.groups),
                      tuple(seq for cut in below for seq in cut.left))  # fmt: skip
        if opened.left:
            opened = _Cut(opened.saved, (*opened.groups, PrefixGroup(opened.left, depth)), ())
        below = [_cut(branch, used, above, levels - 1, known) for branch in branches]
        closed = _Cut(sum(cut.saved for cut in below), tuple(g for cut in below for g in cut.groups),
                      tuple(seq for cut in below for seq in cut.left))  # fmt: skip
        known[key] = opened if opened.saved > closed.saved else closed
    return known[key]


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """Leading entries that are equal."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))
