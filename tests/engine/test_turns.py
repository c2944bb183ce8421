"""Chat turns: the ids that the model generated come back when the client echoes their text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pagedkv import LLM, SamplingParams
from pagedkv.engine.turns import ChatTurns


class Letters:
    """A tokenizer that knows "ab" as one token, and the letters too: a text has more than one spelling in ids."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        ids: list[int] = []
        position = 0
        while position < len(text):
            pair = text[position : position + 2] == "ab"
            ids.append(1000 if pair else ord(text[position]))
            position += 2 if pair else 1
        return ids

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return "".join("ab" if i == 1000 else chr(i) for i in ids)


def ids(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_reply_that_tokenises_differently_from_how_it_was_generated_is_spliced() -> None:
    turns = ChatTurns(Letters())
    prompt = turns.encode("user: hi\nbot: ")
    reply = ids("xaby")  # the tokenizer would write x, ab, y
    turns.finished(prompt, reply, "xaby")
    assert turns.encode("user: hi\nbot: xaby\nuser: ab?") == [*prompt, *reply, *Letters().encode("\nuser: ab?")]


def test_turn_after_turn() -> None:
    turns = ChatTurns(Letters())
    text, kept = "u: hi\nb: ", turns.encode("u: hi\nb: ")
    for turn in range(5):
        reply = ids("ab" * (turn + 1))
        turns.finished(kept, reply, "ab" * (turn + 1))
        text += "ab" * (turn + 1) + f"\nu: {turn}ab\nb: "
        before = [*kept, *reply]
        kept = turns.encode(text)
        assert kept[: len(before)] == before


@pytest.mark.parametrize(
    ("reply", "text", "next_text", "why"),
    [
        (ids("ab"), "ab", "u: hi\nb: ac", "the client changed the reply"),
        (ids("ab!"), "ab", "u: hi\nb: ab!", "a stop string cut the text: its ids say more than was shown"),
        ([], "", "u: hi\nb: ab", "nothing was generated"),
    ],
)
def test_what_is_not_the_very_text_is_not_spliced(reply: list[int], text: str, next_text: str, why: str) -> None:
    turns = ChatTurns(Letters())
    prompt = turns.encode("u: hi\nb: ")
    turns.finished(prompt, reply, text)
    assert turns.encode(next_text) == Letters().encode(next_text), why


def test_another_salt_finds_nothing() -> None:
    turns = ChatTurns(Letters())
    prompt = turns.encode("u: hi\nb: ", salt="A")
    turns.finished(prompt, ids("ab"), "ab", salt="A")
    assert turns.encode("u: hi\nb: ab", salt="B") == Letters().encode("u: hi\nb: ab")
    assert turns.encode("u: hi\nb: ab", salt="A") == [*prompt, *ids("ab")]


def test_prompts_that_were_not_made_here_are_not_kept() -> None:
    turns = ChatTurns(Letters())
    turns.finished(ids("once upon "), ids("ab"), "ab")
    assert turns.num_tokens == 0


def test_memory_is_bounded_in_chats_and_in_tokens() -> None:
    turns = ChatTurns(Letters(), max_chats=8, max_tokens=200)
    for i in range(100):
        prompt = turns.encode(f"u: {i}\nb: ")
        turns.finished(prompt, ids("ab" * (i % 30 + 1)), "ab" * (i % 30 + 1))
        assert turns.num_tokens <= 200
        assert len(turns._chats) <= 8
        assert sum(turns._lengths.values()) == len(turns._chats)
    assert len(turns._asked) <= 4 * 8


def test_the_next_turn_of_a_chat_hits_all_but_its_new_tokens_and_a_block(tiny_model: Callable[..., Path]) -> None:
    """Replies made of single letters, which the tokenizer would merge: without the splice this would miss."""
    llm = LLM(str(tiny_model()), num_gpu_blocks_override=256, max_model_len=512, block_size=4, max_num_seqs=4)
    letters = [llm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "the cache blo"]
    params = SamplingParams(temperature=1, seed=3, max_tokens=24, allowed_token_ids=letters)
    spelled_differently = 0
    for question in ("What is a block?", "What is a table?", "Who shares them?", "When are they copied?"):
        chat = [{"role": "user", "content": question}]
        first = llm.chat(chat, params, use_tqdm=False)[0]
        reply = first.outputs[0]
        chat += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "And then?"}]
        second = llm.chat(chat, params, use_tqdm=False)[0]
        kept = [*first.prompt_token_ids, *reply.token_ids]
        assert list(second.prompt_token_ids)[: len(kept)] == kept
        computed = len(kept) - 1  # the last token of the reply was never run
        assert second.num_cached_tokens >= computed - 4
        spelled_differently += llm.tokenizer.encode(reply.text, add_special_tokens=False) != list(reply.token_ids)
    assert spelled_differently > 0
