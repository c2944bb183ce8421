"""What ``--help`` shows: a screen for every verb, the rest by group, and words for shells to complete."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from pagedkv.cli.help import spelled_out
from pagedkv.cli.main import app

VERBS = ("chat", "collect-env", "complete", "demo", "explain", "plan", "replay", "run-batch", "serve")
BENCHES = ("attention", "cache", "latency", "serve", "steps", "throughput")
SCREEN = 40  # lines of a terminal window of 100 columns


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERMINAL_WIDTH", "100")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, spelled_out(list(arguments)))


@pytest.mark.parametrize("verb", [*((v,) for v in VERBS), *(("bench", b) for b in BENCHES)], ids=" ".join)
def test_the_help_of_every_verb_fits_a_screen(verb: tuple[str, ...]) -> None:
    shown = run(*verb, "--help")
    assert shown.exit_code == 0
    assert len(shown.stdout.splitlines()) <= SCREEN


def test_short_help_names_the_groups_and_leaves_nothing_behind() -> None:
    short = run("serve", "--help").stdout
    assert "--port" in short
    assert "--api-keys-file" not in short
    assert "--help=server|access|model|kv-cache|scheduler" in short
    everything = run("serve", "--help=all").stdout
    assert "--api-keys-file" in everything
    assert "--help=" not in everything
    assert "--trust-remote-code" not in everything  # hidden stays hidden
    assert run("serve", "--help").stdout == short


def test_one_group() -> None:
    shown = run("serve", "--help=KV cache").stdout
    assert "--eviction-policy" in shown
    assert "--port" not in shown
    assert run("serve", "--help=kv-cache").stdout == shown


def test_flags_that_have_to_do_with_a_word() -> None:
    shown = run("serve", "--help=prefix").stdout
    assert "--share-prefixes" in shown
    assert "--enable-prefix-caching" in shown
    assert "--port" not in shown


def test_an_unknown_topic_names_the_groups() -> None:
    result = run("serve", "--help=nonsense")
    assert result.exit_code == 2
    assert "nonsense" in result.stderr
    assert "kv-cache" in result.stderr


def test_completion_for_shells() -> None:
    """As bash asks: the words so far come in the environment, what fits goes to stdout."""
    start = "import sys; sys.argv = ['pagedkv']; from pagedkv.cli.main import main; main()"
    asked = {"_PAGEDKV_COMPLETE": "complete_bash", "COMP_WORDS": "pagedkv ser", "COMP_CWORD": "1"}
    answer = subprocess.run(
        [sys.executable, "-c", start], env={**os.environ, **asked}, capture_output=True, text=True, check=False
    )
    assert answer.stdout.split() == ["serve"], answer
