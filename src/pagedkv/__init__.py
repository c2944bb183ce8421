"""pagedkv: a paged KV cache with prefix caching for LLM inference, and a compact engine and server around it.

The names below are loaded when they are first used, so that ``import pagedkv`` costs nothing
and the parts that need no tensors (``cache.manager``, ``cache.prefix``) never load torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.attention.batch import AttentionBatch
    from pagedkv.attention.decode import paged_decode_attention
    from pagedkv.attention.dispatch import paged_attention, write_kv
    from pagedkv.cache.allocator import BlockAllocator
    from pagedkv.cache.keys import KeyScope
    from pagedkv.cache.manager import KVCacheManager
    from pagedkv.cache.paged import PagedKVCache
    from pagedkv.cache.prefix import PrefixCache
    from pagedkv.cache.slots import physical_slot
    from pagedkv.engine.outputs import CompletionOutput, RequestOutput
    from pagedkv.engine.params import BeamSearchParams, SamplingParams
    from pagedkv.llm import LLM

try:
    __version__ = version("pagedkv")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"

_HOMES = {
    "AsyncLLM": "pagedkv.async_llm",
    "AttentionBatch": "pagedkv.attention.batch",
    "BeamSearchParams": "pagedkv.engine.params",
    "BlockAllocator": "pagedkv.cache.allocator",
    "CompletionOutput": "pagedkv.engine.outputs",
    "KVCacheManager": "pagedkv.cache.manager",
    "KeyScope": "pagedkv.cache.keys",
    "LLM": "pagedkv.llm",
    "PagedKVCache": "pagedkv.cache.paged",
    "PrefixCache": "pagedkv.cache.prefix",
    "RequestOutput": "pagedkv.engine.outputs",
    "SamplingParams": "pagedkv.engine.params",
    "paged_attention": "pagedkv.attention.dispatch",
    "paged_decode_attention": "pagedkv.attention.decode",
    "physical_slot": "pagedkv.cache.slots",
    "write_kv": "pagedkv.attention.dispatch",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AttentionBatch",
    "BeamSearchParams",
    "BlockAllocator",
    "CompletionOutput",
    "KVCacheManager",
    "KeyScope",
    "PagedKVCache",
    "PrefixCache",
    "RequestOutput",
    "SamplingParams",
    "__version__",
    "paged_attention",
    "paged_decode_attention",
    "physical_slot",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
