from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv import LLM
from pagedkv.errors import InvalidRequest
from pagedkv.insight.step_cost import StepCost, StepSample, StepShape, fit_step_cost, measure_steps

SHAPES = [
    StepShape.of(chunks)
    for chunks in (
        [(0, 16)],
        [(0, 256)],
        [(0, 2048)],
        [(2048, 2048)],
        [(100, 1)],
        [(4000, 1)],
        [(50, 1)] * 8,
        [(500, 1)] * 32,
        [(70, 1), (9, 100)],
    )
]


def test_a_shape_counts_tokens_context_and_pairs() -> None:
    assert StepShape.of([]) == (0, 0, 0)
    assert StepShape.of([(9, 1), (4, 1)]) == (2, 15, 0)
    assert StepShape.of([(0, 3)]) == (3, 0, 1 + 2 + 3)
    assert StepShape.of([(10, 2), (0, 1)]) == (3, 1, 11 + 12)


def test_a_step_takes_the_sum_of_its_terms() -> None:
    assert StepCost(1.0, 0.1, 0.01, 0.001).seconds(StepShape(2, 30, 400)) == pytest.approx(1.0 + 0.2 + 0.3 + 0.4)


@pytest.mark.parametrize("truth", [StepCost(), StepCost(1e-3, 2e-5, 3e-7, 4e-9), StepCost(0.0, 1e-4, 0.0, 1e-8)])
def test_the_fit_finds_the_terms_that_made_the_samples(truth: StepCost) -> None:
    fit = fit_step_cost([StepSample(shape, truth.seconds(shape)) for shape in SHAPES])
    for term in ("fixed", "per_token", "per_context", "per_pair"):
        assert getattr(fit.cost, term) == pytest.approx(getattr(truth, term), rel=1e-6, abs=1e-15)
    assert fit.max_error < 1e-6


def test_no_term_is_negative_and_errors_are_told() -> None:
    # steps that get faster with context would ask for a negative term
    samples = [StepSample(shape, 1e-2 + 1e-4 * shape.tokens - 1e-6 * shape.context) for shape in SHAPES]
    fit = fit_step_cost(samples)
    assert fit.cost.per_context == 0.0
    assert min(fit.cost.fixed, fit.cost.per_token, fit.cost.per_pair) >= 0
    assert 0 < fit.median_error <= fit.max_error
    assert fit.max_error == max(abs(fit.cost.seconds(s.shape) / s.seconds - 1) for s in samples)
    with pytest.raises(InvalidRequest, match="3 shapes"):
        fit_step_cost(samples[:3])


def test_costs_come_as_numbers_or_as_a_file(tmp_path: Path) -> None:
    assert StepCost.parse("1e-3,2e-4,3e-6") == StepCost(1e-3, 2e-4, 3e-6, 0.0)
    assert StepCost.parse("1e-3,2e-4,3e-6,0") == StepCost(1e-3, 2e-4, 3e-6, 0.0)
    path = tmp_path / "cost.json"
    fit = fit_step_cost([StepSample(shape, StepCost().seconds(shape)) for shape in SHAPES])
    path.write_text(json.dumps(fit.as_dict()))
    assert StepCost.parse(str(path)) == fit.cost
    path.write_text('{"cost": {"fixed": 1}}')
    with pytest.raises(InvalidRequest, match="not what `bench steps --save` writes"):
        StepCost.parse(str(path))
    for bad in ("1,2", "a,b,c", "no-such-file.json"):
        with pytest.raises(InvalidRequest, match="three or four numbers"):
            StepCost.parse(bad)
    for bad in ("-1,0,0", "nan,0,0", "inf,0,0"):
        with pytest.raises(InvalidRequest, match="fixed is"):
            StepCost.parse(bad)


def test_steps_of_the_engine_are_measured_at_the_shapes_asked_for(tiny_model: Callable[..., Path]) -> None:
    llm = LLM(
        str(tiny_model()),
        num_gpu_blocks_override=32,
        max_model_len=200,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    samples = measure_steps(llm, prefills=(16, 48, 150), decodes=((1, 40), (3, 20), (4, 120), (8, 20)))
    shapes = [sample.shape for sample in samples]
    # 48 tokens run as 32 and 16; 4 x 120 and 8 rows do not fit
    chunks = [[(0, 16)], [(0, 32)], [(32, 16)], *([(start, 32)] for start in range(0, 128, 32)), [(128, 22)]]
    assert shapes[: len(chunks)] == [StepShape.of(chunk) for chunk in chunks]
    (one, many) = shapes[len(chunks) :]
    assert (one.tokens, one.pairs, many.tokens, many.pairs) == (1, 0, 3, 0)
    assert 41 <= one.context <= 48
    assert 63 <= many.context <= 3 * 60
    assert all(sample.seconds > 0 for sample in samples)
    assert not llm.engine.has_unfinished()
    assert llm.engine.stats().blocks_in_use == 0


def test_a_prefix_cache_would_skip_what_is_measured(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(InvalidRequest, match="without a prefix cache"):
        measure_steps(LLM(str(tiny_model()), num_gpu_blocks_override=16, max_model_len=64))
