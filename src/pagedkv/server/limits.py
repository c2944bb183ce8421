"""Bounds on what a connection may send: the size of a body, and a request id that is safe to echo."""

from __future__ import annotations

import re

from fastapi import HTTPException
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedkv.server.errors import error_response

_ID = re.compile(r"[!-~]{1,128}")


class BodyLimit:
    """ASGI middleware: more than ``limit`` bytes are a 413, at the header if it tells, else while they come."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = f"the body is larger than the limit of {self.limit} bytes"
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self.limit:
            await error_response(413, too_large)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise HTTPException(413, too_large)  # FastAPI hands this one on; any other becomes a 400
            return message

        await self.app(scope, counted, send)


class EchoRequestId:
    """ASGI middleware: ``X-Request-Id`` comes back as it was sent, if it is short and printable.

    It is a name for people. The engine's own ids are unique whatever clients send (two may send the same).
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = next((v for n, v in scope.get("headers", ()) if n == b"x-request-id"), b"").decode("latin-1")
        if scope["type"] != "http" or not _ID.fullmatch(raw):
            await self.app(scope, receive, send)
            return
        scope.setdefault("state", {})["request_id"] = raw

        async def echo(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = raw
            await send(message)

        await self.app(scope, receive, echo)
