"""``pagedkv run-batch``: a file of requests in OpenAI's batch format in, a file of answers out.

Each line goes through the server's own application, without a socket, so that fields, checks and errors are those of
the server. Many run at a time; the answers stand in the order of the questions.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from pagedkv.cli.options import with_engine_options

PATHS = ("/v1/chat/completions", "/v1/completions")


@with_engine_options
def run_batch(
    model: Annotated[str, typer.Argument(help="A model as for serve.")] = "smollm2-135m",
    *,
    input_file: Annotated[Path, typer.Option("-i", "--input-file", help="Requests, one JSON object a line.")],
    output_file: Annotated[Path, typer.Option("-o", "--output-file", help="Where the answers go.")],
    served_model_name: Annotated[list[str] | None, typer.Option(help="Name(s) that the requests use.")] = None,
    max_in_flight: Annotated[int, typer.Option(help="Requests under way at a time.", min=1)] = 256,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests (OpenAI's batch format)."""
    from pagedkv.async_llm import AsyncLLM
    from pagedkv.cli.progress import loading
    from pagedkv.errors import InvalidRequest

    try:
        source = input_file.open()
    except OSError as error:
        raise InvalidRequest(f"input_file: {error}", field="input_file") from None
    with source, output_file.open("w") as target:
        with loading(model) as progress:
            llm = AsyncLLM(model, progress=progress, **{"max_num_queued_reqs": max_in_flight, **engine})
        try:
            done, failed = asyncio.run(_answer_all(llm, source, target, served_model_name, max_in_flight))
        finally:
            llm.shutdown()
    print(f"{done} requests answered, {failed} of them with an error: {output_file}", file=sys.stderr)


async def _answer_all(llm: Any, source: TextIO, target: TextIO, names: list[str] | None, most: int) -> tuple[int, int]:
    import httpx

    from pagedkv.server.app import create_app
    from pagedkv.server.config import ServerConfig

    app = create_app(llm, ServerConfig(served_model_name=tuple(names or ())))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    done = failed = 0
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as http:
        async for answer in _in_order((_answer(http, line) for line in source if line.strip()), most):
            done += 1
            failed += answer["response"] is None or answer["response"]["status_code"] != 200
            target.write(json.dumps(answer, ensure_ascii=False) + "\n")
            target.flush()
    return done, failed


async def _in_order(work: Iterator[Any], most: int) -> AsyncIterator[Any]:
    """Results in the order of ``work``, at most ``most`` of them under way."""
    pending: list[asyncio.Task[Any]] = []
    for item in work:
        pending.append(asyncio.ensure_future(item))
        if len(pending) >= most:
            yield await pending.pop(0)
    for task in pending:
        yield await task


async def _answer(http: Any, line: str) -> dict[str, Any]:
    """One line of the output file. A line that is no request becomes an error of its own and stops nothing."""
    answer: dict[str, Any] = {"id": f"batch-{uuid.uuid4().hex}", "custom_id": None, "response": None, "error": None}
    try:
        asked = json.loads(line)
        answer["custom_id"] = asked.get("custom_id")
        path, body = asked["url"], asked["body"]
        if asked.get("method", "POST") != "POST" or path not in PATHS:
            raise ValueError(f"{asked.get('method')} {path}: only POST to {' and '.join(PATHS)}")
        if body.get("stream"):
            raise ValueError("stream: a batch has no streams")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        return answer | {"error": {"code": "invalid_line", "message": reason}}
    response = await http.post(path, json=body)
    answer["response"] = {
        "status_code": response.status_code,
        "request_id": answer["id"],
        "body": response.json(),
    }
    return answer
