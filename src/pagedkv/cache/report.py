"""What attach found and why it stopped there: data only. ``insight/explain`` puts it into words."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from enum import Enum

from pagedkv.cache.evictions import Eviction, EvictionLog
from pagedkv.cache.index import BlockIndex
from pagedkv.cache.keys import KeyChain, KeyScope, decode_tokens
from pagedkv.cache.match import Match

NUM_SCOPES_ASKED = 64


class StopReason(Enum):
    """Why no more of a prompt was found in the cache."""

    LAST_TOKEN = "last token rule"  # all of it was there; one token is computed for its logits
    DIVERGED = "diverged"  # a cached text goes on differently
    EVICTED = "evicted"  # the next block was cached once
    OTHER_SCOPE = "other scope"  # the same text is cached under another scope
    TOO_SHORT = "shorter than a block"  # no block of it can be full before its last token
    NEVER_SEEN = "never seen"  # nothing cached begins like this
    TWIN_IN_FLIGHT = "twin in flight"  # another sequence is computing the next block right now
    NO_ROOM = "no room for a copy"  # a partial hit was given up, since its copy-on-write could not be had
    NOT_READ = "not read"  # the caller asked that nothing be taken from the cache


@dataclass(frozen=True)
class AttachReport:
    """How much of a prompt was reused, and what was in the way of more.

    num_tokens:         of the prompt
    num_cached_tokens:  reused; the other ``num_computed_tokens`` are computed, at least 1
    num_partial_tokens: of the reused ones, those from a block that was cached for another continuation
    reason, position:   why it stopped, and the first position that was not reused
    nearest_tokens:     of all cached blocks that go on from the last full one, the tokens of that which shares most
    nearest_position:   where those tokens begin
    eviction:           the record of the next block (EVICTED)
    other_scope:        a scope under which the first block is cached (OTHER_SCOPE)
    twin:               the sequence that computes the next block (TWIN_IN_FLIGHT)
    scope:              of the sequence
    """

    num_tokens: int
    num_cached_tokens: int
    num_partial_tokens: int
    reason: StopReason
    position: int
    nearest_tokens: tuple[int, ...] = ()
    nearest_position: int = 0
    eviction: Eviction | None = None
    other_scope: KeyScope | None = None
    twin: Hashable | None = None
    scope: KeyScope | None = None

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens left to compute."""
        return self.num_tokens - self.num_cached_tokens


def explain(index: BlockIndex, chain: KeyChain, match: Match, log: EvictionLog, evicted: int) -> AttachReport:
    """The report of a match, made when ``evicted`` blocks had been evicted."""
    full = match.num_blocks
    start = full * index.block_size
    report = AttachReport(
        num_tokens=match.num_tokens,
        num_cached_tokens=match.num_cached_tokens,
        num_partial_tokens=match.num_cached_tokens - start,
        reason=StopReason.NEVER_SEEN,
        position=match.num_cached_tokens,
        nearest_tokens=() if match.nearest is None else decode_tokens(match.nearest),
        nearest_position=start,
        scope=chain.scope,
    )
    if not match.read:
        return replace(report, reason=StopReason.NOT_READ)
    if report.num_computed_tokens == 1:
        return replace(report, reason=StopReason.LAST_TOKEN)
    if match.given_up:
        return replace(report, reason=StopReason.NO_ROOM)
    if match.twin is not None:
        return replace(report, reason=StopReason.TWIN_IN_FLIGHT, twin=match.twin)
    if full < len(chain.keys) and start + index.block_size <= match.num_tokens:
        gone = log.find(chain.keys[full], evicted)
        if gone is not None:
            return replace(report, reason=StopReason.EVICTED, eviction=gone)
    elsewhere = _other_scope(index, chain) if full == 0 and match.num_tokens >= index.block_size else None
    if elsewhere is not None:
        return replace(report, reason=StopReason.OTHER_SCOPE, other_scope=elsewhere)
    if full == 0 and report.num_partial_tokens == 0 and match.num_tokens <= index.block_size:
        return replace(report, reason=StopReason.TOO_SHORT)
    if report.num_partial_tokens or (full and match.nearest is not None):
        return replace(report, reason=StopReason.DIVERGED)
    return report


def _other_scope(index: BlockIndex, chain: KeyChain) -> KeyScope | None:
    """A scope other than the chain's under which its first block is cached; the newest scopes are asked."""
    for root in index.roots()[:NUM_SCOPES_ASKED]:
        scope = index.scope_of(root)
        if scope != chain.scope:
            near = index.children.around(root, chain.chunks[0])
            if any(index.tokens[block] == chain.chunks[0] for block in near):
                return scope
    return None


@dataclass
class PrefixStats:
    """Counts since the cache was made. Tokens, except where the name says blocks.

    queries:  prompt tokens of the attaches that were counted       hits: those of them that were reused
    """

    queries: int = 0
    hits: int = 0
    published_blocks: int = 0
    evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """hits / queries; 0 before the first query."""
        return self.hits / self.queries if self.queries else 0.0
