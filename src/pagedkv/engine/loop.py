"""EngineThread: an engine in a thread of its own, and the streams through which others hear of their requests.

Everything that touches the engine happens in that thread, between two steps: others hand in calls (``call``, ``post``)
and get futures back. A stream keeps the latest output only. Outputs are cumulative, so a consumer that is slower than
the engine misses nothing and nothing piles up behind it.

The thread ends by ``stop`` or by an exception of a step; either way every stream and every call still open gets
EngineDead, and later ones get it at once. Nothing waits for a thread that is gone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pagedkv.engine.engine import Engine
from pagedkv.engine.metrics import EngineStats
from pagedkv.engine.outputs import RequestOutput
from pagedkv.errors import EngineDead

T = TypeVar("T")
_log = logging.getLogger("pagedkv")


class Stream:
    """The outputs of one request, for one consumer in one event loop.

    States: open -> ended (its last output or an error was put). ``key`` is the engine's, once the request is in;
    ``closed``: the consumer is gone, and a request that has not entered yet is not to.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.key: int | None = None
        self.closed = False
        self._news: asyncio.Future[None] | None = None
        self._latest: RequestOutput | None = None
        self._error: BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """In the loop's thread: the newest output, or what ended it."""
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._latest = item
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def next(self) -> RequestOutput:
        """The newest output that was not seen yet; an error only after all outputs."""
        while self._latest is None:
            if self._error is not None:
                raise self._error
            self._news = self.loop.create_future()
            await self._news
        output, self._latest = self._latest, None
        return output


@dataclass(frozen=True)
class _Call(Generic[T]):
    """Something to do between two steps, and who waits for its result."""

    function: Callable[[Engine], T]
    future: Future[T]

    def run(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function(engine))
        except Exception as error:
            self.future.set_exception(error)

    def fail(self, error: EngineDead) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


@dataclass(frozen=True)
class _Entry:
    """A request that comes in. Nobody waits for more than its first output, so it needs no future."""

    stream: Stream
    add: Callable[[Engine], int]
    streams: dict[int, Stream]

    def run(self, engine: Engine) -> None:
        if self.stream.closed:
            return
        try:
            key = self.add(engine)
        except Exception as error:
            self.fail(error)
            return
        self.stream.key = key
        self.streams[key] = self.stream

    def fail(self, error: Exception) -> None:
        _hand_over(self.stream.loop, [(self.stream, error)])


class Observer(Protocol):
    """Hears, in the engine's thread, what happens. What it raises is logged and does not stop the engine."""

    def stepped(self, stats: EngineStats) -> None: ...

    def delivered(self, outputs: Sequence[RequestOutput]) -> None: ...


class EngineThread:
    """Runs ``engine.step`` while there is something to do, and calls in between."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: deque[_Call[Any] | _Entry] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._ended = False
        self._cause: BaseException | None = None
        self._streams: dict[int, Stream] = {}
        self.observer: Observer | None = None
        self.stats: EngineStats = engine.stats()  # as of the last step
        self._thread = threading.Thread(target=self._main, name="pagedkv-engine", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return not self._ended and self._thread.is_alive()

    @property
    def num_calls(self) -> int:
        """Calls that wait for the engine."""
        return len(self._calls)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs ``function(engine)`` between two steps. The future gets its result, its exception, or EngineDead."""
        future: Future[T] = Future()
        self._hand_in(_Call(function, future))
        return future

    def _hand_in(self, call: _Call[Any] | _Entry) -> None:
        with self._wake:
            if not self._ended and not self._stopping:
                self._calls.append(call)
                self._wake.notify()
                return
        call.fail(self._dead())

    def enter(self, stream: Stream, add: Callable[[Engine], int]) -> None:
        """A request comes in: ``add(engine)`` returns its key, its outputs go to ``stream``, and so does an error."""
        self._hand_in(_Entry(stream, add, self._streams))

    def deliver(self, outputs: Sequence[RequestOutput], keys: Iterable[int]) -> None:
        """In the engine's thread: outputs to the streams of the requests with these keys, one wake-up for each loop."""
        batches: dict[asyncio.AbstractEventLoop, list[tuple[Stream, RequestOutput]]] = {}
        for output, key in zip(outputs, keys, strict=True):
            stream = self._streams.pop(key, None) if output.finished else self._streams.get(key)
            if stream is not None:
                batches.setdefault(stream.loop, []).append((stream, output))
        for loop, batch in batches.items():
            _hand_over(loop, batch)
        self._tell(lambda observer: observer.delivered(outputs))

    def _tell(self, news: Callable[[Observer], None]) -> None:
        if self.observer is None:
            return
        try:
            news(self.observer)
        except Exception:
            _log.exception("the observer of the engine failed")

    def stop(self, timeout: float | None = None) -> None:
        """Ends the thread after the step that runs now. What was running is given up. Harmless if called twice."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _main(self) -> None:
        try:
            while self._take_calls():
                if self._engine.has_unfinished():
                    keyed = self._engine.step_keyed()
                    self.stats = stats = self._engine.stats()
                    self._tell(lambda observer, stats=stats: observer.stepped(stats))  # type: ignore[misc]
                    self.deliver([output for _, output in keyed], [key for key, _ in keyed])
        except BaseException as error:
            self._cause = error
            _log.exception("the engine's thread has ended; every open request gets EngineDead")
        finally:
            self._end()

    def _take_calls(self) -> bool:
        """Runs the calls that have come; waits for one while there is nothing else to do. False: stop."""
        while True:
            with self._wake:
                while not self._calls and not self._stopping and not self._engine.has_unfinished():
                    self._wake.wait()
                if self._stopping:
                    return False
                calls = list(self._calls)
                self._calls.clear()
            for call in calls:
                call.run(self._engine)
            if calls:
                self.stats = self._engine.stats()
            if self._engine.has_unfinished():
                return True

    def _end(self) -> None:
        with self._wake:
            self._ended = True
            calls = list(self._calls)
            self._calls.clear()
        for call in calls:
            call.fail(self._dead())
        for stream in self._streams.values():
            _hand_over(stream.loop, [(stream, self._dead())])
        self._streams.clear()

    def _dead(self) -> EngineDead:
        cause = self._cause
        if cause is None:
            return EngineDead("the engine was shut down")
        return EngineDead(f"the engine has stopped: {type(cause).__name__}: {cause}")


def _hand_over(loop: asyncio.AbstractEventLoop, batch: Sequence[tuple[Stream, RequestOutput | Exception]]) -> None:
    def put() -> None:
        for stream, item in batch:
            stream.put(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:  # the loop is closed: nobody is left to read it
        _log.debug("outputs for a closed event loop were dropped")
