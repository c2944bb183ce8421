"""The loops of this package that also exist in C++ (csrc/bindings_loops.cpp, csrc/bindings_keys.cpp).

``@native`` marks a function that says in Python what the one of the same name in the extension does, on the same
lists and dictionaries. Where the extension was built, its function stands in its place; the tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

extension: Any
try:
    from pagedkv import _cache

    extension = _cache
except ImportError:  # built without native code (PAGEDKV_NATIVE=0)
    extension = None

Loop = TypeVar("Loop", bound=Callable[..., Any])
IN_PYTHON: dict[str, Callable[..., Any]] = {}  # every function that was marked, by name


def native(in_python: Loop) -> Loop:
    """The extension's function of this name; ``in_python`` itself where there is no extension."""
    IN_PYTHON[in_python.__name__] = in_python
    if extension is None:
        return in_python
    compiled: Loop | None = getattr(extension, in_python.__name__, None)
    if compiled is None:
        raise ImportError(f"pagedkv._cache has no {in_python.__name__}: it is older than this package; build it again")
    return compiled
