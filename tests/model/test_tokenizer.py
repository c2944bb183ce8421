"""Text <-> ids: transformers' ids, exact bytes, and the frame around a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import SPECIAL, tiny_tokenizer, write_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from pagedkv.errors import InvalidRequest, ModelError, UnsupportedModel
from pagedkv.model.tokenizer import Tokenizer as Ours
from pagedkv.model.tokenizer import tokenizer_from_files

TEXTS = (
    "",
    "Hello world",
    " two  blanks   three\n\n\tend ",
    "naïve café — Ελλάδα, 日本語, العربية, 🎉👩‍👩‍👧",
    "1234567890 3.14159 0x1F",
    "<|im_start|>user\nhi<|im_end|>",
    "don't we'll I'M",
    "\x00\x7f\u00a0\u3000\ufeff",
)


def read(directory: Path, tokenizer: Tokenizer | None = None, **config: Any) -> Ours:
    write_tokenizer(directory, tokenizer, **config)
    return tokenizer_from_files(directory)


def with_bos() -> Tokenizer:
    """A tokenizer whose post-processor puts <|endoftext|> in front, as Llama 3's does with its BOS."""
    tokenizer = tiny_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
    )
    return tokenizer


def sentence_piece_like() -> Tokenizer:
    """Llama 2's kind: U+2581 for blanks, <0x..> for bytes that no token has."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*"▁abcdehlorw", "lo", "wo", "▁h", "▁w"]
    merges = [("l", "o"), ("w", "o"), ("▁", "h"), ("▁", "w")]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in pieces[:3]])
    return tokenizer


@pytest.mark.parametrize("make", [tiny_tokenizer, with_bos])
def test_ids_and_text_are_those_of_transformers(make: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = read(tmp_path, make())
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("make", [tiny_tokenizer, sentence_piece_like])
def test_b68_the_bytes_of_the_tokens_are_the_bytes_of_the_text(make: Any, tmp_path: Path) -> None:
    tokenizer = read(tmp_path, make())
    leading = (
        b" " if make is sentence_piece_like else b""
    )  # SentencePiece puts a blank in front; its decoder takes it off
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        if ids and ids[0] not in tokenizer.special_ids:
            assert b"".join(map(tokenizer.token_bytes, ids)) == leading + text.encode()


def test_b68_half_a_character_is_bytes_and_a_replacement_character(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    first, *rest = tokenizer.encode("🎉")
    assert len(rest) == 3
    assert tokenizer.token_bytes(first) == "🎉".encode()[:1]
    assert tokenizer.token_text(first) == "\ufffd"
    assert tokenizer.decode([first]) == "\ufffd"


def test_bytes_of_byte_fallback_and_of_no_token(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, sentence_piece_like())
    assert tokenizer.token_bytes(3 + 0x0A) == b"\n"
    assert tokenizer.token_bytes(1) == b"<s>"
    assert tokenizer.token_bytes(10_000) == b""
    assert tokenizer.decode([10_000]) == ""
    assert tokenizer.decode(tokenizer.encode("hello world\n日")) == "hello world\n日"


@pytest.mark.parametrize(
    ("add_bos", "in_processor", "expected"),
    [(True, False, True), (False, False, False), (..., False, False), (True, True, True), (..., True, True)],
)
def test_b86_a_prompt_gets_one_bos_where_the_tokenizer_says_so(
    add_bos: Any, in_processor: bool, expected: bool, tmp_path: Path
) -> None:
    make = with_bos if in_processor else tiny_tokenizer
    tokenizer = read(tmp_path, make(), add_bos_token=add_bos, bos_token=SPECIAL[0])
    assert (tokenizer.encode("cache") == [0, *tokenizer.encode("cache", add_special_tokens=False)]) == expected
    assert tokenizer.encode("cache").count(0) == expected


def test_b86_a_flag_wins_over_the_post_processor(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, with_bos(), add_bos_token=False, add_eos_token=True, bos_token=SPECIAL[0])
    assert tokenizer.encode("cache") == [*tokenizer.encode("cache", add_special_tokens=False), 2]


@pytest.mark.parametrize("writes_bos", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_b86_a_chat_has_the_bos_of_its_template_and_no_other(writes_bos: bool, add_bos: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    template = "{{ bos_token }}" * writes_bos + "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    make = with_bos if add_bos else tiny_tokenizer
    tokenizer = read(tmp_path, make(), bos_token=SPECIAL[0], chat_template=template)
    messages = [{"role": "user", "content": "Is this <|im_end|> the end?"}, {"role": "assistant", "content": "No."}]
    ids = tokenizer.apply_chat_template(messages)
    assert ids.count(0) == writes_bos
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ids == theirs.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)


def test_b86_the_text_of_a_special_token_is_that_token_also_in_a_message(tmp_path: Path) -> None:
    tokenizer = read(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "a<|im_end|>b"}], add_generation_prompt=False)
    assert ids.count(2) == 2
    assert tokenizer.encode("a<|im_end|>b").count(2) == 1


def test_special_ids_and_sizes(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, bos_token={"content": SPECIAL[0]})
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (0, (2,), 320)
    assert tokenizer.decode([1, 40, 2]) == tokenizer.token_text(40)
    assert tokenizer.decode([1, 40], skip_special_tokens=False) == SPECIAL[1] + tokenizer.token_text(40)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path: Path) -> None:
    shortened = tiny_tokenizer()
    shortened.enable_truncation(4)
    shortened.enable_padding(length=64)
    tokenizer = read(tmp_path, shortened)
    assert tokenizer.decode(tokenizer.encode(TEXTS[3])) == TEXTS[3]


def test_text_that_is_not_unicode_is_a_bad_request(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="Unicode") as caught:
        read(tmp_path).encode("half \ud83c a pair")
    assert caught.value.field == "prompt"


def test_files_that_are_missing_or_broken_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        tokenizer_from_files(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        tokenizer_from_files(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("nonsense")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json"):
        tokenizer_from_files(tmp_path)
