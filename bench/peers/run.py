"""Measures pagedkv and its peers on the same work, in turns, and writes a table.

    python bench/peers/run.py --work DIR [--rounds 3] [--peers pagedkv,llama] [--workloads W1,W2] [--json FILE]

DIR gets the model in each peer's format and a virtual environment per peer, made once from the pinned files in
requirements/. Every figure is the median over the rounds; within a round the peers take turns on each workload, so
that a slow moment of the machine meets all of them. Two threads each.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Peer:
    """``script`` is run by ``venv`` (None: our own) with ``model`` and ``extra``, then the workload's file."""

    name: str
    script: str
    model: str
    venv: str | None = None
    extra: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    skips: tuple[str, ...] = ()


PEERS = (
    Peer("pagedkv bf16", "peer_pagedkv.py", "smollm2-135m", extra=("none",)),
    Peer("pagedkv four bits", "peer_pagedkv.py", "smollm2-135m", extra=("int4",)),
    Peer("llama.cpp BF16", "peer_llama.py", "model-bf16.gguf", "llama", skips=("W3-off",)),
    Peer("llama.cpp Q4_1", "peer_llama.py", "Q4_1", "llama", skips=("W2", "W3-off", "W3-on", "W3-warm")),
    Peer("OpenVINO GenAI F16", "peer_openvino.py", "model-f16.gguf", "openvino", skips=("W3-off",)),
    Peer("vLLM-cpu bf16", "peer_vllm.py", "hf-bf16", "vllm", environment={"VLLM_CPU_KVCACHE_SPACE": "2"}),
    Peer("transformers bf16", "peer_transformers.py", "hf-bf16", "transformers", skips=("W3-on", "W3-warm")),
)


def python_of(peer: Peer, work: Path) -> Path:
    """The interpreter of the peer's environment, which is made if it is not there."""
    if peer.venv is None:
        return Path(sys.executable)
    home = work / "venvs" / peer.venv
    python = home / "bin" / "python"
    if not python.exists():
        print(f"making an environment for {peer.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
        environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        pip = [python, "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "-r", HERE / "requirements" / f"{peer.venv}.txt"], check=True, env=environment)
        if peer.venv == "vllm":  # these stop its import beside a CPU build of torch
            extras = ["torchvision", "torchaudio", "torchcodec"]
            subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *extras], check=True)
    return python


def model_of(peer: Peer, work: Path) -> str:
    if peer.model == "Q4_1":
        from pagedkv.model.hub import resolve

        return str(resolve("smollm2-135m").weights[0])
    return peer.model if peer.venv is None else str(work / "models" / peer.model)


def one(peer: Peer, workload: str, work: Path, timeout: float) -> dict[str, Any] | None:
    command = [python_of(peer, work), peer.script, model_of(peer, work), *peer.extra]
    command.append(work / "workloads" / f"{workload}.json")
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false", **peer.environment}
    environment["PYTHONPATH"] = str(HERE)
    try:
        done = subprocess.run(
            command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{peer.name} {workload}: no result within {timeout:.0f} s", file=sys.stderr)
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        print(f"{peer.name} {workload} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    summary = {key: statistics.median(run[key] for run in runs) for key in numbers}
    spread = {f"{key}_range": [min(r[key] for r in runs), max(r[key] for r in runs)] for key in numbers}
    return {**summary, **spread, "rounds": len(runs), "first_tokens": runs[0]["first_tokens"]}


def table(results: dict[str, dict[str, Any]]) -> str:
    rows = [
        "| | W1 prefill tok/s | W1 decode tok/s | W2 tok/s (time) | W3 off | W3 on | W3 warm | load | peak memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(name: str, workload: str, key: str, form: str) -> str:
        found = results.get(f"{name}/{workload}")
        return form.format(**found) if found and key in found else "-"

    for name in dict.fromkeys(key.partition("/")[0] for key in results):
        loads = [value["load_s"] for key, value in results.items() if key.startswith(f"{name}/")]
        peaks = [value["peak_rss_bytes"] for key, value in results.items() if key.startswith(f"{name}/W1")]
        cells = [
            cell(name, "W1", "prefill_tok_s", "{prefill_tok_s:,.0f}"),
            cell(name, "W1", "decode_tok_s", "{decode_tok_s:.1f}"),
            cell(name, "W2", "tokens_per_s", "{tokens_per_s:.0f} ({makespan_s:.1f} s)"),
            *(cell(name, workload, "makespan_s", "{makespan_s:.2f} s") for workload in ("W3-off", "W3-on", "W3-warm")),
            f"{statistics.median(loads):.1f} s",
            f"{peaks[0] / 2**20:,.0f} MiB" if peaks else "-",
        ]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)


def machine() -> dict[str, Any]:
    """Where and when figures were taken, and of which commit."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith("model name")]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="", help="beginnings of names, with commas")
    parser.add_argument("--workloads", default="W1,W2,W3-off,W3-on,W3-warm")
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    work = args.work.resolve()
    if not (work / "models").exists():
        subprocess.run([sys.executable, HERE / "export.py", work / "models"], check=True)
    if not (work / "workloads").exists():
        (work / "workloads").mkdir(parents=True)
        sys.path.insert(0, str(HERE))
        from workloads import save

        save(work / "workloads")
    wanted = [name.lower() for name in args.peers.split(",") if name]
    peers = [p for p in PEERS if not wanted or any(p.name.lower().startswith(name) for name in wanted)]
    runs: dict[str, list[dict[str, Any]]] = {}
    for round_ in range(args.rounds):
        for workload in args.workloads.split(","):
            for peer in peers:
                if workload in peer.skips:
                    continue
                result = one(peer, workload, work, args.timeout)
                if result is not None:
                    runs.setdefault(f"{peer.name}/{workload}", []).append(result)
                    key = "decode_tok_s" if "decode_tok_s" in result else "makespan_s"
                    print(f"round {round_} {peer.name} {workload}: {key} {result[key]:.2f}", file=sys.stderr)
    results = {key: medians(found) for key, found in runs.items()}
    record = {**machine(), "results": results}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
