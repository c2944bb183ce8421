"""StepCost: how long a step of the model takes, as a sum of four terms; measured and fitted on the machine at hand.

    seconds = fixed + per_token x tokens + per_context x context + per_pair x pairs

tokens:   computed in the step, decodes and prefill chunks together
context:  tokens that decodes read from the cache
pairs:    in prefill chunks, each token with every token it attends to

``pagedkv bench steps`` runs steps of known shape through the real engine and fits the terms; ``pagedkv replay --timed
--cost FILE`` uses them.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pagedkv.engine.params import SamplingParams
from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.llm import LLM

PREFILLS = (16, 64, 128, 256, 512, 1024, 1536, 2048, 4096)  # tokens of a prompt that runs alone
DECODES = ((1, 64), (1, 512), (1, 2048), (4, 64), (4, 512), (16, 64), (16, 512), (32, 64), (32, 256))  # rows, context
ROOM = 32  # positions that a sequence may fill while others are still prefilled
STEPS = 6  # decodes measured at one shape; prefills are run this often divided by three


class StepShape(NamedTuple):
    """What a step computes: the three counts of the module's formula."""

    tokens: int
    context: int
    pairs: int

    @classmethod
    def of(cls, chunks: Iterable[tuple[int, int]]) -> StepShape:
        """Of chunks (first position, tokens). One of a single token is a decode."""
        tokens = context = pairs = 0
        for start, count in chunks:
            tokens += count
            if count == 1:
                context += start + 1
            else:
                pairs += count * start + count * (count + 1) // 2
        return cls(tokens, context, pairs)


