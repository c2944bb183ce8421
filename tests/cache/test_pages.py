"""Huge pages are advice: taken where the kernel offers them, never an error."""

from __future__ import annotations

import mmap

import pytest
import torch

from pagedkv.cache.pages import advise_huge_pages
from pagedkv.cache.pool import KVPool


def test_a_buffer_without_a_whole_huge_page_is_left_alone() -> None:
    data = torch.empty(1000)
    assert not advise_huge_pages(data.data_ptr(), data.nbytes)


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no such advice")
def test_a_large_pool_keeps_what_is_written_to_it() -> None:
    pool = KVPool(64, 2, 4, 64, 64, dtype=torch.bfloat16)
    assert pool.data.nbytes > 2 << 21
    pool.data.fill_(1.0)
    advise_huge_pages(pool.data.data_ptr(), pool.data.nbytes)  # later than it should be, and still harmless
    assert bool((pool.data == 1.0).all())
