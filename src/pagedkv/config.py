"""What the cache, the scheduler and the engine can be told: frozen dataclasses that check themselves.

A value that cannot work is an ``InvalidRequest`` naming the field, the value and the limit, raised before any weight
is read. The names are vLLM's, so that flags and keyword arguments read as people expect.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict, get_args

from pagedkv.errors import InvalidRequest

SchedulingPolicy = Literal["lpm", "fcfs", "priority"]
EvictionPolicyName = Literal["lru", "slru", "lfu", "gdsf", "queue-aware"]  # those of cache/policies.py
KVCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8_e4m3", "int8_per_token_head"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]

MAX_BLOCK_SIZE = 256


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of ``LLM`` and ``AsyncLLM`` beside the model; the configs below say what they mean."""

    tokenizer: str | None
    revision: str | None
    dtype: str
    device: str
    seed: int
    max_model_len: int | None
    attention_backend: str
    enforce_eager: bool
    quantization: str | None
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int | None
    num_gpu_blocks_override: int | None
    kv_cache_dtype: str
    enable_prefix_caching: bool
    eviction_policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool
    scheduling_policy: str
    max_overtakes: int
    max_num_queued_reqs: int | None
    trust_remote_code: bool


def _refuse(field_name: str, value: object, limit: str) -> InvalidRequest:
    return InvalidRequest(f"{field_name} must be {limit}, not {value!r}", field=field_name)


def _check_int(owner: object, name: str, low: int, high: int | None = None, *, optional: bool = False) -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    limit = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _refuse(name, value, limit)


def _check_bool(owner: object, name: str) -> None:
    if not isinstance(getattr(owner, name), bool):
        raise _refuse(name, getattr(owner, name), "True or False")


def _check_choice(owner: object, name: str, choices: object) -> None:
    value, allowed = getattr(owner, name), get_args(choices)
    if value not in allowed:
        raise _refuse(name, value, "one of " + ", ".join(allowed))


def _check_text(owner: object, name: str, *, optional: bool = True) -> None:
    value = getattr(owner, name)
    if value is None and optional:
        return
    if not isinstance(value, str) or not value:
        raise _refuse(name, value, "a text that is not empty")


@dataclass(frozen=True)
class CacheConfig:
    """The pool of blocks and the prefix cache over it.

    block_size:               tokens a block holds (1 to 256)
    gpu_memory_utilization:   share of a GPU's memory for weights, activations and pool together; not used on a CPU
    kv_cache_memory_bytes:    bytes of the pool; None: sized by the rule of ``engine/sizing.py``
    num_gpu_blocks_override:  blocks of the pool, whatever the memory says (the name is vLLM's; it holds on a CPU too)
    kv_cache_dtype:           how K and V are stored; "auto" is the model's own dtype
    eviction_policy:          which block that only the prefix cache holds leaves first when the pool runs low
    """

    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_dtype: str = "auto"
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"

    def __post_init__(self) -> None:
        _check_int(self, "block_size", 1, MAX_BLOCK_SIZE)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise _refuse("gpu_memory_utilization", share, "above 0 and at most 1")
        _check_int(self, "kv_cache_memory_bytes", 1, optional=True)
        _check_int(self, "num_gpu_blocks_override", 1, optional=True)
        _check_choice(self, "kv_cache_dtype", KVCacheDtype)
        _check_bool(self, "enable_prefix_caching")
        _check_choice(self, "eviction_policy", EvictionPolicyName)


@dataclass(frozen=True)
class SchedulerConfig:
    """When things run.

    max_num_seqs:            sequences that may hold blocks at a time
    max_num_batched_tokens:  the one token budget of a step, decodes and prefill chunks together
    enable_chunked_prefill:  off: a prompt runs in one step, so no sequence may be longer than the budget
    scheduling_policy:       lpm (longest cached prefix first), fcfs (arrival) or priority (lower number first)
    max_overtakes:           a waiting request that this many younger ones were admitted before goes next, whatever the
                             policy says; nothing else is admitted until it is
    max_num_queued_reqs:     requests that may wait; one more is ``QueueFull``. None: no bound (the offline door)
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "lpm"
    max_overtakes: int = 64
    max_num_queued_reqs: int | None = None

    def __post_init__(self) -> None:
        _check_int(self, "max_num_seqs", 1)
        _check_int(self, "max_num_batched_tokens", 1)
        _check_bool(self, "enable_chunked_prefill")
        _check_choice(self, "scheduling_policy", SchedulingPolicy)
        _check_int(self, "max_overtakes", 0)
        _check_int(self, "max_num_queued_reqs", 1, optional=True)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence decodes one token a step",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True)
class EngineConfig:
    """Everything that ``LLM`` and ``AsyncLLM`` take, in its three parts.

    max_model_len: tokens a sequence may have, prompt and output together. None: what the model was trained for, lowered
                   to what the pool holds; a number that the pool cannot hold is an error.
    seed:          where requests that bring no seed of their own get theirs from
    enforce_eager: on a GPU, launch every kernel of a decode step anew in place of replaying a recorded CUDA graph
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    attention_backend: str = "auto"
    enforce_eager: bool = False
    quantization: str | None = None
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)

    def __post_init__(self) -> None:
        _check_text(self, "model", optional=False)
        for name in ("tokenizer", "revision", "quantization"):
            _check_text(self, name)
        for name in ("device", "attention_backend"):
            _check_text(self, name, optional=False)
        _check_choice(self, "dtype", Dtype)
        _check_bool(self, "enforce_eager")
        _check_int(self, "seed", 0, 2**63 - 1)
        _check_int(self, "max_model_len", 1, optional=True)

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineConfig:
        """The config that flat keyword arguments describe. An unknown keyword is a TypeError that names it."""
        if values.pop("trust_remote_code", False):
            raise InvalidRequest(
                "trust_remote_code is refused: pagedkv runs no code that comes with a model; "
                "the architectures it knows are built in",
                field="trust_remote_code",
            )
        parts = {"cache": CacheConfig, "scheduler": SchedulerConfig}
        sorted_out: dict[str, dict[str, Any]] = {name: {} for name in parts}
        own = {f.name for f in fields(cls)} - set(parts)
        for name, value in values.items():
            if name in own:
                continue
            home = next((p for p, kind in parts.items() if name in {f.name for f in fields(kind)}), None)
            if home is None:
                raise TypeError(f"unknown keyword argument {name!r}")
            sorted_out[home][name] = value
        return cls(
            **{name: value for name, value in values.items() if name in own},
            cache=CacheConfig(**sorted_out["cache"]),
            scheduler=SchedulerConfig(**sorted_out["scheduler"]),
        )
