"""A real server over a tiny random model: uvicorn in a thread, spoken to over loopback."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from live_server import BLOCK_SIZE, NUM_BLOCKS, Live

from pagedkv.async_llm import AsyncLLM
from pagedkv.server.app import create_app
from pagedkv.server.config import ServerConfig

Opener = Callable[..., AbstractContextManager[Live]]


@pytest.fixture(scope="session")
def open_server(tiny_model: Callable[..., Path]) -> Opener:
    """Starts a server: ``with open_server(ServerConfig(...), max_num_seqs=2) as live``."""

    @contextmanager
    def opened(config: ServerConfig | None = None, **engine: Any) -> Iterator[Live]:
        options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS, "dtype": "float32", **engine}
        llm = AsyncLLM(str(options.pop("model", None) or tiny_model()), **options)
        app = create_app(llm, config or ServerConfig(served_model_name=("tiny",)))
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, name="test-server")
        thread.start()
        try:
            while not server.started:
                time.sleep(0.005)
            url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=30) as http:
                yield Live(url, http, llm)
        finally:
            app.state.serving.draining = True  # as a signal does
            server.should_exit = True
            thread.join()
            llm.shutdown()

    return opened


@pytest.fixture(scope="session")
def live(open_server: Opener) -> Iterator[Live]:
    """One server for all tests that leave it as they found it."""
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    with open_server() as server:
        yield server
