"""The tutorial's plain decode kernel is right too."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from paged_case import paged_case


@pytest.fixture(scope="module")
def tutorial(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("decode_kernel", repository / "docs/tutorial/decode_kernel.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("heads", "head_dim", "block_size"), [(2, 32, 16), (6, 40, 6), (4, 80, 1)])
def test_the_plain_kernel_against_the_reference(
    tutorial: ModuleType, heads: int, head_dim: int, block_size: int
) -> None:
    case = paged_case([1, 17, 5, 24], heads=heads, head_dim=head_dim, block_size=block_size)
    got = tutorial.plain_decode_attention(
        case.q, case.k_pool, case.v_pool, case.batch.block_table, case.batch.seq_lens, block_size
    )
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-6, rtol=0)


def test_an_empty_sequence_gives_zeros(tutorial: ModuleType) -> None:
    case = paged_case([1, 4], block_size=4)
    lengths = torch.tensor([0, 4], dtype=torch.int32)
    got = tutorial.plain_decode_attention(case.q, case.k_pool, case.v_pool, case.batch.block_table, lengths, 4)
    assert got[0].abs().max() == 0.0
    assert not got.isnan().any()


def test_the_demonstration_runs(tutorial: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    tutorial.main()
    assert "sequence 1: 6 tokens in blocks [2, 8, 0]" in capsys.readouterr().out
