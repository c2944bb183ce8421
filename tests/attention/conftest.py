"""Where Triton has no package (anything but Linux), its tests are not collected; the summary line of pytest says so."""

from __future__ import annotations

from importlib.util import find_spec

HAVE_TRITON = find_spec("triton") is not None
collect_ignore_glob = [] if HAVE_TRITON else ["test_triton_*.py"]


def pytest_report_header() -> str | None:
    return None if HAVE_TRITON else "triton is not installed: the tests of its kernels are left out"
