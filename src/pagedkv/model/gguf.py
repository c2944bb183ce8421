"""GGUF files: header, tensor table, and weights kept in the bits of the file.

Owns: the format (versions 2 and 3, little-endian, split files), ``QuantisedTensor``.
Guarantees: the header is checked against the file's size before anything is believed; a tensor that does not lie
whole inside the file, or whose type is not built here, is named.
Costs: one pass over the header (tens of milliseconds for a vocabulary of 49k); weights are not read until used.

Which numbers a block holds is left to the ``gguf`` package (llama.cpp's own). Its reader is not used: it builds a
numpy object per string, 2.3 s for a vocabulary that the loop below reads in 0.05 s (docs/adr/0031).
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.mapped import MappedFile

_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # ggml type -> dtype
# ggml type -> name, weights in a block, bytes of a block
_QUANTISED = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
}
_TYPE_OF = {name: number for number, (name, _, _) in _QUANTISED.items()}
SUPPORTED_TYPES = ("F32", "F16", "BF16", *_TYPE_OF)

# metadata value types 0-7 and 10-12 -> struct format; 8 is a string, 9 an array
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class QuantisedTensor:
    """A matrix in blocks of a few bits, as its file has them.

    blocks: uint8 [rows, bytes of a row]; ggml_type: "Q4_1", ...; shape: (rows, columns). Rows are independent.
    """

    blocks: Tensor
    ggml_type: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.blocks.numel()

    def dequantize(self) -> Tensor:
        """Float32 of ``shape``, the numbers that ``gguf.quants`` gives."""
        from gguf import GGMLQuantizationType, quants

        values = quants.dequantize(self.blocks.numpy(), GGMLQuantizationType(_TYPE_OF[self.ggml_type]))
        return torch.from_numpy(values).view(self.shape)

    def rows(self, index: Tensor) -> QuantisedTensor:
        """The rows that ``index`` (int64) names, in its order, still quantised."""
        return QuantisedTensor(self.blocks[index], self.ggml_type, (index.numel(), *self.shape[1:]))


@dataclass(frozen=True)
class TensorInfo:
    """One line of the tensor table. shape: as torch orders it; offset: from the start of the file, in bytes."""

    name: str
    ggml_type: int
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: int  # which of the split files


class GGUFFile:
    """A GGUF model, of one file or several (``name-00001-of-00003.gguf``).

    metadata: key -> value (numbers, strings, lists); tensors: name -> TensorInfo; paths: the files, in order.
    """

    def __init__(self, path: Path) -> None:
        self.paths = [path]
        self._files: list[MappedFile] = []
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self.header_sizes: list[int] = []
        self._open(path)
        count = self.metadata.get("split.count", 0)
        if count > 1:
            self._open_rest(path, count)

    def get(self, name: str) -> Tensor | QuantisedTensor:
        """The tensor over the memory map: no copy where the file is aligned. Raises WeightError for a missing name."""
        info = self.tensors.get(name)
        if info is None:
            raise WeightError(f"tensor {name} is missing from {self.paths[0].name}")
        dtype = _PLAIN.get(info.ggml_type)
        if dtype is not None:
            return self._files[info.file].tensor(info.offset, dtype, info.shape)
        name_of_type, _, _ = _QUANTISED[info.ggml_type]
        rows = info.nbytes // max(1, _rows(info.shape))
        blocks = self._files[info.file].tensor(info.offset, torch.uint8, (_rows(info.shape), rows))
        return QuantisedTensor(blocks, name_of_type, info.shape)

    def header_bytes(self, file: int) -> bytes:
        """Everything before the weights of one file: what a fingerprint of the model must cover."""
        return self._files[file].data[: self.header_sizes[file]]

    def forget(self) -> None:
        """As ``MappedFile.forget``."""
        for file in self._files:
            file.forget()

    def _open(self, path: Path) -> None:
        file = len(self._files)
        mapped = MappedFile(path)
        self._files.append(mapped)
        data = mapped.data
        header = _Header(data, path.name)
        metadata, infos = header.read()
        if file == 0:
            self.metadata = metadata
        start = header.data_start(metadata)
        self.header_sizes.append(header.position)
        for name, shape, ggml_type, offset in infos:
            if name in self.tensors:
                raise WeightError(f"tensor {name} is in {path.name} twice")
            nbytes = _size_of(name, shape, ggml_type)
            if start + offset + nbytes > len(data):
                raise WeightError(
                    f"tensor {name} is truncated: it ends at byte {start + offset + nbytes} of {path.name}, "
                    f"which has {len(data)}"
                )
            self.tensors[name] = TensorInfo(name, ggml_type, shape, start + offset, nbytes, file)

    def _open_rest(self, path: Path, count: int) -> None:
        parts = re.fullmatch(r"(.+)-(\d{5})-of-(\d{5})\.gguf", path.name)
        if parts is None or int(parts[3]) != count:
            raise WeightError(
                f"{path.name} is one of {count} files, but is not named like name-00001-of-{count:05}.gguf"
            )
        if self.metadata.get("split.no", 0) != 0:
            raise WeightError(
                f"{path.name} is not the first of its {count} files; name {parts[1]}-00001-of-{parts[3]}.gguf"
            )
        for number in range(2, count + 1):
            other = path.with_name(f"{parts[1]}-{number:05}-of-{parts[3]}.gguf")
            if not other.is_file():
                raise WeightError(f"{other.name} is missing: the model has {count} files")
            self.paths.append(other)
            self._open(other)
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if total != len(self.tensors):
            raise WeightError(f"the {count} files hold {len(self.tensors)} tensors, {path.name} promises {total}")


class _Header:
    """A cursor over the header of one file; every read is checked against the end of the file."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.position = data, name, 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...], int, int]]]:
        """Metadata, and (name, shape, ggml type, offset) of each tensor."""
        if self.data[:4] != b"GGUF":
            raise WeightError(f"{self.name} is not a GGUF file")
        self.position = 4
        (version,) = self._take("I")
        if version not in (2, 3):
            raise UnsupportedModel(
                f"{self.name}: GGUF version {version} is not supported (a big-endian file?); 2 and 3 are"
            )
        num_tensors, num_keys = self._take("QQ")
        metadata = {}
        for _ in range(self._count(num_keys)):
            key = self._string()
            (kind,) = self._take("I")
            metadata[key] = self._value(kind)
        tensors = []
        for _ in range(self._count(num_tensors)):
            name = self._string()
            (rank,) = self._take("I")
            shape = self._take(f"{self._count(rank)}Q")
            ggml_type, offset = self._take("IQ")
            tensors.append((name, tuple(reversed(shape)), ggml_type, offset))
        return metadata, tensors

    def data_start(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise WeightError(f"{self.name}: general.alignment {alignment!r} is not a positive number")
        return -(-self.position // alignment) * alignment

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            of, count = self._take("IQ")
            count = self._count(count)
            if of == _STRING:
                return self._strings(count)
            if of not in _SCALARS:
                raise UnsupportedModel(f"{self.name}: metadata arrays of type {of} are not supported")
            return list(self._take(f"{count}{_SCALARS[of]}"))
        if kind not in _SCALARS:
            raise UnsupportedModel(f"{self.name}: metadata type {kind} is not known")
        return self._take(_SCALARS[kind])[0]

    def _take(self, form: str) -> tuple[Any, ...]:
        form = "<" + form
        end = self.position + struct.calcsize(form)
        if end > len(self.data):
            raise WeightError(f"{self.name} is truncated inside its header, at byte {len(self.data)}")
        values = struct.unpack_from(form, self.data, self.position)
        self.position = end
        return values

    def _count(self, count: int) -> int:
        """A number of things that still have to fit into the file."""
        if count > len(self.data) - self.position:
            raise WeightError(f"{self.name} is truncated: it promises {count} more entries at byte {self.position}")
        return count

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        unpack, data, position, end = struct.Struct("<Q").unpack_from, self.data, self.position, len(self.data)
        strings = []
        for _ in range(count):
            if position + 8 > end:
                raise WeightError(f"{self.name} is truncated inside its header, at byte {end}")
            start = position + 8
            position = start + unpack(data, position)[0]
            if position > end:
                raise WeightError(f"{self.name} is truncated inside its header, at byte {end}")
            strings.append(data[start:position].decode("utf-8", "replace"))
        self.position = position
        return strings


def _rows(shape: tuple[int, ...]) -> int:
    rows = 1
    for length in shape[:-1]:
        rows *= length
    return rows


def _size_of(name: str, shape: tuple[int, ...], ggml_type: int) -> int:
    """Bytes of a tensor; UnsupportedModel for a type that is not built here, by its llama.cpp name."""
    elements = _rows(shape) * (shape[-1] if shape else 1)
    if ggml_type in _PLAIN:
        return elements * _PLAIN[ggml_type].itemsize
    if ggml_type not in _QUANTISED:
        raise UnsupportedModel(
            f"tensor {name} has type {_type_name(ggml_type)}; there are {', '.join(SUPPORTED_TYPES)}"
        )
    kind, weights, nbytes = _QUANTISED[ggml_type]
    if not shape or shape[-1] % weights:
        raise WeightError(f"tensor {name} of shape {shape} cannot be {kind}: rows are not whole blocks of {weights}")
    return elements // weights * nbytes


def _type_name(ggml_type: int) -> str:
    from gguf import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(ggml_type).name)
    except ValueError:
        return f"number {ggml_type}"
