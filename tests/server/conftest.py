"""A real server over a tiny random model: uvicorn in a thread, spoken to over loopback."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from live_server import Live, serving

from pagedkv.server.config import ServerConfig

Opener = Callable[..., AbstractContextManager[Live]]


@pytest.fixture(scope="session")
def open_server(tiny_model: Callable[..., Path]) -> Opener:
    """Starts a server: ``with open_server(ServerConfig(...), max_num_seqs=2) as live``."""

    def opened(config: ServerConfig | None = None, *, model: Path | None = None, **engine: Any) -> Any:
        return serving(model or tiny_model(), config, **engine)

    return opened


@pytest.fixture(scope="session")
def live(open_server: Opener) -> Iterator[Live]:
    """One server for all tests that leave it as they found it."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with open_server() as server:
        yield server
