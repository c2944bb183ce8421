"""Frequencies are transformers', in every spelling; what is not supported is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedkv.errors import UnsupportedModel
from pagedkv.model.layers import RotaryTable
from pagedkv.model.rope import RopeConfig, rope_from_gguf, rope_from_json

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "linear": ("linear", {"factor": 2.5}),
    "llama3": ("llama3", LLAMA3),
    "llama3 published": ("llama3", {**LLAMA3, "original_max_position_embeddings": 8192}),
    "yarn": ("yarn", YARN),
    "yarn betas": ("yarn", {**YARN, "beta_fast": 16, "beta_slow": 2}),
    "yarn not truncated": ("yarn", {**YARN, "truncate": False}),
    "yarn temperature": ("yarn", {**YARN, "attention_factor": 0.7}),
    "yarn mscale": ("yarn", {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}),
    "yarn equal mscale": ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}),
    "yarn factor below one": ("yarn", {**YARN, "factor": 0.5}),
}


def spell(kind: str, parameters: dict[str, Any], spelling: str) -> dict[str, Any]:
    """The same scaling as config.json has had it over the years."""
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 5e5, **parameters}}
    return {"rope_theta": 5e5, "rope_scaling": {spelling: kind, **parameters}}


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
@pytest.mark.parametrize("name", KINDS)
def test_b83_inv_freq_is_bit_for_bit_that_of_transformers(name: str, head_dim: int) -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind, parameters = KINDS[name]
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=512,
        rope_parameters={"rope_type": kind, "rope_theta": 5e5, **parameters},
    )
    if kind == "default":
        expected, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    else:
        expected, factor = utils.ROPE_INIT_FUNCTIONS[kind](config, None)
    for spelling in ("rope_parameters", "type", "rope_type"):
        rope = rope_from_json(spell(kind, parameters, spelling), dim=head_dim, max_position_embeddings=512)
        assert torch.equal(rope.inv_freq(), expected)
        assert rope.attention_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    "nothing", [{}, {"rope_scaling": None}, {"rope_parameters": None}, {"rope_scaling": {}}], ids=str
)
def test_b83_no_scaling_is_plain_rope(nothing: dict[str, Any]) -> None:
    rope = rope_from_json({"rope_theta": 1000.0, **nothing}, dim=16, max_position_embeddings=64)
    assert (rope.theta, rope.kind) == (1000.0, "default")
    assert torch.allclose(rope.inv_freq(), 1000.0 ** (-torch.arange(0, 16, 2) / 16))


def test_b83_lengths_left_out_are_those_of_the_model() -> None:
    rope = rope_from_json({"rope_scaling": {"type": "yarn", "factor": 2.0}}, dim=16, max_position_embeddings=64)
    assert rope.parameters["original_max_position_embeddings"] == 64
    beside = {"rope_scaling": {"type": "yarn", "factor": 2.0}, "original_max_position_embeddings": 32}
    assert (
        rope_from_json(beside, dim=16, max_position_embeddings=64).parameters["original_max_position_embeddings"] == 32
    )
    factor = {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}}
    assert rope_from_json(factor, dim=16, max_position_embeddings=64).parameters["factor"] == 4


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"type": "su"}}, "'su'"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2]}}, "'mrope'"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2]}}, "mrope_section"),
        ({"rope_parameters": {"rope_type": "brandnew"}}, "'brandnew'"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 1.0}}, "high_freq_factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 3}}, "beta_fast"),
        ({"rope_theta": -1}, "rope_theta"),
    ],
    ids=str,
)
def test_b83_what_is_not_supported_is_refused_by_name(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        rope_from_json(config, dim=16, max_position_embeddings=64)


def test_gguf_spells_the_same_scalings() -> None:
    def read(**keys: Any) -> RopeConfig:
        metadata = {f"llama.rope.{name.replace('__', '.')}": value for name, value in keys.items()}
        return rope_from_gguf(metadata, "llama", dim=16, max_position_embeddings=512)

    assert read(freq_base=5e5, dimension_count=16).inv_freq().tolist() == RopeConfig(5e5, 16).inv_freq().tolist()
    assert read(scaling__type="linear", scaling__factor=2.0).kind == "linear"
    assert read(scale_linear=2.0).parameters == {"factor": 2.0}
    yarn = read(scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=128)
    assert yarn.parameters == YARN
    warmer = read(scaling__type="yarn", scaling__factor=4.0, scaling__attn_factor=0.5)
    assert warmer.attention_factor == pytest.approx(yarn.attention_factor / 2)
    with pytest.raises(UnsupportedModel, match="'longrope'"):
        read(scaling__type="longrope", scaling__factor=2.0)
    with pytest.raises(UnsupportedModel, match="dimension_count 8"):
        read(dimension_count=8)
    with pytest.raises(UnsupportedModel, match="yarn_log_multiplier"):
        read(scaling__type="yarn", scaling__factor=4.0, scaling__yarn_log_multiplier=0.1)


def test_the_table_does_not_depend_on_how_it_grew() -> None:
    rope = RopeConfig(10000.0, 80)
    at_once = RotaryTable(rope, torch.device("cpu"))
    at_once.grow(5000)
    slowly = RotaryTable(rope, torch.device("cpu"))
    for length in (1, 3, 1024, 1025, 2500, 5000):
        slowly.grow(length)
    common = min(slowly.cos.shape[0], at_once.cos.shape[0])
    assert common >= 5000
    assert torch.equal(slowly.cos[:common], at_once.cos[:common])
    assert torch.equal(slowly.sin[:common], at_once.sin[:common])
    angles = torch.arange(5000)[:, None] * rope.inv_freq()
    assert (at_once.cos[:5000] - angles.cos()).abs().max() < 1e-6
