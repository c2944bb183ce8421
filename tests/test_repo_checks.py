"""The repository's own rules, and the proof that the tools which check them can fail."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import pagedkv


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def check_imports(repository: Path) -> ModuleType:
    return load(repository / "tools" / "check_imports.py")


@pytest.fixture(scope="module")
def check_sizes(repository: Path) -> ModuleType:
    return load(repository / "tools" / "check_sizes.py")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "pagedkv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("cache/manager.py", "import torch", "torch has no place here"),
        ("cache/manager.py", "from torch.nn import functional", "torch has no place here"),
        ("engine/scheduler.py", "def f():\n    import torch", "torch has no place here"),
        ("cache/prefix.py", "from pagedkv.attention.batch import AttentionBatch", "cache may not import attention"),
        ("attention/native.py", "from ..cache.pool import KVPool", "attention may not import cache"),
        ("engine/engine.py", "from pagedkv import llm", "engine may not import llm"),
        ("llm.py", "import pagedkv.server.app", "llm may not import server"),
        ("cache/keys.py", "import pagedkv", "cache may not import pagedkv"),
        ("model/load.py", "import transformers", "its homes: none"),
        ("engine/runner.py", "from pagedkv._native import forward", "pagedkv._native has no place here"),
        ("attention/reference.py", "import triton.language as tl", "triton has no place here"),
        (
            "errors.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pagedkv.cache.keys import KeyScope",
            "errors may not import cache",
        ),
    ],
)
def test_import_against_the_table_is_found(
    check_imports: ModuleType, tmp_path: Path, file: str, line: str, complaint: str
) -> None:
    write(tmp_path, {file: line})
    found = list(check_imports.violations(tmp_path))
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cache/pool.py", "import torch"),
        ("cache/prefix.py", "from pagedkv.cache.keys import KeyScope"),
        ("cache/keys.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("engine/engine.py", "from pagedkv.cache.manager import KVCacheManager\nimport torch"),
        ("attention/triton_decode.py", "import triton"),
        ("cli/main.py", "from pagedkv import __version__\nimport typer"),
    ],
)
def test_import_within_the_table_passes(check_imports: ModuleType, tmp_path: Path, file: str, line: str) -> None:
    write(tmp_path, {file: line})
    assert list(check_imports.violations(tmp_path)) == []


def test_oversized_file_function_and_kernel_are_found(check_sizes: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "csrc").mkdir()
    body = "    x = 1\n"
    (tmp_path / "src" / "long.py").write_text("x = 1\n" * 451)
    (tmp_path / "src" / "functions.py").write_text(
        f"def fits():\n{body * 59}\n"
        f"def over():\n{body * 60}\n"
        f'def documented():\n    """{"word" + chr(10) * 40}"""\n{body * 30}\n'
        f"@triton.jit\ndef kernel_fits():\n{body * 100}\n"
        f"@triton.jit\ndef kernel_over():\n{body * 120}\n"
    )
    (tmp_path / "csrc" / "kernel.cpp").write_text(
        "namespace a {\nstruct S { int x; };\n"
        + "template <int D> void over(const S* s) {\n"
        + "  if (s) { // }\n  }\n" * 60
        + "}\nvoid fits() {\n"
        + "  f('{');\n" * 110
        + "}\n}\n"
    )
    assert [key for key, _ in check_sizes.findings(tmp_path)] == [
        "src/functions.py:over",
        "src/functions.py:kernel_over",
        "src/long.py",
        "csrc/kernel.cpp:over",
    ]


def test_public_names_are_sorted_and_complete() -> None:
    names = pagedkv.__all__
    assert set(names) == {*pagedkv._HOMES, "__version__"}

    def isort_style(
        name: str,
    ) -> tuple[int, str]:  # constants, then classes, then the rest: what ruff's RUF022 asks for
        return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)

    assert names == sorted(names, key=isort_style)


@pytest.mark.parametrize("name", sorted(pagedkv._HOMES))
def test_public_name_loads_from_its_home(name: str) -> None:
    value = getattr(pagedkv, name)
    assert value.__module__ == pagedkv._HOMES[name]


def modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(' '.join(m for m in sys.modules if '.' not in m))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import pagedkv",
        "import pagedkv.cache.manager, pagedkv.cache.prefix, pagedkv.cache.allocator, pagedkv.cache.keys",
        "import pagedkv.engine.scheduler, pagedkv.engine.request",
        "import pagedkv.cli.main",
    ],
)
def test_bookkeeping_and_start_up_load_no_torch(statement: str) -> None:
    assert not {"torch", "transformers", "triton", "fastapi", "matplotlib"} & modules_after(statement)


def test_no_registry_host_and_no_foreign_path_in_the_repository(repository: Path) -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=repository, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    # written in two halves, so that this file does not find itself
    forbidden = re.compile(
        "|".join(["pypi" + r"\.org/simple", "download" + r"\.pytorch\.org", " --index" + "-url", "/home" + "/"])
    )
    found = [
        f"{name}: {match.group()}"
        for name in filter(None, listed.stdout.split("\0"))
        if (path := repository / name).is_file() and path.suffix not in {".png", ".svg", ".gguf"}
        for match in forbidden.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []
