"""explain, replay, plot and bench cache from the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pagedkv.cli.main import app
from pagedkv.errors import InvalidRequest


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "small.jsonl"
    lines = [
        {"timestamp": 100 * i, "input_length": 1200, "output_length": 3, "hash_ids": [0, 1 + i % 4, 100 + i]}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_replay_prints_the_agreed_json(trace: str) -> None:
    figures = json.loads(run("replay", trace, "--blocks", "6", "--json").stdout)
    assert {"token_hit_rate", "infinite_hit_rate", "optimum_hit_rate", "evictions", "preemptions"} <= set(figures)
    assert 0 < figures["token_hit_rate"] <= figures["optimum_hit_rate"] <= figures["infinite_hit_rate"] < 1


def test_replay_compares_pools_sizes_and_policies(trace: str, tmp_path: Path) -> None:
    out = run("replay", trace, "--compare", "--blocks", "6,12", "--policy", "lru,gdsf", "--plot", str(tmp_path / "p"))
    assert out.stdout.count("gdsf") == 2
    assert (tmp_path / "p" / "replay-small.svg").exists()
    every = json.loads(run("replay", trace, "--compare", "--blocks", "6", "--block-size", "512,256", "--json").stdout)
    assert len(every) == 2 * 5


def test_replay_timed(trace: str) -> None:
    figures = json.loads(run("replay", trace, "--timed", "--blocks", "40", "--cost", "1e-3,1e-5,0", "--json").stdout)
    assert figures["num_refused"] == 0
    assert figures["ttft_median"] > 0
    assert "TTFT" in run("replay", trace, "--timed", "--blocks", "40").stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--blocks", "x"], "blocks is 'x'"),
        (["--blocks", "0"], "blocks is 0"),
        (["--blocks", "1,2"], "need --compare"),
        (["--timed"], "needs --blocks"),
        (["--timed", "--blocks", "9", "--cost", "1,2"], "three or four numbers"),
        (["--plot", "p"], "curves of --compare"),
        (["--policy", "mru"], "'mru' is none of"),
    ],
)
def test_replay_refuses_by_name(trace: str, arguments: list[str], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        run("replay", trace, *arguments)


def test_explain_two_prompts_with_the_default_models_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("The capital of France is Paris and nothing else, as everybody knows. Or not?")
    a = "The capital of France is Paris and nothing else, as everybody knows. Really?"
    words = run("explain", a, f"@{tmp_path / 'b.txt'}", "--block-size", "4").stdout
    assert "A says ' Really?', B says ' Or not?'" in words
    figures = json.loads(run("explain", a, a, "--chat", "--json").stdout)
    assert figures["num_common"] == figures["num_tokens_a"] == figures["num_tokens_b"]
    with pytest.raises(InvalidRequest, match="no-such"):
        run("explain", a, "@no-such-file")


def test_plot_writes_both_formats(tmp_path: Path) -> None:
    assert run("plot", "utilisation", "--out", str(tmp_path)).stdout.split()[-1].endswith("utilisation.svg")
    run("plot", "prefix", "--out", str(tmp_path), "--requests", "3")
    run("plot", "replay", "--out", str(tmp_path), "--requests", "20", "--chats", "3")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "prefix.png",
        "prefix.svg",
        "replay-synthetic.png",
        "replay-synthetic.svg",
        "utilisation.png",
        "utilisation.svg",
    ]
    with pytest.raises(InvalidRequest, match="lengths"):
        run("plot", "utilisation", "--lengths", "1,x")


def test_bench_cache_measures_every_operation_and_replays(trace: str) -> None:
    out = json.loads(run("bench", "cache", trace, "--block-sizes", "512,16", "--blocks", "8,0", "--json").stdout)
    assert {rate["operation"] for rate in out["operations"]} > {"attach, hit", "attach, miss", "remember", "evict"}
    assert all(rate["us_per_call"] > 0 for rate in out["operations"])
    assert [replay["block_size"] for replay in out["replays"]] == [512, 16]
    assert out["replays"][1]["limited"] is False


def test_bench_steps_fits_what_replay_takes(tiny_model: Callable[..., Path], trace: str, tmp_path: Path) -> None:
    saved = str(tmp_path / "made" / "cost.json")
    small = ("--num-gpu-blocks-override", "64", "--max-model-len", "500", "--max-num-batched-tokens", "128")
    out = run("bench", "steps", str(tiny_model()), *small, "--save", saved)
    assert "--cost" in out.stdout
    terms = json.loads(Path(saved).read_text())["cost"]
    figures = json.loads(run("replay", trace, "--timed", "--blocks", "40", "--cost", saved, "--json").stdout)
    plain = ",".join(str(terms[name]) for name in ("fixed", "per_token", "per_context", "per_pair"))
    again = json.loads(run("replay", trace, "--timed", "--blocks", "40", "--cost", plain, "--json").stdout)
    assert figures["duration"] == again["duration"] > 0


def test_version_and_help_answer() -> None:
    assert run("--version").stdout.startswith("pagedkv ")
    assert "replay" in run("--help").stdout
