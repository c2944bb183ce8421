"""All weights of a model in one structure, whatever file they came from.

Owns: the check that a checkpoint has exactly the tensors its config asks for, the four cases of a tied head, and
undoing llama.cpp's row order of q and k. Both decoders (``decoder.py``, ``native.py``) are built from the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedkv.errors import WeightError
from pagedkv.model import names
from pagedkv.model.config import ModelConfig
from pagedkv.model.gguf import GGUFFile, QuantisedTensor

Weight = Tensor | QuantisedTensor


class Checkpoint(Protocol):
    """Tensors by their Hugging Face names, on the CPU."""

    @property
    def names(self) -> set[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def nbytes(self, name: str) -> int: ...

    def get(self, name: str) -> Weight: ...

    def forget(self) -> None: ...


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. Matrices are [out_features, in_features]; norms and biases are vectors."""

    input_norm: Tensor
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    post_norm: Tensor
    gate: Weight
    up: Weight
    down: Weight
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True)
class ModelWeights:
    """embedding [vocab, hidden]; head None when it is the embedding; nbytes: in the files.

    layers: one that is asked for is read from the files then, and what was read before it leaves memory.
    """

    embedding: Weight
    layers: Sequence[LayerWeights]
    final_norm: Tensor
    head: Weight | None
    nbytes: int


