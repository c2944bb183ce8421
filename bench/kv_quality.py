"""What the formats of a KV cache cost in quality: logits, perplexity and greedy text on the default model.

    python bench/kv_quality.py [--windows 2] [--window 8192] [--continuations 32] [--json FILE]

Text: the topics of Python's own help (pydoc_data), English prose with code, the same for a version of Python. Windows
of consecutive tokens go through the real path: chunks of 256 tokens, their KV written into a pool of the format and
read back through a scattered block table (a chunk gives the bits of one-token steps, so this is what decoding sees).
In each chunk every format meets the same tokens, and its logits are compared, token by token, with those of the same
model over a float32 pool. Then prompts from the same text are continued greedily by the engine itself.

Two models: ``bfloat16`` is the file as the engine loads it (weights in the file's bits, activations in bf16),
``float32`` the same weights widened and everything computed in float32, which shows the format alone.

error:       |logit - reference logit|, mean over all tokens of the vocabulary and all positions; 99th percentile over
             every 97th token of the vocabulary and all positions
KL:          from the reference's distribution of the next token to the format's, in nats; mean and 99th percentile over
             positions
same argmax: share of positions whose likeliest next token is the reference's
greedy:      share of continuations without any difference, and the mean number of tokens before the first one
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor

from pagedkv import LLM, SamplingParams
from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.pool import KVPool
from pagedkv.model.decoder import LanguageModel
from pagedkv.model.load import LoadedModel, load_model

REFERENCE = "float32"
FORMATS = ("float32", "bfloat16", "float16", "int8_per_token_head", "fp8_e4m3")
BLOCK_SIZE, CHUNK = 16, 256
EVERY = 97  # tokens of the vocabulary whose errors are kept for the percentile
PROMPT, CONTINUED = 128, 64  # tokens of a prompt, and of its continuation


@dataclass(frozen=True)
class Quality:
    """What a format does to the distribution of the next token, over all positions; see the top of the file."""

    positions: int
    perplexity: float
    error_mean: float
    error_p99: float
    kl_mean: float
    kl_p99: float
    same_argmax: float


class Comparison:
    """Adds up the differences between two runs over the same tokens."""

    def __init__(self) -> None:
        self._loss, self._error = 0.0, 0.0
        self._same, self._positions = 0, 0
        self._divergences: list[Tensor] = []
        self._errors: list[Tensor] = []

    def add(self, reference: Tensor, logits: Tensor, next_ids: Tensor) -> None:
        """reference, logits float32 [T, vocab_size]; next_ids int64 [T]: the tokens that the text goes on with."""
        error = (logits - reference).abs_()
        expected, found = reference.double().log_softmax(-1), logits.double().log_softmax(-1)
        self._loss -= float(found.gather(1, next_ids[:, None]).sum())
        self._error += float(error.mean(-1, dtype=torch.float64).sum())
        self._same += int((reference.argmax(-1) == logits.argmax(-1)).sum())
        self._positions += len(next_ids)
        self._divergences.append((expected.exp() * (expected - found)).sum(-1))
        self._errors.append(error[:, ::EVERY].flatten())

    def quality(self) -> Quality:
        divergences, errors = torch.cat(self._divergences), torch.cat(self._errors)
        return Quality(
            positions=self._positions,
            perplexity=math.exp(self._loss / self._positions),
            error_mean=self._error / self._positions,
            error_p99=percentile(errors, 0.99),
            kl_mean=float(divergences.mean()),
            kl_p99=percentile(divergences, 0.99),
            same_argmax=self._same / self._positions,
        )


def percentile(values: Tensor, share: float) -> float:
    """The smallest of the values that at least ``share`` of them do not exceed."""
    return float(values.kthvalue(max(1, math.ceil(share * values.numel()))).values)


def before_first_difference(expected: Sequence[int], found: Sequence[int]) -> int:
    """How many tokens two continuations begin with in common."""
    pairs = enumerate(zip(expected, found, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(expected))


class Window:
    """One sequence on its way through a model, its KV in a pool of one format."""

    def __init__(self, model: LanguageModel, kv_cache_dtype: str, length: int) -> None:
        config, blocks = model.config, -(-length // BLOCK_SIZE)
        self._model = model
        self._pool = KVPool(blocks, config.num_layers, config.num_kv_heads, BLOCK_SIZE, config.head_dim,
                            dtype=model.dtype, kv_cache_dtype=kv_cache_dtype)  # fmt: skip
        self._table = torch.randperm(blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._length = 0

    def advance(self, ids: Tensor) -> Tensor:
        """Logits float32 [T, vocab_size] after each of the next tokens int64 [T]."""
        self._length += len(ids)
        batch = AttentionBatch.build([self._table], [self._length], [len(ids)], BLOCK_SIZE)
        return self._model.logits(self._model.forward(ids, batch, self._pool))


def compare(model: LanguageModel, windows: Sequence[Tensor], formats: Sequence[str] = FORMATS) -> dict[str, Quality]:
    """The quality of each format against the first of ``formats``; windows: int64 [length + 1] each."""
    comparisons = {name: Comparison() for name in formats}
    for ids in windows:
        runs = {name: Window(model, name, len(ids) - 1) for name in formats}
        for start in range(0, len(ids) - 1, CHUNK):
            known, following = ids[start:-1][:CHUNK].contiguous(), ids[start + 1 :][:CHUNK]
            reference = runs[formats[0]].advance(known)
            for name, run in runs.items():
                logits = reference if name == formats[0] else run.advance(known)
                comparisons[name].add(reference, logits, following)
    return {name: comparison.quality() for name, comparison in comparisons.items()}


def text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))


def cut(ids: Sequence[int], length: int, count: int) -> Iterator[list[int]]:
    """``count`` runs of ``length`` ids, spread evenly over all of them."""
    if length * count > len(ids):
        raise SystemExit(f"--windows and --window ask for {length * count} tokens; the text has {len(ids)}")
    step = (len(ids) - length) // max(1, count - 1)
    return (list(ids[i * step : i * step + length]) for i in range(count))


def continuations(model: str, dtype: str, prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """Greedy continuations of the prompts by the engine, for each format."""
    params = SamplingParams(temperature=0, max_tokens=CONTINUED, ignore_eos=True)
    found = {}
    for name in FORMATS:
        llm = LLM(model, dtype=dtype, device="cpu", kv_cache_dtype=name, max_model_len=PROMPT + CONTINUED)
        found[name] = [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
    return found


def greedy(found: dict[str, list[list[int]]]) -> dict[str, dict[str, float]]:
    """Against the reference: the share of continuations that are the same, and the mean of tokens in common."""
    figures = {}
    for name, texts in found.items():
        common = [before_first_difference(a, b) for a, b in zip(found[REFERENCE], texts, strict=True)]
        same = sum(count == len(texts[0]) for count in common)
        figures[name] = {"same": same / len(common), "tokens_before": sum(common) / len(common)}
    return figures


def bytes_per_token(loaded: LoadedModel, kv_cache_dtype: str) -> int:
    config = loaded.config
    return KVPool.block_bytes(config.num_layers, config.num_kv_heads, 1, config.head_dim,
                              kv_cache_dtype=kv_cache_dtype)  # fmt: skip


def table(dtype: str, rows: dict[str, dict[str, Any]]) -> str:
    reference = rows[REFERENCE]["perplexity"]
    lines = [
        f"| KV format, model in {dtype} | bytes a token | perplexity | against float32 | error, mean (p99) | "
        "KL, mean (p99), nats | same argmax | greedy: same of all | tokens before a difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['bytes_per_token']:,} | {row['perplexity']:.4f} | {row['perplexity'] - reference:+.4f} | "
            f"{row['error_mean']:.4f} ({row['error_p99']:.4f}) | {row['kl_mean']:.1e} ({row['kl_p99']:.1e}) | "
            f"{100 * row['same_argmax']:.2f} % | {100 * row['same']:.0f} % | {row['tokens_before']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--window", type=int, default=8192, help="tokens of a window")
    parser.add_argument("--continuations", type=int, default=32)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record: dict[str, Any] = {"model": args.model, "machine": platform.machine(), "python": platform.python_version(),
                              "torch": torch.__version__, "commit": commit.stdout.strip(),
                              "windows": args.windows, "window": args.window}  # fmt: skip
    for dtype in args.dtypes.split(","):
        start = time.perf_counter()
        loaded = load_model(args.model, dtype=dtype, device="cpu")
        ids = loaded.tokenizer.encode(text(), add_special_tokens=False)
        windows = [torch.tensor(window) for window in cut(ids, args.window + 1, args.windows)]
        qualities = compare(loaded.model, windows)
        found = greedy(continuations(args.model, dtype, list(cut(ids, PROMPT, args.continuations))))
        rows = {
            name: {**asdict(quality), **found[name], "bytes_per_token": bytes_per_token(loaded, name)}
            for name, quality in qualities.items()
        }
        record[dtype] = rows
        print(table(dtype, rows), flush=True)
        print(f"{dtype}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
