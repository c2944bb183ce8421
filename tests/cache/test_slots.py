from __future__ import annotations

import random

import pytest

from pagedkv.cache.slots import physical_slot


def test_the_chapters_example() -> None:
    assert physical_slot([5, 1, 7], 9, 4) == (7, 1)


def test_every_position_has_its_own_slot() -> None:
    rng = random.Random(0)
    for block_size in (1, 3, 16, 256):
        table = rng.sample(range(100), 5)
        slots = [physical_slot(table, position, block_size) for position in range(5 * block_size)]
        assert len(set(slots)) == 5 * block_size
        assert {block for block, _ in slots} == set(table)


@pytest.mark.parametrize("position", [-1, 12])
def test_a_position_outside_the_table_is_an_error(position: int) -> None:
    with pytest.raises(IndexError, match="outside a table of 3 blocks of 4"):
        physical_slot([5, 1, 7], position, 4)
