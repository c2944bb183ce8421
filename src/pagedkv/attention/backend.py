"""The Protocol that every attention backend meets, and the one place where a backend is chosen.

A backend is asked for by name and never falls back silently: ``backend="native"`` without the extension is
``BackendUnavailable``. ``"auto"`` picks the fastest exact one for the device and says once, in the log, what it
picked and why.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Protocol

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.errors import BackendUnavailable

logger = logging.getLogger(__name__)

NAMES = ("auto", "native", "triton", "reference")


class AttentionBackend(Protocol):
    """Attention through the block table, and the write of new KV. Shapes and errors: ``dispatch.py``.

    exact: a token's result does not depend on how (decode, prefill, chunk) or with whom it was computed, bit for bit.
    """

    name: str
    exact: bool

    def paged_attention(
        self,
        q: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        batch: AttentionBatch,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None: ...


def choose(name: str = "auto", device: torch.device | str = "cpu") -> AttentionBackend:
    """The backend called ``name`` for tensors on ``device``. Raises BackendUnavailable with the reason."""
    return _choose(name, torch.device(device).type)


@cache
def _choose(name: str, device: str) -> AttentionBackend:
    if name not in NAMES:
        raise BackendUnavailable(f"attention backend {name!r} is unknown; there are {', '.join(NAMES)}")
    if name != "auto":
        return _load(name, device)
    fastest = {"cpu": "native", "cuda": "triton"}.get(device)
    if fastest is None:
        logger.info("attention backend: reference (no kernels for device %s)", device)
        return _load("reference", device)
    try:
        backend = _load(fastest, device)
    except BackendUnavailable as error:
        logger.warning("attention backend: reference, which is slow (%s)", error)
        return _load("reference", device)
    logger.info("attention backend: %s on %s", backend.name, device)
    return backend


def _load(name: str, device: str) -> AttentionBackend:
    if name == "native":
        if device != "cpu":
            raise BackendUnavailable(f"attention backend 'native' runs on the CPU; these tensors are on {device}")
        from pagedkv.attention.native import NativeAttention

        return NativeAttention()
    if name == "triton":
        from pagedkv.attention.triton_backend import TritonAttention

        return TritonAttention(device)
    from pagedkv.attention.reference import ReferenceAttention

    return ReferenceAttention()
