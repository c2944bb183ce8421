"""GGUF files written from a tiny Hugging Face checkpoint, in the way of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from pagedkv.model import names
from pagedkv.model.config import config_from_json

Quantise = Callable[[str, np.ndarray], tuple[np.ndarray, gguf.GGMLQuantizationType]]
_THEIRS = {ours: theirs for theirs, ours in names._GGUF_TOP.items()}
_PARTS = {ours: theirs for theirs, ours in names._GGUF_LAYER.items()}


def gguf_name(name: str) -> str:
    """model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight"""
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    return _THEIRS[name] if match is None else f"blk.{match[1]}.{_PARTS[match[2]]}.{match[3]}"


def interleave(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """What the converter does to q and k of the llama architecture: halves of a head become neighbours."""
    per_head = rows.shape[0] // num_heads
    halves = rows.reshape(num_heads, 2, per_head // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def quantise(kind: str) -> Quantise:
    """Matrices in ``kind``; vectors stay float32, as llama.cpp has them."""
    ggml_type = gguf.GGMLQuantizationType[kind]

    def apply(_: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        if values.ndim == 1 or kind == "F32":
            return values, gguf.GGMLQuantizationType.F32
        if kind == "F16":
            return values.astype(np.float16), ggml_type
        return gguf.quants.quantize(values, ggml_type), ggml_type

    return apply


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor],
    apply: Quantise,
    *,
    extra: Mapping[str, torch.Tensor] | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    alignment: int | None = None,
    split_max_tensors: int = 0,
) -> Path:
    """Write a model. extra: tensors under their GGUF names; metadata: adds or changes keys."""
    shape = config_from_json(config)
    architecture = "llama" if shape.architecture == "mistral" else shape.architecture
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split_max_tensors)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_vocab_size(shape.vocab_size)
    writer.add_context_length(shape.max_position_embeddings)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope.theta)
    writer.add_layer_norm_rms_eps(shape.rms_norm_eps)
    if metadata is not None:
        metadata(writer)
    for name, tensor in weights.items():
        heads = shape.num_heads if ".q_proj." in name else shape.num_kv_heads
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            tensor = interleave(tensor, heads)
        data, ggml_type = apply(name, tensor.float().contiguous().numpy())
        writer.add_tensor(gguf_name(name), data, raw_dtype=ggml_type)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if split_max_tensors:
        return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0]
    return path
