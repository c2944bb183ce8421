"""The bookkeeping against vLLM's, over a trace: alternating runs, medians, one JSON file.

    python bench/cache.py TRACE.jsonl [--rounds 3] [--limit 1500] [--save bench/results/cache.json]

Each run is a process of its own, so that memory is measured too. vLLM runs in bench/peers/venvs/vllm, which is made
from pinned requirements where it is missing. The claim that is checked: hit rates agree, so both did the same work.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEER = HERE / "peers" / "venvs" / "vllm"
OURS = """
import json, resource, sys
from pathlib import Path
from pagedkv.insight.replay import replay_sequential
from pagedkv.insight.trace import read_trace
trace = read_trace(Path(sys.argv[1]), int(sys.argv[4]) or None)
report = replay_sequential(trace, block_size=int(sys.argv[2]), num_blocks=int(sys.argv[3]) or None, yardsticks=False)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"engine": "pagedkv", "peak_mib": peak, **report.as_dict()}))
"""


def peer_python(given: str | None) -> str:
    """The interpreter of vLLM's environment, which is made where it is missing."""
    if given is not None:
        return given
    python = PEER / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(PEER)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "-r", str(HERE / "peers" / "requirements" / "vllm.txt")]
        subprocess.run(pip, check=True)
        extra = ["torchvision", "torchaudio", "torchcodec"]  # not needed, and they stop the import on a CPU
        subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *extra], check=True)
    return str(python)


def run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stderr[-2000:]}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    figures: dict[str, Any] = json.loads(line)
    return figures


def compare(trace: Path, python: str, block_size: int, num_blocks: int, limit: int, rounds: int) -> dict[str, Any]:
    """Medians of alternating runs of both engines, and their ratio."""
    where = [str(trace), str(block_size), str(num_blocks), str(limit)]
    runs: dict[str, list[dict[str, Any]]] = {"pagedkv": [], "vllm": []}
    for _ in range(rounds):
        runs["pagedkv"].append(run([sys.executable, "-c", OURS, *where]))
        runs["vllm"].append(run([python, str(HERE / "peers" / "cache_vllm.py"), *where]))
    rates = {name: {figures["token_hit_rate"] for figures in found} for name, found in runs.items()}
    if len(rates["pagedkv"] | rates["vllm"]) > 2 or abs(min(rates["pagedkv"]) - min(rates["vllm"])) > 1e-3:
        raise SystemExit(f"hit rates differ, so the engines did not do the same: {rates}")
    row: dict[str, Any] = {"block_size": block_size, "num_blocks": num_blocks, "limit": limit}
    for name, found in runs.items():
        times = [figures["us_per_block"] for figures in found]
        row[name] = {
            "us_per_block": statistics.median(times),
            "spread": [min(times), max(times)],
            "peak_mib": max(figures["peak_mib"] for figures in found),
            "token_hit_rate": found[0]["token_hit_rate"],
            "parts": found[0].get("parts_us_per_block"),
        }
    row["block_references"] = runs["vllm"][0]["block_references"]
    row["ratio"] = row["vllm"]["us_per_block"] / row["pagedkv"]["us_per_block"]
    row["peer"] = runs["vllm"][0]["engine"]
    return row


def commit() -> str:
    done = subprocess.run(["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=1500, help="requests of the trace; 0: all")
    parser.add_argument("--settings", default="512:20000,16:640000", help="block size:pool, with commas")
    parser.add_argument("--python", help="an interpreter that imports vLLM")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    python = peer_python(asked.python)
    rows = []
    for setting in asked.settings.split(","):
        size, _, blocks = setting.partition(":")
        row = compare(asked.trace, python, int(size), int(blocks), asked.limit, asked.rounds)
        rows.append(row)
        print(
            f"block {size}, pool {int(blocks):,}, {row['block_references']:,} references: "
            f"pagedkv {row['pagedkv']['us_per_block']:.2f} us a block in {row['pagedkv']['peak_mib']:,.0f} MiB, "
            f"{row['peer']} {row['vllm']['us_per_block']:.2f} in {row['vllm']['peak_mib']:,.0f}: "
            f"{row['ratio']:.1f} times as fast; {row['pagedkv']['token_hit_rate']:.2%} of tokens hit",
            flush=True,
        )
    if asked.save is not None:
        asked.save.parent.mkdir(parents=True, exist_ok=True)
        about = {
            "machine": processor(),
            "python": platform.python_version(),
            "commit": commit(),
            "trace": asked.trace.name,
        }
        asked.save.write_text(json.dumps({**about, "rounds": asked.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
