"""From a name to a model: dtype, device, end of text, fingerprint, progress."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lone_run import run
from tiny_gguf import quantise, write_gguf
from tiny_models import make_tiny_model, tiny_config, tiny_weights, write_tokenizer

from pagedkv.errors import BackendUnavailable, UnsupportedModel
from pagedkv.model.load import LoadedModel, load_model


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(path, **{"device": "cpu", "attention_backend": "reference", **options})


def test_b85_end_of_text_is_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", eos_token_id=7)
    assert load(directory).config.eos_token_ids == (7, 2)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load(directory).config.eos_token_ids == (7, 9, 2)
    write_tokenizer(directory, eos_token=...)
    assert load(directory).config.eos_token_ids == (7, 9)


def test_dtype_auto_is_the_checkpoints(tmp_path: Path) -> None:
    for name in ("float32", "bfloat16", "float16"):
        directory = make_tiny_model(tmp_path / name, torch_dtype=name)
        assert load(directory).model.dtype == getattr(torch, name)
    assert load(tmp_path / "float16", dtype="float32").model.dtype == torch.float32
    config = json.loads((tmp_path / "float32" / "config.json").read_text())
    config["dtype"] = config.pop("torch_dtype").replace("float32", "bfloat16")
    (tmp_path / "float32" / "config.json").write_text(json.dumps(config))
    assert load(tmp_path / "float32").model.dtype == torch.bfloat16


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_dtype_auto_of_a_gguf_file_is_the_processors(
    has_bfloat16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    write_tokenizer(tmp_path / "words")
    file = write_gguf(tmp_path / "m.gguf", tiny_config(), tiny_weights(tiny_config()), quantise("F16"))
    model = load(file, tokenizer=tmp_path / "words").model
    assert model.dtype == (torch.bfloat16 if has_bfloat16 else torch.float32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "int3"}, UnsupportedModel, "'int3'"),
        ({"device": "abacus"}, BackendUnavailable, "'abacus'"),
        ({"attention_backend": "telepathy"}, BackendUnavailable, "'telepathy'"),
        ({"quantization": "int4"}, UnsupportedModel, "'int4'"),
    ],
    ids=str,
)
def test_a_choice_that_is_not_there_is_an_error(
    options: dict[str, Any], error: type[Exception], words: str, tiny_model: Callable[..., Path]
) -> None:
    with pytest.raises(error, match=words):
        load(tiny_model(), **options)


def test_no_gpu_is_said(tiny_model: Callable[..., Path]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(BackendUnavailable, match="sees no GPU"):
        load(tiny_model(), device="cuda")


def test_the_tokenizer_of_another_model(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    write_tokenizer(tmp_path, chat_template="mine")
    loaded = load(tiny_model(), tokenizer=tmp_path)
    assert loaded.tokenizer.render_chat([{"role": "user", "content": "x"}]) == "mine"


def test_what_is_told_about_a_model(tiny_model: Callable[..., Path]) -> None:
    loaded = load(tiny_model("qwen3"))
    assert loaded.description.endswith("qwen3, 2 layers, GQA 4/2, safetensors, float32 on cpu")
    assert loaded.source == str(tiny_model("qwen3") / "model.safetensors")
    parameters = sum(tensor.numel() for tensor in tiny_weights(tiny_config("qwen3")).values())
    assert 4 * 0.95 * parameters < loaded.weight_bytes < 4 * 1.5 * parameters


def test_progress_counts_the_weights_up(tiny_model: Callable[..., Path], attention_name: str) -> None:
    seen: list[tuple[int, int]] = []
    load(tiny_model(), attention_backend=attention_name, progress=lambda done, total: seen.append((done, total)))
    total = sum(tensor.nbytes for tensor in tiny_weights(tiny_config()).values())
    assert {of for _, of in seen} == {total}
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)
    assert len(seen) >= 10  # the native decoder joins q, k, v and gate, up


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_the_fingerprint_is_of_the_weights_not_of_the_place(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), tmp_path / "copy")
    original = load(tiny_model()).fingerprint
    assert load(tmp_path / "copy").fingerprint == original
    assert load(tmp_path / "copy", dtype="bfloat16").fingerprint == original  # the dtype is a part of the key scope
    assert load(make_tiny_model(tmp_path / "other", seed=1)).fingerprint != original


def test_b16_weights_that_changed_have_another_fingerprint(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", hidden_size=128, intermediate_size=512)
    file = directory / "model.safetensors"
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    size = file.stat().st_size
    assert size - header > 10 * 65536
    before, whole = load(directory).fingerprint, load(directory, verify_weights=True).fingerprint
    for at in (header, header + 16383, (header + size) // 2, size - 1):  # a byte in each part of the sample
        flip(file, at)
        assert load(directory).fingerprint != before
        flip(file, at)
    assert load(directory).fingerprint == before
    flip(file, header + 100_000)  # outside the sample: only the whole check sees it
    assert load(directory).fingerprint == before
    assert load(directory, verify_weights=True).fingerprint != whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_b16_a_file_that_is_overwritten_does_not_change_a_model_that_runs(dtype: str, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", torch_dtype=dtype)
    model = load(directory).model
    ids = list(range(3, 20))
    before = run(model, ids, [17])
    file = directory / "model.safetensors"
    with file.open("r+b") as handle:
        handle.seek(8 + int.from_bytes(file.read_bytes()[:8], "little"))
        handle.write(bytes(file.stat().st_size - handle.tell()))
    assert torch.equal(run(model, ids, [17]), before)