class _Layers(Sequence[LayerWeights]):
    """The layers of a checkpoint, in a memory that need not hold them all at once."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self._checkpoint, self._count = checkpoint, config.num_layers
        self._parts = names.layer_shapes(config)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        self._checkpoint.forget()
        return _layer(self._checkpoint, range(self._count)[index], self._parts)


def read_weights(config: ModelConfig, checkpoint: Checkpoint) -> ModelWeights:
    """Take every tensor that ``config`` asks for. Raises WeightError for a missing, surplus or misshapen one."""
    expected = names.expected_shapes(config)
    surplus = [n for n in checkpoint.names if n not in expected and n != names.HEAD and not names.is_ignored(n)]
    if surplus:
        raise WeightError(f"the checkpoint has {_some(surplus)}, which a {config.architecture} model has no place for")
    missing = [name for name in expected if name not in checkpoint.names]
    if missing:
        raise WeightError(f"the checkpoint lacks {_some(missing)}")
    for name, shape in expected.items():
        _check_shape(checkpoint, name, shape)
    head = _head(config, checkpoint)
    taken = [*expected] if head is None else [*expected, names.HEAD]
    return ModelWeights(
        embedding=checkpoint.get(names.EMBEDDING),
        layers=_Layers(config, checkpoint),
        final_norm=_vector(checkpoint, names.FINAL_NORM),
        head=head,
        nbytes=sum(checkpoint.nbytes(name) for name in taken),
    )


def _layer(checkpoint: Checkpoint, index: int, parts: dict[str, tuple[int, ...]]) -> LayerWeights:
    def matrix(part: str) -> Weight:
        return checkpoint.get(names.layer(index, f"{part}.weight"))

    def vector(part: str) -> Tensor | None:
        return _vector(checkpoint, names.layer(index, part)) if part in parts else None

    return LayerWeights(
        input_norm=_vector(checkpoint, names.layer(index, "input_layernorm.weight")),
        q=matrix("self_attn.q_proj"),
        k=matrix("self_attn.k_proj"),
        v=matrix("self_attn.v_proj"),
        o=matrix("self_attn.o_proj"),
        post_norm=_vector(checkpoint, names.layer(index, "post_attention_layernorm.weight")),
        gate=matrix("mlp.gate_proj"),
        up=matrix("mlp.up_proj"),
        down=matrix("mlp.down_proj"),
        q_bias=vector("self_attn.q_proj.bias"),
        k_bias=vector("self_attn.k_proj.bias"),
        v_bias=vector("self_attn.v_proj.bias"),
        o_bias=vector("self_attn.o_proj.bias"),
        gate_bias=vector("mlp.gate_proj.bias"),
        up_bias=vector("mlp.up_proj.bias"),
        down_bias=vector("mlp.down_proj.bias"),
        q_norm=vector("self_attn.q_norm.weight"),
        k_norm=vector("self_attn.k_norm.weight"),
    )


def _head(config: ModelConfig, checkpoint: Checkpoint) -> Weight | None:
    """The output matrix, in the four cases of (tied or not) x (in the file or not)."""
    if names.HEAD not in checkpoint.names:
        if config.tie_word_embeddings:
            return None
        raise WeightError(f"the checkpoint lacks {names.HEAD}, and its config says tie_word_embeddings = false")
    _check_shape(checkpoint, names.HEAD, (config.vocab_size, config.hidden_size))
    head = checkpoint.get(names.HEAD)
    if not config.tie_word_embeddings:
        return head
    if not _equal(head, checkpoint.get(names.EMBEDDING)):
        raise WeightError(
            f"tie_word_embeddings is true, but {names.HEAD} differs from {names.EMBEDDING}: "
            "one of the two must be wrong, and nothing tells which"
        )
    return None


def _equal(a: Weight, b: Weight) -> bool:
    if isinstance(a, QuantisedTensor) or isinstance(b, QuantisedTensor):
        return type(a) is type(b) and a.ggml_type == b.ggml_type and torch.equal(a.blocks, b.blocks)  # type: ignore[union-attr]
    return a.dtype == b.dtype and torch.equal(a, b)


def _vector(checkpoint: Checkpoint, name: str) -> Tensor:
    weight = checkpoint.get(name)
    return weight.dequantize() if isinstance(weight, QuantisedTensor) else weight


def _check_shape(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    found = checkpoint.shape(name)
    if found != shape:
        raise WeightError(f"tensor {name} has shape {found}, the config asks for {shape}")


def _some(tensors: list[str]) -> str:
    shown = ", ".join(sorted(tensors)[:3])
    return f"tensor {shown}" if len(tensors) <= 3 else f"tensors {shown} and {len(tensors) - 3} more"


class GGUFCheckpoint:
    """A GGUF file under Hugging Face names, with q and k in their row order.

    llama.cpp's converter interleaves the two halves of every head of q and k, for the architecture "llama" alone, so
    that its rotation can work on neighbouring rows. Rows are independent, so quantised ones are put back as they are.
    """

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.file = file
        self._config = config
        self._theirs: dict[str, str] = {}
        for name in file.tensors:
            if name != names.ROPE_FACTORS:
                self._theirs[names.from_gguf(name) or name] = name

    @property
    def names(self) -> set[str]:
        return set(self._theirs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.file.tensors[self._theirs[name]].shape

    def nbytes(self, name: str) -> int:
        return self.file.tensors[self._theirs[name]].nbytes

    def forget(self) -> None:
        self.file.forget()

    def get(self, name: str) -> Weight:
        weight = self.file.get(self._theirs[name])
        if self._config.architecture != "llama" or (".q_proj." not in name and ".k_proj." not in name):
            return weight
        order = _half_order(weight.shape[0], self._config.head_dim)
        return weight.rows(order) if isinstance(weight, QuantisedTensor) else weight[order]


def _half_order(rows: int, head_dim: int) -> Tensor:
    """Where each row of [heads, 2, head_dim / 2] lies in a file that has [heads, head_dim / 2, 2]: int64 [rows]."""
    return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).reshape(-1)


def with_rope_factors(config: ModelConfig, file: GGUFFile) -> ModelConfig:
    """Add the llama3 frequencies, which a GGUF file keeps as divisors in a tensor of their own."""
    if names.ROPE_FACTORS not in file.tensors:
        return config
    factors = file.get(names.ROPE_FACTORS)
    if isinstance(factors, QuantisedTensor) or config.rope.kind != "default":
        raise WeightError(f"{names.ROPE_FACTORS} beside rope scaling {config.rope.kind!r}, or quantised")
    return replace(config, rope=replace(config.rope, factors=tuple(factors.float().tolist())))
