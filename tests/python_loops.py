"""The bookkeeping without its native loops: what the extension is compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedkv.cache import allocator, eviction, index, keys
from pagedkv.cache.native import IN_PYTHON


@contextmanager
def loops_in_python() -> Iterator[None]:
    """Within it, every function marked ``@native`` is the Python one."""
    with pytest.MonkeyPatch.context() as patch:
        places = [(module, name) for module in (allocator, eviction, index, keys) for name in IN_PYTHON]
        found = {name for module, name in places if hasattr(module, name)}
        assert found == set(IN_PYTHON), "a native loop lives in a module that is not named here"
        for module, name in places:
            if hasattr(module, name):
                patch.setattr(module, name, IN_PYTHON[name])
        yield
