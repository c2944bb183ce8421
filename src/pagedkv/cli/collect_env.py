"""``pagedkv collect-env``: what a bug report needs to say of the machine. Nothing in it is secret."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import pagedkv

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf", "fastapi", "uvicorn", "llguidance")


def collect_env() -> None:
    """Print versions, processor, memory and which kernels are chosen."""
    for name, value in facts():
        print(f"{name + ':':<22}{value}")


def facts() -> list[tuple[str, str]]:
    found = [
        ("pagedkv", pagedkv.__version__),
        ("Python", f"{platform.python_version()} ({sys.executable})"),
        ("platform", platform.platform()),
        ("processor", _processor()),
        (
            "cores usable",
            str(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else str(os.cpu_count()),
        ),
        ("memory", _memory()),
    ]
    found += [(name, _version(name)) for name in PACKAGES]
    found += _torch_facts()
    found += [
        (name, value) for name, value in sorted(os.environ.items()) if name.startswith("PAGEDKV_") and "KEY" not in name
    ]
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _memory() -> str:
    from pagedkv.engine.sizing import available_memory

    available = available_memory()
    return "unknown" if available is None else f"{available / 2**30:.1f} GiB available"


def _torch_facts() -> list[tuple[str, str]]:
    import torch

    from pagedkv.attention.backend import choose
    from pagedkv.engine.extensions import complaints
    from pagedkv.errors import BackendUnavailable

    found = [("torch threads", str(torch.get_num_threads()))]
    found += [(f"GPU {i}", torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    try:
        from pagedkv.attention.native import extension

        found.append(("instruction set", str(extension().instruction_set())))
    except (BackendUnavailable, ImportError) as error:
        found.append(("native kernels", f"not there: {error}"))
    found += [("compiled parts", complaint) for complaint in complaints() or ["there, and built from these sources"]]
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        try:
            found.append((f"attention on {device}", choose("auto", torch.device(device)).name))
        except BackendUnavailable as error:
            found.append((f"attention on {device}", f"none: {error}"))
    return found
