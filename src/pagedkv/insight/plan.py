"""plan: how much memory a model needs and how many requests fit, from its configuration alone. No weight is read.

The arithmetic is that of the code it predicts (``cache/pool.py``, ``model/native.py``, ``engine/sizing.py``), written
down once more; tests compare it with what real loads allocate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pagedkv.errors import InvalidRequest
from pagedkv.insight.waste import slots
from pagedkv.model.config import ModelConfig

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8_per_token_head": 1, "fp8_e4m3": 1}
SCALED = ("int8_per_token_head", "fp8_e4m3")  # one float32 per token and KV head beside the values
_PANEL = 32  # columns that the native product packs together
_GROUP = 32  # weights that share a factor
_GROUP_BYTES = {"int4": 18, "int4_offset": 20, "int8": 34}  # of 32 weights: the integers and their half floats
_OF_GGUF = {"Q4_0": "int4", "Q4_1": "int4_offset", "Q8_0": "int8"}


@dataclass(frozen=True)
class Matrix:
    """A product of the model as it is packed: parts of one input, side by side.

    names:   of its parts, in GGUF's words; columns: out features with all parts; depth: in features
    """

    names: tuple[str, ...]
    columns: int
    depth: int

    @property
    def is_inner(self) -> bool:
        """Not the embedding or the head."""
        return self.names[0].startswith("blk.")


def matrices(config: ModelConfig) -> list[Matrix]:
    """Every matrix of the model; the head only where it is not the embedding."""
    heads, kv = config.num_heads * config.head_dim, config.kv_width
    hidden, inner = config.hidden_size, -(-config.intermediate_size // 16) * 16
    found = [Matrix(("token_embd",), config.vocab_size, hidden)]
    if not config.tie_word_embeddings:
        found.append(Matrix(("output",), config.vocab_size, hidden))
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        found += [
            Matrix((block + "attn_q", block + "attn_k", block + "attn_v"), heads + 2 * kv, hidden),
            Matrix((block + "attn_output",), hidden, heads),
            Matrix((block + "ffn_gate", block + "ffn_up"), 2 * inner, hidden),
            Matrix((block + "ffn_down",), hidden, config.intermediate_size),
        ]
    return found


def packed_bytes(matrix: Matrix, kind: str) -> int:
    """Bytes that a matrix takes as the native product keeps it."""
    panels = -(-matrix.columns // _PANEL)
    if kind in _GROUP_BYTES:
        return panels * _PANEL * (matrix.depth // _GROUP) * _GROUP_BYTES[kind]
    return panels * _PANEL * matrix.depth * ITEM_BYTES[kind]


def weight_bytes(
    config: ModelConfig, dtype: str, *, quantization: str | None = None, types: Mapping[str, str] | None = None
) -> int:
    """Bytes of the packed weights on a CPU with the native kernels.

    types: GGUF's tensor types by name ("blk.0.attn_q"), whose four and eight bits are kept under bfloat16
    """
    return sum(packed_bytes(matrix, _kind(matrix, dtype, quantization, types or {})) for matrix in matrices(config))


def _kind(matrix: Matrix, dtype: str, quantization: str | None, types: Mapping[str, str]) -> str:
    if quantization in ("int4", "int8"):
        return "int4_offset" if quantization == "int4" and matrix.is_inner else "int8"
    kinds = {_OF_GGUF.get(types.get(name, "")) for name in matrix.names}
    kind = kinds.pop()
    return dtype if kind is None or kinds or quantization == "none" or dtype != "bfloat16" else kind


def token_bytes(config: ModelConfig, kv_dtype: str) -> int:
    """Bytes of KV that one token takes in all layers, its scales included."""
    per_head = config.head_dim * ITEM_BYTES[kv_dtype] + (4 if kv_dtype in SCALED else 0)
    return config.num_layers * 2 * config.num_kv_heads * per_head


def activation_bytes(config: ModelConfig, num_tokens: int, dtype: str) -> int:
    """Bytes of the native decoder's workspace for a step of ``num_tokens``: it keeps one layer's rows at a time."""
    item = ITEM_BYTES[dtype]
    heads = config.num_heads * config.head_dim
    rows = 4 * config.hidden_size + item * (2 * config.hidden_size + heads + config.intermediate_size)
    qkv = 4 * (heads + 2 * config.kv_width)
    logits = 4 * config.vocab_size  # of the one row whose next token is wanted
    rotary = 4 * config.head_dim  # cos and sin of one position
    return num_tokens * (rows + qkv + rotary) + logits


@dataclass(frozen=True)
class MemoryPlan:
    """What fits. Bytes and blocks.

    requests:   how many of the given lengths fit at a time (taken in turn, whole blocks each); None without lengths
    """

    kv_dtype: str
    block_size: int
    token_bytes: int
    block_bytes: int
    weight_bytes: int
    activation_bytes: int
    memory: int
    num_blocks: int
    requests: int | None

    @property
    def num_tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.num_blocks * self.block_size


def plan_memory(
    config: ModelConfig,
    memory: int,
    *,
    weights: int,
    dtype: str,
    kv_dtype: str = "auto",
    block_size: int = 16,
    max_num_batched_tokens: int = 2048,
    lengths: Sequence[int] = (),
) -> MemoryPlan:
    """Blocks and requests that fit into ``memory`` bytes beside the weights and the activations of a full step."""
    stored = dtype if kv_dtype == "auto" else kv_dtype
    if stored not in ITEM_BYTES:
        raise InvalidRequest(
            f"kv_cache_dtype {kv_dtype!r} is none of auto, {', '.join(ITEM_BYTES)}", field="kv_cache_dtype"
        )
    if block_size < 1:
        raise InvalidRequest(f"block_size is {block_size}; at least 1 is needed", field="block_size")
    per_token = token_bytes(config, stored)
    activations = activation_bytes(config, max_num_batched_tokens, dtype)
    room = memory - weights - activations
    num_blocks = room // (per_token * block_size)
    if num_blocks < 1:
        raise InvalidRequest(
            f"memory is {memory:,} bytes; weights take {weights:,} and activations {activations:,}: no room for one "
            f"block of {per_token * block_size:,}",
            field="memory",
        )
    return MemoryPlan(
        kv_dtype=stored,
        block_size=block_size,
        token_bytes=per_token,
        block_bytes=per_token * block_size,
        weight_bytes=weights,
        activation_bytes=activations,
        memory=memory,
        num_blocks=num_blocks,
        requests=requests_that_fit(lengths, num_blocks, block_size) if lengths else None,
    )


def requests_that_fit(lengths: Sequence[int], num_blocks: int, block_size: int) -> int:
    """How many requests run at a time when they come with these lengths in turn, without end."""
    needed = [-(-length // block_size) for length in lengths]
    rounds, left = divmod(num_blocks, sum(needed))
    count = rounds * len(needed)
    for blocks in needed:
        if blocks > left:
            break
        left -= blocks
        count += 1
    return count


def pool_bytes(lengths: Sequence[int], concurrency: int, plan: MemoryPlan) -> int:
    """Bytes of the blocks of ``concurrency`` requests at a time, whose lengths come in turn."""
    needed = [-(-length // plan.block_size) for length in lengths]
    rounds, rest = divmod(concurrency, len(needed))
    return (rounds * sum(needed) + sum(needed[:rest])) * plan.block_bytes


@dataclass(frozen=True)
class WasteRow:
    """One block size: slots over tokens that are stored, bytes wasted for these lengths, entries of their tables."""

    block_size: int
    utilization: float
    wasted_bytes: int
    table_entries: int


def waste_rows(
    lengths: Sequence[int], per_token: int, sizes: Sequence[int] = (1, 8, 16, 32, 64, 128)
) -> list[WasteRow]:
    """What each block size wastes on sequences of these lengths."""
    stored = sum(lengths)
    rows = []
    for size in sizes:
        reserved = slots(lengths, size)
        rows.append(WasteRow(size, stored / reserved, (reserved - stored) * per_token, reserved // size))
    return rows
