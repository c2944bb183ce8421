"""Tiny random checkpoints on disk, in the Hugging Face layout: config, weights, tokenizer, chat template.

Made without transformers (whose import costs seconds), from the names and shapes of ``pagedkv.model``. The tests of
``model/`` make theirs with transformers' own ``save_pretrained`` too, so that the layout here is not our invention.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from pagedkv.model import names
from pagedkv.model.config import config_from_json

CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2  # <|im_end|>
VOCAB_SIZE = 320
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXT = (
    "The cache keeps keys and values in blocks of sixteen tokens.",
    "A block table says where each block of a sequence lies.",
    "What two prompts share at the start is computed once.",
)


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json of about 100k parameters: 2 layers, hidden 64, 4 query heads on 2 KV heads of 16."""
    config: dict[str, Any] = {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if family == "mistral":
        config["sliding_window"] = 24
    config.update(overrides)
    return {key: value for key, value in config.items() if value is not ...}


def tiny_weights(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights under the checkpoint's names, large enough that greedy text is not one token over and over."""
    generator = torch.Generator().manual_seed(seed)
    shape = config_from_json(config)
    dtype = getattr(torch, config["torch_dtype"])
    weights = {}
    for name, size in names.expected_shapes(shape).items():
        values = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1 + 0.1 * values
        else:
            weights[name] = values * (0.3 if name.endswith("bias") else 1.5 / size[-1] ** 0.5)
    if not shape.tie_word_embeddings:
        weights[names.HEAD] = torch.randn((shape.vocab_size, shape.hidden_size), generator=generator) * 0.2
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A byte-level BPE: every text can be encoded, and decoding gives it back. Ids 0-2 are ``SPECIAL``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    return tokenizer


def write_tokenizer(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> None:
    """tokenizer.json and tokenizer_config.json; ``config`` overrides fields of the latter, ``...`` leaves one out."""
    directory.mkdir(parents=True, exist_ok=True)
    (tokenizer or tiny_tokenizer()).save(str(directory / "tokenizer.json"))
    fields: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        **config,
    }
    kept = {key: value for key, value in fields.items() if value is not ...}
    (directory / "tokenizer_config.json").write_text(json.dumps(kept))


def make_tiny_model(directory: Path, family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
    """Write a whole checkpoint into ``directory`` and return it. ``overrides``: config.json fields, ``...`` to omit."""
    config = tiny_config(family, **overrides)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tiny_weights(config, seed), str(directory / "model.safetensors"), metadata={"format": "pt"})
    write_tokenizer(directory)
    return directory
