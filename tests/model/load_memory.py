"""Run by test_load_memory.py in a process of its own: loads a model, prints as JSON what that took at its most."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pagedkv.model.hub import resolve
from pagedkv.model.load import load_model, tokenizer_of


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def main() -> None:
    model, quantization = sys.argv[1], sys.argv[2]
    import pagedkv.model.native  # noqa: F401  # imports are no part of the load, nor is a vocabulary

    first = tokenizer_of(resolve(model))
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    loaded = load_model(model, dtype="bfloat16", quantization=quantization)
    assert first.vocab_size == loaded.tokenizer.vocab_size
    print(json.dumps({"growth": status("VmHWM") - before, "weight_bytes": loaded.weight_bytes}))


if __name__ == "__main__":
    main()
