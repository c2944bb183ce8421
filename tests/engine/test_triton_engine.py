"""The engine over the Triton kernels, in the interpreter: the same text as over the reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv import LLM, SamplingParams


def test_the_engine_says_the_same_over_triton(tiny_model: Callable[..., Path]) -> None:
    """Two prompts with a common prefix, prefill in chunks, an odd head group, fp8 KV."""
    pytest.importorskip("triton")
    path = tiny_model("qwen3", num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=1)
    prompts = [{"prompt_token_ids": [*range(40, 52), last]} for last in (60, 61)]
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    said = {}
    for backend in ("reference", "triton"):
        llm = LLM(
            str(path), attention_backend=backend, block_size=4, kv_cache_dtype="fp8_e4m3", num_gpu_blocks_override=16,
            max_model_len=32, max_num_seqs=2, max_num_batched_tokens=8, device="cpu",
        )  # fmt: skip
        outputs = llm.generate(prompts, params)
        said[backend] = [output.outputs[0].token_ids for output in outputs]
        assert outputs[1].num_cached_tokens == 12
    assert said["triton"] == said["reference"]
    assert all(len(tokens) == 3 for tokens in said["triton"])
