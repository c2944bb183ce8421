"""What every test may use, and what must be set before torch or Triton is first imported."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
# Triton's kernels run in its interpreter, so that they are tested everywhere alike; on a GPU bench/gpu.py checks them.
os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for a network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

NOT_INSTALLED = " is not installed: "
REQUIRE_ALL = os.environ.get("PAGEDKV_REQUIRE") == "all"
ROOT = Path(__file__).resolve().parent.parent


def missing(tool: str, install: str) -> None:
    """Ends the test for want of a system package: a skip that names the command, or a failure if all is required."""
    reason = f"{tool}{NOT_INSTALLED}{install}"
    if REQUIRE_ALL:
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture
def system_tool() -> Callable[[str, str], str]:
    """``system_tool("chromium", "apt-get install chromium")`` -> its path. Several names: "chromium|chrome"."""

    def find(names: str, install: str) -> str:
        for name in names.split("|"):
            path = shutil.which(name)
            if path is not None:
                return path
        missing(names, install)
        raise AssertionError("unreachable")

    return find


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny_model("qwen3", num_hidden_layers=3)`` -> the directory of a tiny random checkpoint (tiny_models.py).

    Made once per session for the same arguments: do not write into it.
    """
    from tiny_models import make_tiny_model

    made: dict[str, Path] = {}

    def make(family: str = "llama", *, seed: int = 0, **overrides: Any) -> Path:
        key = repr((family, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = make_tiny_model(tmp_path_factory.mktemp(f"tiny-{family}-"), family, seed=seed, **overrides)
        return made[key]

    return make


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])]
    wanting = sorted({reason.removeprefix("Skipped: ") for reason in skipped if NOT_INSTALLED in reason})
    if wanting:
        terminalreporter.section("not tested here, for want of a system package")
        for reason in wanting:
            terminalreporter.write_line(reason)
