"""safetensors files: one, or several named by an index.

Owns: the format's header (8 bytes of length, JSON, then the numbers).
Guarantees: every tensor's extent is checked against its shape and against the file before any is handed out; a missing
shard and a truncated tensor are named.
Costs: the headers only; weights are not read until used.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.config import read_json
from pagedkv.model.mapped import MappedFile

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class _Entry:
    file: int
    dtype: str
    shape: tuple[int, ...]
    offset: int


class SafetensorsFiles:
    """The tensors of one checkpoint. ``paths`` in order; ``names`` as the checkpoint spells them."""

    def __init__(self, paths: Sequence[Path], index: Path | None = None) -> None:
        self.paths = list(paths)
        self._files: list[MappedFile] = []
        self._entries: dict[str, _Entry] = {}
        self.header_sizes: list[int] = []
        for path in self.paths:
            self._open(path)
        if index is not None:
            for name, file in read_json(index).get("weight_map", {}).items():
                entry = self._entries.get(name)
                if entry is None or self.paths[entry.file].name != file:
                    raise WeightError(f"tensor {name} is missing from {file}, where {index.name} says it is")

    @property
    def names(self) -> set[str]:
        return set(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def nbytes(self, name: str) -> int:
        entry = self._entries[name]
        dtype = DTYPES.get(entry.dtype)
        return 0 if dtype is None else math.prod(entry.shape) * dtype.itemsize

    def get(self, name: str) -> Tensor:
        """A view of the memory map. Raises UnsupportedModel for a number format that is not built here."""
        entry = self._entries[name]
        dtype = DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModel(f"tensor {name} has dtype {entry.dtype}; there are {', '.join(DTYPES)}")
        return self._files[entry.file].tensor(entry.offset, dtype, entry.shape)

    def header_bytes(self, file: int) -> bytes:
        """Everything before the weights of one file: what a fingerprint of the model must cover."""
        return self._files[file].data[: self.header_sizes[file]]

    def forget(self) -> None:
        """As ``MappedFile.forget``."""
        for file in self._files:
            file.forget()

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise WeightError(f"{path.name} is missing from {path.parent}")
        size = path.stat().st_size
        if size < 8:
            raise WeightError(f"{path.name} is truncated: {size} bytes are no safetensors file")
        file = MappedFile(path)
        data = file.data
        (length,) = struct.unpack_from("<Q", data)
        start = 8 + length
        if start > size:
            raise WeightError(
                f"{path.name} is truncated inside its header, at byte {size} of {start}, or no safetensors"
            )
        try:
            header: dict[str, Any] = json.loads(data[8:start])
            header.pop("__metadata__", None)
            entries = {name: self._entry(entry, start) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightError(f"{path.name} has no readable safetensors header: {error}") from error
        for name, (entry, end) in entries.items():
            if name in self._entries:
                raise WeightError(f"tensor {name} is in {self.paths[self._entries[name].file].name} and in {path.name}")
            dtype = DTYPES.get(entry.dtype)
            if dtype is not None and entry.offset + math.prod(entry.shape) * dtype.itemsize != end:
                raise WeightError(f"tensor {name} in {path.name}: {end - entry.offset} bytes for shape {entry.shape}")
            if end > size:
                raise WeightError(f"tensor {name} is truncated: it ends at byte {end} of {path.name}, which has {size}")
            self._entries[name] = entry
        self._files.append(file)
        self.header_sizes.append(start)

    def _entry(self, entry: dict[str, Any], start: int) -> tuple[_Entry, int]:
        begin, end = entry["data_offsets"]
        shape = tuple(int(length) for length in entry["shape"])
        return _Entry(len(self._files), entry["dtype"], shape, start + begin), start + end
