"""Decode steps recorded once as CUDA graphs and replayed, so that a step costs one launch instead of hundreds.

``GraphedModel`` is a model to whoever calls it. A step of one token per sequence is padded to the next recorded batch
size and replayed; every other step (prefill, mixed, too many sequences) goes to the model as it is.

    persistent, made once     token_ids, positions, slot_mapping, seq_lens, block_table, the groups of a shared prefix
    per step, in place        rows [0, n) from the batch; rows [n, size) become padding
    per recorded size         views of the first ``size`` rows, the recorded pass, the memory of its output;
                              twice if prefixes are shared, for steps with and without groups

A padding row has length 0, attends to nothing and writes nothing (slot -1). Graphs are planned for sequences of
``max_model_len``; the kernels take every length from the device, so a replay is right for any. Nothing here waits for
the device. The output of a replay is valid until the next one.

What records and replays is behind ``GraphRecorder``; tests drive it on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import SharedPrefixes
from pagedkv.engine.runner import Model, Pool
from pagedkv.errors import InvalidRequest


class GraphRecorder(Protocol):
    """Records what a function launches, to be launched again on the same memory."""

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """(output, replay): ``run`` has been called at least once; ``replay`` refills the output from the inputs."""
        ...


class CudaRecorder:
    """CUDA graphs of one device, which share one pool of memory: only one is replayed at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle of the graphs' memory

    def record(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Runs twice outside the graph first: kernels are compiled and lazy tables filled before the recording."""
        side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            run()
            run()
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            output = run()
        self._pool = self._pool or graph.pool()
        return output, graph.replay


@dataclass(frozen=True)
class _Recorded:
    output: Tensor
    replay: Callable[[], None]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record: 1, 2, 4, 8, ... and the largest batch there can be."""
    sizes = [1 << power for power in range(max_num_seqs.bit_length()) if 1 << power < max_num_seqs]
    return [*sizes, max_num_seqs]


class GraphedModel:
    """``model`` over ``kv``, its decode steps recorded for every size of ``decode_sizes(max_num_seqs)``.

    block_size, max_model_len: of the pool and the engine; no batch may hold a longer sequence. share_prefixes: record
    steps whose batch has ``SharedPrefixes`` too; otherwise those go to the model as they are.
    Recording runs the model on padding rows, so it writes nothing into the pool.
    """

    def __init__(
        self,
        model: Model,
        kv: Pool,
        recorder: GraphRecorder,
        *,
        max_num_seqs: int,
        block_size: int,
        max_model_len: int,
        share_prefixes: bool = False,
    ) -> None:
        if max_num_seqs < 1:
            raise InvalidRequest(f"max_num_seqs is {max_num_seqs}; at least 1 is needed", field="max_num_seqs")
        self._model, self._kv = model, kv
        self._block_size, self._max_model_len = block_size, max_model_len
        width = -(-max_model_len // block_size)
        rows, device = max_num_seqs, model.device
        self._token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slot_mapping = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._seq_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._block_table = torch.zeros((rows, width), dtype=torch.int32, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._group_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._members = torch.arange(rows, dtype=torch.int32, device=device)
        self._shared_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.sizes = decode_sizes(max_num_seqs)
        self._recorded: dict[tuple[int, bool], _Recorded] = {}
        for size in reversed(self.sizes):  # the largest first, so that the others fit into its memory
            for shared in (False, True) if share_prefixes else (False,):
                run = _Pass(model, self._token_ids[:size], self._views(size, shared), kv)
                self._recorded[size, shared] = _Recorded(*recorder.record(run))

    @property
    def device(self) -> torch.device:
        return self._model.device

    @torch.inference_mode()
    def forward(self, token_ids: Tensor, batch: AttentionBatch, kv: Pool, rows: Tensor | None = None) -> Tensor:
        """Hidden states [T, hidden] (or of ``rows``), as the model's own ``forward`` gives them."""
        num_seqs = batch.num_seqs
        size = next((size for size in self.sizes if size >= num_seqs), 0)
        recorded = self._recorded.get((size, SharedPrefixes in batch.plans))
        decode = batch.max_query_len == 1 and batch.num_tokens == num_seqs > 0
        if recorded is None or not decode or kv is not self._kv:
            return self._model.forward(token_ids, batch, kv, rows)
        if batch.max_seq_len > self._max_model_len:
            raise InvalidRequest(
                f"a sequence of {batch.max_seq_len} tokens; decode was recorded for at most {self._max_model_len}",
                field="max_model_len",
            )
        self._fill(token_ids, batch, size)
        if SharedPrefixes in batch.plans:
            self._fill_groups(batch.plans[SharedPrefixes], num_seqs, size)
        recorded.replay()
        return recorded.output[:num_seqs] if rows is None else recorded.output[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """As the model's own."""
        return self._model.logits(hidden)

    def _views(self, size: int, shared: bool) -> AttentionBatch:
        views = AttentionBatch(
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_table=self._block_table[:size],
            slot_mapping=self._slot_mapping[:size],
            positions=self._positions[:size],
            block_size=self._block_size,
            max_query_len=1,
            max_seq_len=self._max_model_len,
        )
        if shared:
            views.plans[SharedPrefixes] = SharedPrefixes(
                self._group_start[: size + 1], self._members[:size], self._shared_lens[:size], self._max_model_len
            )
        return views

    def _fill(self, token_ids: Tensor, batch: AttentionBatch, size: int) -> None:
        """Rows of the batch, then padding up to ``size``. Behind a table's used part an older step's ids may stand."""
        num_seqs, width = batch.num_seqs, min(batch.block_table.shape[1], self._block_table.shape[1])
        self._token_ids[:num_seqs].copy_(token_ids, non_blocking=True)
        self._positions[:num_seqs].copy_(batch.positions, non_blocking=True)
        self._slot_mapping[:num_seqs].copy_(batch.slot_mapping, non_blocking=True)
        self._seq_lens[:num_seqs].copy_(batch.seq_lens, non_blocking=True)
        self._block_table[:num_seqs, :width].copy_(batch.block_table[:, :width], non_blocking=True)
        if size > num_seqs:
            self._token_ids[num_seqs:size].zero_()
            self._positions[num_seqs:size].zero_()
            self._slot_mapping[num_seqs:size].fill_(-1)
            self._seq_lens[num_seqs:size].zero_()

    def _fill_groups(self, prefixes: SharedPrefixes, num_seqs: int, size: int) -> None:
        """The groups of the batch, then a group without members in each place that is left, then padding rows alone.

        There are as many places as rows. A padding row is a group of one that shares nothing, so that it has parts to
        merge, if empty ones.
        """
        num_groups = prefixes.group_start.shape[0] - 1
        self._group_start[: num_groups + 1].copy_(prefixes.group_start, non_blocking=True)
        self._group_start[num_groups + 1 : num_seqs + 1].fill_(num_seqs)
        self._group_start[num_seqs + 1 : size + 1].copy_(self._query_start[num_seqs + 1 : size + 1])
        self._members[:num_seqs].copy_(prefixes.members, non_blocking=True)
        self._members[num_seqs:size].copy_(self._query_start[num_seqs:size])
        self._shared_lens[:num_seqs].copy_(prefixes.shared_lens, non_blocking=True)
        self._shared_lens[num_seqs:size].zero_()


@dataclass(frozen=True)
class _Pass:
    """One forward pass over the same memory each time it is called."""

    model: Model
    token_ids: Tensor
    batch: AttentionBatch
    kv: Pool

    def __call__(self) -> Tensor:
        return self.model.forward(self.token_ids, self.batch, self.kv)
