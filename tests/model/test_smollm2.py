"""The default model says, token for token, what transformers says from the same file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import greedy

from pagedkv.errors import ModelNotFound
from pagedkv.model.hub import resolve
from pagedkv.model.load import LoadedModel, load_model

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Translate 'good morning' into German, then count from 1 to 12.",
    "def fibonacci(n):\n    ",
    "Émile's café sells 3 croissants — how much are they, if one costs 2.50?",
)
NUM_TOKENS = 64


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return resolve("smollm2-135m").weights[0]
    except ModelNotFound as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def ours(path: Path) -> LoadedModel:
    return load_model(path, dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def theirs(path: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@pytest.mark.timeout(300)  # most of it is transformers reading the file
def test_greedy_tokens_are_those_of_transformers(ours: LoadedModel, theirs: Any) -> None:
    """transformers sees each prompt with our text after it, in one pass: its best token at every place must be the one
    that stands there. By induction that is its own greedy text."""
    chats = [ours.tokenizer.apply_chat_template([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    for prompt, output in zip(chats, greedy(ours.model, chats, NUM_TOKENS), strict=True):
        assert len(output) == NUM_TOKENS
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + output[:-1]]), logits_to_keep=NUM_TOKENS).logits[0]
        assert logits.argmax(-1).tolist() == output
    answer = ours.tokenizer.decode(greedy(ours.model, chats[:1], 12)[0])
    assert "Paris" in answer


def test_its_config_and_tokenizer_come_from_the_metadata(ours: LoadedModel) -> None:
    assert ours.config.eos_token_ids == (2,)
    assert ours.config.tie_word_embeddings
    assert (ours.config.num_heads, ours.config.num_kv_heads, ours.config.head_dim) == (9, 3, 64)
    assert ours.tokenizer.has_chat_template
    assert ours.tokenizer.decode(ours.tokenizer.encode("a\tb 12 日本 🎉")) == "a\tb 12 日本 🎉"


def test_neither_torch_nor_transformers_before_they_are_needed(path: Path) -> None:
    """``import pagedkv`` is cheap; loading a model and generating from it never loads transformers."""
    code = """
import json, sys
import pagedkv
first = [name for name in ("torch", "transformers") if name in sys.modules]
from lone_run import greedy
from pagedkv.model.load import load_model
loaded = load_model(sys.argv[1], device="cpu")
text = loaded.tokenizer.decode(greedy(loaded.model, [loaded.tokenizer.encode("Once upon a time")], 4)[0])
print(json.dumps([first, [name for name in ("transformers",) if name in sys.modules], text]))
"""
    here = str(Path(__file__).resolve().parent.parent)
    environment = {**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    before, after, text = json.loads(done.stdout)
    assert before == []
    assert after == []
    assert text.strip()
