"""GGUF: what is read is what was written; what cannot be read is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from lone_run import run
from tiny_gguf import quantise, write_gguf
from tiny_models import tiny_config, tiny_weights, write_tokenizer

from pagedkv.errors import ModelError, UnsupportedModel, WeightError
from pagedkv.model import names
from pagedkv.model.gguf import _QUANTISED, GGUFFile, QuantisedTensor
from pagedkv.model.load import LoadedModel, load_model

IDS = torch.randint(0, 320, (19,), generator=torch.Generator().manual_seed(1)).tolist()


def load(path: Path, words: Path) -> LoadedModel:
    """The files here have no vocabulary; the tokenizer is the tiny model's."""
    return load_model(path, tokenizer=words, dtype="float32", device="cpu", attention_backend="reference")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("words")
    write_tokenizer(directory)
    return directory


def from_safetensors(directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> LoadedModel:
    import json

    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(weights, str(directory / "model.safetensors"))
    write_tokenizer(directory)
    return load_model(directory, dtype="float32", device="cpu", attention_backend="reference")


def rounded(weights: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """The weights as ``kind`` stores them: quantised and widened again by the gguf package."""
    apply = quantise(kind)
    result = {}
    for name, tensor in weights.items():
        data, ggml_type = apply(name, tensor.numpy())
        result[name] = torch.from_numpy(np.ascontiguousarray(gguf.quants.dequantize(data, ggml_type))).view(
            tensor.shape
        )
    return result


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_b84_equals_the_safetensors_model_with_the_same_numbers(
    family: str, kind: str, tmp_path: Path, words: Path
) -> None:
    config = tiny_config(family)
    weights = tiny_weights(config)
    model = load(write_gguf(tmp_path / "m.gguf", config, weights, quantise(kind)), words)
    expected = from_safetensors(tmp_path / "hf", config, rounded(weights, kind))
    assert model.config.tie_word_embeddings
    assert torch.equal(run(model.model, IDS, [12, 7]), run(expected.model, IDS, [12, 7]))
    if kind == "F32":
        original = from_safetensors(tmp_path / "original", config, weights)
        assert torch.equal(run(model.model, IDS, [19]), run(original.model, IDS, [19]))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_b84_every_family_with_and_without_an_output_matrix(
    family: str, tied: bool, tmp_path: Path, words: Path
) -> None:
    biased = {"attention_bias": True} if family == "llama" else {}
    config = tiny_config(family, tie_word_embeddings=tied, sliding_window=None, **biased)
    weights = tiny_weights(config)
    file = write_gguf(tmp_path / "m.gguf", config, weights, quantise("F32"))
    assert ("output.weight" in GGUFFile(file).tensors) == (not tied)
    expected = from_safetensors(tmp_path / "hf", config, weights)
    assert torch.equal(run(load(file, words).model, IDS, [19]), run(expected.model, IDS, [19]))


def test_b84_rope_factors_are_the_llama3_scaling(tmp_path: Path, words: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = tiny_config("llama", rope_scaling=scaling)
    weights = tiny_weights(config)
    expected = from_safetensors(tmp_path / "hf", config, weights)
    plain = from_safetensors(tmp_path / "plain", tiny_config("llama"), weights)
    factors = plain.config.rope.inv_freq() / expected.config.rope.inv_freq()
    file = write_gguf(tmp_path / "m.gguf", config, weights, quantise("F32"), extra={"rope_freqs.weight": factors})
    ids = torch.randint(0, 320, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    logits = run(load(file, words).model, ids, [60, 40])
    assert (logits - run(expected.model, ids, [60, 40])).abs().max() < 1e-4
    assert (logits - run(plain.model, ids, [60, 40])).abs().max() > 1e-2


@pytest.mark.parametrize("alignment", [8, 64])
def test_b84_other_alignments(alignment: int, tmp_path: Path, words: Path) -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    usual = load(write_gguf(tmp_path / "m.gguf", config, weights, quantise("Q8_0")), words)
    other = load(write_gguf(tmp_path / "a.gguf", config, weights, quantise("Q8_0"), alignment=alignment), words)
    assert torch.equal(run(other.model, IDS, [19]), run(usual.model, IDS, [19]))


def test_b84_split_files(tmp_path: Path, words: Path) -> None:
    config = tiny_config("llama")
    weights = tiny_weights(config)
    whole = load(write_gguf(tmp_path / "m.gguf", config, weights, quantise("Q8_0")), words)
    first = write_gguf(tmp_path / "parts.gguf", config, weights, quantise("Q8_0"), split_max_tensors=6)
    assert len(GGUFFile(first).paths) > 2
    assert torch.equal(run(load(first, words).model, IDS, [19]), run(whole.model, IDS, [19]))
    second = sorted(tmp_path.glob("parts-00002*"))[0]
    with pytest.raises(WeightError, match=f"not the first of its.*{first.name}"):
        GGUFFile(second)
    second.unlink()
    with pytest.raises(WeightError, match=second.name):
        GGUFFile(first)


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    config = tiny_config("llama")
    for padding in range(1, 4):  # one of these makes the header odd
        file = write_gguf(
            tmp_path / "m.gguf",
            config,
            tiny_weights(config),
            quantise("Q8_0"),
            alignment=1,
            metadata=lambda writer, length=padding: writer.add_string("x.padding", "x" * length),
        )
        read, expected = GGUFFile(file), gguf.GGUFReader(file)
        if any(info.offset % 4 for info in read.tensors.values()):
            break
    else:
        raise AssertionError("no tensor lies at an odd offset")
    for tensor in expected.tensors:
        ours = read.get(tensor.name)
        values = ours.dequantize() if isinstance(ours, QuantisedTensor) else ours
        assert np.array_equal(values.numpy(), gguf.quants.dequantize(tensor.data, tensor.tensor_type))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, weights, nbytes) in _QUANTISED.items():
        assert gguf.GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (weights, nbytes)


@pytest.mark.parametrize("kind", [name for name, _, _ in _QUANTISED.values()])
def test_blocks_of_any_bits_widen_as_the_gguf_package_does(kind: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[kind]
    weights, nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
    rng = np.random.default_rng(int(ggml_type))
    raw = rng.integers(0, 256, (6, 3 * nbytes), dtype=np.uint8)
    finite = np.float16(rng.uniform(-1, 1, (6, 3, nbytes // 2))).view(np.uint8)  # scales of any bits could be NaN
    raw.reshape(6, 3, nbytes)[:, :, :4] = finite[:, :, :4]
    raw.reshape(6, 3, nbytes)[:, :, -4:] = finite[:, :, :4]
    expected = torch.from_numpy(gguf.quants.dequantize(raw, ggml_type))
    tensor = QuantisedTensor(torch.from_numpy(raw), kind, (6, 3 * weights))
    assert tensor.nbytes == 6 * 3 * nbytes
    assert torch.equal(tensor.dequantize(), expected)
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(tensor.rows(order).dequantize(), expected[order])
    assert tensor.rows(order).shape == (4, 3 * weights)


def test_mixed_types_in_one_model(tmp_path: Path, words: Path) -> None:
    """As in a Q4_K_M file: other types for other matrices, K-quants with their blocks of 256."""
    config = tiny_config("llama", hidden_size=256, intermediate_size=512, head_dim=64)
    weights = tiny_weights(config)
    rng = np.random.default_rng(0)
    kinds = {"down_proj": "Q6_K", "up_proj": "Q4_K", "gate_proj": "Q4_K", "v_proj": "Q8_0", "k_proj": "Q4_0"}
    widened: dict[str, torch.Tensor] = {}

    def apply(name: str, values: np.ndarray) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
        kind = next((kind for part, kind in kinds.items() if part in name), "F32")
        ggml_type = gguf.GGMLQuantizationType[kind]
        if kind.endswith("_K"):  # the package cannot quantise these: bits by chance, scales small
            _, nbytes = gguf.GGML_QUANT_SIZES[ggml_type]
            raw = rng.integers(0, 256, (values.shape[0], values.shape[1] // 256, nbytes), dtype=np.uint8)
            scale = np.float16(rng.uniform(1e-5, 2e-5, raw.shape[:2])).view(np.uint8).reshape(*raw.shape[:2], 2)
            raw[..., :2] = scale
            raw[..., 2:4] = scale
            raw[..., -2:] = scale
            data = raw.reshape(values.shape[0], -1)
        else:
            data, ggml_type = quantise(kind)(name, values)
        widened[name] = torch.from_numpy(gguf.quants.dequantize(data, ggml_type)).view(values.shape)
        return data, ggml_type

    model = load(write_gguf(tmp_path / "m.gguf", config, weights, apply), words)
    for name in list(widened):
        if ".k_proj." in name or ".q_proj." in name:
            widened[name] = weights[name]
    expected = from_safetensors(tmp_path / "hf", config, widened)
    exact = run(expected.model, IDS, [19])
    difference = (run(model.model, IDS, [19]) - exact).abs()
    assert difference.mean() < 0.2 * exact.std()  # k alone is 4 bits here and whole there
    assert {kind for _, kind in kinds.items()} <= {
        gguf.GGMLQuantizationType(info.ggml_type).name for info in GGUFFile(Path(model.source)).tensors.values()
    }


def test_an_unknown_type_is_refused_by_name(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tiny_weights(tiny_config()), quantise("F32"))
    data = bytearray(file.read_bytes())
    at = data.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight") + 4 + 2 * 8
    for number, name in ((23, "IQ4_XS"), (77, "number 77")):
        data[at : at + 4] = struct.pack("<I", number)
        file.write_bytes(data)
        with pytest.raises(UnsupportedModel, match=rf"blk\.0\.attn_q\.weight has type {name}"):
            GGUFFile(file)


def test_a_truncated_file_names_the_tensor_or_the_place(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tiny_weights(tiny_config()), quantise("F32"))
    whole, last = file.read_bytes(), max(GGUFFile(file).tensors.values(), key=lambda info: info.offset)
    file.write_bytes(whole[: last.offset + last.nbytes - 1])
    with pytest.raises(WeightError, match=f"tensor {last.name} is truncated"):
        GGUFFile(file)
    for length in (0, 3, 10, 30, 200, 600):
        file.write_bytes(whole[:length])
        with pytest.raises(WeightError, match=r"m\.gguf"):
            GGUFFile(file)


@pytest.mark.parametrize(
    ("at", "value", "error"),
    [
        (0, b"GGML", WeightError),
        (4, struct.pack("<I", 1), UnsupportedModel),
        (4, struct.pack(">I", 3), UnsupportedModel),
        (8, struct.pack("<Q", 2**60), WeightError),
        (16, struct.pack("<Q", 2**60), WeightError),
        (24, struct.pack("<Q", 2**62), WeightError),
    ],
)
def test_a_header_that_lies_is_an_error_and_costs_no_memory(
    at: int, value: bytes, error: type[Exception], tmp_path: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tiny_weights(tiny_config()), quantise("F32"))
    data = bytearray(file.read_bytes())
    data[at : at + len(value)] = value
    file.write_bytes(data)
    with pytest.raises(error, match=r"m\.gguf"):
        GGUFFile(file)


@pytest.mark.parametrize(
    ("drop", "add", "words_in_error"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"lacks tensor model\.layers\.1\.mlp\.up_proj\.weight"),
        (None, "blk.0.attn_sinks.weight", r"blk\.0\.attn_sinks\.weight"),
        (None, "blk.2.attn_norm.weight", r"model\.layers\.2\.input_layernorm\.weight"),
    ],
)
def test_missing_and_surplus_tensors_are_named(
    drop: str | None, add: str | None, words_in_error: str, tmp_path: Path, words: Path
) -> None:
    weights = {name: tensor for name, tensor in tiny_weights(tiny_config()).items() if name != drop}
    extra = {} if add is None else {add: torch.ones(64)}
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), weights, quantise("F32"), extra=extra)
    with pytest.raises(WeightError, match=words_in_error):
        load(file, words)


def test_metadata_of_every_type_is_read_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_uint8("x.u8", 200)
        writer.add_int8("x.i8", -3)
        writer.add_uint16("x.u16", 60000)
        writer.add_int16("x.i16", -300)
        writer.add_int32("x.i32", -70000)
        writer.add_float32("x.f32", 0.1)
        writer.add_bool("x.bool", True)
        writer.add_string("x.text", "naïve 日本 🎉")
        writer.add_uint64("x.u64", 2**63)
        writer.add_int64("x.i64", -(2**62))
        writer.add_float64("x.f64", 0.1)
        writer.add_array("x.words", ["a", "", "ü"])
        writer.add_array("x.numbers", [1, 2, 3])
        writer.add_array("x.reals", [0.5, 0.25])

    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tiny_weights(tiny_config()), quantise("F32"), metadata=add)
    ours, theirs = GGUFFile(file), gguf.GGUFReader(file)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.tensors[tensor.name].offset == tensor.data_offset


def test_names_of_the_two_worlds_are_one_to_one() -> None:
    from tiny_gguf import gguf_name

    from pagedkv.model.config import config_from_json

    for family in ("llama", "qwen2", "qwen3"):
        for name in names.expected_shapes(config_from_json(tiny_config(family))):
            assert names.from_gguf(gguf_name(name)) == name
    assert names.from_gguf("blk.0.ssm_a.weight") is None


def test_no_flipped_bit_in_a_header_escapes_as_another_error(tmp_path: Path, words: Path) -> None:
    """Whatever a damaged header says, the model loads or the error is one of ours."""
    config = tiny_config(num_hidden_layers=1)
    file = write_gguf(tmp_path / "m.gguf", config, tiny_weights(config), quantise("F32"))
    whole = file.read_bytes()
    end = GGUFFile(file).header_sizes[0]
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.choice(end, 150, replace=False):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.integers(8)
        file.write_bytes(damaged)
        try:
            load(file, words)
        except ModelError:
            refused += 1
    assert refused > 50
