"""The CPU kernels of csrc/attention*.cpp behind the backend's call."""

from __future__ import annotations

from pagedkv.errors import BackendUnavailable


class NativeAttention:
    """Placeholder until the kernel lands in this file."""

    def __init__(self) -> None:
        raise BackendUnavailable("the native attention kernels are not built yet")
