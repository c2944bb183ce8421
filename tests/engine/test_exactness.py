"""The promise of the engine (I9): a token's logits are bit for bit those of a lone run from scratch.

The lone run is no engine at all: the whole text of an answer goes through the model in one pass, over a scrambled block
table in a pool full of NaN (``lone_run.run``), and gives the logits of every position. What the engine computed in any
mix, chunk, order, thread count, with hits, forks, twins and preemptions is compared with it by ``torch.equal``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import lone_run
import pytest
import torch

from pagedkv.config import CacheConfig, EngineConfig, SchedulerConfig
from pagedkv.engine.build import assemble
from pagedkv.engine.engine import Engine
from pagedkv.engine.params import SamplingParams
from pagedkv.engine.request import Sequence
from pagedkv.errors import BackendUnavailable
from pagedkv.model.load import LoadedModel, load_model

Logits = dict[tuple[str, int, int], torch.Tensor]  # (request, sample, position of the token before) -> a row
BLOCK = 4
TEXT = "the cache keeps keys and values in blocks of sixteen tokens and a table says where each of them lies"


class Recorder:
    """An engine that keeps every row of logits it samples from."""

    def __init__(self, loaded: LoadedModel, *, blocks: int = 512, block_size: int = BLOCK, **options: object) -> None:
        prefix = bool(options.pop("enable_prefix_caching", True))
        scheduler: dict[str, object] = {"max_num_seqs": 16, "max_num_batched_tokens": 256, **options}
        config = EngineConfig(
            model="tiny",
            cache=CacheConfig(block_size=block_size, num_gpu_blocks_override=blocks, enable_prefix_caching=prefix),
            scheduler=SchedulerConfig(**scheduler),  # type: ignore[arg-type]
        )
        built = assemble(config, loaded)
        built.pool.data.fill_(float("nan"))
        self.engine: Engine = built.engine
        self.loaded = loaded
        self.block_size = block_size
        self.rows: Logits = {}
        self.asked: dict[str, list[int]] = {}
        self.outputs: dict[str, list[list[int]]] = {}
        draw = self.engine.sampling._draw

        def recording(sequences: list[Sequence], logits: torch.Tensor, samples: object) -> None:
            for seq, row in zip(sequences, logits, strict=True):
                self.rows[seq.request.request_id, seq.index, seq.num_tokens - 1] = row.clone()
            draw(sequences, logits, samples)  # type: ignore[arg-type]

        self.engine.sampling._draw = recording  # type: ignore[method-assign]

    def add(self, name: str, prompt: list[int], params: SamplingParams) -> None:
        self.engine.add_request(name, prompt, params)
        self.asked[name] = prompt

    def step(self) -> None:
        for output in self.engine.step():
            assert output.error is None
            self.outputs[output.request_id] = [list(sample.token_ids) for sample in output.outputs]
        self.engine.scheduler.manager.check()

    def run(self) -> None:
        while self.engine.has_unfinished():
            self.step()

    def compare(self, *names: str) -> None:
        """Every row of these requests (all, if none is named) against the lone run of the same text."""
        for name in names or tuple(self.asked):
            prompt = self.asked[name]
            for sample, output in enumerate(self.outputs[name]):
                text = [*prompt, *output[:-1]]
                alone = lone_run.run(self.loaded.model, text, [len(text)], block_size=self.block_size)
                for position in range(len(prompt) - 1, len(text)):
                    key = (name, 0 if position == len(prompt) - 1 and sample else sample, position)
                    assert torch.equal(self.rows[key], alone[position]), key


def prompt(seed: int, length: int, vocab: int = 300) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, vocab) for _ in range(length)]


def greedy(max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def sampled(seed: int, n: int = 1, max_tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=max_tokens, ignore_eos=True)


@pytest.fixture(autouse=True, params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


_loaded: dict[tuple[str, str], LoadedModel] = {}


@pytest.fixture(params=[(f, d) for f in ("llama", "qwen3") for d in ("float32", "bfloat16")], ids="-".join)
def tiny(request: pytest.FixtureRequest, tiny_model: Callable[..., Path]) -> LoadedModel:
    """A tiny random model on the native path."""
    key = request.param
    if key not in _loaded:
        _loaded[key] = native(str(tiny_model(key[0])), key[1])
    return _loaded[key]


def native(name: str, dtype: str) -> LoadedModel:
    try:
        loaded = load_model(name, dtype=dtype, device="cpu", attention_backend="native")
    except BackendUnavailable as error:
        pytest.skip(f"the exact path needs the native extension: {error}")
    assert loaded.model.exact
    return loaded


@pytest.mark.parametrize("budget", [16, 23, 256])
def test_any_mix_and_any_chunk(tiny: LoadedModel, budget: int) -> None:
    recorder = Recorder(tiny, max_num_batched_tokens=budget, enable_prefix_caching=False)
    for i in range(9):
        recorder.add(str(i), prompt(i, 1 + 13 * i % 60), greedy(6))
        recorder.step()
    recorder.run()
    recorder.compare()


def test_hits_whole_and_partial_and_partly_evicted(tiny: LoadedModel) -> None:
    recorder = Recorder(tiny)
    shared = prompt(1, 37)
    recorder.add("cold", shared, greedy())
    recorder.run()
    cached = {}
    for cut in (37, 36, 30, 17, 4):
        name = f"first {cut}"
        recorder.add(name, [*shared[:cut], *prompt(cut, 1 + cut % 3)], greedy())
        recorder.run()
        cached[cut] = recorder.engine.stats().prefix_hits
    assert cached[37] >= 37
    assert recorder.engine.stats().copied_blocks > 0, "partial hits are copied on write"
    assert recorder.engine.scheduler.prefix is not None
    allocator = recorder.engine.scheduler.manager.allocator
    recorder.engine.scheduler.prefix.evict(allocator.num_free + allocator.num_evictable // 2)
    for cut in (37, 21):
        recorder.add(f"evicted {cut}", [*shared[:cut], 7, 8], greedy())
    recorder.add("again", shared, greedy())
    recorder.run()
    recorder.compare()


def test_forks(tiny: LoadedModel) -> None:
    recorder = Recorder(tiny)
    for i, length in enumerate((7, 8, 9, 30)):
        recorder.add(str(i), prompt(i, length), sampled(i, n=3))
    recorder.run()
    assert recorder.engine.stats().copied_blocks >= 6
    recorder.compare()


def test_at_least_five_preemptions(tiny: LoadedModel) -> None:
    recorder = Recorder(tiny, blocks=32, max_num_seqs=8)
    for i in range(8):
        recorder.add(str(i), prompt(i, 12 + i), greedy(40) if i % 2 else sampled(i, max_tokens=40))
    recorder.run()
    assert recorder.engine.stats().num_preemptions >= 5
    assert recorder.engine.stats().recomputed_tokens > 0
    recorder.compare()


def test_twins_in_any_order_of_arrival(tiny: LoadedModel) -> None:
    shared = prompt(5, 50)
    texts = {str(i): [*shared[: 50 - 7 * (i % 3)], *prompt(100 + i, 1 + i % 5)] for i in range(10)}
    first: dict[str, list[list[int]]] | None = None
    for order in (1, 2):
        recorder = Recorder(tiny, max_num_batched_tokens=32)
        names = sorted(texts)
        random.Random(order).shuffle(names)
        for count, name in enumerate(names):
            recorder.add(name, texts[name], greedy(5))
            if count % 4 == 3:
                recorder.step()
        recorder.run()
        assert recorder.engine.stats().num_twin_waits > 0
        recorder.compare()
        first = first or recorder.outputs
        assert recorder.outputs == first


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_smollm2(dtype: str, threads: int) -> None:
    """A real model, everything at once: a shared prefix, hits, forks, chunks and a pool that is too small."""
    key = ("smollm2-135m", dtype)
    if key not in _loaded:
        _loaded[key] = native(*key)
    loaded = _loaded[key]
    recorder = Recorder(loaded, blocks=11, block_size=16, max_num_seqs=6, max_num_batched_tokens=64)
    encode = loaded.tokenizer.encode
    shared = encode(f"{TEXT} {TEXT}")
    for i in range(5):
        recorder.add(str(i), [*shared, *encode(TEXT.split()[i])], greedy(9))
    recorder.add("samples", encode("Once upon a time"), sampled(threads, n=2, max_tokens=6))
    recorder.run()
    stats = recorder.engine.stats()
    assert stats.prefix_hits > 0
    recorder.compare("0", "3", "samples")
