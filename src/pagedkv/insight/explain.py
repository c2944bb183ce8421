"""explain: why a prompt did, or did not, hit the prefix cache.

``describe`` puts the AttachReport of a running engine into words. ``compare`` answers the same question offline for
two prompts: where their tokens part, how many blocks they can share, and what template or tokenizer had to do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from pagedkv.cache.keys import KeyScope
from pagedkv.cache.report import AttachReport, StopReason

Decode = Callable[[Sequence[int]], str]  # token ids -> text


def describe(
    report: AttachReport,
    *,
    decode: Decode | None = None,
    prompt: Sequence[int] = (),
    scope: KeyScope | None = None,
    now: float | None = None,
) -> str:
    """The report in one or two sentences.

    decode:  given, and with ``prompt``, the texts around a divergence are quoted; left out, no text appears
    scope:   of the request, so that ``other scope`` can say which part differs (never its value)
    now:     on the cache's clock, so that ``evicted`` can say how long ago
    """
    total, cached = report.num_tokens, report.num_cached_tokens
    head = f"{cached:,} of {total:,} prompt tokens came from the cache, {report.num_computed_tokens:,} were computed."
    return f"{head} {_why(report, decode, prompt, scope, now)}"


def _why(
    report: AttachReport, decode: Decode | None, prompt: Sequence[int], scope: KeyScope | None, now: float | None
) -> str:
    at = f"token {report.position:,}"
    if report.reason is StopReason.DIVERGED:
        return f"Diverged at {at}: cached texts that begin alike go on differently there." + _quoted(
            report, decode, prompt
        )
    if report.reason is StopReason.EVICTED:
        return f"Evicted: the block at {at} was cached once" + _eviction(report, now)
    if report.reason is StopReason.OTHER_SCOPE:
        return f"Other scope: the same text is cached, but under another {_differences(scope, report.other_scope)}."
    plain = {
        StopReason.LAST_TOKEN: "Last token rule: all of it was there; the last token is computed for its logits.",
        StopReason.TOO_SHORT: "Shorter than a block: no block of this prompt is full before its last token.",
        StopReason.NEVER_SEEN: f"Never seen: nothing in the cache goes on from {at} like this prompt.",
        StopReason.TWIN_IN_FLIGHT: f"Twin in flight: another request is computing the block at {at} right now.",
        StopReason.NO_ROOM: f"No room for a copy: the block at {at} matches in part, and the pool could not spare the "
        "block that copying it on the first write takes.",
        StopReason.NOT_READ: "Not read: this request asked that nothing be taken from the cache.",
    }
    return plain[report.reason]


def _quoted(report: AttachReport, decode: Decode | None, prompt: Sequence[int]) -> str:
    if decode is None or not report.nearest_tokens:
        return ""
    start, at = report.nearest_position, report.position
    ours = prompt[start : start + len(report.nearest_tokens)]
    cut = at - start
    return (
        f" After {decode(ours[:cut])!r} this prompt says {decode(ours[cut:])!r}, "
        f"the nearest cached one {decode(report.nearest_tokens[cut:])!r}."
    )


def _eviction(report: AttachReport, now: float | None) -> str:
    gone = report.eviction
    if gone is None:
        return "."
    idle = f" and left after {gone.at - gone.idle_since:.1f} s idle"
    ago = f", {now - gone.at:.1f} s ago," if now is not None else ","
    return f"{idle}{ago} when {gone.blocks_wanted:,} blocks were wanted."


_PART_NAMES = {
    "model": "model",
    "rope": "position encoding",
    "dtype": "dtype",
    "kv_dtype": "KV format",
    "adapter": "adapter",
    "salt": "salt",
}


def scope_differences(ours: KeyScope, theirs: KeyScope) -> list[str]:
    """The parts in which two scopes differ, in words; never their values, since a salt is a secret."""
    return [_PART_NAMES[part.name] for part in fields(ours) if getattr(ours, part.name) != getattr(theirs, part.name)]


def _differences(ours: KeyScope | None, theirs: KeyScope | None) -> str:
    if ours is None or theirs is None:
        return "scope (model, adapter, salt or KV format)"
    return " and ".join(scope_differences(ours, theirs))


@dataclass(frozen=True)
class Comparison:
    """How much two prompts can share.

    num_common:      leading tokens that are equal
    num_shared:      tokens that B reuses after A, by whole blocks and then by copy-on-write within one
    num_full_blocks: whole blocks of these
    common_text:     leading characters that are equal, None where no text was given
    note:            what template or tokenizer had to do with it; "" if nothing
    """

    num_tokens_a: int
    num_tokens_b: int
    block_size: int
    num_common: int
    num_shared: int
    num_full_blocks: int
    common_text: int | None = None
    note: str = ""


def compare(a: Sequence[int], b: Sequence[int], block_size: int) -> Comparison:
    """What B finds in the cache after A was computed and published."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    published = len(a) // block_size * block_size  # of A, only full blocks are in the cache
    shared = max(0, min(common, published, len(b) - 1))
    return Comparison(len(a), len(b), block_size, common, shared, shared // block_size)


def compare_texts(
    text_a: str, text_b: str, encode: Callable[[str], list[int]], decode: Decode, block_size: int
) -> Comparison:
    """``compare`` for rendered prompts, with a note where tokens part earlier than characters do."""
    a, b = encode(text_a), encode(text_b)
    plain = compare(a, b, block_size)
    chars = next((i for i, (x, y) in enumerate(zip(text_a, text_b, strict=False)) if x != y), None)
    chars = min(len(text_a), len(text_b)) if chars is None else chars
    covered = len(decode(a[: plain.num_common]))
    note = ""
    if covered < chars:
        lost = text_a[covered:chars]
        note = (
            f"The texts are equal for {chars - covered} characters more ({_short(lost)!r}), but the tokenizer joins "
            f"them with what follows into other tokens."
        )
    return Comparison(
        plain.num_tokens_a,
        plain.num_tokens_b,
        block_size,
        plain.num_common,
        plain.num_shared,
        plain.num_full_blocks,
        chars,
        note,
    )


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
