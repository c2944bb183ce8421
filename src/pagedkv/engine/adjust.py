"""What a request adds to or takes from the logits before a token is chosen.

Order (vLLM's): allowed ids, grammar, bad words, minimum length, bias, penalties. All but the first two touch single
cells of the matrix, so each is gathered over the batch into one list of cells and applied at once.

``TokenCounts`` keeps the distinct tokens of a sequence, so a penalty costs O(distinct tokens) a step and not O(V), and
a new token costs O(1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pagedkv.engine.params import SamplingParams

if TYPE_CHECKING:
    from pagedkv.engine.structured import Grammar

Ids = NDArray[np.int64]
Cells = list[tuple[int, Ids, NDArray[np.float32]]]  # (row, ids, a value for each id)


class TokenCounts:
    """Distinct tokens of one sequence and how often each was generated (0: it stands in the prompt only).

    ``tokens`` is read, never changed, and may only grow; ``update`` catches up with it.
    """

    def __init__(self, tokens: Sequence[int], num_prompt_tokens: int, *, with_prompt: bool) -> None:
        self._tokens = tokens
        self._seen = num_prompt_tokens
        start = np.unique(np.asarray(tokens[:num_prompt_tokens] if with_prompt else [], dtype=np.int64))
        self._slots = {token: slot for slot, token in enumerate(start.tolist())}
        self._ids = start
        self._counts = np.zeros(len(start), dtype=np.float32)

    def update(self) -> tuple[Ids, NDArray[np.float32]]:
        """(ids, counts), views that are good until the next call."""
        tokens, slots = self._tokens, self._slots
        for position in range(self._seen, len(tokens)):
            slot = slots.setdefault(tokens[position], len(slots))
            if slot >= len(self._ids):  # doubled, so growing is O(1) a token
                self._ids = np.resize(self._ids, 2 * slot + 16)
                self._counts = np.concatenate([self._counts, np.zeros(len(self._ids) - slot, dtype=np.float32)])
            self._ids[slot] = tokens[position]
            self._counts[slot] += 1
        self._seen = len(tokens)
        return self._ids[: len(slots)], self._counts[: len(slots)]


class SampleRow:
    """What the sampler needs to know of one sequence; made once, used in every step.

    tokens:    the sequence's own list, prompt then output; read only here, it grows as the engine appends
    seed, index: with the output position they decide every random number (``draw.uniform``)
    eos_ids:   ids that end the text unless the request ignores them
    bad_words: token sequences that are not generated (``encode_bad_words``)
    grammar:   what may come next under a structured output; the engine moves it on
    """

    __slots__ = (
        "_adjusts",
        "_allowed",
        "_bias",
        "_counts",
        "_stop_ids",
        "bad_words",
        "eos_ids",
        "filters",
        "grammar",
        "index",
        "num_prompt_tokens",
        "params",
        "seed",
        "tokens",
    )

    def __init__(
        self,
        params: SamplingParams,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        *,
        seed: int,
        index: int = 0,
        eos_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self.params = params
        self.tokens = tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.seed = seed
        self.index = index
        self.eos_ids = tuple(eos_ids)
        self.bad_words = tuple(tuple(word) for word in bad_words)
        self.grammar = grammar
        self.filters = params.top_k > 0 or params.top_p < 1 or params.min_p > 0
        ends = {*(() if params.ignore_eos else self.eos_ids), *(params.stop_token_ids or ())}
        self._stop_ids = np.array(sorted(ends), dtype=np.int64)
        bias = params.logit_bias or {}
        self._bias = (np.array([*bias], dtype=np.int64), np.array([*bias.values()], dtype=np.float32))
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, dtype=np.int64)
        self._counts: TokenCounts | None = None
        if self.penalised:
            self._counts = TokenCounts(tokens, num_prompt_tokens, with_prompt=params.repetition_penalty != 1)
        self._adjusts = bool(bias) or self._allowed is not None or bool(self.bad_words) or self.penalised

    def fork(self, tokens: Sequence[int], index: int) -> SampleRow:
        """The row of another sample: same parameters and seed, its own tokens and index."""
        return SampleRow(
            self.params,
            tokens,
            self.num_prompt_tokens,
            seed=self.seed,
            index=index,
            eos_ids=self.eos_ids,
            bad_words=self.bad_words,
            grammar=self.grammar.fork() if self.grammar else None,
        )

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def penalised(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    @property
    def must_go_on(self) -> bool:
        """Too short to end: no EOS id and no stop id yet."""
        return self.params.min_tokens > self.num_outputs

    @property
    def adjusts(self) -> bool:
        return self._adjusts or self.must_go_on or self.grammar is not None

    @property
    def allowed(self) -> Ids | None:
        return self._allowed

    @property
    def bias(self) -> tuple[Ids, NDArray[np.float32]]:
        return self._bias

    def banned(self) -> Ids:
        """Ids that would complete a bad word, or end the text too early."""
        ids: list[int] = []
        for word in self.bad_words:
            start = len(self.tokens) - (len(word) - 1)
            if start >= self.num_prompt_tokens and tuple(self.tokens[start:]) == word[:-1]:
                ids.append(word[-1])
        banned = np.array(ids, dtype=np.int64)
        return np.concatenate([banned, self._stop_ids]) if self.must_go_on else banned

    def penalties(self) -> tuple[Ids, NDArray[np.float32], NDArray[np.float32]] | None:
        """(ids, what divides a positive and multiplies a negative logit, what is then subtracted)."""
        if self._counts is None:
            return None
        params = self.params
        ids, counts = self._counts.update()
        less = params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        return ids, np.full(len(ids), params.repetition_penalty, dtype=np.float32), less.astype(np.float32)


class Encoder(Protocol):
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def encode_bad_words(params: SamplingParams, tokenizer: Encoder) -> list[list[int]]:
    """Each word as it is tokenised at the start of a text and after a space; other spellings are not recognised."""
    words: list[list[int]] = []
    for word in params.bad_words or ():
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if ids and ids not in words:
                words.append(ids)
    return words


def adjust(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """logits float32 [R, V] -> the same object where no row asks for anything, else a changed copy."""
    active = [(i, row) for i, row in enumerate(rows) if row.adjusts]
    if not active:
        return logits
    final = logits.clone(memory_format=torch.contiguous_format)
    _restrict(final, active)
    cells = final.view(-1)
    _apply_bans(cells, final.shape[1], active)
    _apply_bias(cells, final.shape[1], active)
    _apply_penalties(cells, final.shape[1], active)
    return final


def _restrict(final: Tensor, active: Sequence[tuple[int, SampleRow]]) -> None:
    """Allowed ids and grammars: all but a set goes."""
    limited = [(i, row) for i, row in active if row.allowed is not None or row.grammar is not None]
    if not limited:
        return
    num_ids = final.shape[1]
    keep = np.ones((len(limited), num_ids), dtype=np.bool_)
    for mask, (_, row) in zip(keep, limited, strict=True):
        if row.allowed is not None:
            mask[:] = False
            mask[row.allowed[row.allowed < num_ids]] = True
        if row.grammar is not None:
            bits = np.zeros((num_ids + 31) // 32, dtype=np.int32)
            row.grammar.mask(bits)
            mask &= np.unpackbits(bits.view(np.uint8), count=num_ids, bitorder="little").view(np.bool_)
    at = torch.tensor([i for i, _ in limited], device=final.device)
    final[at] = final[at].masked_fill(torch.from_numpy(~keep).to(final.device), -torch.inf)


def _apply_bans(cells: Tensor, num_ids: int, active: Sequence[tuple[int, SampleRow]]) -> None:
    where, _ = _gather([(i, row.banned()) for i, row in active], num_ids)
    if len(where):
        cells[torch.from_numpy(where).to(cells.device)] = -torch.inf


def _apply_bias(cells: Tensor, num_ids: int, active: Sequence[tuple[int, SampleRow]]) -> None:
    where, kept = _gather([(i, row.bias[0]) for i, row in active], num_ids)
    if len(where):
        values = np.concatenate([row.bias[1] for _, row in active])[kept]
        at = torch.from_numpy(where).to(cells.device)
        cells[at] = cells[at] + torch.from_numpy(values).to(cells.device)


def _apply_penalties(cells: Tensor, num_ids: int, active: Sequence[tuple[int, SampleRow]]) -> None:
    found = [(i, penalties) for i, row in active if (penalties := row.penalties()) is not None]
    if not found:
        return
    where, kept = _gather([(i, ids) for i, (ids, _, _) in found], num_ids)
    at = torch.from_numpy(where).to(cells.device)
    factor = torch.from_numpy(np.concatenate([factor for _, (_, factor, _) in found])[kept]).to(cells.device)
    less = torch.from_numpy(np.concatenate([less for _, (_, _, less) in found])[kept]).to(cells.device)
    old = cells[at]
    cells[at] = torch.where(old > 0, old / factor, old * factor) - less


def _gather(parts: Sequence[tuple[int, Ids]], num_ids: int) -> tuple[Ids, NDArray[np.bool_]]:
    """(row, ids) pairs -> flat positions in the matrix, without ids past its columns, and which ids were kept."""
    ids = np.concatenate([ids for _, ids in parts])
    rows = np.repeat(np.array([i for i, _ in parts], dtype=np.int64), [len(ids) for _, ids in parts])
    kept = ids < num_ids
    return (rows * num_ids + ids)[kept], kept
