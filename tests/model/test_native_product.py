"""The packed product of csrc/product.hpp against float64, on every instruction set that the machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pagedkv.errors import InvalidRequest, UnsupportedModel
from pagedkv.model.groups import GroupedWeight, quantise
from pagedkv.model.packed import ADD, SILU_MUL, PackedMatrix, Weight

native = pytest.importorskip("pagedkv._native")

KINDS = ("f32", "bf16", "int4", "int4_offset", "int8")
GROUPED = KINDS[2:]


@pytest.fixture(params=native.instruction_sets(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set("")


def make(kind: str, columns: int, depth: int, rows: int = 5) -> tuple[Weight, Tensor, Tensor]:
    """A weight as the kind has it, its float64 numbers, and x [rows, depth]."""
    generator = torch.Generator().manual_seed(columns * 1000 + depth)
    plain = torch.randn((columns, depth), generator=generator)
    x = torch.randn((rows, depth), generator=generator)
    if kind == "f32":
        return plain, plain.double(), x
    if kind == "bf16":
        return plain.bfloat16(), plain.bfloat16().double(), x.bfloat16()
    weight = four_bits(plain) if kind == "int4" else quantise(plain, 8 if kind == "int8" else 4)
    return weight, weight.dequantize().double(), x.bfloat16()


def four_bits(plain: Tensor) -> GroupedWeight:
    """The symmetric kind, which only GGUF files bring: value 0 stands for -8."""
    groups = plain.view(plain.shape[0], -1, 32)
    factors = (groups.abs().amax(-1) / 7).half()
    values = ((groups / factors.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    return GroupedWeight("int4", values.view(plain.shape), factors, None)


def near(y: Tensor, exact: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Within rounding: of the sum, relative to what was added up, and of the result."""
    summands = x.double().abs() @ weight.abs().T + 1
    return bool(((y.double() - exact).abs() <= torch.finfo(y.dtype).eps * exact.abs() + 8e-7 * summands).all())


WHOLE_GROUPS = [(32, 32), (1, 64), (77, 96), (130, 576)]
SIZES = [(kind, *size) for kind in KINDS for size in WHOLE_GROUPS + ([] if kind in GROUPED else [(64, 1), (33, 31)])]


