"""`pagedkv demo`: being written."""

from __future__ import annotations


def demo() -> None:
    """Six questions through one paged cache."""
    raise NotImplementedError
