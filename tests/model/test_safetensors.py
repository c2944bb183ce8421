"""safetensors: one file or shards; whatever is wrong with a tensor, its name is in the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import run
from safetensors.torch import save_file
from tiny_models import make_tiny_model, tiny_config, tiny_weights

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model import names
from pagedkv.model.load import LoadedModel, load_model
from pagedkv.model.safetensors import SafetensorsFiles

IDS = torch.randint(0, 320, (11,), generator=torch.Generator().manual_seed(3)).tolist()


def load(directory: Path) -> LoadedModel:
    return load_model(directory, device="cpu", attention_backend="reference")


def rewrite(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, str(directory / "model.safetensors"))


def shard(directory: Path, weights: dict[str, torch.Tensor], num_shards: int = 3) -> dict[str, str]:
    """Deal the tensors out to several files; returns the index's map."""
    (directory / "model.safetensors").unlink()
    where = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[number::num_shards]}
        save_file(part, str(directory / file))
        where.update(dict.fromkeys(part, file))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_tensors_are_those_that_were_saved(dtype: str, tmp_path: Path) -> None:
    weights = {name: t.to(getattr(torch, dtype)) for name, t in tiny_weights(tiny_config()).items()}
    save_file(weights, str(tmp_path / "model.safetensors"))
    read = SafetensorsFiles([tmp_path / "model.safetensors"])
    assert read.names == set(weights)
    for name, tensor in weights.items():
        assert torch.equal(read.get(name), tensor)
        assert read.shape(name) == tuple(tensor.shape)


def test_tensors_at_odd_offsets_are_read(tmp_path: Path) -> None:
    """A header of any length is legal; ours must not need an aligned one."""
    weights = {"a": torch.arange(7, dtype=torch.float32), "empty": torch.empty((0, 3)), "b": torch.ones(3).half()}
    save_file(weights, str(tmp_path / "model.safetensors"))
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    odd = (length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :]
    (tmp_path / "odd.safetensors").write_bytes(odd)
    read = SafetensorsFiles([tmp_path / "odd.safetensors"])
    for name, tensor in weights.items():
        assert torch.equal(read.get(name), tensor)


def test_shards_are_one_model(tmp_path: Path) -> None:
    whole = load(make_tiny_model(tmp_path / "whole"))
    directory = make_tiny_model(tmp_path / "shards")
    shard(directory, tiny_weights(tiny_config()))
    assert torch.equal(run(load(directory).model, IDS, [11]), run(whole.model, IDS, [11]))


def test_a_missing_shard_and_an_index_that_lies_are_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    where = shard(directory, tiny_weights(tiny_config()))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {**where, names.FINAL_NORM: where[names.EMBEDDING]}}))
    if where[names.FINAL_NORM] != where[names.EMBEDDING]:
        with pytest.raises(WeightError, match=rf"{names.FINAL_NORM} is missing from {where[names.EMBEDDING]}"):
            load(directory)
    index.write_text(json.dumps({"weight_map": where}))
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-00002-of-00003\.safetensors"):
        load(directory)


@pytest.mark.parametrize(
    "name",
    [names.EMBEDDING, names.FINAL_NORM, "model.layers.0.self_attn.k_proj.weight", "model.layers.1.mlp.up_proj.weight"],
)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    rewrite(directory, {n: t for n, t in tiny_weights(tiny_config()).items() if n != name})
    with pytest.raises(WeightError, match=f"lacks tensor {name}"):
        load(directory)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.2.mlp.up_proj.weight", "visual.patch_embed.weight"]
)
def test_a_surplus_tensor_is_named(name: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    rewrite(directory, {**tiny_weights(tiny_config()), name: torch.zeros(64)})
    with pytest.raises(WeightError, match=name):
        load(directory)


def test_rotary_buffers_of_old_checkpoints_are_left_unread(tmp_path: Path) -> None:
    expected = run(load(make_tiny_model(tmp_path / "plain")).model, IDS, [11])
    directory = make_tiny_model(tmp_path / "old")
    buffers = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.full((8,), float("nan")) for i in range(2)}
    rewrite(directory, {**tiny_weights(tiny_config()), **buffers, "model.rotary_emb.inv_freq": torch.zeros(8)})
    assert torch.equal(run(load(directory).model, IDS, [11]), expected)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    weights = tiny_weights(tiny_config())
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(directory, {**weights, name: weights[name].T.contiguous()})
    with pytest.raises(WeightError, match=rf"{name} has shape \(96, 64\).*\(64, 96\)"):
        load(directory)


def test_a_tensor_of_another_number_format_is_named(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    name = "model.layers.0.mlp.down_proj.weight"
    rewrite(directory, {**tiny_weights(tiny_config()), name: torch.zeros(64, 96, dtype=torch.int8)})
    with pytest.raises(UnsupportedModel, match=f"{name} has dtype I8"):
        load(directory)


def test_a_truncated_file_names_the_tensor_or_the_header(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    file.write_bytes(whole[:-1])
    with pytest.raises(WeightError, match=f"tensor {last} is truncated"):
        load(directory)
    for length in (0, 7, 8, 100):
        file.write_bytes(whole[:length])
        with pytest.raises(WeightError, match=r"model\.safetensors"):
            load(directory)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}',
        b'{"a": {"dtype": "F32", "shape": [4]}}',
    ],
    ids=str,
)
def test_a_broken_header_is_an_error(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        SafetensorsFiles([file])


HEAD = torch.randn((320, 64), generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("flag", [True, False, ...], ids=["tied", "untied", "left out"])
@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_b80_tied_or_not_with_a_head_or_not(flag: Any, head: str, tmp_path: Path) -> None:
    config = tiny_config(tie_word_embeddings=flag)
    weights = tiny_weights(tiny_config(tie_word_embeddings=True))
    embedding = weights[names.EMBEDDING]
    directory = make_tiny_model(tmp_path / "m", tie_word_embeddings=flag)
    heads = {"absent": {}, "equal": {names.HEAD: embedding.clone()}, "different": {names.HEAD: HEAD}}
    rewrite(directory, {**weights, **heads[head]})
    tied = config.get("tie_word_embeddings", False)
    if tied and head == "different":
        with pytest.raises(WeightError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
            load(directory)
    elif not tied and head == "absent":
        with pytest.raises(WeightError, match=r"lacks lm_head\.weight"):
            load(directory)
    else:
        model = load(directory).model
        used = HEAD if head == "different" else embedding
        hidden = torch.randn((5, 64), generator=torch.Generator().manual_seed(4))
        assert torch.allclose(model.logits(hidden), hidden @ used.T, atol=1e-5)
