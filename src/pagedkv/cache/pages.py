"""Huge pages for a pool in RAM: fewer address look-ups when attention walks scattered blocks."""

from __future__ import annotations

import ctypes
import mmap

_HUGE = 1 << 21  # bytes of a huge page on x86-64 and most aarch64 kernels


def advise_huge_pages(address: int, nbytes: int) -> bool:
    """Ask the kernel for 2 MiB pages where a buffer spans whole ones; True if it accepted. Advice only, never an error.

    It matters before the memory is first touched. Linux with transparent huge pages at "madvise" or "always".
    """
    first, last = -(-address // _HUGE) * _HUGE, (address + nbytes) // _HUGE * _HUGE
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None or last <= first:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advice)) == 0  # type: ignore[no-any-return]
