"""The names of tensors: what a model must have, and what GGUF calls it.

The names inside pagedkv are those of the Hugging Face checkpoints. This file knows no file format.
"""

from __future__ import annotations

import re

from pagedkv.model.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
ROPE_FACTORS = "rope_freqs.weight"  # GGUF only

# Buffers that old checkpoints saved by accident: the frequencies follow from the config, and rope.py works them out.
_IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")

_GGUF_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def layer(index: int, part: str) -> str:
    """``layer(3, "mlp.up_proj.weight")`` -> the checkpoint's name of it."""
    return f"model.layers.{index}.{part}"


def is_ignored(name: str) -> bool:
    """Whether a surplus tensor may be left unread: only the rotary buffers, on purpose."""
    return _IGNORED.fullmatch(name) is not None


def from_gguf(name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for one that has no counterpart."""
    if name in _GGUF_TOP:
        return _GGUF_TOP[name]
    match = _GGUF_BLOCK.fullmatch(name)
    if match is None or match[2] not in _GGUF_LAYER:
        return None
    return layer(int(match[1]), f"{_GGUF_LAYER[match[2]]}.{match[3]}")


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of one layer, by the part of its name after the layer's number."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.kv_width
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_width, hidden),
        "self_attn.k_proj.weight": (kv_width, hidden),
        "self_attn.v_proj.weight": (kv_width, hidden),
        "self_attn.o_proj.weight": (hidden, q_width),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    biased = {
        "self_attn.q_proj": config.attention_bias,
        "self_attn.k_proj": config.attention_bias,
        "self_attn.v_proj": config.attention_bias,
        "self_attn.o_proj": config.output_bias,
        "mlp.gate_proj": config.mlp_bias,
        "mlp.up_proj": config.mlp_bias,
        "mlp.down_proj": config.mlp_bias,
    }
    for part, has_bias in biased.items():
        if has_bias:
            shapes[f"{part}.bias"] = shapes[f"{part}.weight"][:1]
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model but the head, which depends on how it is tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes.update({layer(index, part): shape for part, shape in layer_shapes(config).items()})
    shapes[FINAL_NORM] = (config.hidden_size,)
    return shapes
