"""Every Python example in README and docs runs, and prints what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SERVER = "http://127.0.0.1:8000"  # as the pages write it; tests start one on a free port


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server as the pages start it, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("served") / "log").open("w+")
    command = [sys.executable, "-m", "pagedkv", "serve", "smollm2-135m", "--port", str(port), "--max-model-len", "2048"]
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for _ in range(900):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                break
            if server.poll() is not None:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"the server does not answer: {Path(log.name).read_text()[-2000:]}")
        assert server.poll() is None, Path(log.name).read_text()[-2000:]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)
        log.close()


class Example(NamedTuple):
    line: int
    code: str
    prints: str | None


def examples(page: Path) -> list[Example]:
    """The Python blocks of a page, each with the text block that follows it at once, if one does."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```\n(?:```text\n(.*?)^```$)?", text, re.DOTALL | re.MULTILINE)
    return [Example(text.count("\n", 0, match.start()) + 2, match[1], match[2]) for match in found]


WITH_EXAMPLES = [page for page in PAGES if examples(page)]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_run_and_print_what_the_page_says(page: Path, request: pytest.FixtureRequest) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    for example in examples(page):
        code = example.code
        if SERVER in code:
            code = code.replace(SERVER, request.getfixturevalue("served"))
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (example.line - 1) + code, str(page), "exec"), names)
        if example.prints is not None:
            assert printed.getvalue() == example.prints


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?://|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_pagedkv_exist(page: Path) -> None:
    from pagedkv.cli.main import app

    verbs = {command.callback.__name__.replace("_", "-") for command in app.registered_commands if command.callback}
    verbs |= {group.name for group in app.registered_groups if group.name}
    used = re.findall(r"(?:^|`)pagedkv ([a-z][a-z-]*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(used) <= verbs
