"""A file of weights behind a memory map: tensors are views of it, and what was read need not stay in memory."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagedkv.errors import WeightError


class MappedFile:
    """One file. data: its bytes; they must not be written, and live as long as a view of them does."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as handle:
            try:
                # private and writable, so that torch may look at it; pages stay shared until somebody writes
                self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
            except ValueError as error:
                raise WeightError(f"{path.name} is empty") from error

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """A view of the file; a copy only where ``offset`` is not a multiple of the element size."""
        count = math.prod(shape)
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype)
        if offset % dtype.itemsize:
            raw = bytearray(self.data[offset : offset + count * dtype.itemsize])
            return torch.frombuffer(raw, dtype=dtype, count=count).view(*shape)
        return torch.frombuffer(self.data, dtype=dtype, count=count, offset=offset).view(*shape)

    def forget(self) -> None:
        """Take what was read out of this process's memory. Views stay valid: a page comes back when it is looked at."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.data.madvise(mmap.MADV_DONTNEED)
