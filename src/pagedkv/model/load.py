"""A model's name -> a model that is ready to run.

    resolve (hub) -> config -> weights (memory-mapped) -> decoder (packed) ;  tokenizer ;  fingerprint

Which decoder: on a CPU the native one, if the extension is there and ``attention_backend`` is "auto" or "native"; else
the torch one. A choice made by name is never replaced.

End of text (``config.eos_token_ids`` of what is returned) is the union of config.json, generation_config.json and the
tokenizer's own eos (for GGUF: eos, eot and eom of the metadata). A field that is absent adds nothing.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from pagedkv.attention.backend import choose
from pagedkv.errors import BackendUnavailable, UnsupportedModel
from pagedkv.model.config import ModelConfig, config_from_gguf, config_from_json
from pagedkv.model.decoder import Decoder, LanguageModel, Progress
from pagedkv.model.gguf import GGUFFile
from pagedkv.model.gguf_tokenizer import tokenizer_from_gguf
from pagedkv.model.hub import ModelFiles, resolve
from pagedkv.model.safetensors import SafetensorsFiles
from pagedkv.model.tokenizer import Tokenizer, tokenizer_from_files
from pagedkv.model.weights import GGUFCheckpoint, ModelWeights, read_weights, with_rope_factors

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float": torch.float32,
    "half": torch.float16,
}
SAMPLE = 64 * 1024  # bytes of each weight file that a fingerprint looks at
_TAG = b"pagedkv model 1"


@dataclass(frozen=True)
class LoadedModel:
    """config: eos ids completed from the tokenizer; weight_bytes: what the packed weights take in memory;
    fingerprint: identity of the weights for cache keys; source: where they came from; description: one line for people.
    """

    config: ModelConfig
    model: LanguageModel
    tokenizer: Tokenizer
    fingerprint: str
    source: str
    weight_bytes: int
    description: str


def load_model(
    name_or_path: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    quantization: str | None = None,
    attention_backend: str = "auto",
    verify_weights: bool = False,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by name (see ``hub.py``).

    tokenizer: another name to take the tokenizer from. dtype: "auto" is the checkpoint's own; for a GGUF file bfloat16
    where the processor multiplies it in hardware (a GPU, AVX-512-BF16, AMX), else float32. device: "auto" is a GPU if
    torch sees one. quantization: None leaves weights as their file has them, "int4" and "int8" round them, "none"
    widens those of a GGUF file to the dtype (``native.NativeDecoder``). verify_weights: the fingerprint covers every
    byte of the weights. progress(done, total): bytes.

    Raises ModelNotFound, UnsupportedModel, WeightError, BackendUnavailable.
    """
    files = resolve(name_or_path, revision=revision)
    place = pick_device(device)
    container, config, weights = _open(files)
    number_format = pick_dtype(dtype, config, place)
    model = _decoder(config, weights, number_format, place, (attention_backend, quantization), progress)
    if progress is not None:
        progress(weights.nbytes, weights.nbytes)
    words = tokenizer_of(files if tokenizer is None else resolve(tokenizer, weights=False), container)
    config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *words.eos_ids))))
    return LoadedModel(
        config=config,
        model=model,
        tokenizer=words,
        fingerprint=fingerprint(files, container, everything=verify_weights),
        source=str(files.weights[0]),
        weight_bytes=model.nbytes,
        description=describe(config, files, number_format, place),
    )


def read_config(name_or_path: str | Path, *, revision: str | None = None) -> ModelConfig:
    """The configuration alone; no weight is read, and from the hub none is fetched."""
    files = resolve(name_or_path, revision=revision, weights=False)
    if files.is_gguf:
        file = GGUFFile(files.weights[0])
        return with_rope_factors(config_from_gguf(file.metadata, file.tensors), file)
    return config_from_json(files.json("config.json") or {}, files.json("generation_config.json"))


def tokenizer_of(files: ModelFiles, container: GGUFFile | SafetensorsFiles | None = None) -> Tokenizer:
    """The tokenizer of a model's files. ``container``: the GGUF file, if it is open already."""
    if files.is_gguf:
        file = container if isinstance(container, GGUFFile) else GGUFFile(files.weights[0])
        return tokenizer_from_gguf(file.metadata)
    return tokenizer_from_files(files.directory)


