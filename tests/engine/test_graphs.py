"""Recorded decode steps, with a recorder that runs on a CPU: what a replay may and may not see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lone_run import make_pool

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import PrefixGroup, SharedPrefixes
from pagedkv.cache.pool import KVPool
from pagedkv.engine.graphs import GraphedModel, decode_sizes
from pagedkv.errors import InvalidRequest
from pagedkv.model.decoder import LanguageModel
from pagedkv.model.load import load_model

BLOCK = 4
LONGEST = 24


class Recorder:
    """Keeps the function and the memory of its output; a replay runs it again, as a graph runs its kernels again."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0

    def record(self, run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Callable[[], None]]:
        output = run()
        self.sizes.append(output.shape[0])

        @torch.inference_mode()
        def replay() -> None:
            self.replays += 1
            output.copy_(run())

        return output, replay


def load(tiny_model: Callable[..., Path], backend: str) -> LanguageModel:
    path = tiny_model("qwen3", num_hidden_layers=1)
    return load_model(path, attention_backend=backend, dtype="float32", device="cpu").model


@pytest.fixture(scope="module")
def model(tiny_model: Callable[..., Path]) -> LanguageModel:
    return load(tiny_model, "reference")


class Steps:
    """Sequences of growing length over one pool: what an engine would feed."""

    def __init__(self, model: LanguageModel, lengths: list[int]) -> None:
        self.pool, blocks = make_pool(model, 6 * LONGEST, BLOCK)
        per_sequence = LONGEST // BLOCK
        self.tables = [blocks[i * per_sequence : (i + 1) * per_sequence] for i in range(len(lengths))]
        self.lengths = lengths
        random = torch.Generator().manual_seed(1)
        self.ids = torch.randint(0, 300, (len(lengths), LONGEST), generator=random)
        prompt = self.batch(range(len(lengths)), lengths)
        model.forward(torch.cat([self.ids[i, :n] for i, n in enumerate(lengths)]), prompt, self.pool)

    def batch(self, rows: object, query_lens: list[int]) -> AttentionBatch:
        rows = list(rows)  # type: ignore[call-overload]
        return AttentionBatch.build([self.tables[i] for i in rows], [self.lengths[i] for i in rows], query_lens, BLOCK)

    def next(self, rows: list[int]) -> tuple[torch.Tensor, AttentionBatch]:
        """One more token for each of ``rows``."""
        for row in rows:
            self.lengths[row] += 1
        ids = torch.stack([self.ids[row, self.lengths[row] - 1] for row in rows])
        return ids, self.batch(rows, [1] * len(rows))


def graphed(model: LanguageModel, pool: KVPool, max_num_seqs: int = 5) -> tuple[GraphedModel, Recorder]:
    recorder = Recorder()
    made = GraphedModel(model, pool, recorder, max_num_seqs=max_num_seqs, block_size=BLOCK, max_model_len=LONGEST)
    return made, recorder


