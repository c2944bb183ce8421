"""How large the pool is and how long a sequence may get: decided once, before anything is allocated.

On a CPU the pool is ``kv_cache_memory_bytes`` if that is given, else the smallest of 4 GiB, a quarter of the memory
available now (a cgroup's limit respected) and what ``max_num_seqs`` sequences of ``max_model_len`` tokens need. On a
GPU it is what ``gpu_memory_utilization`` leaves after the weights and the activations of the largest step.
``num_gpu_blocks_override`` settles the number of blocks whatever the memory.

``max_model_len`` left out is what the model was trained for, lowered to what the pool holds (and, without chunked
prefill, to the token budget of a step); given, it is kept, and it is an error where that cannot be.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from pagedkv.config import EngineConfig
from pagedkv.errors import InvalidRequest

MOST_CPU_BYTES = 4 * 2**30
CPU_SHARE = 4  # of the memory available now, a quarter
_UNLIMITED = 2**60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True)
class Memory:
    """Bytes that the pool may take at most on this device, and why; None: what is there is not known."""

    num_bytes: int | None
    reason: str


@dataclass(frozen=True)
class PoolPlan:
    """num_blocks, max_model_len: as decided;  note: one line on what was lowered and why, empty if nothing was"""

    num_blocks: int
    max_model_len: int
    note: str = ""


def plan_pool(config: EngineConfig, *, trained_len: int, block_bytes: int, memory: Memory) -> PoolPlan:
    """Blocks and context length for a model of ``trained_len`` positions whose blocks take ``block_bytes``."""
    wanted = _context(config, trained_len)
    block_size = config.cache.block_size
    per_sequence = -(-wanted // block_size)
    num_blocks, reason = _num_blocks(config, per_sequence * config.scheduler.max_num_seqs, block_bytes, memory)
    holds = num_blocks * block_size
    if wanted <= holds:
        lowered = f"max_model_len {wanted} of {trained_len}: " + _WITHOUT_CHUNKS if wanted < trained_len else ""
        return PoolPlan(num_blocks, wanted, "" if config.max_model_len is not None else lowered)
    if config.max_model_len is not None:
        raise InvalidRequest(
            f"max_model_len is {wanted} tokens and the KV pool holds {holds} ({num_blocks} blocks of {block_size}, "
            f"{reason}); lower max_model_len or give the pool more memory (kv_cache_memory_bytes)",
            field="max_model_len",
        )
    note = f"max_model_len lowered from {wanted} to {holds}, what the pool holds ({reason})"
    return PoolPlan(num_blocks, holds, note)


_WITHOUT_CHUNKS = "without chunked prefill a sequence must fit in max_num_batched_tokens"


def _context(config: EngineConfig, trained_len: int) -> int:
    given = config.max_model_len
    if given is not None and given > trained_len:
        raise InvalidRequest(
            f"max_model_len is {given} and the model has {trained_len} positions", field="max_model_len"
        )
    wanted = given or trained_len
    budget = config.scheduler.max_num_batched_tokens
    if config.scheduler.enable_chunked_prefill or wanted <= budget:
        return wanted
    if given is not None:
        raise InvalidRequest(
            f"max_model_len is {given} and max_num_batched_tokens {budget}: {_WITHOUT_CHUNKS}", field="max_model_len"
        )
    return budget


def _num_blocks(config: EngineConfig, needed: int, block_bytes: int, memory: Memory) -> tuple[int, str]:
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, "num_gpu_blocks_override"
    if cache.kv_cache_memory_bytes is not None:
        num_bytes, reason = cache.kv_cache_memory_bytes, "kv_cache_memory_bytes"
    elif memory.num_bytes is None:
        num_bytes, reason = MOST_CPU_BYTES, "4 GiB"
    else:
        num_bytes, reason = memory.num_bytes, memory.reason
    blocks = num_bytes // block_bytes
    if blocks < 1:
        raise InvalidRequest(
            f"the KV pool would have {num_bytes} bytes ({reason}) and one block takes {block_bytes}",
            field="kv_cache_memory_bytes",
        )
    if cache.kv_cache_memory_bytes is None and needed < blocks:
        return needed, "what max_num_seqs x max_model_len tokens need"
    return blocks, reason


def cpu_memory() -> Memory:
    """The rule for a CPU: at most 4 GiB, at most a quarter of what is available now."""
    available = available_memory()
    if available is None or available // CPU_SHARE >= MOST_CPU_BYTES:
        return Memory(MOST_CPU_BYTES, "4 GiB")
    return Memory(available // CPU_SHARE, f"a quarter of the {available / 2**30:.1f} GiB available")


def gpu_memory(utilization: float, free: int, total: int, activation_bytes: int) -> Memory:
    """The rule for a GPU, after the weights are loaded. free, total, activation_bytes: bytes"""
    return Memory(
        max(0, int(total * utilization) - (total - free) - activation_bytes),
        f"gpu_memory_utilization {utilization} of {total / 2**30:.1f} GiB, less weights and activations",
    )


def available_memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process could still take: the machine's, or its cgroup's where that is less. None: unknown."""
    found = [value for value in (_machine(proc), *_cgroups(proc, cgroup)) if value is not None]
    return max(0, min(found)) if found else None


def _machine(proc: Path) -> int | None:
    try:
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _cgroups(proc: Path, root: Path) -> list[int]:
    """What each limited group above this process has left; version 2 and, under memory/, version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    left: list[int] = []
    for line in [*lines, "0::/", "1:memory:/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers not in ("", "memory"):
            continue
        base = root / "memory" if controllers else root
        limit, usage = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        group = base / path.lstrip("/")
        while group == base or base in group.parents:
            most, used = _number(group / limit), _number(group / usage)
            if most is not None and used is not None and most < _UNLIMITED:
                left.append(most - used)
            if group == base:
                break
            group = group.parent
    return left


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
