"""The demonstration on the default model: six right answers, and figures that the block tables bear out."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagedkv.cli.demo_text import QUESTIONS
from pagedkv.cli.main import app

KNOWN = ("Jupiter", "Neptune", "Mercury", "88", "Armstrong", "Venus")


@pytest.fixture(scope="module")
def runs() -> dict[str, str]:
    """What it prints, for machines and for people."""
    found = {}
    for name, arguments in (("json", ["demo", "--json"]), ("plain", ["demo"])):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        found[name] = result.stdout
    return found


def test_six_questions_are_answered_and_more_is_reused_than_computed(runs: dict[str, str]) -> None:
    figures = json.loads(runs["json"])
    assert [answer["question"] for answer in figures["answers"]] == list(QUESTIONS)
    for answer, word in zip(figures["answers"], KNOWN, strict=True):
        assert word in answer["answer"]
    assert figures["tokens_reused"] + figures["tokens_computed"] == figures["prompt_tokens"]
    assert figures["tokens_reused"] > figures["tokens_computed"]
    assert 0 < figures["blocks_in_use"] < figures["blocks_without_sharing"]
    assert 0.9 < figures["utilization"] <= 1.0
    assert figures["tokens_per_second"] > 0


def test_piped_output_is_plain_text_with_the_same_answers(runs: dict[str, str]) -> None:
    figures, text = json.loads(runs["json"]), runs["plain"]
    assert "\x1b" not in text
    assert all(answer["question"] in text for answer in figures["answers"])
    assert f"{figures['tokens_reused']:,}" in text
    assert "pagedkv serve smollm2-135m" in text
