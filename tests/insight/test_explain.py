"""explain: the right reason in words for each way a prompt can miss, from a real cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from pagedkv.cache.keys import KeyScope
from pagedkv.cache.manager import KVCacheManager
from pagedkv.cache.prefix import PrefixCache
from pagedkv.cache.report import StopReason
from pagedkv.insight.explain import compare, compare_texts, describe, scope_differences, tell

BLOCK = 4
TEXT = list(range(100, 112))  # three blocks


def letters(ids: Any) -> str:
    return "".join(chr(token) for token in ids)


@dataclass
class Cache:
    num_blocks: int = 16
    now: float = 0.0
    manager: KVCacheManager = field(init=False)
    prefix: PrefixCache = field(init=False)
    count: int = 0

    def __post_init__(self) -> None:
        self.manager = KVCacheManager(self.num_blocks, BLOCK)
        self.prefix = PrefixCache(self.manager, clock=lambda: self.now)

    def begin(self, prompt: list[int], **attach: Any) -> int:
        self.count += 1
        self.prefix.attach(self.count, prompt, **attach)
        return self.count

    def compute(self, seq: int, prompt: list[int]) -> None:
        new = len(prompt) - self.manager.lengths[seq]
        self.prefix.evict(self.manager.blocks_to_reserve(seq, new))
        self.manager.reserve(seq, new)
        self.manager.advance(seq, new)
        self.prefix.remember(seq, prompt)

    def serve(self, prompt: list[int], **attach: Any) -> None:
        seq = self.begin(prompt, **attach)
        self.compute(seq, prompt)
        self.manager.free(seq)

    def why(self, prompt: list[int], **attach: Any) -> tuple[StopReason, str]:
        report = self.prefix.report(self.begin(prompt, **attach))
        return report.reason, describe(report, decode=letters, prompt=prompt, now=self.now)


def test_diverged_names_the_token_and_quotes_both_texts() -> None:
    cache = Cache()
    cache.serve(TEXT)
    reason, words = cache.why([*TEXT[:6], 65, 66, 67])
    assert reason is StopReason.DIVERGED
    assert words.startswith("6 of 9 prompt tokens came from the cache, 3 were computed. Diverged at token 6:")
    assert "After 'hi' this prompt says 'AB', the nearest cached one 'jk'." in words


def test_without_a_decoder_no_text_appears() -> None:
    cache = Cache()
    cache.serve(TEXT)
    prompt = [*TEXT[:6], 65, 66, 67]
    words = describe(cache.prefix.report(cache.begin(prompt)), prompt=prompt)
    assert words.endswith("go on differently there.")


def test_evicted_says_how_long_idle_how_long_ago_and_under_what_pressure() -> None:
    cache = Cache(num_blocks=4)
    cache.serve(TEXT)
    cache.now = 2.5
    cache.serve([7] * 16)
    cache.now = 10.0
    cache.prefix.evict(4)
    reason, words = cache.why([*TEXT, 1])
    assert reason is StopReason.EVICTED
    assert "0 of 13" in words
    assert "left after 2.5 s idle, 7.5 s ago, when 4 blocks were wanted" in words


@pytest.mark.parametrize(
    ("other", "part"),
    [
        (KeyScope(salt="tenant-b"), "salt"),
        (KeyScope(adapter="x"), "adapter"),
        (KeyScope(model="y"), "model"),
        (KeyScope(kv_dtype="int8"), "KV format"),
        (KeyScope(salt="tenant-b", adapter="x"), "adapter and salt"),
    ],
)
def test_other_scope_names_the_part_that_differs_and_never_its_value(other: KeyScope, part: str) -> None:
    cache = Cache()
    cache.serve(TEXT)
    reason, words = cache.why(TEXT, scope=other)
    assert reason is StopReason.OTHER_SCOPE
    assert words.endswith(f"under another {part}.")
    assert "tenant-b" not in words


def test_shorter_than_a_block() -> None:
    reason, words = Cache().why([1, 2, 3])
    assert reason is StopReason.TOO_SHORT
    assert "Shorter than a block" in words


def test_never_seen() -> None:
    cache = Cache()
    cache.serve(TEXT)
    reason, words = cache.why([50] * 9)
    assert reason is StopReason.NEVER_SEEN
    assert "goes on from token 0 like this prompt" in words


def test_last_token_rule() -> None:
    cache = Cache()
    cache.serve(TEXT)
    reason, words = cache.why(TEXT)
    assert reason is StopReason.LAST_TOKEN
    assert words.startswith("11 of 12 prompt tokens came from the cache, 1 were computed. Last token rule")


def test_twin_in_flight() -> None:
    cache = Cache()
    cache.begin(TEXT)
    reason, words = cache.why(TEXT)
    assert reason is StopReason.TWIN_IN_FLIGHT
    assert "another request is computing the block at token 0 right now" in words


def test_no_room_for_a_copy() -> None:
    cache = Cache(num_blocks=3)
    cache.serve(TEXT)
    reason, words = cache.why(TEXT)
    assert reason is StopReason.NO_ROOM
    assert "could not spare the block" in words


def test_not_read() -> None:
    cache = Cache()
    cache.serve(TEXT)
    assert cache.why(TEXT, read=False)[0] is StopReason.NOT_READ


def test_every_reason_has_words() -> None:
    cache = Cache()
    cache.serve(TEXT)
    report = cache.prefix.report(cache.begin(TEXT))
    from dataclasses import replace

    for reason in StopReason:
        assert len(describe(replace(report, reason=reason))) > 60


def test_scope_differences_are_words_in_order() -> None:
    assert scope_differences(KeyScope(), KeyScope(dtype="a", rope="b")) == ["position encoding", "dtype"]


@pytest.mark.parametrize(
    ("a", "b", "common", "shared", "blocks"),
    [
        (TEXT, TEXT, 12, 11, 2),
        (TEXT, [*TEXT, 1], 12, 12, 3),
        (TEXT[:6], TEXT, 6, 4, 1),  # A's second block is not full, so it was never published
        (TEXT, [*TEXT[:6], 1], 6, 6, 1),
        (TEXT, [1], 0, 0, 0),
        (TEXT, TEXT[:1], 1, 0, 0),
    ],
)
def test_compare_agrees_with_the_real_cache(a: list[int], b: list[int], common: int, shared: int, blocks: int) -> None:
    found = compare(a, b, BLOCK)
    assert (found.num_common, found.num_shared, found.num_full_blocks) == (common, shared, blocks)
    cache = Cache()
    cache.serve(a)
    assert cache.prefix.match(b).num_cached_tokens == shared


def encode_pairs(text: str) -> list[int]:
    """A toy tokenizer that joins letters two by two."""
    return [ord(text[i]) * 256 + (ord(text[i + 1]) if i + 1 < len(text) else 0) for i in range(0, len(text), 2)]


def decode_pairs(ids: Any) -> str:
    return "".join(chr(i // 256) + (chr(i % 256) if i % 256 else "") for i in ids)


def test_texts_are_quoted_where_they_part() -> None:
    found = compare_texts("abcdXX", "abcdYY", encode_pairs, decode_pairs, 2)
    assert (found.after, found.says_a, found.says_b, found.note) == ("abcd", "XX", "YY", "")
    words = tell(found)
    assert "They part at token 2 (block 1, offset 0)." in words
    assert "B reuses 2 tokens (1 block of 2) and computes 1." in words


def test_a_tokenizer_that_joins_across_the_end_of_what_is_equal_is_named() -> None:
    found = compare_texts("abcdeX", "abcdeY", encode_pairs, decode_pairs, 2)
    assert "equal for 1 characters more ('e')" in found.note
    assert found.note in tell(found)


def test_equal_texts_and_beginnings_do_not_part() -> None:
    assert "They do not part" in tell(compare_texts("abcd", "abcd", encode_pairs, decode_pairs, 1))
    assert "A is the beginning" in tell(compare_texts("ab", "abcd", encode_pairs, decode_pairs, 1))


def test_an_output_of_the_engine_explains_itself_where_it_was_asked_to(tiny_model: Any) -> None:
    from pagedkv import LLM, SamplingParams

    llm = LLM(str(tiny_model()), block_size=4, num_gpu_blocks_override=32, max_model_len=64)
    greedy = SamplingParams(temperature=0, max_tokens=2)
    prompt = list(range(3, 16))
    asked, not_asked = (
        llm.generate({"prompt_token_ids": prompt}, greedy, use_tqdm=False, explain=explain)[0]
        for explain in (True, False)
    )
    assert asked.report is not None
    assert asked.report.reason is StopReason.NEVER_SEEN
    assert asked.explain().startswith("0 of 13 prompt tokens came from the cache, 13 were computed.")
    assert not_asked.report is None
    assert "explain=True" in not_asked.explain()
    other = [*prompt[:6], 40, 41, 42]
    output = llm.generate([other], greedy, use_tqdm=False, explain=True)[0]
    assert output.num_cached_tokens == 6
    assert "Diverged at token 6" in output.explain()
    assert "this prompt says" in output.explain(decode=llm.tokenizer.decode)
