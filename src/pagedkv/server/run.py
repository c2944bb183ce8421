"""Runs the application until someone says stop: signals, the end of the engine, the status line.

running --SIGTERM/SIGINT--> draining (new requests: 503) --all answered, or shutdown_timeout--> stopped, status 0
   |                            |--second signal--> stopped at once
   +--the engine's thread dies--> /health is 503, then stopped, status 1, so that a supervisor starts it again
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from pagedkv.async_llm import AsyncLLM
from pagedkv.engine.metrics import EngineStats
from pagedkv.server.app import create_app
from pagedkv.server.config import ServerConfig
from pagedkv.server.serving import Serving

log = logging.getLogger("pagedkv.server")

SEEN_DEAD = 2.0  # seconds for which a dead server still answers /health, so that probes see why
CUT_GRACE = 3.0  # seconds for aborted requests to say so to their clients


class Server(uvicorn.Server):
    """uvicorn's, with draining and a watch on the engine."""

    def __init__(self, config: uvicorn.Config, serving: Serving) -> None:
        super().__init__(config)
        self.serving = serving
        self.failed = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.serving.draining:
            self.force_exit = True
        self.serving.draining = True
        super().handle_exit(sig, frame)

    async def main_loop(self) -> None:
        watch = asyncio.create_task(self._watch_engine())
        status = asyncio.create_task(self._say_status())
        try:
            await super().main_loop()
        finally:
            for task in (watch, status):
                task.cancel()
            await asyncio.gather(watch, status, return_exceptions=True)

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Stops accepting; after ``shutdown_timeout`` what still runs is aborted and its clients are told."""
        timeout = self.serving.config.shutdown_timeout
        if self.serving.num_active:
            log.info("shutting down: %d requests get up to %g s", self.serving.num_active, timeout)
        cut = asyncio.get_running_loop().call_later(timeout, self.serving.llm.abort_all)
        try:
            await super().shutdown(sockets)  # type: ignore[arg-type]
        finally:
            cut.cancel()

    async def _watch_engine(self) -> None:
        while self.serving.llm.is_alive:
            await asyncio.sleep(0.25)
        self.failed = True
        log.error("the engine has stopped; the server ends with status 1")
        await asyncio.sleep(SEEN_DEAD)
        self.should_exit = True

    async def _say_status(self) -> None:
        interval = self.serving.config.status_interval
        if interval <= 0:
            return
        line = StatusLine(self.serving.llm.stats)
        while True:
            await asyncio.sleep(interval)
            if (text := line.next()) is not None:
                log.info(text)


class StatusLine:
    """What happened since the last line; None while nothing does."""

    def __init__(self, stats: Callable[[], EngineStats], clock: Callable[[], float] = time.monotonic) -> None:
        self._stats = stats
        self._clock = clock
        self._before, self._moment = stats(), clock()

    def next(self) -> str | None:
        now, moment = self._stats(), self._clock()
        before, seconds = self._before, max(1e-9, moment - self._moment)
        self._before, self._moment = now, moment
        if not (now.num_running or now.num_waiting or now.num_steps > before.num_steps):
            return None
        asked, hit = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
        prefill = (now.prefill_tokens - before.prefill_tokens) / seconds
        generated = (now.generated_tokens - before.generated_tokens) / seconds
        return (
            f"running {now.num_running}, waiting {now.num_waiting}, KV in use {now.kv_cache_usage:.1%}, "
            f"prefix hits {f'{hit / asked:.1%}' if asked else '-'}, prefill {prefill:.0f} tok/s, "
            f"generated {generated:.1f} tok/s"
        )


def banner(llm: AsyncLLM, config: ServerConfig) -> str:
    """What is being served, for the person who started it."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    url = f"http://{host}:{config.port}"
    keys = "an API key is asked for" if config.api_key or config.api_keys_file else "no API key is asked for"
    lines = [*llm.banner, f"{url}/v1   ({keys})", f"{url}/cache   the cache map;   {url}/metrics   for Prometheus"]
    return "\n".join(f"  {line}" for line in lines)


def serve(llm: AsyncLLM, config: ServerConfig) -> int:
    """Serves until a signal comes or the engine dies. Shuts the engine down. Returns the exit status."""
    app = create_app(llm, config)
    server = Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=int(config.shutdown_timeout + CUT_GRACE),
            lifespan="on",
        ),
        app.state.serving,
    )
    # uvicorn hands a signal on once it has stopped; a clean stop is status 0, not death by signal.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    print(banner(llm, config), file=sys.stderr, flush=True)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            server.run()
    finally:
        llm.shutdown()
    return 1 if server.failed or not server.started else 0
