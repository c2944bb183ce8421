"""The instruction sets of this machine, for tests of the native kernels; skips where the extension is not built."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from pagedkv.attention.native import extension
from pagedkv.errors import BackendUnavailable

try:
    NATIVE = extension()
except BackendUnavailable as error:
    pytest.skip(str(error), allow_module_level=True)

ISAS: list[str] = NATIVE.instruction_sets()


@contextmanager
def forced(isa: str) -> Iterator[None]:
    """The kernels of one instruction set, then again those chosen by cpuid (or PAGEDKV_ISA)."""
    NATIVE.force_instruction_set(isa)
    try:
        yield
    finally:
        NATIVE.force_instruction_set("")