def test_sizes() -> None:
    assert decode_sizes(1) == [1]
    assert decode_sizes(8) == [1, 2, 4, 8]
    assert decode_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_replays_give_what_the_model_gives(tiny_model: Callable[..., Path], backend: str) -> None:
    """Batches shrink, grow and change order between steps; old rows and tables stand behind the padding."""
    if backend == "triton":
        pytest.importorskip("triton")
    model = load(tiny_model, backend)
    plain, recorded = Steps(model, [5, 3, 9, 1, 12]), Steps(model, [5, 3, 9, 1, 12])
    runner, recorder = graphed(model, recorded.pool)
    assert runner.sizes == [1, 2, 4, 5]
    assert recorder.sizes == [5, 4, 2, 1]  # the largest first
    batches = ([0, 1, 2, 3, 4], [2, 0, 4], [3], [4, 3, 2, 1, 0], [1, 2])
    batches = batches[:2] if backend == "triton" else batches  # the interpreter is slow
    for rows in batches:
        expected = model.forward(*plain.next(rows), plain.pool)
        ids, batch = recorded.next(rows)
        got = runner.forward(ids, batch, recorded.pool)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(runner.logits(got), model.logits(expected), atol=1e-5, rtol=1e-5)
    assert recorder.replays == len(batches)
    torch.testing.assert_close(recorded.pool.data, plain.pool.data, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_shared_prefixes_are_replayed_too(tiny_model: Callable[..., Path]) -> None:
    """A recorded step with groups: two that share, one alone, one row of padding; then the next batch without any."""
    pytest.importorskip("triton")
    model = load(tiny_model, "triton")
    plain, recorded = Steps(model, [9, 6, 11]), Steps(model, [9, 6, 11])
    for steps in (plain, recorded):  # sequence 2 begins with the blocks of sequence 0
        steps.tables[2][:2] = steps.tables[0][:2]
    runner = GraphedModel(
        model, recorded.pool, Recorder(), max_num_seqs=4, block_size=BLOCK, max_model_len=LONGEST, share_prefixes=True
    )
    for groups in ([PrefixGroup((2, 0), 2), PrefixGroup((1,), 0)], None):
        expected = model.forward(*plain.next([0, 1, 2]), plain.pool)
        ids, batch = recorded.next([0, 1, 2])
        if groups is not None:
            batch.plans[SharedPrefixes] = SharedPrefixes.build(groups, BLOCK, "cpu")
        got = runner.forward(ids, batch, recorded.pool)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_padding_writes_nothing_into_the_pool(model: LanguageModel) -> None:
    steps = Steps(model, [5, 3, 9])
    before = steps.pool.data.clone()
    runner, _ = graphed(model, steps.pool)
    torch.testing.assert_close(steps.pool.data, before, rtol=0, atol=0, equal_nan=True)
    ids, batch = steps.next([0, 1, 2])
    runner.forward(ids, batch, steps.pool)
    same = torch.isclose(steps.pool.data, before, rtol=0, atol=0, equal_nan=True).flatten(1).all(1)
    current = {steps.tables[row][(steps.lengths[row] - 1) // BLOCK] for row in range(3)}
    assert set((~same).nonzero().flatten().tolist()) == current


def test_steps_that_are_not_decodes_run_as_they_are(model: LanguageModel) -> None:
    plain, recorded = Steps(model, [5, 3, 9]), Steps(model, [5, 3, 9])
    runner, recorder = graphed(model, recorded.pool, max_num_seqs=2)
    for steps in (plain, recorded):
        steps.lengths[:] = [8, 4, 10]
    ids = torch.cat([plain.ids[0, 5:8], plain.ids[1, 3:4], plain.ids[2, 9:10]])
    expected = model.forward(ids, plain.batch(range(3), [3, 1, 1]), plain.pool)
    got = runner.forward(ids, recorded.batch(range(3), [3, 1, 1]), recorded.pool)
    assert torch.equal(got, expected)
    assert torch.equal(
        runner.forward(*recorded.next([0, 1, 2]), recorded.pool), model.forward(*plain.next([0, 1, 2]), plain.pool)
    )
    other = KVPool(40, 1, 2, BLOCK, 16)
    ids, batch = plain.next([0])
    runner.forward(ids, batch, other)  # another pool than the recorded one
    assert recorder.replays == 0


def test_a_sequence_longer_than_recorded_is_refused(model: LanguageModel) -> None:
    steps = Steps(model, [5])
    runner = GraphedModel(model, steps.pool, Recorder(), max_num_seqs=1, block_size=BLOCK, max_model_len=5)
    ids, batch = steps.next([0])
    with pytest.raises(InvalidRequest, match="6 tokens; decode was recorded for at most 5"):
        runner.forward(ids, batch, steps.pool)


def test_no_sequences_is_refused(model: LanguageModel) -> None:
    with pytest.raises(InvalidRequest, match="max_num_seqs is 0"):
        graphed(model, KVPool(2, 2, 2, BLOCK, 16), max_num_seqs=0)
