"""One line a request in the log: who asked what, how it ended, and what the prefix cache did for it."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.server.serving import Served, Serving

log = logging.getLogger("pagedkv.access")


class AccessLog:
    """ASGI middleware; also counts the requests that are being answered (``/load``)."""

    def __init__(self, app: ASGIApp, serving: Serving) -> None:
        self.app = app
        self.serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        served = scope.setdefault("state", {})["served"] = Served()
        status = 0
        began = time.perf_counter()

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.serving.num_active += 1
        try:
            await self.app(scope, receive, watched)
        finally:
            self.serving.num_active -= 1
            self._write(scope, served, status, time.perf_counter() - began)

    def _write(self, scope: Scope, served: Served, status: int, seconds: float) -> None:
        route = f"{scope['method']} {scope['path']}"
        ending = str(status) if status else "client gone"
        if served.request_id == "-":
            log.info("%s %s %.1f ms", route, ending, seconds * 1e3)
            return
        ttft = "-" if served.ttft is None else f"{served.ttft * 1e3:.0f} ms"
        log.info(
            "%s %s %s: %d prompt tokens (%d cached), %d generated, first token %s, %.0f ms",
            route,
            ending,
            served.request_id,
            served.prompt_tokens,
            served.cached_tokens,
            served.completion_tokens,
            ttft,
            seconds * 1e3,
        )
