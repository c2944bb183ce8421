"""What the Triton kernels need of GPUs that are not here: registers, spills and shared memory, from the compiled code.

    python bench/triton_resources.py            a variant of each kernel and each path through it, per target
    python bench/triton_resources.py --all      every variant: dtype, head size, group, KV format, window, sinks, splits
    python bench/triton_resources.py --json F   the table as JSON

The launches are the ones that attention/triton_launch.py plans, compiled for sm_80, sm_90 and gfx942. Exit code 1 if
one spills registers or wants more shared memory than a block may have. NVIDIA: cuobjdump -res-usage on the cubin;
AMD: the metadata at the end of the assembly. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.shared_prefix import PrefixGroup, SharedPrefixes
from pagedkv.attention.tiling import Gpu
from pagedkv.attention.triton_copy import copy_launch
from pagedkv.attention.triton_launch import AttentionCall, Launch, PoolArguments, write_launch

# shared memory that one block may have, in bytes; A100, H200, MI300X
TARGETS = {
    "sm_80": (GPUTarget("cuda", 80, 32), 163 * 1024, Gpu(num_multiprocessors=108, capability=80)),
    "sm_90": (GPUTarget("cuda", 90, 32), 227 * 1024, Gpu(num_multiprocessors=132, capability=90)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), 64 * 1024, Gpu(num_multiprocessors=304, capability=0)),
}
POOLS = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8,
         "fp8": torch.float8_e4m3fn}  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """One call: ``path`` is decode, prefill, shared, write or copy; q and pool name dtypes."""

    path: str
    q: str = "bf16"
    pool: str = "bf16"
    head_dim: int = 128
    group: int = 4
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    splits: int | None = None
    query_len: int = 512

    def __str__(self) -> str:
        features = {"window": self.window, "softcap": self.softcap, "sinks": self.sinks}
        extras = [name for name, value in features.items() if value]
        extras += [f"splits {self.splits}"] if self.splits else []
        extras += [f"query {self.query_len}"] if self.path == "prefill" and self.query_len != 512 else []
        shape = f"{self.q} q, {self.pool} pool, D {self.head_dim}, group {self.group}, block {self.block_size}"
        return ", ".join([f"{self.path}: {shape}", *extras])


@dataclass(frozen=True)
class Resources:
    """A compiled kernel. ``limit`` is the target's shared memory per block, in bytes."""

    target: str
    variant: str
    kernel: str
    registers: int
    spilled: int
    shared: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.spilled == 0 and self.shared <= self.limit


QUICK = [
    Variant("decode", group=1, sinks=True),
    Variant("decode", pool="fp8", head_dim=96, window=1024),
    Variant("prefill"),
    Variant("prefill", q="fp16", pool="int8", head_dim=80, group=7, softcap=30.0),
    Variant("shared"),  # decode with parts and the merge come with it
    Variant("write", pool="fp8"),
    Variant("copy"),
]


