"""Fails when a module imports what it may not: the drawing of the house in ARCHITECTURE.md, as a table.

    errors, config <- cache                          cache and attention do not know each other
    errors, config <- attention <- model
    all of these <- engine <- llm, async_llm <- server, insight, cli

Third-party packages have homes too: torch is kept out of the bookkeeping, Triton, the native module and the web
framework stay in their own files. Imports under ``if TYPE_CHECKING:`` load nothing, so only the direction counts there.
"""

from __future__ import annotations

import ast
import fnmatch
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = "pagedkv"

_BASE = {"errors", "config"}
_PARTS = _BASE | {"cache", "attention", "model", "engine"}
_FRONT = _PARTS | {"llm", "async_llm"}

# part -> the parts of pagedkv that it may import, itself included. "" is the package's own __init__ (its version).
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"errors"},
    "config": _BASE,
    "cache": _BASE | {"cache"},
    "attention": _BASE | {"attention"},
    "model": _BASE | {"attention", "model"},
    "engine": _PARTS,
    "llm": _FRONT,
    "async_llm": _FRONT,
    "insight": _FRONT | {"insight", ""},
    "server": _FRONT | {"server", "insight", ""},
    "cli": _FRONT | {"server", "insight", "cli", ""},
    "": _FRONT,
}

# third-party package -> the files (under src/pagedkv) that may import it; "!" takes files away again.
HOMES: dict[str, tuple[str, ...]] = {
    "torch": ("*", "!cache/*", "cache/pool.py", "cache/paged.py", "!engine/scheduler.py", "!engine/request.py"),
    "triton": ("attention/triton_*.py",),
    "pagedkv._native": ("attention/native*.py", "model/native*.py", "model/linear*.py"),
    "pagedkv._cache": ("cache/native.py",),
    "fastapi": ("server/*",),
    "starlette": ("server/*",),
    "uvicorn": ("server/*",),
    "prometheus_client": ("server/*",),
    "matplotlib": ("insight/plot*.py",),
    "typer": ("cli/*",),
    "transformers": (),
}

# (file, module) -> why this one import against the table is right.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "engine/outputs.py",
        "pagedkv.insight.explain.describe",
    ): "RequestOutput.explain() is for people: loaded when called",
    ("__main__.py", "pagedkv.cli.main.main"): "`python -m pagedkv` is the command line",
}


class Import(NamedTuple):
    module: str
    line: int
    typing_only: bool


def imports(tree: ast.Module, package: list[str]) -> Iterator[Import]:
    """Every import of a module, relative ones resolved against ``package``; ``from a import b`` gives ``a.b``."""
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, id(node) in typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(f"{source}.{alias.name}", node.lineno, id(node) in typing_only)


def at_home(file: str, patterns: tuple[str, ...]) -> bool:
    """The last pattern that matches decides, as in a .gitignore."""
    allowed = False
    for pattern in patterns:
        if fnmatch.fnmatch(file, pattern.removeprefix("!")):
            allowed = not pattern.startswith("!")
    return allowed


def part_of(module: str, parts: set[str]) -> str:
    names = module.split(".")
    return names[1] if len(names) > 1 and names[1] in parts else ""


def violations(source: Path) -> Iterator[str]:
    """``source``: the folder that holds the package ``pagedkv``."""
    parts = set(MAY_IMPORT) - {""}
    for path in sorted((source / PACKAGE).rglob("*.py")):
        file = path.relative_to(source / PACKAGE).as_posix()
        own = part_of(".".join([PACKAGE, *Path(file).with_suffix("").parts]), parts)
        package = [PACKAGE, *Path(file).parent.parts]
        for found in imports(ast.parse(path.read_text(encoding="utf-8")), package):
            if (file, found.module) in EXCEPTIONS:
                continue
            where = f"src/{PACKAGE}/{file}:{found.line}"
            home = next((h for h in HOMES if found.module == h or found.module.startswith(h + ".")), None)
            if home is not None and not found.typing_only and not at_home(file, HOMES[home]):
                yield f"{where}: {home} has no place here (its homes: {', '.join(HOMES[home]) or 'none'})"
            if home is None and found.module.split(".")[0] == PACKAGE:
                other = part_of(found.module, parts)
                if other not in MAY_IMPORT[own]:
                    yield f"{where}: {own or PACKAGE} may not import {other or PACKAGE} ({found.module})"


def main(source: Path) -> int:
    problems = list(violations(source))
    print("\n".join(problems) if problems else "imports: every module keeps to its place")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "src"))
