"""Every family gives transformers' logits, however the tokens are cut into forward passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import run

from pagedkv.model.load import load_model

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with every bias": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"sliding_window": 7},
    "mistral without a window": {"sliding_window": None},
    "qwen2": {},
    "qwen2 with windows in its last layers": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"head_dim": 16},
    "qwen3 with named layer types": {
        "head_dim": 24,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
CUTS = {"prefill": [23], "chunks": [9, 1, 8, 5], "step by step": [1] * 23}


def make(kind: str, directory: Path, **overrides: Any) -> torch.nn.Module:
    """A random model of transformers' own making, saved by ``save_pretrained``."""
    family = kind.split()[0]
    torch.manual_seed(len(kind))
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **overrides})
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # transformers starts biases at zero, where a lost one would not be seen
                parameter.normal_(std=0.3)
            if name.endswith("norm.weight"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(directory)
    from tiny_models import write_tokenizer

    write_tokenizer(directory)
    return model


def theirs(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[torch.nn.Module, Path]]:
    made: dict[str, tuple[torch.nn.Module, Path]] = {}

    def get(kind: str) -> tuple[torch.nn.Module, Path]:
        if kind not in made:
            directory = tmp_path_factory.mktemp("family")
            made[kind] = make(kind, directory, **FAMILIES[kind]), directory
        return made[kind]

    return get


IDS = torch.randint(0, 320, (23,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.mark.parametrize("kind", FAMILIES)
def test_equals_transformers_in_float32(
    kind: str, pair: Callable[[str], tuple[torch.nn.Module, Path]], attention_name: str
) -> None:
    reference, directory = pair(kind)
    expected = theirs(reference, IDS)
    assert expected.std() > 0.3  # a model that says the same of every token would prove nothing
    model = load_model(directory, dtype="float32", device="cpu", attention_backend=attention_name).model
    for cut, chunks in CUTS.items():
        difference = (run(model, IDS, chunks) - expected).abs().max()
        assert difference < 1e-4, cut


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 32},
        {"head_dim": 24},
        {"head_dim": 8},
        {"head_dim": None},
        {"head_dim": ...},
        {"head_dim": 32, "num_key_value_heads": None},
        {"head_dim": 32, "num_key_value_heads": 4},
        {"head_dim": 32, "num_key_value_heads": 1},
    ],
    ids=str,
)
def test_b82_head_dim_is_a_fact_of_its_own(shape: dict[str, Any], tmp_path: Path) -> None:
    given = {name: value for name, value in shape.items() if value is not ...}
    reference = make("llama", tmp_path, **given)
    loaded = load_model(tmp_path, dtype="float32", device="cpu", attention_backend="reference")
    head_dim = reference.config.head_dim
    assert loaded.config.head_dim == head_dim
    assert loaded.config.kv_width == head_dim * (given.get("num_key_value_heads", 2) or 4)
    assert (run(loaded.model, IDS, [10, 13]) - theirs(reference, IDS)).abs().max() < 1e-4


SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn with its own temperature": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "attention_factor": 1.3,
        "beta_fast": 8,
        "beta_slow": 2,
    },
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_b83_scaled_rope_equals_transformers_to_four_times_the_original_length(kind: str, tmp_path: Path) -> None:
    ids = torch.randint(0, 320, (64,), generator=torch.Generator().manual_seed(6)).tolist()
    reference = make("llama", tmp_path, rope_parameters={"rope_theta": 500.0, **SCALINGS[kind]})
    model = load_model(tmp_path, dtype="float32", device="cpu", attention_backend="reference").model
    assert (run(model, ids, [30, 1, 33]) - theirs(reference, ids)).abs().max() < 1e-4


def test_bfloat16_is_near_float32(pair: Callable[[str], tuple[torch.nn.Module, Path]]) -> None:
    reference, directory = pair("llama")
    model = load_model(directory, dtype="bfloat16", device="cpu", attention_backend="reference").model
    expected = theirs(reference, IDS)
    assert (run(model, IDS, [23]) - expected).abs().mean() < 0.05 * expected.std()
