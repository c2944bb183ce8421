"""The milestone test of the chapter: paged attention and prefix caching."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedkv import AttentionBatch, BlockAllocator, PagedKVCache, PrefixCache, paged_decode_attention, physical_slot
from pagedkv.attention.backend import choose
from pagedkv.errors import BackendUnavailable
from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import Decoder
from pagedkv.model.native import NativeDecoder
from pagedkv.model.rope import RopeConfig
from pagedkv.model.weights import LayerWeights, ModelWeights

LINES = [
    {
        "requests": 32,
        "tokens_stored": 9924,
        "static_slots_reserved": 32768,
        "paged_slots_reserved": 10144,
        "static_utilization": 0.303,
        "paged_utilization": 0.978,
    },
    {"parent_blocks": 3, "new_blocks_after_4_forks": 0, "new_blocks_after_each_sample_writes_a_token": 4},
    {"prompt_tokens": 832, "tokens_prefilled": 160, "blocks_in_use": 14, "blocks_without_sharing": 56},
]

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, VOCAB = 2, 64, 4, 2, 32, 97
BLOCK = 4


def random_weights() -> ModelWeights:
    generator = torch.Generator().manual_seed(25)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    layers = tuple(
        LayerWeights(
            input_norm=torch.ones(HIDDEN),
            q=matrix(HEADS * DIM, HIDDEN),
            k=matrix(KV_HEADS * DIM, HIDDEN),
            v=matrix(KV_HEADS * DIM, HIDDEN),
            o=matrix(HIDDEN, HEADS * DIM),
            post_norm=torch.ones(HIDDEN),
            gate=matrix(128, HIDDEN),
            up=matrix(128, HIDDEN),
            down=matrix(HIDDEN, 128),
        )
        for _ in range(LAYERS)
    )
    return ModelWeights(
        embedding=matrix(VOCAB, HIDDEN), layers=layers, final_norm=torch.ones(HIDDEN), head=None, nbytes=0
    )


class ChapterDecoder:
    """A decoder in the chapter's manner: it knows a cache by ``update`` only, and attends to what that returns."""

    exact = False

    def __init__(self) -> None:
        self.weights = random_weights()

    def __call__(self, cache: PagedKVCache, seqs: list[Hashable], tokens: torch.Tensor) -> torch.Tensor:
        """Logits [B, T, VOCAB] of tokens [B, T], the next of each sequence; their room is reserved."""
        cache.set_batch(seqs)
        starts = torch.tensor([cache.lengths[seq] for seq in seqs])
        positions = starts[:, None] + torch.arange(tokens.shape[1])
        w = self.weights
        hidden = w.embedding[tokens] + torch.sin(positions[..., None] * torch.linspace(0.01, 2, HIDDEN))
        for layer, weights in enumerate(w.layers):
            q = (hidden @ weights.q.T).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
            k = (hidden @ weights.k.T).unflatten(-1, (KV_HEADS, DIM)).transpose(1, 2)
            v = (hidden @ weights.v.T).unflatten(-1, (KV_HEADS, DIM)).transpose(1, 2)
            keys, values, logical = cache.update(layer, k, v, positions)
            keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (keys, values))
            scores = q @ keys.transpose(-1, -2) / DIM**0.5
            seen = logical <= positions[..., None]
            weight = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
            hidden = hidden + (weight @ values).transpose(1, 2).flatten(2) @ weights.o.T
            hidden = hidden + (torch.relu(hidden @ weights.gate.T) * (hidden @ weights.up.T)) @ weights.down.T
        return hidden @ w.embedding.T


class PagedDecoder:
    """The package's own decoder on the same cache: attention through the block table, as the engine runs it."""

    def __init__(self, kind: str) -> None:
        config = ModelConfig(
            architecture="llama",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=128,
            num_layers=LAYERS,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=DIM,
            max_position_embeddings=256,
            rms_norm_eps=1e-5,
            rope=RopeConfig(theta=10000.0, dim=DIM),
            layer_windows=(None,) * LAYERS,
            tie_word_embeddings=True,
        )
        self.model: Any
        if kind == "native":
            self.model = NativeDecoder(config, random_weights())
            assert self.model.exact  # so that its comparisons below are bit for bit
        else:
            self.model = Decoder(config, random_weights(), attention=choose("reference", "cpu"))
        self.exact = self.model.exact

    def __call__(self, cache: PagedKVCache, seqs: list[Hashable], tokens: torch.Tensor) -> torch.Tensor:
        tables, lengths = [cache.tables[seq] for seq in seqs], [cache.lengths[seq] for seq in seqs]
        new = tokens.shape[1]
        batch = AttentionBatch.build(tables, [length + new for length in lengths], [new] * len(seqs), BLOCK)
        hidden = self.model.forward(tokens.reshape(-1), batch, cache)
        for seq in seqs:
            cache.advance(seq, new)
        return self.model.logits(hidden).reshape(len(seqs), new, VOCAB)


