"""The application: routes, the layers around them, and who is let through.

A request passes, outermost first: the path prefix -> CORS (a preflight carries no key) -> request id -> key ->
body limit -> the count of active requests and the access log -> the route.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import JSONResponse
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

import pagedkv
from pagedkv.async_llm import AsyncLLM
from pagedkv.insight.record import TraceRecorder
from pagedkv.server import admin, cache_map, chat, completions, errors, metrics
from pagedkv.server.access import AccessLog
from pagedkv.server.auth import ApiKeys, RequireKey
from pagedkv.server.config import ServerConfig
from pagedkv.server.errors import error_response
from pagedkv.server.insight import Insight
from pagedkv.server.limits import BodyLimit, EchoRequestId
from pagedkv.server.serving import Draining, ModelNotServed, Serving


def create_app(llm: AsyncLLM, config: ServerConfig | None = None) -> FastAPI:
    """The ASGI application over an engine that is already running; the caller shuts the engine down.

    Args:
        llm: the engine; its name is served unless ``config.served_model_name`` says otherwise.
        config: None for the defaults (no key, bound by whoever runs it).
    """
    config = config or ServerConfig()
    keys = ApiKeys.load(config.api_key, config.api_keys_file)
    record = None if config.record is None else TraceRecorder(config.record)
    serving = Serving(llm, config, config.served_model_name or (llm.model_name,), insight=Insight(record))
    layers = [
        Middleware(EchoRequestId),
        Middleware(RequireKey, keys=keys),
        Middleware(BodyLimit, limit=config.max_body_bytes),
        Middleware(AccessLog, serving=serving),
    ]
    if config.allowed_origins:
        layers.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_credentials=config.allow_credentials,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type", "X-Request-Id"],
            ),
        )
    layers.insert(0, Middleware(BehindPrefix, prefix=config.root_path))

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        serving.draining = True
        if record is not None:
            record.close()

    app = FastAPI(
        title="pagedkv",
        version=pagedkv.__version__,
        middleware=layers,
        lifespan=lifespan,
        responses=errors.DOCUMENTED,
    )
    app.state.serving = serving
    app.state.metrics = metrics.EngineMetrics(llm, serving.names[0])
    errors.install(app)

    @app.exception_handler(ModelNotServed)
    async def not_served(_: Request, error: ModelNotServed) -> JSONResponse:
        return error_response(404, str(error), param="model", code="model_not_found")

    @app.exception_handler(Draining)
    async def draining(_: Request, __: Draining) -> JSONResponse:
        return error_response(503, "the server is shutting down", headers={"Retry-After": "5"})

    app.openapi = lambda: documented(app)  # type: ignore[method-assign]
    for part in (completions, chat, admin, metrics, cache_map):
        app.include_router(part.router)
    return app


class BehindPrefix:
    """ASGI middleware: tells the layers inside which prefix a proxy puts before every path.

    Routes are found whether the proxy takes the prefix off or leaves it. (uvicorn's own option knows the first way
    only, and FastAPI's is deprecated.)
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self.app = app
        self.prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.prefix:
            scope["root_path"] = self.prefix
        await self.app(scope, receive, send)


def documented(app: FastAPI) -> dict[str, Any]:
    """The OpenAPI document without the 422 that FastAPI writes and that never comes: bad values are a 400 here."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes, summary="OpenAI-compatible")
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = schema
    return app.openapi_schema
