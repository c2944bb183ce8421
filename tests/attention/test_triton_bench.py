"""bench/gpu.py runs through in the interpreter: the script is right before a GPU is at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_the_gpu_benchmark_runs_on_a_cpu(repository: Path, tmp_path: Path) -> None:
    report = tmp_path / "gpu.json"
    command = [sys.executable, repository / "bench/gpu.py", "--interpret", "--json", report]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(report.read_text())
    assert found["failed"] == []
    assert found["card"] == "Triton's interpreter on a CPU"
    assert {row["name"].split()[0] for row in found["rows"]} == {"decode", "prefill"}
    assert all(row["us"] > 0 and row["bytes"] > 0 and row["operations"] > 0 for row in found["rows"])
    assert any("sdpa_us" in row for row in found["rows"])


def test_the_work_of_a_call_is_counted_right(repository: Path) -> None:
    """The predicted figures of docs/benchmarks.md, for three calls counted by hand."""
    code = (
        "from gpu_work import decode_work, prefill_work, Work; import json;"
        "works = [decode_work(2, 100, 4), decode_work(2, 100, 4, 'fp8', shared=60), prefill_work(3, 10, 1)];"
        "print(json.dumps([[w.num_bytes, w.operations] for w in works]), Work(10, 40).seconds(5, 8))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repository / "bench", capture_output=True, text=True, check=True
    )
    figures, seconds = result.stdout.rsplit(" ", 1)
    # 8 KV heads of 128: a position is 2 * 8 * 128 elements; pairs of the prefill: 11 + 12 + 13
    rows = 2 * 2 * 2 * 32 * 128
    assert json.loads(figures) == [
        [200 * 2 * 8 * 128 * 2 + rows, 4 * 2 * 32 * 128 * 100],
        [140 * 2 * 8 * (128 + 4) + rows, 4 * 2 * 32 * 128 * 100],
        [13 * 2 * 8 * 128 * 2 + 2 * 2 * 3 * 8 * 128, 4 * 8 * 128 * 36],
    ]
    assert float(seconds) == 5.0


def test_the_predicted_table_of_the_docs_is_the_scripts(repository: Path) -> None:
    """Every row of ``bench/gpu_work.py`` stands in docs/benchmarks.md as it is."""
    script = repository / "bench/gpu_work.py"
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    text = (repository / "docs/benchmarks.md").read_text().splitlines()
    assert len(rows) > 30
    assert [row for row in rows if row not in text] == []
