"""Every failure as OpenAI's clients expect it: ``{"error": {"message", "type", "param", "code"}}``.

What the caller did wrong is a 400 that names the field; what never can be served says both numbers; a full
queue is a 503 with ``Retry-After``; only a fault of ours is a 500, and it says no more than that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from pagedkv.errors import (
    ChatTemplateError,
    EngineDead,
    InvalidRequest,
    OutOfBlocks,
    QueueFull,
    RequestFailed,
)
from pagedkv.server.schema import ErrorBody, ErrorReply

log = logging.getLogger("pagedkv.server")

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


# What any route may answer beside its own; FastAPI's 422 never leaves this server.
DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": HTTPStatus(status).phrase} for status in (400, 401, 404, 413, 500, 503)
}


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON object of an error; also what a stream that fails half-way sends as its last event."""
    kind = _KINDS.get(status, "internal_server_error")
    return ErrorReply(error=ErrorBody(message=message, type=kind, param=param, code=code or status)).model_dump()


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(status, message, param=param, code=code), status, dict(headers or {}))


def describe(error: Exception) -> tuple[int, str, str | None, dict[str, str]]:
    """(status, message, param, headers) of an exception that the engine raised."""
    match error:
        case InvalidRequest():
            return 400, str(error), error.field, {}
        case ChatTemplateError():
            return 400, str(error), "messages", {}
        case QueueFull():
            return 503, str(error), None, {"Retry-After": str(max(1, round(error.retry_after)))}
        case EngineDead():
            return 503, str(error) or "the engine has stopped", None, {}
        case RequestFailed() | OutOfBlocks():
            return 500, str(error), None, {}
    return 500, "internal error; the server's log has the details", None, {}


def field_of(location: Sequence[int | str]) -> str | None:
    """``("body", "messages", 0, "content", "str")`` -> ``messages.0.content``: the path as the caller wrote it."""
    parts = [str(part) for part in location if part != "body"]
    names = [part for part in parts if part.isdigit() or (part.isidentifier() and part not in _TYPE_NAMES)]
    return ".".join(names) or None


_TYPE_NAMES = {"str", "int", "float", "bool", "list", "dict", "Message", "ContentPart", "NamedToolChoice"}


def install(app: FastAPI) -> None:
    """Registers the handlers; nothing leaves the server in another shape."""

    @app.exception_handler(RequestValidationError)
    async def validation(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        field = field_of(first["loc"])
        if first["type"] == "json_invalid":
            return error_response(400, f"the body is not valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
        return error_response(400, f"{field or 'body'}: {first['msg']}", param=field)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> JSONResponse:
        detail = error.detail if isinstance(error.detail, str) else HTTPStatus(error.status_code).phrase
        return error_response(error.status_code, detail, headers=error.headers)

    @app.exception_handler(Exception)
    async def anything(_: Request, error: Exception) -> JSONResponse:
        status, message, param, headers = describe(error)
        if status == 500:
            log.error("a request failed", exc_info=error)
        return error_response(status, message, param=param, headers=headers)

    for kind in (InvalidRequest, ChatTemplateError, QueueFull, EngineDead, RequestFailed):
        app.add_exception_handler(kind, anything)
