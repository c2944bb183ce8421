"""How an answer leaves: as one JSON object, or as server-sent events that end with ``[DONE]``."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi.responses import Response, StreamingResponse
from fastapi.sse import format_sse_event
from pydantic import BaseModel

from pagedkv.server.errors import describe, error_body

STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "whole, or as events",
    }
}


async def frames(chunks: AsyncIterator[BaseModel]) -> AsyncIterator[bytes]:
    """The events of a stream. A failure after the first byte can no longer have a status: it becomes an event."""
    try:
        async for chunk in chunks:
            yield format_sse_event(data_str=chunk.model_dump_json())
        yield format_sse_event(data_str="[DONE]")
    except Exception as error:
        status, message, param, _ = describe(error)
        yield format_sse_event(data_str=json.dumps(error_body(status, message, param=param)))
        yield format_sse_event(data_str="[DONE]")


def event_stream(chunks: AsyncIterator[BaseModel]) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies hand events on at once
    return StreamingResponse(frames(chunks), media_type="text/event-stream", headers=headers)


def json_reply(answer: BaseModel) -> Response:
    """Serialised once, by pydantic; FastAPI would validate it again."""
    return Response(answer.model_dump_json(), media_type="application/json")
