"""Writes the default model in the forms that the peers read: a Hugging Face directory in bf16, GGUF in BF16 and F16.

    python bench/peers/export.py DIR

All of them hold the same numbers: the Q4_1 file's weights, dequantised and rounded once.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file

from pagedkv.model.config import config_from_gguf
from pagedkv.model.gguf import GGUFFile, QuantisedTensor
from pagedkv.model.hub import resolve
from pagedkv.model.names import expected_shapes
from pagedkv.model.weights import GGUFCheckpoint

MODEL = "smollm2-135m"
FILE_TYPES = {
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
    gguf.GGMLQuantizationType.BF16: gguf.LlamaFileType.MOSTLY_BF16,
}


def plain(weight: torch.Tensor | QuantisedTensor) -> torch.Tensor:
    return weight.dequantize() if isinstance(weight, QuantisedTensor) else weight


def write_directory(target: Path) -> None:
    """Our own loader's view of the model, as transformers and vLLM read it (token ids only, so no tokenizer)."""
    target.mkdir(parents=True, exist_ok=True)
    file = GGUFFile(resolve(MODEL).weights[0])
    config = config_from_gguf(file.metadata, file.tensors)
    checkpoint = GGUFCheckpoint(file, config)
    tensors = {name: plain(checkpoint.get(name)).to(torch.bfloat16).contiguous() for name in expected_shapes(config)}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    theta = config.rope.theta
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": sorted(config.eos_token_ids),
        "torch_dtype": "bfloat16",
    }
    (target / "config.json").write_text(json.dumps(described, indent=1))


def write_gguf(target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """The same file with its matrices in another type; metadata, names and row order stay llama.cpp's own."""
    reader = gguf.GGUFReader(resolve(MODEL).weights[0])
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kinds = field.types
        sub_type = kinds[-1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kinds[0], sub_type=sub_type)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        as_type = kind if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, as_type), raw_dtype=as_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(folder: Path) -> None:
    write_directory(folder / "hf-bf16")
    write_gguf(folder / "model-bf16.gguf", gguf.GGMLQuantizationType.BF16)
    write_gguf(folder / "model-f16.gguf", gguf.GGMLQuantizationType.F16)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
