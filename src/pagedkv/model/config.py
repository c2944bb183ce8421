"""What a checkpoint says about its model, in one form for every family and file format.

Owns: ``ModelConfig`` and its reading from config.json or GGUF metadata. No weight is touched, so a memory plan needs
no more than this.
Guarantees: a field that changes the maths is honoured or refused by name, never skipped.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.errors import ModelError, UnsupportedModel
from pagedkv.model.rope import RopeConfig, rope_from_gguf, rope_from_json

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")

# max_position_embeddings that a family has when its config.json leaves the field out
_DEFAULT_CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder. Counts start with ``num_``; widths are in features.

    head_dim is a fact of its own: it need not be ``hidden_size / num_heads`` (Qwen3, Mistral Nemo), and the KV pool is
    sized with it. ``layer_windows[i]``: tokens that layer i looks back, its own included; None for all.
    """

    architecture: str  # llama | mistral | qwen2 | qwen3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    attention_bias: bool = False  # of q, k and v
    output_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k, before the rotation
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    torch_dtype: str | None = None  # the checkpoint's own, "bfloat16"; None for GGUF, where every tensor has its own

    def __post_init__(self) -> None:
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        for name in (*counts, "head_dim", "max_position_embeddings"):
            value = getattr(self, name)
            if not isinstance(value, int) or value <= 0:
                raise UnsupportedModel(f"{name} must be a positive whole number, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.rope.dim != self.head_dim:
            raise UnsupportedModel(f"the rotation is {self.rope.dim} wide, the heads {self.head_dim}")
        if len(self.layer_windows) != self.num_layers:
            raise UnsupportedModel(f"{len(self.layer_windows)} layer types for {self.num_layers} layers")
        if any(window is not None and window <= 0 for window in self.layer_windows):
            raise UnsupportedModel(f"a sliding window must be positive: {self.layer_windows}")

    @property
    def kv_width(self) -> int:
        """Elements of K, or of V, that one token has in one layer."""
        return self.num_kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint; ModelError names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object")
    return value


def config_from_json(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a Hugging Face config.json and, where there is one, generation_config.json."""
    try:
        family = _family(config)
        _refuse_what_is_not_built(config)
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        head_dim = config.get("head_dim", 128 if family == "qwen3" else None) or hidden // heads
        context = config.get("max_position_embeddings", _DEFAULT_CONTEXT[family])
        bias = bool(config.get("attention_bias", False))
        return ModelConfig(
            architecture=family,
            vocab_size=config["vocab_size"],
            hidden_size=hidden,
            intermediate_size=config["intermediate_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=_num_kv_heads(family, config),
            head_dim=head_dim,
            max_position_embeddings=context,
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope=rope_from_json(config, dim=head_dim, max_position_embeddings=context),
            layer_windows=_layer_windows(family, config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=True if family == "qwen2" else bias and family != "mistral",
            output_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
            qk_norm=family == "qwen3",
            eos_token_ids=_union(_ids(config, "eos_token_id"), _ids(generation or {}, "eos_token_id")),
            bos_token_id=next(iter(_ids(config, "bos_token_id")), None),
            torch_dtype=config.get("dtype") or config.get("torch_dtype"),
        )
    except KeyError as error:
        raise UnsupportedModel(f"config.json has no field {error}") from error
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:  # a field of another type than it has
        raise UnsupportedModel(f"config.json cannot be understood: {error}") from error


def config_from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    """Read a GGUF file's metadata. Which biases there are and whether the head is tied, its tensor names tell."""
    try:
        return _from_gguf(metadata, tensor_names)
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:  # a key of another type than it has
        raise UnsupportedModel(f"the GGUF metadata cannot be understood: {error}") from error


def _from_gguf(metadata: Mapping[str, Any], tensor_names: Collection[str]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r} is not supported; there are {', '.join(GGUF_ARCHITECTURES)}"
        )

    def value(name: str, default: Any = None) -> Any:
        found = metadata.get(f"{architecture}.{name}", default)
        if found is None:
            raise UnsupportedModel(f"the GGUF metadata has no {architecture}.{name}")
        return found

    heads = _one_for_all_layers(value("attention.head_count"), f"{architecture}.attention.head_count")
    head_dim = value("attention.key_length", value("embedding_length") // heads)
    if value("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModel(f"{architecture}: heads of K and V have different widths")
    if value("expert_count", 0):
        raise UnsupportedModel(f"{architecture}: mixtures of experts are not supported")
    layers, context = value("block_count"), value("context_length")
    window = metadata.get(f"{architecture}.attention.sliding_window") or None
    return ModelConfig(
        architecture=architecture,
        vocab_size=value("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=value("embedding_length"),
        intermediate_size=_one_for_all_layers(value("feed_forward_length"), f"{architecture}.feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_one_for_all_layers(value("attention.head_count_kv", heads), "head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=context,
        rms_norm_eps=value("attention.layer_norm_rms_epsilon"),
        rope=rope_from_gguf(metadata, architecture, dim=head_dim, max_position_embeddings=context),
        layer_windows=(window,) * layers,
        tie_word_embeddings="output.weight" not in tensor_names,
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
        eos_token_ids=_union(*(_ids(metadata, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))),
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
    )


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    known = ", ".join(FAMILIES)
    if len(names) == 1:
        if names[0] not in FAMILIES:
            raise UnsupportedModel(f"architecture {names[0]!r} is not supported; there are {known}")
        return FAMILIES[names[0]]
    kind = config.get("model_type")
    if names or kind not in FAMILIES.values():
        raise UnsupportedModel(f"architectures {names}, model_type {kind!r}: not supported; there are {known}")
    return str(kind)


def _refuse_what_is_not_built(config: Mapping[str, Any]) -> None:
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise UnsupportedModel(f"hidden_act {config['hidden_act']!r} is not supported, only silu")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(f"quantization_config {method!r} is not supported; GGUF files are")
    if config.get("auto_map"):
        raise UnsupportedModel("the checkpoint needs code of its own (auto_map); no foreign code is run here")


def _num_kv_heads(family: str, config: Mapping[str, Any]) -> int:
    if "num_key_value_heads" in config and config["num_key_value_heads"] is not None:
        return int(config["num_key_value_heads"])
    if "num_key_value_heads" not in config and family in ("mistral", "qwen2", "qwen3"):
        # these families' own defaults are sizes of one model, so a left out field means nothing sure
        raise UnsupportedModel(f"config.json of a {family} model has no field 'num_key_value_heads'")
    return int(config["num_attention_heads"])


def _layer_windows(family: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """sliding_window, use_sliding_window, max_window_layers and layer_types, as each family reads them."""
    layers = config["num_hidden_layers"]
    window = config.get("sliding_window", None if family == "llama" else 4096)
    if family.startswith("qwen") and not config.get("use_sliding_window", False):
        window = None
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28) if family.startswith("qwen") else 0
        kinds = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise UnsupportedModel(f"layer_types {', '.join(map(repr, strange))} is not supported")
    if "sliding_attention" in kinds and not window:
        raise UnsupportedModel(f"layer_types has 'sliding_attention', but sliding_window is {window}")
    if family == "llama" and "sliding_attention" in kinds:
        raise UnsupportedModel(f"sliding_window {window} in a llama model: its layers have none")
    if family == "mistral" and window and "full_attention" in kinds:
        raise UnsupportedModel("layer_types with full attention in a mistral model that has a sliding_window")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def _one_for_all_layers(value: Any, name: str) -> int:
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UnsupportedModel(f"{name} differs from layer to layer: {value}")
        return int(value[0])
    return int(value)


def _ids(source: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = source.get(field)
    if value is None:
        return ()
    return tuple(int(i) for i in value) if isinstance(value, list) else (int(value),)


def _union(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """In order of first mention."""
    return tuple(dict.fromkeys(i for group in groups for i in group))
