"""NativeDecoder against the readable Decoder, and against itself: the same bits however the tokens are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from lone_run import make_pool, run

from pagedkv.attention.backend import choose
from pagedkv.attention.batch import AttentionBatch
from pagedkv.cache.pool import KVPool
from pagedkv.errors import InvalidRequest, UnsupportedModel
from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import Decoder
from pagedkv.model.gguf import QuantisedTensor
from pagedkv.model.load import load_model
from pagedkv.model.weights import ModelWeights

native = pytest.importorskip("pagedkv._native")

from pagedkv.model.native import NativeDecoder  # noqa: E402

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "every bias, a head of its own": (
        "llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    ),
    "odd sizes": ("llama", {"hidden_size": 68, "intermediate_size": 100, "head_dim": 20}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen2 with windows in its last layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 24, "num_key_value_heads": 1}),
    "scaled rope": (
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
}
IDS = torch.randint(0, 320, (60,), generator=torch.Generator().manual_seed(5)).tolist()
CUTS = ([60], [9, 1, 20, 30], [13] * 4 + [8], [1] * 60)


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., tuple[ModelConfig, ModelWeights]]:
    """Config and weights of a tiny checkpoint, read once."""
    from tiny_models import make_tiny_model

    from pagedkv.model.config import config_from_json
    from pagedkv.model.hub import resolve
    from pagedkv.model.safetensors import SafetensorsFiles
    from pagedkv.model.weights import read_weights

    made: dict[str, tuple[ModelConfig, ModelWeights]] = {}

    def get(name: str) -> tuple[ModelConfig, ModelWeights]:
        if name not in made:
            family, overrides = FAMILIES[name]
            files = resolve(make_tiny_model(tmp_path_factory.mktemp("native"), family, **overrides))
            config = config_from_json(files.json("config.json") or {}, None)
            made[name] = config, read_weights(config, SafetensorsFiles(files.weights, files.index))
        return made[name]

    return get


@pytest.fixture
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.force_instruction_set(request.param)
    yield request.param
    native.force_instruction_set("")


def reference(config: ModelConfig, weights: ModelWeights, dtype: torch.dtype) -> Decoder:
    attention = choose("reference", torch.device("cpu"))
    return Decoder(config, weights, attention=attention, dtype=dtype, product="torch")


@pytest.mark.parametrize("isa", native.instruction_sets(), indirect=True)
@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_torch_decoder(name: str, isa: str, parts: Callable[..., Any]) -> None:
    config, weights = parts(name)
    expected = run(reference(config, weights, torch.float32), IDS, [60])
    assert expected.std() > 0.3
    assert (run(NativeDecoder(config, weights), IDS, [60]) - expected).abs().max() < 1e-4, isa


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_no_further_from_float32_than_the_torch_decoder(name: str, parts: Callable[..., Any]) -> None:
    config, weights = parts(name)
    exact = run(reference(config, weights, torch.float32), IDS, [60])
    theirs = (run(reference(config, weights, torch.bfloat16), IDS, [60]) - exact).abs().mean()
    ours = (run(NativeDecoder(config, weights, dtype=torch.bfloat16), IDS, [60]) - exact).abs().mean()
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("isa", native.instruction_sets(), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_the_same_bits_for_every_cut_and_thread_count(
    name: str, dtype: torch.dtype, isa: str, parts: Callable[..., Any]
) -> None:
    model = NativeDecoder(*parts(name), dtype=dtype)
    threads = torch.get_num_threads()
    whole = run(model, IDS, [60])
    try:
        for number, cut in enumerate(CUTS):
            torch.set_num_threads(1 + number % 2)
            assert torch.equal(run(model, IDS, cut), whole), (isa, cut)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("quantization", [None, "int4", "int8"])
@pytest.mark.parametrize("kv", ["auto", "float32", "float16", "int8_per_token_head", "fp8_e4m3"])
def test_a_sequence_has_the_same_bits_among_others(
    quantization: str | None, kv: str, parts: Callable[..., Any]
) -> None:
    """Twelve sequences in one mixed batch, whose chunks differ, against each alone from scratch."""
    config, weights = parts("llama")
    model = NativeDecoder(config, weights, dtype=torch.bfloat16, quantization=quantization)
    lengths = [1, 2, 3, 5, 8, 13, 17, 16, 15, 33, 40, 60]
    starts = [0, 1, 2, 0, 7, 12, 8, 0, 14, 1, 32, 0]  # tokens that earlier passes have computed
    pool = make(config, 64, kv)
    tables = [[4 * i + j for j in range(4)] for i in range(12)]
    for table, start in zip(tables, starts, strict=True):
        if start:
            model.forward(torch.tensor(IDS[:start]), AttentionBatch.build([table], [start], [start], 16), pool)
    new = [length - start for length, start in zip(lengths, starts, strict=True)]
    tokens = torch.tensor([x for length, start in zip(lengths, starts, strict=True) for x in IDS[start:length]])
    hidden = model.forward(tokens, AttentionBatch.build(tables, lengths, new, 16), pool)
    logits = model.logits(hidden)
    row = 0
    for length, count in zip(lengths, new, strict=True):
        row += count
        alone = make(config, 4, kv)
        batch = AttentionBatch.build([[2, 0, 3, 1]], [length], [length], 16)
        expected = model.logits(model.forward(torch.tensor(IDS[:length]), batch, alone)[-1:])
        assert torch.equal(logits[row - 1 : row], expected), length


def make(config: ModelConfig, blocks: int, kv: str) -> KVPool:
    shape = (blocks, config.num_layers, config.num_kv_heads, 16, config.head_dim)
    return KVPool(*shape, dtype=torch.bfloat16, kv_cache_dtype=kv)


def test_weights_of_eight_bits_are_near_and_of_four_bits_nearer_than_nothing(parts: Callable[..., Any]) -> None:
    config, weights = parts("llama")
    exact = run(reference(config, weights, torch.float32), IDS, [60])

    def error(quantization: str | None) -> float:
        model = NativeDecoder(config, weights, dtype=torch.bfloat16, quantization=quantization)
        return float((run(model, IDS, [60]) - exact).abs().mean() / exact.std())

    assert error("none") < error("int8") < 0.06 < error("int4") < 0.4


def test_parts_of_different_kinds_meet_at_the_dtype(parts: Callable[..., Any]) -> None:
    """A file may hold q in four bits and v in eight; a matrix of its own keeps what it has."""
    config, weights = parts("llama")

    def rounded(weight: torch.Tensor, name: str) -> QuantisedTensor:
        blocks = quants.quantize(weight.numpy(), GGMLQuantizationType[name])
        return QuantisedTensor(torch.from_numpy(blocks), name, tuple(weight.shape))

    layers = tuple(
        replace(layer, q=rounded(layer.q, "Q4_1"), v=rounded(layer.v, "Q8_0"), down=rounded(layer.down, "Q4_0"))
        for layer in weights.layers
    )
    mixed = replace(weights, layers=layers)
    model = NativeDecoder(config, mixed, dtype=torch.bfloat16)
    assert model.kinds == {"bf16", "int4"}
    exact = run(reference(config, mixed, torch.float32), IDS, [60])
    assert (run(model, IDS, [60]) - exact).abs().mean() < 0.03 * exact.std()


def test_weights_are_counted_once(parts: Callable[..., Any]) -> None:
    config, weights = parts("llama")
    done: list[tuple[int, int]] = []
    model = NativeDecoder(config, weights, progress=lambda *pair: done.append(pair))
    # 320 x 64 embedding, which is the head too, and two layers of 128 x 64, 64 x 64, 192 x 64, 64 x 96
    assert model.nbytes == 4 * (320 * 64 + 2 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96))
    assert done == sorted(done)
    assert done[-1][0] <= done[-1][1] == weights.nbytes
    assert NativeDecoder(config, weights, dtype=torch.bfloat16).nbytes == model.nbytes // 2


def test_load_picks_it_on_a_cpu(tiny_model: Callable[..., Path]) -> None:
    assert isinstance(load_model(tiny_model(), device="cpu").model, NativeDecoder)
    assert isinstance(load_model(tiny_model(), device="cpu", attention_backend="reference").model, Decoder)
    with pytest.raises(UnsupportedModel, match=r"int4.*reference"):
        load_model(tiny_model(), device="cpu", attention_backend="reference", quantization="int4")
    with pytest.raises(UnsupportedModel, match="int3"):
        load_model(tiny_model(), device="cpu", quantization="int3")
    with pytest.raises(UnsupportedModel, match=r"int4.*float32"):
        load_model(tiny_model(), device="cpu", dtype="float32", quantization="int4")
    with pytest.raises(UnsupportedModel, match=r"68.*multiple of the group size 32|68.*multiple of 32"):
        load_model(tiny_model(hidden_size=68, head_dim=16, torch_dtype="bfloat16"), device="cpu", quantization="int8")


@pytest.mark.parametrize("isa", native.instruction_sets(), indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_wanted_rows_have_the_bits_they_have_among_all(
    name: str, dtype: torch.dtype, isa: str, parts: Callable[..., Any]
) -> None:
    """Two prefills behind a history and a decode: any choice of rows, and the same KV is left behind."""
    config, weights = parts(name)
    model = NativeDecoder(config, weights, dtype=dtype)
    tables, lengths, new = [[0, 3, 5, 7], [1, 2, 4, 6], [8, 9, 10, 11]], [40, 57, 33], [24, 41, 1]
    choices: list[list[int]] = [[], [23], [64, 65], [23, 64, 65], list(range(24)), [0, 1, 22, 24, 30, 31], [*range(66)]]

    def forward(rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        pool = make(config, 12, "auto")
        pool.data.zero_()
        for table, length, count in zip(tables, lengths, new, strict=True):
            done = length - count
            model.forward(torch.tensor(IDS[:done]), AttentionBatch.build([table], [done], [done], 16), pool)
        ids = [x for length, count in zip(lengths, new, strict=True) for x in IDS[length - count : length]]
        return model.forward(torch.tensor(ids), AttentionBatch.build(tables, lengths, new, 16), pool, rows), pool.data

    every, kv = forward(None)
    for choice in choices:
        rows = torch.tensor(choice, dtype=torch.int64)
        hidden, left = forward(rows)
        assert torch.equal(hidden, every[rows]), (isa, choice)
        assert torch.equal(left, kv), (isa, choice)


def test_the_torch_decoder_gives_the_same_choice_of_rows(parts: Callable[..., Any]) -> None:
    model = reference(*parts("llama"), torch.float32)
    pool, table = make_pool(model, 12, 4)
    batch = AttentionBatch.build([table], [9], [9], 4)
    every = model.forward(torch.tensor(IDS[:9]), batch, pool)
    rows = torch.tensor([0, 4, 8])
    assert torch.equal(model.forward(torch.tensor(IDS[:9]), batch, pool, rows), every[rows])


def test_what_a_step_gets_wrong_is_named_and_nothing_is_written(parts: Callable[..., Any]) -> None:
    config, weights = parts("llama")
    model = NativeDecoder(config, weights)
    pool, table = make_pool(model, 16, 4)
    before = pool.data.clone()

    def forward(ids: list[int], batch: AttentionBatch) -> None:
        model.forward(torch.tensor(ids), batch, pool)

    batch = AttentionBatch.build([table], [3], [3], 4)
    with pytest.raises(InvalidRequest, match="token id 320 is outside the vocabulary of 320"):
        forward([1, 320, 2], batch)
    with pytest.raises(InvalidRequest, match="token id -1"):
        forward([1, 2, -1], batch)
    with pytest.raises(InvalidRequest, match="2 token ids, but the batch has 3"):
        forward([1, 2], batch)
    with pytest.raises(InvalidRequest, match="slot"):
        forward([1, 2, 3], AttentionBatch.build([[99, 1]], [3], [3], 4))
    with pytest.raises(InvalidRequest, match="int64"):
        model.forward(torch.tensor([1, 2, 3], dtype=torch.int32), batch, pool)
    for rows, wrong in (([0, 3], "wanted row 3"), ([1, 1], "wanted row 1"), ([-1], "wanted row -1")):
        with pytest.raises(InvalidRequest, match=wrong):
            model.forward(torch.tensor([1, 2, 3]), batch, pool, torch.tensor(rows))
    other = KVPool(4, config.num_layers, config.num_kv_heads + 1, 4, config.head_dim)
    with pytest.raises(InvalidRequest, match="2 KV heads of 16"):
        model.forward(torch.tensor([1, 2, 3]), batch, other)
    assert torch.equal(pool.data.nan_to_num(7.0), before.nan_to_num(7.0))


def test_an_empty_batch_gives_no_rows(parts: Callable[..., Any]) -> None:
    model = NativeDecoder(*parts("llama"))
    pool, _ = make_pool(model, 4, 4)
    hidden = model.forward(torch.tensor([], dtype=torch.int64), AttentionBatch.build([], [], [], 4), pool)
    assert model.logits(hidden).shape == (0, 320)


def test_two_pools_of_one_model_are_told_apart(parts: Callable[..., Any]) -> None:
    model = NativeDecoder(*parts("llama"))
    batch = AttentionBatch.build([[0, 1]], [7], [7], 4)
    pools = [make_pool(model, 16, 4)[0] for _ in range(2)]
    for pool in pools:
        model.forward(torch.tensor(IDS[:7]), batch, pool)
    assert torch.equal(pools[0].data[:2, :, :, :, :3], pools[1].data[:2, :, :, :, :3])
    assert not pools[1].data[0].isnan().any()
