"""Every exception that pagedkv raises on purpose.

    PagedKVError
    ├── OutOfBlocks            (MemoryError)   the pool cannot make the room asked for; nothing was changed
    ├── BlockStateError        (RuntimeError)  a block is not in the state that the call needs (release of a free one)
    ├── SequenceExists         (ValueError)    create or fork onto an id that is in use
    ├── UnknownSequence        (KeyError)      an id that was never created, or was freed
    ├── InvalidRequest         (ValueError)    a request that cannot be served: names the field, the value and the limit
    │   └── RequestTooLong                     it can never fit, whatever else leaves
    ├── QueueFull                              the bounded queue of waiting requests is full; try again later
    ├── EngineDead             (RuntimeError)  the engine's thread has ended; nothing more will be answered
    ├── RequestFailed          (RuntimeError)  this one request ended with an error; others go on
    ├── ModelError
    │   ├── UnsupportedModel   (ValueError)    an architecture, format or feature that is not built here
    │   ├── WeightError        (ValueError)    a tensor is missing, surplus, truncated or of another shape
    │   ├── ModelNotFound      (LookupError)   a name that resolves to no files
    │   └── ChatTemplateError  (ValueError)    no chat template, or the template refused the messages
    └── BackendUnavailable     (RuntimeError)  an attention or product backend was asked for by name and is not here

What a user can cause is one of these, never an ``assert``. The second base is the builtin that callers of
Python's own containers expect, so ``except MemoryError`` around ``reserve`` works as the chapter writes it.
"""

from __future__ import annotations


class PagedKVError(Exception):
    """Base of everything below."""


class OutOfBlocks(PagedKVError, MemoryError):
    """The pool cannot make the room asked for.

    needed:    fresh blocks that the call wanted
    free:      blocks on the free list
    evictable: blocks that only the prefix cache holds; ``evict`` can free every one of them
    """

    def __init__(self, needed: int, free: int, evictable: int = 0) -> None:
        super().__init__(needed, free, evictable)
        self.needed = needed
        self.free = free
        self.evictable = evictable

    def __str__(self) -> str:
        return f"out of blocks: {self.needed} needed, {self.free} free, {self.evictable} evictable"


class BlockStateError(PagedKVError, RuntimeError):
    """A block is not in the state that the call needs; nothing was changed."""


class SequenceExists(PagedKVError, ValueError):
    """``create`` or ``fork`` onto an id that is in use."""


class UnknownSequence(PagedKVError, KeyError):
    """An id that was never created, or was freed."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else "unknown sequence"


class InvalidRequest(PagedKVError, ValueError):
    """A request that cannot be served. ``field`` is the parameter's name as the caller wrote it."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class RequestTooLong(InvalidRequest):
    """It can never fit (context length or pool), whatever else leaves. The message carries both numbers."""


class QueueFull(PagedKVError):
    """The bounded queue of waiting requests is full; ``retry_after`` is a guess in seconds."""

    def __init__(self, limit: int, retry_after: float = 1.0) -> None:
        super().__init__(f"{limit} requests are waiting already, which is the limit")
        self.limit = limit
        self.retry_after = retry_after


class EngineDead(PagedKVError, RuntimeError):
    """The engine's thread has ended; nothing more will be answered."""


class RequestFailed(PagedKVError, RuntimeError):
    """This one request ended with an error; others go on."""


class ModelError(PagedKVError):
    """Base of everything about model files, tokenizers and templates."""


class UnsupportedModel(ModelError, ValueError):
    """An architecture, format or feature that is not built here."""


class WeightError(ModelError, ValueError):
    """A tensor is missing, surplus, truncated or of another shape; the message names it."""


class ModelNotFound(ModelError, LookupError):
    """A name that resolves to no files."""


class ChatTemplateError(ModelError, ValueError):
    """No chat template, or the template refused the messages."""


class BackendUnavailable(PagedKVError, RuntimeError):
    """A backend was asked for by name and is not available here; the message says why."""
