"""The GPU backend: Triton kernels behind the calls of ``dispatch.py``.

On a machine without a GPU the kernels run only in Triton's interpreter (TRITON_INTERPRET=1, set before the first
import), which is for tests. Nothing is read back from the device, so every call can be captured in a graph; that is
also why a slot or block id outside the pool cannot be refused here: the batch is checked on the host where it is made.
Not exact across batches: how a history is split follows the batch, and with it the order of sums.
"""

from __future__ import annotations

from functools import cache

import torch

from pagedkv.attention.batch import AttentionBatch
from pagedkv.attention.tiling import Gpu
from pagedkv.errors import BackendUnavailable, InvalidRequest

try:
    from pagedkv.attention.triton_launch import AttentionCall, PoolArguments, interpreted, write_launch
except ImportError as error:
    raise BackendUnavailable(f"attention backend 'triton' needs the package triton ({error})") from error

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
INTERPRETED = Gpu(num_multiprocessors=2, capability=80)  # what the interpreter plans for


class TritonAttention:
    """See ``dispatch.paged_attention`` and ``dispatch.write_kv`` for shapes and errors.

    splits, native_fp8: in place of what would be chosen, for tests and measurements.
    """

    name = "triton"
    exact = False

    def __init__(
        self, device: torch.device | str = "cuda", *, splits: int | None = None, native_fp8: bool | None = None
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise BackendUnavailable("attention backend 'triton' needs a GPU, and torch finds none on this machine")
        if device.type != "cuda" and not interpreted():
            raise BackendUnavailable(
                f"attention backend 'triton' needs a GPU, and the device here is {device.type}. (Its kernels can be "
                "tried without one in Triton's interpreter: set TRITON_INTERPRET=1, which is slow)"
            )
        self._gpu = _gpu(device)
        self._splits = splits
        self._native_fp8 = self._gpu.native_fp8 if native_fp8 is None else native_fp8

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
    ) -> torch.Tensor:
        if q.dtype not in QUERY_DTYPES:
            raise InvalidRequest(f"q is {q.dtype}; the Triton kernels take float16, bfloat16 and float32", field="q")
        if q.shape[2] > MAX_HEAD_DIM:
            raise InvalidRequest(
                f"head_dim is {q.shape[2]}; the Triton kernels take at most {MAX_HEAD_DIM}", field="head_dim"
            )
        out = torch.empty_like(q) if out is None else out
        if q.numel() == 0:
            return out
        pool = PoolArguments.of(k_pool, v_pool, k_scale, v_scale, native_fp8=self._native_fp8)
        call = AttentionCall(q, out, pool, batch, scale, window, softcap, sinks, self._gpu, splits=self._splits)
        for launch in call.launches():
            launch.run()
        return out

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
    ) -> None:
        if k.numel():
            pool = PoolArguments.of(k_pool, v_pool, k_scale, v_scale, native_fp8=False)
            write_launch(k, v, pool, slot_mapping).run()


@cache
def _gpu(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return INTERPRETED
    major, minor = torch.cuda.get_device_capability(device)
    capability = 0 if torch.version.hip else major * 10 + minor
    return Gpu(int(torch.cuda.get_device_properties(device).multi_processor_count), capability)
