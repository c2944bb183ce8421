"""config.json and GGUF metadata: every field that changes the maths is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny_config

from pagedkv.errors import UnsupportedModel
from pagedkv.model.config import ModelConfig, config_from_gguf, config_from_json

TENSORS = ("token_embd.weight", "blk.0.attn_q.weight")


def read(family: str = "llama", generation: dict[str, Any] | None = None, **overrides: Any) -> ModelConfig:
    return config_from_json(tiny_config(family, **overrides), generation)


def gguf(architecture: str = "llama", **overrides: Any) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "vocab_size": 320,
        "context_length": 512,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    metadata = {f"{architecture}.{name}": value for name, value in keys.items() if value is not ...}
    return {"general.architecture": architecture, **metadata}


def test_the_shape_of_a_model() -> None:
    config = read("qwen3", head_dim=24, num_key_value_heads=1)
    assert (config.architecture, config.num_layers, config.num_heads, config.num_kv_heads) == ("qwen3", 2, 4, 1)
    assert (config.head_dim, config.kv_width, config.hidden_size, config.intermediate_size) == (24, 24, 64, 96)
    assert (config.qk_norm, config.attention_bias, config.tie_word_embeddings) == (True, False, True)
    assert config.torch_dtype == "float32"


def test_biases_are_the_families_own() -> None:
    def biases(family: str, **overrides: Any) -> tuple[bool, bool, bool]:
        config = read(family, **overrides)
        return config.attention_bias, config.output_bias, config.mlp_bias

    assert biases("llama") == (False, False, False)
    assert biases("llama", attention_bias=True, mlp_bias=True) == (True, True, True)
    assert biases("qwen2") == (True, False, False)
    assert biases("qwen3", attention_bias=True) == (True, True, False)
    assert biases("mistral") == (False, False, False)


@pytest.mark.parametrize(
    ("family", "overrides", "windows"),
    [
        ("llama", {}, (None, None)),
        ("llama", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 8}, (8, 8)),
        ("mistral", {"sliding_window": ...}, (4096, 4096)),
        ("mistral", {"sliding_window": None}, (None, None)),
        ("mistral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ("qwen2", {"sliding_window": 8}, (None, None)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}, (None, 8)),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True}, (None, None)),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (
            "qwen3",
            {"sliding_window": 8, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            (8, None),
        ),
    ],
    ids=str,
)
def test_windows_of_the_layers(family: str, overrides: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(family, **overrides).layer_windows == windows


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'"),
        ({"architectures": [], "model_type": "phi"}, "'phi'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"auto_map": {"AutoModelForCausalLM": "code.Model"}}, "no foreign code"),
        ({"sliding_window": 8}, "sliding_window 8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'"),
        ({"layer_types": ["full_attention"]}, "1 layer types for 2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is None"),
        ({"num_attention_heads": 3}, "num_heads 3 .* num_kv_heads 2"),
        ({"head_dim": 15}, "15"),
        ({"num_hidden_layers": 0, "layer_types": []}, "num_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"hidden_size": ...}, "'hidden_size'"),
        ({"intermediate_size": ...}, "'intermediate_size'"),
        ({"hidden_size": "64", "head_dim": None}, "cannot be understood"),
        ({"num_attention_heads": 0, "head_dim": None}, "cannot be understood"),
        ({"num_hidden_layers": None}, "cannot be understood"),
        ({"rope_scaling": [1]}, "cannot be understood"),
        ({"rope_theta": "big"}, "cannot be understood"),
        ({"eos_token_id": "two"}, "cannot be understood"),
        ({"architectures": 7}, "cannot be understood"),
    ],
    ids=str,
)
def test_what_is_not_built_is_refused_by_name(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        read(**overrides)


def test_a_family_needs_its_kv_heads_said() -> None:
    assert read("llama", num_key_value_heads=...).num_kv_heads == 4
    assert read("qwen2", num_key_value_heads=None).num_kv_heads == 4
    with pytest.raises(UnsupportedModel, match="num_key_value_heads"):
        read("qwen2", num_key_value_heads=...)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (7, None, (7,)),
        (7, {"eos_token_id": [7, 9]}, (7, 9)),
        ([7, 8], {"eos_token_id": 9}, (7, 8, 9)),
        (None, {"eos_token_id": 9}, (9,)),
        (..., {}, ()),
        (None, None, ()),
    ],
)
def test_b85_end_of_text_is_the_union_of_both_files(
    config: Any, generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read("llama", generation, eos_token_id=config).eos_token_ids == expected


def test_gguf_metadata_is_the_same_model() -> None:
    config = config_from_gguf(gguf(), TENSORS)
    expected = read("llama")
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size", "rope"):
        assert getattr(config, field) == getattr(expected, field)
    assert config.tie_word_embeddings
    assert config.torch_dtype is None
    assert not config_from_gguf(gguf(), (*TENSORS, "output.weight")).tie_word_embeddings
    assert config_from_gguf(gguf("qwen2"), (*TENSORS, "blk.0.attn_q.bias")).attention_bias
    assert config_from_gguf(gguf("qwen3", attention__key_length=32, attention__value_length=32), TENSORS).head_dim == 32
    assert config_from_gguf(gguf(attention__sliding_window=9), TENSORS).layer_windows == (9, 9)
    assert config_from_gguf(gguf(feed_forward_length=[96, 96]), TENSORS).intermediate_size == 96


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (gguf("gemma3"), "'gemma3'"),
        ({}, "None"),
        (gguf(block_count=...), "llama.block_count"),
        (gguf(expert_count=8), "experts"),
        (gguf(attention__head_count=[4, 2]), "differs from layer to layer"),
        (gguf(attention__value_length=32), "widths"),
        (gguf(rope__dimension_count=8), "dimension_count 8"),
        (gguf(rope__scaling__type="longrope", rope__scaling__factor=2.0), "'longrope'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_gguf_metadata_that_is_not_supported_is_refused_by_name(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        config_from_gguf(metadata, TENSORS)
