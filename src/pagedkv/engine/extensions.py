"""Whether the compiled parts of the package are there, and were built from the sources that lie beside them."""

from __future__ import annotations

import hashlib
import logging
import os
from functools import cache
from pathlib import Path

from pagedkv.attention.native import extension as kernels
from pagedkv.cache.native import extension as loops
from pagedkv.errors import BackendUnavailable

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).resolve().parents[3] / "csrc"  # in a checkout; an installed package has none
REMEDY = "run `make setup`, or `pip install .` again"


def complaints(sources: Path = SOURCES) -> list[str]:
    """One sentence for each compiled part that is missing or old; none where PAGEDKV_NATIVE=0 says it is meant so."""
    if os.environ.get("PAGEDKV_NATIVE") == "0":
        return []
    found = []
    try:
        built = {"pagedkv._native": getattr(kernels(), "sources", "")}
    except BackendUnavailable as error:
        built = {}
        found.append(f"{error}: the model runs in torch, which is slow on a CPU; {REMEDY}")
    if loops is None:
        found.append(f"pagedkv._cache is not installed: the cache's loops run in Python, which is slow; {REMEDY}")
    else:
        built["pagedkv._cache"] = getattr(loops, "sources", "")
    if sources.is_dir():
        here = digest(sources)
        found += [
            f"{name} was built from other sources than {sources} has; {REMEDY}" for name in built if built[name] != here
        ]
    return found


@cache
def warn_once() -> None:
    """The complaints as warnings in the log, the first time."""
    for complaint in complaints():
        logger.warning(complaint)


def digest(sources: Path) -> str:
    """SHA-256 over the sources, as CMakeLists.txt has it."""
    paths = sorted(path for path in sources.iterdir() if path.suffix in (".cpp", ".hpp", ".cmake"))
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in paths]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
