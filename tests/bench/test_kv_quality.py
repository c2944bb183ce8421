"""The figures of bench/kv_quality.py: each metric on numbers worked out by hand, and the formats on a tiny model."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import native_isa
import pytest
import torch

from pagedkv.model.load import load_model


@pytest.fixture(scope="module")
def kv_quality() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[2] / "bench" / "kv_quality.py"
    spec = importlib.util.spec_from_file_location("kv_quality", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["kv_quality"] = importlib.util.module_from_spec(spec)  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["kv_quality"]


def test_the_metrics_of_two_positions_counted_by_hand(kv_quality: ModuleType) -> None:
    """Two tokens: (1/2, 1/2) against (3/4, 1/4), and (4/5, 1/5) against itself."""
    reference = torch.tensor([[0.0, 0.0], [math.log(4), 0.0]])
    logits = torch.tensor([[math.log(3), 0.0], [math.log(4), 0.0]])
    comparison = kv_quality.Comparison()
    comparison.add(reference[:1], logits[:1], torch.tensor([1]))
    comparison.add(reference[1:], logits[1:], torch.tensor([0]))
    found = comparison.quality()
    divergence = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.positions == 2
    assert found.perplexity == pytest.approx((0.25 * 0.8) ** -0.5)
    assert found.error_mean == pytest.approx(math.log(3) / 4)  # one of the four logits is off by log 3
    assert found.error_p99 == pytest.approx(math.log(3))
    assert found.kl_mean == pytest.approx(divergence / 2)
    assert found.kl_p99 == pytest.approx(divergence)
    assert found.same_argmax == 1.0


def test_another_argmax_is_counted(kv_quality: ModuleType) -> None:
    comparison = kv_quality.Comparison()
    rows = torch.eye(4)
    comparison.add(rows, rows[[0, 1, 3, 2]], torch.zeros(4, dtype=torch.int64))
    assert comparison.quality().same_argmax == 0.5


def test_percentile_and_first_difference(kv_quality: ModuleType) -> None:
    values = torch.arange(1, 101).flip(0).float()
    assert [kv_quality.percentile(values, share) for share in (0.01, 0.5, 0.99, 1.0)] == [1, 50, 99, 100]
    assert kv_quality.before_first_difference([5, 6, 7], [5, 6, 7]) == 3
    assert kv_quality.before_first_difference([5, 6, 7], [5, 0, 7]) == 1
    assert kv_quality.before_first_difference([5], [6]) == 0


def test_windows_are_spread_over_the_text(kv_quality: ModuleType) -> None:
    assert list(kv_quality.cut(range(10), 4, 2)) == [[0, 1, 2, 3], [6, 7, 8, 9]]
    assert list(kv_quality.cut(range(10), 4, 1)) == [[0, 1, 2, 3]]
    with pytest.raises(SystemExit, match="ask for 12 tokens; the text has 10"):
        kv_quality.cut(range(10), 4, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_formats_of_a_tiny_model(kv_quality: ModuleType, tiny_model: Callable[..., Path], dtype: str) -> None:
    """The reference differs from itself by nothing, the others by something, in the order of their precision."""
    assert native_isa.ISAS
    model = load_model(tiny_model("llama"), dtype=dtype, device="cpu").model
    ids = torch.randint(0, 320, (400,), generator=torch.Generator().manual_seed(0))
    found = kv_quality.compare(model, [ids])
    same = found["float32"]
    assert (same.positions, same.error_mean, same.error_p99, same.kl_mean, same.same_argmax) == (399, 0, 0, 0, 1)
    window = kv_quality.Window(model, "float32", 399)
    logits = torch.cat([window.advance(ids[start:-1][:256]) for start in (0, 256)])
    loss = torch.nn.functional.cross_entropy(logits.double(), ids[1:])
    assert same.perplexity == pytest.approx(math.exp(loss), rel=1e-9)
    errors = {name: quality.error_mean for name, quality in found.items()}
    assert 0 < errors["bfloat16"] < errors["fp8_e4m3"]
    assert 0 < errors["int8_per_token_head"] < errors["fp8_e4m3"]
    spread = float(logits.std())
    assert errors["int8_per_token_head"] < 0.03 * spread  # stored to 1/254 of a row's largest; found 0.016
    assert errors["fp8_e4m3"] < 0.15 * spread  # stored to 1/16 of itself; found 0.075
