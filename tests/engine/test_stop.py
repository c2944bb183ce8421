"""Where a text ends, whatever the borders of its tokens; and nothing that was said is ever taken back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.engine.params import SamplingParams
from pagedkv.engine.stop import Finish, StopStrings, Voice

EOS, OTHER_EOS, SPECIAL = 1000, 1001, 1002


class Pieces:
    """A tokenizer whose token i is the i-th of some byte strings; three ids more are special."""

    special_ids = frozenset({EOS, OTHER_EOS, SPECIAL})

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return f"<{token_id}>".encode() if token_id in self.special_ids else self.pieces[token_id]


def speak(text: str | list[str], ids: list[int] | None = None, **params: Any) -> tuple[str, Finish | None, int]:
    """(the text, why it ended, how many tokens it took)"""
    pieces = [piece.encode() for piece in text]
    voice = Voice(Pieces(pieces), SamplingParams(**params), eos_ids=[EOS, OTHER_EOS])
    finish, said, count = None, "", 0
    for token in range(len(pieces)) if ids is None else ids:
        finish, count = voice.push(token), count + 1
        assert voice.text.startswith(said)
        said = voice.text
        if finish is not None:
            return voice.text, finish, count
    voice.close()
    return voice.text, finish, count


def test_a_stop_string_across_tokens() -> None:
    assert speak(["one ", "#", "# two"], stop="##") == ("one ", Finish("stop", "##"), 3)
    assert speak(["one ", "#", "# two"], stop="##", include_stop_str_in_output=True)[0] == "one ##"
    assert speak(["one ", "#", "x# two"], stop="##") == ("one #x# two", None, 3)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    voice = Voice(Pieces([b"ab", b"c", b"xab", b"q"]), SamplingParams(stop=["abcd", "bce"]))
    said = []
    for token in range(4):
        assert voice.push(token) is None
        said.append(voice.text)
    assert said == ["", "", "abcx", "abcxabq"]
    voice = Voice(Pieces([b"ab", b"c"]), SamplingParams(stop=["abcd"]))
    voice.push(0)
    voice.push(1)
    voice.close()
    assert voice.text == "abc"


def test_the_first_complete_one_wins_then_the_longest() -> None:
    assert speak(["xxabcd"], stop=["abcd", "bc"]) == ("xxa", Finish("stop", "bc"), 1)
    assert speak(["xxabc"], stop=["c", "abc"]) == ("xx", Finish("stop", "abc"), 1)
    assert speak(["aab"], stop=["ab"]) == ("a", Finish("stop", "ab"), 1)


def test_stop_inside_a_multibyte_character_run() -> None:
    tokens = [bytes([byte]) for byte in "a한국b".encode()]
    voice = Voice(Pieces(tokens), SamplingParams(stop="국"))
    ends = [voice.push(token) for token in range(len(tokens) - 1)]
    assert ends == [None] * (len(tokens) - 2) + [Finish("stop", "국")]
    assert voice.text == "a한"


letters = st.text("ab", min_size=1, max_size=4)


def first_end(text: str, stops: list[str], start: int = 0) -> tuple[int, str] | None:
    """By trying every end of every string."""
    for end in range(max(start, 1), len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None


@settings(max_examples=300, deadline=None)
@given(st.text("abc", max_size=24), st.lists(letters, min_size=1, max_size=4), st.data())
def test_any_cut_into_tokens_gives_the_same_end(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)) | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(cuts)]
    minimum = data.draw(st.integers(0, 3))
    late = len("".join(pieces[:minimum])) + 1  # the first end that may count
    expected = first_end(text, stops, late)
    said, finish, _ = speak(pieces, stop=stops, min_tokens=minimum, max_tokens=None)
    if expected is None:
        assert (said, finish) == (text, None)
    else:
        end, stop = expected
        assert (said, finish) == (text[: end - len(stop)], Finish("stop", stop))


@settings(max_examples=200, deadline=None)
@given(st.text("ab", max_size=20), st.lists(letters, min_size=1, max_size=4))
def test_held_is_the_longest_tail_that_a_string_begins_with(text: str, stops: list[str]) -> None:
    automaton, state = StopStrings(stops), 0
    for char in text:
        state = automaton.step(state, char)
    tails = [k for k in range(len(text) + 1) for s in stops if k < len(s) and text.endswith(s[:k])]
    assert automaton.held[state] == max(tails)
    matches = [s for s in stops if text.endswith(s)]
    assert automaton.match[state] == (max(matches, key=len) if matches else None)


@pytest.mark.parametrize("eos", [EOS, OTHER_EOS])
def test_b85_every_eos_id_ends_the_text_and_is_not_in_it(eos: int) -> None:
    assert speak(["a", "b"], [0, eos]) == ("a", Finish("stop"), 2)
    assert speak(["a", "b"], [0, eos, 1], ignore_eos=True) == ("ab", None, 3)
    assert speak(["a", "b"], [0, eos], skip_special_tokens=False)[0] == "a"
    assert speak(["a"], [0, eos], skip_special_tokens=False, include_stop_str_in_output=True)[0] == f"a<{eos}>"


def test_b85_min_tokens_puts_the_end_off() -> None:
    assert speak(["a", "b"], [0, EOS, 1, EOS, 1], min_tokens=2) == ("ab", Finish("stop"), 4)
    assert speak(["a", "b"], [0, 1, 0, 1], stop="ab", min_tokens=2) == ("ab", Finish("stop", "ab"), 4)


def test_stop_ids() -> None:
    assert speak(["a", "b", "c"], [0, 1, 2], stop_token_ids=[1]) == ("a", Finish("stop", 1), 2)
    assert speak(["a", "b"], [0, 1], stop_token_ids=[1], include_stop_str_in_output=True)[0] == "ab"
    assert speak(["a", "b"], [0, 1], stop_token_ids=[1], ignore_eos=True)[1] == Finish("stop", 1)
    assert speak(["a"], [0, EOS], stop_token_ids=[EOS]) == ("a", Finish("stop"), 2)
    assert speak(["a"], [0, EOS], stop_token_ids=[EOS], ignore_eos=True)[1] == Finish("stop", EOS)


def test_an_end_by_id_gives_back_what_was_held() -> None:
    assert speak(["a", "#"], [0, 1, EOS], stop="##")[0] == "a#"


def test_without_a_tokenizer_ids_still_end_it() -> None:
    voice = Voice(None, SamplingParams(stop_token_ids=[5]), eos_ids=[EOS])
    assert [voice.push(3), voice.push(5)] == [None, Finish("stop", 5)]
    assert voice.text == ""
