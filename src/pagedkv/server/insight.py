"""What the server keeps of requests that have ended: explanations that were asked for, and the record of traffic."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass

from fastapi import Request

from pagedkv.engine.outputs import RequestOutput
from pagedkv.insight.explain import Decode
from pagedkv.insight.record import TraceRecorder
from pagedkv.server.schema import Explanation

MAX_KEPT = 256  # requests whose explanations are remembered


@dataclass(frozen=True)
class Asker:
    """Who asked: explanations and recorded beginnings are never shared between two."""

    tenant: str | None
    salt: str | None


class Insight:
    """``record``: None where traffic is not recorded."""

    def __init__(self, record: TraceRecorder | None = None) -> None:
        self.record = record
        self._kept: OrderedDict[tuple[str | None, str], list[Explanation]] = OrderedDict()

    async def watch(
        self, outputs: AsyncIterator[RequestOutput], request: Request, asker: Asker, decode: Decode | None
    ) -> AsyncIterator[RequestOutput]:
        """``outputs`` as they are; of the last one is kept what is to be. ``decode``: None where no text is shown."""
        async with aclosing(outputs) as source:  # type: ignore[type-var]
            async for output in source:
                if output.finished:
                    self._ended(output, request.state.served.request_id, asker, decode)
                yield output

    def _ended(self, output: RequestOutput, name: str, asker: Asker, decode: Decode | None) -> None:
        if self.record is not None:
            generated = sum(len(sample.token_ids) for sample in output.outputs)
            scope = f"{asker.tenant or ''}\0{asker.salt or ''}"
            self.record.add(output.metrics.arrival, output.prompt_token_ids, generated, scope)
        if output.report is None:
            return
        kept = self._kept.setdefault((asker.tenant, name), [])
        kept.append(
            Explanation(
                prompt_tokens=output.report.num_tokens,
                cached_tokens=output.report.num_cached_tokens,
                reason=output.report.reason.value,
                position=output.report.position,
                text=output.explain(decode),
            )
        )
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def explanations(self, tenant: str | None, name: str) -> list[Explanation]:
        """Of one request, a prompt each; empty if there are none."""
        return self._kept.get((tenant, name), [])
