"""The attention benchmark runs, checks what it times, and refuses a wrong result."""

from __future__ import annotations

import json

import native_isa
import pytest
import torch
from typer.testing import CliRunner

from pagedkv.cli.main import app
from pagedkv.insight import attention_rates as rates


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "WORKING_SET", 1 << 16)
    assert native_isa.ISAS


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head", "fp8_e4m3"])
def test_decode_rate(kv_cache_dtype: str) -> None:
    rate = rates.decode_rate(rates.DecodeCase(2, 64, 32, 2, kv_cache_dtype=kv_cache_dtype), rounds=2)
    assert rate.ms > 0
    assert rate.share is not None
    assert rate.torch_ms is not None


def test_prefill_and_shared_rates() -> None:
    assert rates.prefill_rate(64, 32, 4, 2, rounds=1).times is not None
    assert rates.shared_prefix_rate(32, 2, 1, rounds=1, batch=3, shared=256, own=16).times is not None


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "_attend", lambda q, *_: torch.full_like(q, 3.0))
    with pytest.raises(AssertionError, match="largest error"):
        rates.decode_rate(rates.DecodeCase(1, 32, 32, 1), rounds=1)


def test_the_command_prints_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "quantised_cases", lambda: [rates.DecodeCase(1, 32, 32, 1)])
    before = torch.get_num_threads()
    try:
        done = CliRunner().invoke(app, ["bench", "attention", "--what", "Q", "--rounds", "1", "--json"])
    finally:
        torch.set_num_threads(before)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["Q"][0]["name"].startswith("batch 1")