@pytest.fixture(params=["chapter", "reference", "native"])
def decoder(request: pytest.FixtureRequest) -> Any:
    """The gather path, the package's decoder on reference attention, and the engine's own on a CPU."""
    if request.param == "chapter":
        return ChapterDecoder()
    try:
        choose(request.param, "cpu")
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return PagedDecoder(request.param)


def new_cache(num_blocks: int = 64) -> PagedKVCache:
    return PagedKVCache(LAYERS, num_blocks, BLOCK, KV_HEADS, DIM)


def run(decoder: Any, cache: PagedKVCache, seq: Hashable, tokens: list[int]) -> torch.Tensor:
    """Logits [len(tokens), VOCAB] of the next tokens of one sequence."""
    cache.reserve(seq, len(tokens))
    return decoder(cache, [seq], torch.tensor([tokens]))[0]


def from_scratch(decoder: Any, tokens: list[int]) -> torch.Tensor:
    cache = new_cache()
    cache.create("alone")
    return run(decoder, cache, "alone", tokens)


def assert_same(decoder: Any, logits: torch.Tensor, expected: torch.Tensor) -> None:
    if decoder.exact:
        assert torch.equal(logits, expected)
    else:
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("impl", ["reference", "engine"])
def test_the_demonstration_prints_its_three_lines(impl: str, repository: Path) -> None:
    done = subprocess.run(
        [sys.executable, "run.py", "paged", "--impl", impl], cwd=repository, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    assert [json.loads(line) for line in lines] == LINES
    assert lines == [json.dumps(line) for line in LINES]


def test_physical_slots() -> None:
    assert physical_slot([5, 1, 7], 9, 4) == (7, 1)
    assert [physical_slot([5, 1, 7], p, 4) for p in (0, 3, 4, 11)] == [(5, 0), (5, 3), (1, 0), (7, 3)]


def test_allocator_errors() -> None:
    allocator = BlockAllocator(2)
    first, second = allocator.allocate(), allocator.allocate()
    with pytest.raises(MemoryError):
        allocator.allocate()
    allocator.share(first)
    allocator.release(first)
    allocator.release(first)
    assert (allocator.num_free, allocator.refs[first], allocator.refs[second]) == (1, 0, 1)
    with pytest.raises(RuntimeError):
        allocator.release(first)
    assert allocator.num_free == 1


def test_creating_twice_is_a_value_error_and_running_out_changes_nothing() -> None:
    cache = new_cache(num_blocks=2)
    cache.create("a")
    with pytest.raises(ValueError, match="exists"):
        cache.create("a")
    cache.reserve("a", 5)
    with pytest.raises(MemoryError):
        cache.reserve("a", 9)
    assert (len(cache.tables["a"]), cache.lengths["a"], cache.allocator.num_free) == (2, 0, 0)


def test_fork_with_divergence_is_a_run_from_scratch(decoder: Any) -> None:
    cache = new_cache()
    prompt = [3, 14, 15, 92, 65, 35]  # one full block and a half
    cache.create("parent")
    assert_same(decoder, run(decoder, cache, "parent", prompt), from_scratch(decoder, prompt))
    cache.fork("parent", "child")
    assert cache.tables["child"] == cache.tables["parent"]
    ours, theirs = [8, 9, 79, 32], [38, 46, 26, 43]
    got: dict[str, list[torch.Tensor]] = {"parent": [], "child": []}
    for mine, other in zip(ours, theirs, strict=True):  # both go on together, in one batch
        for seq in ("parent", "child"):
            cache.reserve(seq, 1)
        logits = decoder(cache, ["parent", "child"], torch.tensor([[mine], [other]]))
        got["parent"].append(logits[0, 0])
        got["child"].append(logits[1, 0])
    assert_same(decoder, torch.stack(got["parent"]), from_scratch(decoder, prompt + ours)[6:])
    assert_same(decoder, torch.stack(got["child"]), from_scratch(decoder, prompt + theirs)[6:])
    assert cache.tables["child"][0] == cache.tables["parent"][0]
    assert not set(cache.tables["child"][1:]) & set(cache.tables["parent"][1:])
    cache.check()


def test_prefix_reuse_is_a_run_from_scratch(decoder: Any) -> None:
    cache = new_cache()
    prefix = PrefixCache(cache)
    system = [(7 * i) % VOCAB for i in range(10)]
    for seq, own in enumerate(([1, 2, 3], [1, 2, 4], [5], [1, 2, 3])):
        prompt = system + own
        reused = prefix.attach(seq, prompt)
        assert reused == (0, 12, 10, 12)[seq]
        logits = run(decoder, cache, seq, prompt[reused:])
        assert_same(decoder, logits, from_scratch(decoder, prompt)[reused:])
        prefix.remember(seq, prompt)
        cache.check()


def test_a_fully_cached_prompt_computes_one_token(decoder: Any) -> None:
    cache = new_cache()
    prefix = PrefixCache(cache)
    prompt = list(range(12))
    prefix.attach("first", prompt)
    run(decoder, cache, "first", prompt)
    assert prefix.remember("first", prompt) == 3
    assert prefix.attach("second", prompt) == 11
    assert_same(decoder, run(decoder, cache, "second", prompt[11:]), from_scratch(decoder, prompt)[11:])


def test_cached_blocks_outlive_their_sequence_and_leave_under_pressure(decoder: Any) -> None:
    cache = new_cache(num_blocks=4)
    prefix = PrefixCache(cache)
    old, new = list(range(12)), list(range(50, 62))
    prefix.attach("old", old)
    run(decoder, cache, "old", old)
    prefix.remember("old", old)
    cache.free("old")
    assert (cache.allocator.num_free, prefix.num_evictable) == (1, 3)
    prefix.attach("new", new)
    with pytest.raises(MemoryError) as caught:
        cache.reserve("new", 12)
    assert caught.value.evictable == 3  # type: ignore[attr-defined]
    assert prefix.evict(3) == 2
    assert_same(decoder, run(decoder, cache, "new", new), from_scratch(decoder, new))
    assert prefix.match(old).num_cached_tokens == 4  # the head of the old prompt lived longest
    cache.check()


def test_truncate_then_other_tokens_is_a_run_from_scratch(decoder: Any) -> None:
    cache = new_cache()
    cache.create("a")
    run(decoder, cache, "a", list(range(11)))
    cache.truncate("a", 6)
    assert (len(cache.tables["a"]), cache.lengths["a"]) == (2, 6)
    other = [90, 80, 70, 60]
    assert_same(decoder, run(decoder, cache, "a", other), from_scratch(decoder, list(range(6)) + other)[6:])


@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_decode_attention_against_a_gather_with_scrambled_tables(block_size: int) -> None:
    generator = torch.Generator().manual_seed(block_size)
    lengths = torch.tensor([1, 7, 16, 33])
    width = -(-33 // block_size)
    num_blocks = 4 * width + 3
    k_pool, v_pool = torch.randn(2, num_blocks, KV_HEADS, block_size, DIM, generator=generator)
    tables = torch.randperm(num_blocks, generator=generator)[: 4 * width].reshape(4, width).int()
    q = torch.randn(4, HEADS, DIM, generator=generator)
    expected = []
    for row, length in enumerate(lengths.tolist()):
        k, v = (
            torch.cat([pool[block] for block in tables[row].tolist()], dim=1)[:, :length].repeat_interleave(2, 0)
            for pool in (k_pool, v_pool)
        )
        weights = (k @ q[row, :, :, None] / DIM**0.5).softmax(1)
        expected.append((weights * v).sum(1))
        unused = set(range(width * block_size)) - set(range(length))
        for position in unused:  # what lies beyond the length must not matter
            block, offset = physical_slot(tables[row].tolist(), position, block_size)
            k_pool[block, :, offset] = v_pool[block, :, offset] = float("nan")
    attended = paged_decode_attention(q, k_pool, v_pool, tables, lengths, block_size)
    torch.testing.assert_close(attended, torch.stack(expected), atol=1e-5, rtol=1e-5)
