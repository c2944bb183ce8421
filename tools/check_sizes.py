"""Fails when a file, a function or a kernel has outgrown what can be read in a sitting.

    a file       450 lines
    a function    60 lines, its docstring not counted (contracts are worth their lines)
    a kernel     120 lines: what ``triton.jit`` decorates, and every function of csrc/

An exception is listed below with its reason. One that is no longer needed is an error too, so that the list stays true.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 450, 60, 120
FOLDERS = ("src", "csrc", "tests", "bench", "tools")

# "path" for a file, "path:function" for a function -> why it may be longer.
EXCEPTIONS: dict[str, str] = {}

_COMMENT_OR_LITERAL = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
)
_NAME_BEFORE_PARENTHESIS = re.compile(r"([A-Za-z_]\w*)\s*\(")


def is_kernel(function: ast.AST) -> bool:
    return any("triton.jit" in ast.unparse(d) for d in getattr(function, "decorator_list", []))


def python_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """(name, lines without the docstring, limit) of every function, nested ones counted within their parents too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            yield node.name, lines, KERNEL_LINES if is_kernel(node) else FUNCTION_LINES


def cpp_functions(source: str) -> Iterator[tuple[str, int, int]]:
    """(name, lines, limit) of every C++ function: a brace opened outside any other function, after a parameter list."""
    blank = _COMMENT_OR_LITERAL.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), source)
    depth, inside, start, name, head = 0, None, 0, "", 0
    for at, char in enumerate(blank):
        if char in ";}" and inside is None:
            head = at + 1
        if char == "{":
            before = blank[head:at]
            if inside is None:
                found = _NAME_BEFORE_PARENTHESIS.search(
                    re.sub(r"\b(alignas|decltype|__attribute__|noexcept)\s*\(", "", before)
                )
                if found and not re.search(r"\b(namespace|struct|class|enum|union)\b[^()]*$", before):
                    inside, name, start = depth, found.group(1), head + len(before) - len(before.lstrip())
                head = at + 1
            depth += 1
        elif char == "}":
            depth -= 1
            if inside is not None and depth == inside:
                yield name, blank.count("\n", start, at) + 1, KERNEL_LINES
                inside, head = None, at + 1


def findings(root: Path) -> Iterator[tuple[str, str]]:
    """(key of EXCEPTIONS, sentence) of everything over its limit."""
    paths = [p for folder in FOLDERS for p in sorted((root / folder).rglob("*")) if p.suffix in {".py", ".hpp", ".cpp"}]
    for path in [*paths, *sorted(root.glob("*.py"))]:
        name, source = path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
        lines = source.count("\n")
        if lines > FILE_LINES:
            yield name, f"{name}: {lines} lines, {FILE_LINES} at most"
        functions = python_functions(source) if path.suffix == ".py" else cpp_functions(source)
        for function, length, limit in functions:
            if length > limit:
                yield f"{name}:{function}", f"{name}: {function} has {length} lines, {limit} at most"


def main(root: Path) -> int:
    found = dict(findings(root))
    problems = [sentence for key, sentence in found.items() if key not in EXCEPTIONS]
    problems += [f"{key} is listed as an exception and needs none" for key in EXCEPTIONS if key not in found]
    print("\n".join(problems) if problems else "sizes: every file, function and kernel can be read in a sitting")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent))
