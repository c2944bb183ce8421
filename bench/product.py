"""Matrix products of the default model: ours against oneDNN's packed ones and torch's, and the whole decode step.

    python bench/product.py [--threads 2] [--rounds 7] [--layers 30] [--no-step] [--processor-time] [--json FILE]

Products: the four weights of a layer (qkv 960 x 576, o 576 x 576, gate and up 3072 x 576, down 576 x 1536), once per
layer with weights of its own, so that with few rows they come from memory as in a decode step. Every layer's result is
checked against float64 before anything is timed, and ours for equal bits at every number of rows. Rounds alternate
between the backends; figures are medians and the spread (10th to 90th percentile) over the rounds. The streaming rate
(a sum over the same bytes) is measured in the same rounds, because it varies by two between moments.
With --processor-time (and --threads 1) the clock counts this process alone: for a machine that others use too.
Step: SmolLM2-135M, one sequence, 512 tokens of history, by the bits of its weights: forward pass and LM head.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagedkv.model.groups import quantise
from pagedkv.model.linear import Linear, make_linear

clock = time.perf_counter
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))
ROWS = (1, 8, 32, 512)
BACKENDS = {
    "native bf16": ("native", torch.bfloat16, 16),
    "onednn bf16": ("onednn", torch.bfloat16, 16),
    "torch bf16": ("torch", torch.bfloat16, 16),
    "native int8": ("native", torch.bfloat16, 8),
    "native int4": ("native", torch.bfloat16, 4),
    "native fp32": ("native", torch.float32, 32),
    "onednn fp32": ("onednn", torch.float32, 32),
}


def make_layers(name: str, layers: int) -> list[Linear]:
    backend, dtype, bits = BACKENDS[name]
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(layers):
        for columns, depth in SHAPES:
            weight = torch.randn((columns, depth), generator=generator)
            packed = quantise(weight, bits) if bits < 16 else weight.to(dtype)
            made.append(make_linear(packed, dtype=dtype, backend=backend))
            if len(made) <= len(SHAPES):
                numbers = packed if isinstance(packed, torch.Tensor) else packed.dequantize()
                check(name, made[-1], numbers)
    return made


def check(name: str, layer: Linear, numbers: torch.Tensor) -> None:
    """Against float64; where a layer says that it is exact, equal bits at every number of rows."""
    x = inputs(40, layer.in_features, BACKENDS[name][1])
    y = layer(x).double()
    exact = x.double() @ numbers.double().T
    scale = x.double().abs() @ numbers.double().abs().T
    assert bool(((y - exact).abs() <= torch.finfo(x.dtype).eps * exact.abs() + 1e-6 * scale).all()), name
    if layer.exact:
        assert all(torch.equal(layer(x[:rows]).double(), y[:rows]) for rows in range(1, 41)), name


def inputs(rows: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn((rows, depth), generator=torch.Generator().manual_seed(rows)).to(dtype)


def products(names: list[str], layers: int, rounds: int) -> dict[str, Any]:
    """GFLOP/s by backend and number of rows, and the streaming rate in GB/s."""
    made = {name: make_layers(name, layers) for name in names}
    stream = torch.ones(64 << 20)  # 256 MiB
    times: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in names for rows in ROWS}
    streams = []
    for number in range(rounds + 1):
        streams.append(timed(stream.sum))
        for rows in ROWS:
            for name in names:
                # many rows take long enough for a part of the layers
                part = made[name][: len(SHAPES) * (layers if rows < 32 else max(1, layers // 6))]
                xs = {depth: inputs(rows, depth, BACKENDS[name][1]) for depth in (576, 1536)}
                seconds = timed(lambda part=part, xs=xs: run_through(part, xs))
                if number:  # the first round warms up
                    times[name, rows].append(seconds / flops(part, rows))
    rate = {name: {rows: spread([1e-9 / t for t in times[name, rows]]) for rows in ROWS} for name in names}
    return {"stream_gb_s": spread([stream.nbytes / t / 1e9 for t in streams[1:]]), "gflop_s": rate}


def run_through(layers: list[Linear], xs: dict[int, torch.Tensor]) -> None:
    """Each layer alone; its output is dropped at once, so that the next one's memory is not new to the process."""
    for layer in layers:
        layer(xs[layer.in_features])