@dataclass(frozen=True)
class StepCost:
    """Seconds a step, token, context token and pair. The defaults are those of SmolLM2-135M in bfloat16 on the two
    cores of docs/benchmarks.md, as ``pagedkv bench steps`` fitted them.
    """

    fixed: float = 3.4e-3
    per_token: float = 6.3e-4
    per_context: float = 1.2e-6
    per_pair: float = 2.5e-7

    def __post_init__(self) -> None:
        for term in fields(self):
            value = getattr(self, term.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise InvalidRequest(f"{term.name} is {value!r}; seconds, at least 0, are needed", field="cost")

    def seconds(self, shape: StepShape) -> float:
        """What a step of this shape takes."""
        return (
            self.fixed + self.per_token * shape.tokens + self.per_context * shape.context + self.per_pair * shape.pairs
        )

    @classmethod
    def parse(cls, text: str) -> StepCost:
        """Three or four numbers with commas (no fourth: pairs cost nothing), or a file that ``bench steps`` wrote."""
        if Path(text).is_file():
            return cls.load(Path(text))
        try:
            terms = [float(part) for part in text.split(",")]
        except ValueError:
            terms = []
        if len(terms) not in (3, 4):
            raise InvalidRequest(
                f"cost is {text!r}; three or four numbers with commas, or a file of `bench steps`, are needed",
                field="cost",
            )
        return cls(*terms, *[0.0] * (4 - len(terms)))

    @classmethod
    def load(cls, path: Path) -> StepCost:
        """From a file that ``bench steps --save`` wrote."""
        try:
            terms = json.loads(path.read_text())["cost"]
            return cls(**{term.name: terms[term.name] for term in fields(cls)})
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidRequest(
                f"cost file {path} is not what `bench steps --save` writes: {error!r}", field="cost"
            ) from error


@dataclass(frozen=True)
class StepSample:
    """A shape, and the median of the seconds that steps of it took."""

    shape: StepShape
    seconds: float


@dataclass(frozen=True)
class StepFit:
    """A cost and what it was fitted to. An error is |predicted / measured - 1|."""

    cost: StepCost
    samples: Sequence[StepSample]

    @property
    def errors(self) -> list[float]:
        return [abs(self.cost.seconds(sample.shape) / sample.seconds - 1) for sample in self.samples]

    @property
    def median_error(self) -> float:
        return statistics.median(self.errors)

    @property
    def max_error(self) -> float:
        return max(self.errors)

    def as_dict(self) -> dict[str, Any]:
        """For ``--save`` and ``--json``."""
        samples = [{**sample.shape._asdict(), "seconds": sample.seconds} for sample in self.samples]
        errors = {"median_error": self.median_error, "max_error": self.max_error}
        return {"cost": asdict(self.cost), **errors, "samples": samples}


def fit_step_cost(samples: Sequence[StepSample]) -> StepFit:
    """The cost with the least sum of squared relative errors among those without a negative term.

    With four terms every set of those that may be above zero is tried: the best one whose solution is not negative is
    the non-negative optimum (Lawson and Hanson 1974 search the sets in a cleverer order).
    """
    if len(samples) < len(fields(StepCost)):
        raise InvalidRequest(f"{len(samples)} shapes were measured; at least 4 are needed for a fit", field="samples")
    rows = np.array([(1, *sample.shape) for sample in samples]) / np.array([[s.seconds] for s in samples])
    best, least = StepCost(0.0, 0.0, 0.0, 0.0), float("inf")
    for size in range(1, rows.shape[1] + 1):
        for chosen in combinations(range(rows.shape[1]), size):
            terms = np.zeros(rows.shape[1])
            terms[list(chosen)] = np.linalg.lstsq(rows[:, chosen], np.ones(len(rows)), rcond=None)[0]
            off = float(((rows @ terms - 1) ** 2).sum())
            if terms.min() >= 0 and off < least:
                best, least = StepCost(*terms.tolist()), off
    return StepFit(best, samples)


def measure_steps(
    llm: LLM,
    *,
    prefills: Sequence[int] = PREFILLS,
    decodes: Sequence[tuple[int, int]] = DECODES,
    progress: Callable[[int, int], None] | None = None,
) -> list[StepSample]:
    """Runs steps of these shapes and times them. ``llm`` has no prefix cache, so that nothing is skipped.

    Shapes that do not fit in the pool, the seats or ``max_model_len`` are left out.
    """
    if llm.engine.scheduler.prefix is not None:
        raise InvalidRequest("steps are measured without a prefix cache", field="enable_prefix_caching")
    samples: list[StepSample] = []
    runs = [(1, length, 2) for length in prefills] + [(rows, context, STEPS) for rows, context in decodes]
    _run(llm, 1, 16, 2)  # the first step of a process pays for more than itself
    for done, (rows, length, steps) in enumerate(runs, 1):
        if _fits(llm, rows, length + steps + ROOM):
            repeats = 1 if steps == STEPS else STEPS // 3
            timed = [pair for _ in range(repeats) for pair in _run(llm, rows, length, steps)]
            samples += _medians(timed, decodes=steps == STEPS)
        if progress is not None:
            progress(done, len(runs))
    return samples


def _fits(llm: LLM, rows: int, length: int) -> bool:
    scheduler = llm.engine.scheduler
    seats = rows <= scheduler.config.max_num_seqs
    blocks = rows * scheduler.manager.blocks_needed(length) + 2 * rows  # admission leaves the running ones room to grow
    return seats and length <= llm.max_model_len and blocks <= scheduler.manager.allocator.num_blocks


def _run(llm: LLM, rows: int, length: int, decodes: int) -> list[tuple[StepShape, float]]:
    """``rows`` prompts of ``length`` tokens and ``decodes`` steps with all of them: shape and seconds of every step."""
    engine, vocabulary = llm.engine, llm.model_config.vocab_size
    room = llm.max_model_len - length  # whoever is through early goes on until the last one is
    params = SamplingParams(temperature=0, max_tokens=room, ignore_eos=True)
    for row in range(rows):
        engine.add_request(f"step {row}", [(row * 7919 + i * 31) % vocabulary for i in range(length)], params)
    timed: list[tuple[StepShape, float]] = []
    computed: dict[Any, int] = {}
    while decodes and engine.has_unfinished():
        began = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - began
        now = {seq.id: seq.num_computed_tokens for seq in engine.scheduler.running}
        chunks = [(computed.get(key, 0), end - computed.get(key, 0)) for key, end in now.items()]
        timed.append((StepShape.of(chunk for chunk in chunks if chunk[1]), seconds))
        decodes -= len(now) == rows and all(count == 1 for _, count in chunks)
        computed = now
    for row in range(rows):
        engine.abort(f"step {row}")
    return timed


def _medians(timed: list[tuple[StepShape, float]], *, decodes: bool) -> list[StepSample]:
    """One sample for the decodes of a run (their contexts differ by a few tokens), one for each shape of prefill."""
    by_shape: dict[StepShape, list[float]] = {}
    if decodes:
        rows = min(shape.tokens for shape, _ in timed if shape.pairs == 0)
        alike = [(shape, seconds) for shape, seconds in timed if shape.pairs == 0 and shape.tokens == rows]
        by_shape[alike[len(alike) // 2][0]] = [seconds for _, seconds in alike]
    else:
        for shape, seconds in timed:
            if shape.pairs:
                by_shape.setdefault(shape, []).append(seconds)
    return [StepSample(shape, statistics.median(seconds)) for shape, seconds in by_shape.items()]