@pytest.mark.parametrize(("kind", "columns", "depth"), SIZES)
def test_equals_the_float64_product(kind: str, columns: int, depth: int) -> None:
    for rows in (1, 2, 7, 13, 29, 60):
        weight, numbers, x = make(kind, columns, depth, rows)
        packed = PackedMatrix([weight], kind=kind)
        exact = x.double() @ numbers.T
        for dtype in (torch.float32, torch.bfloat16):
            assert near(packed.multiply(x, torch.full((rows, columns), 7.0, dtype=dtype)), exact, x, numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_batch_at_every_place_and_thread_count(kind: str) -> None:
    weight, _, x = make(kind, 100, 96, 40)
    packed = PackedMatrix([weight], kind=kind)
    whole = packed.multiply(x, torch.empty((40, 100)))
    threads = torch.get_num_threads()
    try:
        for rows in range(1, 41):
            torch.set_num_threads(1 + rows % 2)
            assert torch.equal(packed.multiply(x[:rows], torch.empty((rows, 100))), whole[:rows])
            assert torch.equal(packed.multiply(x[40 - rows :], torch.empty((rows, 100))), whole[40 - rows :])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_beyond_one_block_of_rows(kind: str) -> None:
    """Alone it meets the integers themselves, among many a panel of them that was widened to bf16 first."""
    weight, _, x = make(kind, 40, 64, 300)
    packed = PackedMatrix([weight], kind=kind)
    whole = packed.multiply(x, torch.empty((300, 40)))
    for row in (0, 99, 143, 144, 150, 299):
        assert torch.equal(packed.multiply(x[row : row + 1], torch.empty((1, 40))), whole[row : row + 1])
    assert torch.equal(packed.multiply(x[100:160], torch.empty((60, 40))), whole[100:160])


@pytest.mark.parametrize("kind", KINDS)
def test_tails_add_the_bias_the_residual_and_the_gate(kind: str) -> None:
    weight, numbers, x = make(kind, 77, 96)
    bias = torch.randn(77, generator=torch.Generator().manual_seed(1))
    residual = torch.randn((5, 77), generator=torch.Generator().manual_seed(2))
    exact = x.double() @ numbers.T + bias.double()
    packed = PackedMatrix([weight], kind=kind)
    assert near(packed.multiply(x, torch.empty((5, 77)), bias=bias), exact, x, numbers)
    assert near(packed.multiply(x, residual.clone(), bias=bias, tail=ADD), exact + residual, x, numbers)

    gate, up = (make(kind, 77, 96 + 32 * i)[0] for i in (0, 0))
    both = PackedMatrix([gate, up], kind=kind, gate_up=True)
    y = both.multiply(x, torch.empty((5, 77)), tail=SILU_MUL)
    h = x.double() @ numbers.T
    assert torch.allclose(y.double(), torch.nn.functional.silu(h) * h, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_one_input_are_packed_side_by_side(kind: str) -> None:
    parts = [make(kind, columns, 64) for columns in (48, 17, 16)]
    x = parts[0][2]
    packed = PackedMatrix([weight for weight, _, _ in parts], kind=kind)
    y = packed.multiply(x, torch.empty((5, 81)))
    for (weight, _, _), part in zip(parts, y.split((48, 17, 16), dim=1), strict=True):
        alone = PackedMatrix([weight], kind=kind)
        assert torch.equal(alone.multiply(x, torch.empty_like(part)), part.contiguous())


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_read_back_as_they_were(kind: str) -> None:
    weight, numbers, _ = make(kind, 77, 96)
    packed = PackedMatrix([weight], kind=kind)
    ids = torch.tensor([76, 0, 31, 32, 5])
    assert torch.equal(packed.rows(ids).double(), numbers[ids])
    with pytest.raises(ValueError, match="outside"):
        packed.rows(torch.tensor([77]))


@pytest.mark.parametrize("kind", ["f32", "bf16", "int4_offset", "int8"])
def test_a_large_matrix_is_packed_a_few_rows_at_a_time(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole or in slices that end inside panels: the same columns, plain and as gate and up."""
    weights = torch.randn((2, 75, 64), generator=torch.Generator().manual_seed(3))
    plain = kind in ("f32", "bf16")  # float64 is no type that the kernels read, so it is narrowed on the way
    sources: list[Weight] = [w.double() if plain else quantise(w, 8 if kind == "int8" else 4) for w in weights]
    whole = [PackedMatrix(sources, kind=kind, gate_up=pairs) for pairs in (False, True)]
    monkeypatch.setattr("pagedkv.model.packed.AT_A_TIME", 22 * 64)
    for pairs, expected in zip((False, True), whole, strict=True):
        sliced = PackedMatrix(sources, kind=kind, gate_up=pairs)
        ids = torch.arange(expected.columns)
        assert torch.equal(sliced.rows(ids), expected.rows(ids)), pairs


def test_every_value_of_eight_and_four_bits_is_exact() -> None:
    """-128 is a value of a file's int8 too, though no quantiser here makes it."""
    values = torch.arange(-128, 128, dtype=torch.int8).view(8, 32)
    one = torch.ones((8, 1), dtype=torch.float16)
    nibbles = torch.arange(16, dtype=torch.uint8).repeat(2, 1).view(1, 32)
    x = torch.eye(32, dtype=torch.bfloat16)
    for weight in (
        GroupedWeight("int8", values, one, None),
        GroupedWeight("int4", nibbles, one[:1], None),
        GroupedWeight("int4_offset", nibbles, one[:1], -3 * one[:1]),
    ):
        packed = PackedMatrix([weight], kind=weight.kind)
        y = packed.multiply(x, torch.empty((32, weight.shape[0])))
        assert torch.equal(y, weight.dequantize().T)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_stays_alone(kind: str) -> None:
    weight, _, x = make(kind, 40, 64)
    packed = PackedMatrix([weight], kind=kind)
    clean = packed.multiply(x, torch.empty((5, 40)))
    spoilt = x.clone()
    spoilt[2, 3] = float("nan")
    y = packed.multiply(spoilt, torch.empty((5, 40)))
    assert y[2].isnan().all()
    keep = [0, 1, 3, 4]
    assert torch.equal(y[keep], clean[keep])


def test_nothing_is_written_beside_the_output() -> None:
    weight, _, x = make("bf16", 37, 50)
    packed = PackedMatrix([weight], kind="bf16")
    frame = torch.full((7, 64), 3.0)
    packed.multiply(x, frame[1:6, 8:45])
    frame[1:6, 8:45] = 3.0
    assert (frame == 3.0).all()


def test_what_does_not_fit_is_said() -> None:
    weight, _, x = make("bf16", 32, 64)
    packed = PackedMatrix([weight], kind="bf16")
    with pytest.raises(InvalidRequest, match=r"\[rows, 64\]"):
        packed.multiply(x[:, :32], torch.empty((5, 32)))
    with pytest.raises(InvalidRequest, match="float32"):
        packed.multiply(x.float(), torch.empty((5, 32)))
    with pytest.raises(UnsupportedModel, match="48, not a multiple of the group size 32"):
        PackedMatrix([torch.zeros((4, 48))], kind="int8")
    with pytest.raises(InvalidRequest, match=r"\[32, 64\] in_features"):
        PackedMatrix([torch.zeros((4, 32)), torch.zeros((4, 64))], kind="f32")
