"""What tests of the server share: a running one, and how a client reads a stream of events."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from pagedkv.async_llm import AsyncLLM
from pagedkv.server.app import create_app
from pagedkv.server.config import ServerConfig

BLOCK_SIZE = 4
NUM_BLOCKS = 128


@dataclass
class Live:
    """``http``: a client without a key. ``llm``: the engine behind it."""

    url: str
    http: httpx.Client
    llm: AsyncLLM

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def complete(self, prompt: Any = "The cache keeps", **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", prompt=prompt, **{"max_tokens": 6, "temperature": 0, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def settle(self) -> None:
        """Waits until nothing runs, then checks that every block is free or only cached."""
        for _ in range(400):
            stats = self.llm.stats()
            if not (stats.num_running or stats.num_waiting):
                break
            time.sleep(0.01)
        assert (stats.num_running, stats.num_waiting, stats.blocks_in_use) == (0, 0, 0)
        assert stats.blocks_free + stats.blocks_cached == stats.num_blocks


@contextmanager
def slowed(live: Live, seconds: float) -> Iterator[None]:
    """Every step of the engine takes this much longer, so that what goes on can be looked at."""

    def put(make: Callable[[Any], Any]) -> None:
        live.llm._thread.call(lambda engine: setattr(engine.runner, "run", make(engine.runner.run))).result()

    quick: list[Any] = []

    def slower(run: Any) -> Any:
        quick.append(run)
        return lambda plan: (time.sleep(seconds), run(plan))[1]

    put(slower)
    try:
        yield
    finally:
        put(lambda _: quick[0])


@contextmanager
def serving(model: str | Path, config: ServerConfig | None = None, **engine: Any) -> Iterator[Live]:
    """A server over a model, in a thread of this process, for as long as the context lasts."""
    options = {"block_size": BLOCK_SIZE, "num_gpu_blocks_override": NUM_BLOCKS, "dtype": "float32", **engine}
    llm = AsyncLLM(str(model), **options)
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


def read_events(live: Live, path: str, **body: Any) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream, which must end with [DONE]."""
    done = False
    with live.http.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if line.startswith("data: "):
                assert not done
                if line == "data: [DONE]":
                    done = True
                else:
                    yield json.loads(line[len("data: ") :])
    assert done
