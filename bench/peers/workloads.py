"""W1, W2 and W3: what every engine is given, as token ids, the same for all."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

VOCABULARY = 49152
FIRST_ID = 100  # below lie special tokens


@dataclass(frozen=True)
class Workload:
    """``prompts``: token ids; each is followed by exactly ``new_tokens`` greedy tokens, EOS ignored.

    ``warm``: the requests are sent once before they are timed, so that a prefix cache holds their prompts.
    """

    name: str
    prompts: list[list[int]]
    new_tokens: int
    prefix_caching: bool = False
    warm: bool = False


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(FIRST_ID, VOCABULARY, (count,), generator=generator).tolist()


def workloads() -> dict[str, Workload]:
    lengths = torch.randint(20, 500, (32,), generator=torch.Generator().manual_seed(2)).tolist()
    prefix = tokens(1024, seed=3)
    shared = [prefix + tokens(32, seed=1000 + i) for i in range(32)]
    made = [
        Workload("W1", [tokens(512, seed=1)], 128),
        Workload("W2", [tokens(n, seed=100 + i) for i, n in enumerate(lengths)], 64),
        Workload("W3-off", shared, 32),
        Workload("W3-on", shared, 32, prefix_caching=True),
        Workload("W3-warm", shared, 32, prefix_caching=True, warm=True),
    ]
    return {workload.name: workload for workload in made}


def save(folder: Path) -> None:
    for workload in workloads().values():
        (folder / f"{workload.name}.json").write_text(json.dumps(asdict(workload)))
