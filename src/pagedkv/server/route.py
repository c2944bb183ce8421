"""BodyRoute: how a JSON body reaches its endpoint, in one step.

FastAPI parses a body into Python objects and validates those; here pydantic reads the bytes themselves, and nothing
else of FastAPI's dependency solving stands in the way of a request. The OpenAPI document is FastAPI's as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect


class BodyRoute(APIRoute):
    """For endpoints ``async def endpoint(body: Model, request: Request) -> Response``; others are FastAPI's as usual.

    What is wrong with a body is a RequestValidationError, or an HTTPException with status 400.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        endpoint = self.endpoint
        model = get_type_hints(endpoint).get("body")
        if model is None:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                raw = await request.body()
            except ClientDisconnect:
                raise HTTPException(400, "the connection was closed before the end of the body") from None
            answer: Response = await endpoint(read_body(model, raw, request.headers.get("Content-Type", "")), request)
            return answer

        return handle


def read_body(model: type[BaseModel], raw: bytes, kind: str) -> BaseModel:
    """``raw`` as a ``model``. ``kind``: its Content-Type, which must say JSON (a form of another site cannot)."""
    if not raw:
        raise RequestValidationError([{"type": "missing", "loc": ("body",), "msg": "Field required"}])
    media_type = kind.partition(";")[0].strip().lower()
    if not re.fullmatch(r"application/([^/]+\+)?json", media_type):
        sent = f"not {kind[:100]}" if kind else "which is missing"
        raise HTTPException(400, f"the body must come with the header Content-Type: application/json, {sent}")
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