def all_variants() -> Iterator[Variant]:
    """Every format by head size and way of making products, and every feature on a 16-bit and an fp32 model.

    float16 and bfloat16 compile to the same code but for the instruction's name, and groups of 2 to 16 heads to the
    same tile, so one of each stands for the others.
    """
    yield from QUICK
    formats = [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp8"), ("fp16", "int8"), ("fp32", "bf16")]
    for (q, pool), head_dim in itertools.product(formats, (32, 64, 96, 128, 256)):
        yield Variant("decode", q, pool, head_dim, group=1)
        yield Variant("decode", q, pool, head_dim)
        yield Variant("prefill", q, pool, head_dim)
    for path, q, block_size in itertools.product(("decode", "prefill"), ("bf16", "fp32"), (1, 48, 256)):
        yield Variant(path, q, q, block_size=block_size)
    for path, q in itertools.product(("decode", "prefill"), ("bf16", "fp32")):
        for head_dim in (128, 256):
            yield Variant(path, q, q, head_dim, window=1024)
            yield Variant(path, q, q, head_dim, softcap=30.0, sinks=True)
            yield Variant(path, q, q, head_dim, splits=8, sinks=True)
        yield Variant(path, q, q, group=32)
    yield from (
        Variant("decode", splits=4),
        Variant("write"),
        Variant("prefill", head_dim=256, window=1024, sinks=True),
    )
    for query_len in (2, 8, 16):
        yield Variant("prefill", query_len=query_len)
    for (q, pool), head_dim in itertools.product(formats, (64, 128, 256)):
        yield Variant("shared", q, pool, head_dim)
        yield Variant("write", q, pool, head_dim)


def launches(variant: Variant, gpu: Gpu) -> list[Launch]:
    """What the backend would launch for this variant; small tensors of the right dtypes stand in for the pool."""
    num_kv_heads, block_size, head_dim = 8, variant.block_size, variant.head_dim
    if variant.path == "copy":
        return [
            copy_launch(torch.empty(4, 2, 2, num_kv_heads, block_size, head_dim), torch.zeros(1, 2, dtype=torch.int64))
        ]
    data = torch.empty(4, 2, 2, num_kv_heads, block_size, head_dim, dtype=POOLS[variant.pool])
    scales = torch.empty(data.shape[:-1]) if variant.pool in ("int8", "fp8") else None
    k_scale, v_scale = (None, None) if scales is None else (scales[:, 0, 0], scales[:, 0, 1])
    dtype = POOLS[variant.q]
    if variant.path == "write":
        pool = PoolArguments.of(data[:, 0, 0], data[:, 0, 1], k_scale, v_scale, native_fp8=False)
        k = torch.empty(16, num_kv_heads, head_dim, dtype=dtype)
        return [write_launch(k, k, pool, torch.zeros(16, dtype=torch.int64))]
    pool = PoolArguments.of(data[:, 0, 0], data[:, 0, 1], k_scale, v_scale, native_fp8=gpu.native_fp8)
    num_seqs, query_len = 64, variant.query_len if variant.path == "prefill" else 1
    q = torch.empty(num_seqs * query_len, num_kv_heads * variant.group, head_dim, dtype=dtype)
    batch = AttentionBatch(
        query_start=torch.zeros(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32),
        block_table=torch.zeros(num_seqs, 8192 // block_size, dtype=torch.int32),
        slot_mapping=torch.zeros(q.shape[0], dtype=torch.int64),
        positions=torch.zeros(q.shape[0], dtype=torch.int64),
        block_size=block_size,
        max_query_len=query_len,
        max_seq_len=8192,
    )
    if variant.path == "shared":
        group = PrefixGroup(tuple(range(num_seqs)), 4096 // block_size)
        batch.plans[SharedPrefixes] = SharedPrefixes.build([group], block_size, "cpu")
    sinks = torch.empty(q.shape[1]) if variant.sinks else None
    return AttentionCall(
        q, q, pool, batch, head_dim**-0.5, variant.window, variant.softcap, sinks, gpu, variant.splits or 1
    ).launches()


def source(launch: Launch) -> ASTSource:
    """The launch as the compiler takes it: types, constants and divisibility by 16, by the rules of the jit."""
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.uint8: "u8",
             torch.int32: "i32", torch.int64: "i64", torch.float8_e4m3fn: "fp8e4nv"}  # fmt: skip
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}

    def kind(value: Any, path: tuple[int, ...], constant: bool, special: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(kind(item, (*path, index), constant, special) for index, item in enumerate(value))
        if constant or (special and isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, torch.Tensor) or (special and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return f"*{names[value.dtype]}"
        return "i32" if value < 2**31 else "i64"

    signature = {}
    for index, parameter in enumerate(launch.kernel.params):
        value, special = launch.arguments[parameter.name], not parameter.do_not_specialize
        signature[parameter.name] = kind(value, (index,), parameter.is_constexpr, special)
    return ASTSource(launch.kernel, signature, constants, attributes)


def measure(job: tuple[str, str, Launch]) -> Resources:
    """Compile one launch for one target."""
    target_name, variant, launch = job
    target, limit, _ = TARGETS[target_name]
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages}
    compiled = triton.compile(source(launch), target=target, options=options)
    read = amd_usage if target.backend == "hip" else nvidia_usage
    registers, spilled = read(compiled)
    return Resources(target_name, variant, launch.kernel.__name__, registers, spilled, compiled.metadata.shared, limit)


def nvidia_usage(compiled: Any) -> tuple[int, int]:
    """(registers, bytes of local memory) by cuobjdump; the kernels have no local memory but spilled registers."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], check=True, capture_output=True, text=True).stdout
    registers, stack, local = (re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL"))
    if registers is None or stack is None or local is None:
        raise RuntimeError(f"cuobjdump says nothing about registers: {text!r}")
    return int(registers[1]), int(stack[1]) + int(local[1])


def amd_usage(compiled: Any) -> tuple[int, int]:
    """(vector registers, spilled vector and scalar registers) from the assembly's metadata."""
    text = compiled.asm["amdgcn"]
    found = [re.search(rf"\.{name}:\s+(\d+)", text) for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")]
    if any(match is None for match in found):
        raise RuntimeError("the assembly has no register counts")
    registers, vector, scalar = (int(match[1]) for match in found if match is not None)
    return registers, vector + scalar


def jobs(variants: list[Variant], targets: list[str]) -> list[tuple[str, str, Launch]]:
    """Each different kernel once: a merge that two variants share is compiled for the first."""
    seen: dict[str, tuple[str, str, Launch]] = {}
    for target, variant in itertools.product(targets, variants):
        for launch in launches(variant, TARGETS[target][2]):
            key = f"{target} {source(launch).hash()} {launch.num_warps} {launch.num_stages}"
            seen.setdefault(key, (target, str(variant), launch))
    return list(seen.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant, not only one per path")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--match", default="", help="only variants whose description contains this")
    parser.add_argument("--jobs", type=int, default=1, help="compilers side by side")
    parser.add_argument("--json", type=Path, help="write the table there too")
    options = parser.parse_args()
    variants = [variant for variant in (all_variants() if options.all else QUICK) if options.match in str(variant)]
    planned = jobs(list(dict.fromkeys(variants)), options.targets)
    print(f"Triton {triton.__version__}")
    print(f"{'target':8} {'regs':>5} {'spilled':>8} {'shared':>8} {'limit':>8}  kernel, variant")
    table = []
    with ProcessPoolExecutor(options.jobs) as pool:
        for row in pool.map(measure, planned) if options.jobs > 1 else map(measure, planned):
            table.append(row)
            mark = "" if row.fits else "   <-- DOES NOT FIT"
            print(f"{row.target:8} {row.registers:5} {row.spilled:8} {row.shared:8} {row.limit:8}  "
                  f"{row.kernel}, {row.variant}{mark}", flush=True)  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in table], indent=1))
    bad = sum(not row.fits for row in table)
    print(f"{len(table)} kernels compiled, {bad} spill or do not fit")
    return 1 if bad or not table else 0


if __name__ == "__main__":
    sys.exit(main())