def flops(layers: list[Linear], rows: int) -> float:
    return sum(2.0 * rows * layer.in_features * layer.out_features for layer in layers)


def timed(run: Callable[[], Any]) -> float:
    begin = clock()
    run()
    return clock() - begin


def spread(values: list[float]) -> dict[str, float]:
    values = sorted(values)
    return {
        "median": statistics.median(values),
        "p10": values[len(values) // 10],
        "p90": values[-1 - len(values) // 10],
    }


def decode_step(quantization: str | None, steps: int = 96, history: int = 512) -> dict[str, Any]:
    """Milliseconds of a step at one sequence, and prefill tokens/s of its history."""
    from pagedkv.attention.batch import AttentionBatch
    from pagedkv.cache.pool import KVPool
    from pagedkv.model.load import load_model

    model = load_model("smollm2-135m", dtype="bfloat16", device="cpu", quantization=quantization).model
    config = model.config
    blocks = (history + steps) // 16 + 2
    pool = KVPool(blocks, config.num_layers, config.num_kv_heads, 16, config.head_dim, dtype=torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (history,), generator=torch.Generator().manual_seed(1))
    table = list(range(blocks))

    def run(tokens: torch.Tensor, length: int) -> torch.Tensor:
        batch = AttentionBatch.build([table], [length], [tokens.numel()], 16)
        return model.forward(tokens, batch, pool)[-1:]

    prefill = [timed(lambda: model.logits(run(ids, history))) for _ in range(4)][1:]
    forward, head = [], []
    for step in range(steps):
        begin = clock()
        hidden = run(ids[:1], history + 1 + step)
        forward.append((clock() - begin) * 1e3)
        head.append(timed(lambda hidden=hidden: model.logits(hidden)) * 1e3)
    both = [a + b for a, b in zip(forward, head, strict=True)]
    return {
        "weights_mib": model.nbytes / 2**20,
        "prefill_tok_s": history / statistics.median(prefill),
        "decode_tok_s": 1e3 / statistics.median(both),
        "forward_ms": spread(forward),
        "head_ms": spread(head),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=list(BACKENDS), choices=list(BACKENDS), metavar="BACKEND")
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.processor_time:
        if args.threads != 1:
            parser.error("--processor-time adds up threads; it needs --threads 1")
        global clock
        clock = time.process_time
    torch.set_num_threads(args.threads)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": args.threads,
        "clock": clock.__name__,
        "torch": torch.__version__,
        "commit": commit(),
        "seed": 0,
        "layers": args.layers,
        "rounds": args.rounds,
    }
    result |= products(args.only, args.layers, args.rounds)
    print(f"streaming read {result['stream_gb_s']['median']:.1f} GB/s, {args.threads} threads")
    print("  GFLOP/s     " + "".join(f"{rows:6} row{'s' * (rows > 1)}".ljust(22) for rows in ROWS))
    for name, by_rows in result["gflop_s"].items():
        cells = (f"{r['median']:6.0f} ({r['p10']:.0f} .. {r['p90']:.0f})".ljust(22) for r in by_rows.values())
        print(f"  {name:12}" + "".join(cells))
    if not args.no_step:
        result["step"] = {str(q): decode_step(q) for q in ("none", None, "int8", "int4")}
        for name, step in result["step"].items():
            label = {"none": "bf16", "None": "as the file"}.get(name, name)
            print(
                f"  {label:12}{step['weights_mib']:5.0f} MiB  prefill {step['prefill_tok_s']:6.0f} tok/s  "
                f"decode {step['decode_tok_s']:5.0f} tok/s = "
                f"{step['forward_ms']['median']:.2f} + {step['head_ms']['median']:.2f} ms"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
