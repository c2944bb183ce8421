"""explain: why a prompt did, or did not, hit the prefix cache.

``describe`` puts the AttachReport of a running engine into words. ``compare`` answers the same question offline for
two prompts: where their tokens part, how many blocks they can share, and what template or tokenizer had to do with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from pagedkv.cache.keys import KeyScope
from pagedkv.cache.report import AttachReport, StopReason

Decode = Callable[[Sequence[int]], str]  # token ids -> text


def describe(
    report: AttachReport,
    *,
    decode: Decode | None = None,
    prompt: Sequence[int] = (),
    now: float | None = None,
) -> str:
    """The report in one or two sentences.

    decode:  given, and with ``prompt``, the texts around a divergence are quoted; left out, no text appears
    now:     on the cache's clock, so that ``evicted`` can say how long ago
    """
    total, cached = report.num_tokens, report.num_cached_tokens
    head = f"{cached:,} of {total:,} prompt tokens came from the cache, {report.num_computed_tokens:,} were computed."
    return f"{head} {_why(report, decode, prompt, now)}"


def _why(report: AttachReport, decode: Decode | None, prompt: Sequence[int], now: float | None) -> str:
    at = f"token {report.position:,}"
    if report.reason is StopReason.DIVERGED:
        return f"Diverged at {at}: cached texts that begin alike go on differently there." + _quoted(
            report, decode, prompt
        )
    if report.reason is StopReason.EVICTED:
        return f"Evicted: the block at {at} was cached once" + _eviction(report, now)
    if report.reason is StopReason.OTHER_SCOPE:
        return (
            f"Other scope: the same text is cached, but under another {_differences(report.scope, report.other_scope)}."
        )
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
    """How much prompt B reuses after prompt A was computed.

    num_common:      leading tokens that are equal
    num_shared:      tokens that B reuses: whole blocks of A, then the common part of the next one (copied on write)
    num_full_blocks: the whole blocks among them
    after, says_a, says_b: the text before the place where they part, and how each goes on ("" where it ends there)
    note:            what the tokenizer had to do with it; "" if nothing
    """

    num_tokens_a: int
    num_tokens_b: int
    block_size: int
    num_common: int
    num_shared: int
    num_full_blocks: int
    after: str = ""
    says_a: str = ""
    says_b: str = ""
    note: str = ""


def compare(a: Sequence[int], b: Sequence[int], block_size: int) -> Comparison:
    """What B finds in the cache after A was computed and its full blocks published."""
    common = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    published = len(a) // block_size * block_size
    shared = max(0, min(common, published, len(b) - 1))
    return Comparison(len(a), len(b), block_size, common, shared, shared // block_size)


def compare_texts(
    text_a: str, text_b: str, encode: Callable[[str], list[int]], decode: Decode, block_size: int
) -> Comparison:
    """``compare`` for rendered prompts, with the texts around the place where they part."""
    a, b = encode(text_a), encode(text_b)
    plain = compare(a, b, block_size)
    at = plain.num_common
    before, equal = decode(a[:at]), _num_equal(text_a, text_b)
    note = ""
    lost = text_a[len(before) : equal]
    if lost.strip() and at < min(len(a), len(b)):
        note = (
            f"The texts are equal for {len(lost)} characters more ({_short(lost)!r}): the tokenizer joins them with "
            "what follows into other tokens."
        )
    return replace(
        plain,
        after=_tail(before),
        says_a=_short(decode(a[at : at + SHOWN_TOKENS])),
        says_b=_short(decode(b[at : at + SHOWN_TOKENS])),
        note=note,
    )


def tell(found: Comparison) -> str:
    """A comparison in a few lines."""
    size, shared = found.block_size, found.num_shared
    lines = [
        f"A has {found.num_tokens_a:,} tokens, B {found.num_tokens_b:,}; {found.num_common:,} at the start are equal."
    ]
    if found.num_common == min(found.num_tokens_a, found.num_tokens_b):
        shorter = "A" if found.num_tokens_a <= found.num_tokens_b else "B"
        lines.append(f"They do not part: {shorter} is the beginning of the other, or both are the same.")
    else:
        block, offset = divmod(found.num_common, size)
        lines.append(f"They part at token {found.num_common:,} (block {block}, offset {offset}).")
        lines.append(f"After {found.after!r} A says {found.says_a!r}, B says {found.says_b!r}.")
    if found.note:
        lines.append(found.note)
    partial = shared - found.num_full_blocks * size
    copied = f" and {partial} tokens of one more, copied on the first write" if partial else ""
    lines.append(
        f"After A, B reuses {shared:,} tokens ({_blocks(found.num_full_blocks, size)}{copied}) "
        f"and computes {found.num_tokens_b - shared:,}."
    )
    if found.num_common > shared and shared < found.num_tokens_b - 1:
        lines.append(f"A's last {found.num_tokens_a % size} tokens fill no block, so they are not in the cache.")
    if shared == found.num_tokens_b - 1:
        lines.append("All of B was there; its last token is computed for its logits.")
    return "\n".join(lines)


SHOWN_TOKENS = 8


def _blocks(count: int, size: int) -> str:
    return f"{count:,} block{'' if count == 1 else 's'} of {size}"


def _num_equal(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _short(text: str, most: int = 40) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _tail(text: str, most: int = 40) -> str:
    return text if len(text) <= most else "..." + text[3 - most :]