def fingerprint(files: ModelFiles, container: GGUFFile | SafetensorsFiles, *, everything: bool = False) -> str:
    """What makes these weights these weights: the hub's commit, or a SHA-256 over the headers, the sizes and a sample
    of 64 KiB (first, middle and last part) of each file; over every byte with ``everything``.
    """
    if files.revision is not None and not everything:
        return f"hub:{files.name}@{files.revision}"
    digest = hashlib.sha256(_TAG)
    for number, path in enumerate(container.paths):
        header = container.header_bytes(number)
        size = path.stat().st_size
        digest.update(struct.pack("<QQ", len(header), size))
        digest.update(header)
        with path.open("rb") as handle:
            spans = [(len(header), size)] if everything else _sample(len(header), size)
            for start, end in spans:
                handle.seek(start)
                while start < end and (chunk := handle.read(min(1 << 20, end - start))):
                    digest.update(chunk)
                    start += len(chunk)
    return f"sha256:{digest.hexdigest()}"


def describe(config: ModelConfig, files: ModelFiles, dtype: torch.dtype, device: torch.device) -> str:
    """ "smollm2-135m: llama, 30 layers, GQA 9/3, GGUF, float32 on cpu" """
    kind = "GGUF" if files.is_gguf else "safetensors"
    heads = f"GQA {config.num_heads}/{config.num_kv_heads}"
    number_format = str(dtype).removeprefix("torch.")
    return (
        f"{files.name}: {config.architecture}, {config.num_layers} layers, {heads}, {kind}, {number_format} on {device}"
    )


def _open(files: ModelFiles) -> tuple[GGUFFile | SafetensorsFiles, ModelConfig, ModelWeights]:
    if files.is_gguf:
        file = GGUFFile(files.weights[0])
        config = with_rope_factors(config_from_gguf(file.metadata, file.tensors), file)
        return file, config, read_weights(config, GGUFCheckpoint(file, config))
    config = config_from_json(files.json("config.json") or {}, files.json("generation_config.json"))
    tensors = SafetensorsFiles(files.weights, files.index)
    return tensors, config, read_weights(config, tensors)


def _decoder(
    config: ModelConfig,
    weights: ModelWeights,
    dtype: torch.dtype,
    device: torch.device,
    asked: tuple[str, str | None],
    progress: Progress | None,
) -> LanguageModel:
    attention_backend, quantization = asked
    attention = choose(attention_backend, device)
    if attention.name == "native" and dtype in (torch.bfloat16, torch.float32):
        from pagedkv.model.native import NativeDecoder

        return NativeDecoder(config, weights, dtype=dtype, quantization=quantization, progress=progress)
    if quantization not in (None, "none"):
        raise UnsupportedModel(
            f"quantization {quantization!r} needs the native decoder on a CPU, in bfloat16; "
            f"this is {attention.name!r} on {device} in {dtype}"
        )
    return Decoder(config, weights, attention=attention, dtype=dtype, device=device, progress=progress)


def pick_device(name: str) -> torch.device:
    """The device of a name; "auto" is a GPU if torch sees one. Raises BackendUnavailable."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BackendUnavailable(f"device {name!r} is not known to torch") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable(f"device {name!r}: torch {torch.__version__} sees no GPU")
    return device


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of a name; "auto" as ``load_model`` says. Raises UnsupportedModel."""
    wanted = name
    if name == "auto":
        wanted = config.torch_dtype or ("bfloat16" if _multiplies_bfloat16(device) else "float32")
    if wanted not in DTYPES:
        raise UnsupportedModel(f"dtype {wanted!r} is not supported; there are auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _sample(start: int, size: int) -> Sequence[tuple[int, int]]:
    """Three spans of the weights, SAMPLE bytes in all: first, middle, last. Fixed, so equal files agree everywhere."""
    part = SAMPLE // 4
    if size - start <= SAMPLE:
        return [(start, size)]
    middle = (start + size) // 2
    return [(start, start + part), (middle, middle + 2 * part), (size - part, size)]
