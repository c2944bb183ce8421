"""Tokenizers out of GGUF metadata give the ids of the tokenizers that the metadata was made from."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest
from tiny_models import CHAT_TEMPLATE, SPECIAL, tiny_tokenizer
from tokenizers import Tokenizer, models, trainers

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.gguf_tokenizer import _LLAMA3, _QWEN2, tokenizer_from_gguf
from pagedkv.model.tokenizer import Tokenizer as Ours

CONTROL, NORMAL, USER, BYTE, UNKNOWN = 3, 1, 4, 6, 2
TEXTS = (
    "",
    "The cache keeps 12345 keys; don't we'll I'M HE'LL",
    "  two  blanks\n\n\n and\ttabs \r\n end  ",
    "naïve café — Ελλάδα, 日本語, العربية, 🎉👩‍👩‍👧 e\u0301 ﬁ ½ ²",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x=1;y+=2.5e3 // 0x1F --> $9,999.00",
    "\u00a0\u3000\u200b",
)


def byte_level_metadata(tokenizer: Tokenizer, pre: str, **extra: Any) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL if token in SPECIAL else NORMAL for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.{key}": value for key, value in extra.items()},
    }


def test_b84_gpt2_kind_encodes_as_the_tokenizer_it_came_from() -> None:
    source = tiny_tokenizer()
    ours = tokenizer_from_gguf(byte_level_metadata(source, "gpt-2"))
    for text in TEXTS:
        ids = source.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special_tokens=False) == source.decode(ids, skip_special_tokens=False) == text
    assert ours.special_ids == {0, 1, 2}
    assert ours.eos_ids == (2,)


def test_b84_qwen2_kind_encodes_as_transformers_own_class() -> None:
    transformers = pytest.importorskip("transformers")
    source = tiny_tokenizer()
    model = json.loads(source.to_str())["model"]
    vocab, merges = source.get_vocab(), [tuple(merge) for merge in model["merges"]]
    theirs = transformers.Qwen2Tokenizer(
        vocab=vocab,
        merges=merges,
        unk_token=None,
        eos_token=SPECIAL[2],
        pad_token=SPECIAL[0],
        extra_special_tokens=[SPECIAL[1]],
    )
    ours = tokenizer_from_gguf(byte_level_metadata(source, "qwen2"))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_b84_the_patterns_are_the_published_ones() -> None:
    converter = pytest.importorskip("transformers.convert_slow_tokenizer")
    assert converter.TikTokenConverter("unused").pattern == _LLAMA3
    assert _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}") == _QWEN2


def pieces(tokenizer: Ours, text: str) -> list[str]:
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def learned(words: list[str], pre: str) -> Ours:
    """A vocabulary that would merge whole ``words`` if its pre-tokenizer let it."""
    tokenizer = tiny_tokenizer(259)
    state = json.loads(tokenizer.to_str())
    vocab, merges = state["model"]["vocab"], []
    for word in words:
        built = word[0]
        for letter in word[1:]:
            if built + letter not in vocab:
                vocab[built + letter] = len(vocab)
                merges.append([built, letter])
            built += letter
    state["model"]["merges"] = merges
    return tokenizer_from_gguf(byte_level_metadata(Tokenizer.from_str(json.dumps(state)), pre))


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["1234"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("qwen2", "1234", ["1", "2", "3", "4"]),
        ("llama-bpe", "1234", ["123", "4"]),
        ("tekken", "1234", ["1", "2", "3", "4"]),
        ("gpt-2", "abCD", ["abCD"]),
        ("tekken", "abCD", ["ab", "CD"]),
        ("gpt-2", "(ab", ["(", "ab"]),
        ("llama-bpe", "(ab", ["(ab"]),
    ],
)
def test_b84_each_name_cuts_a_text_in_its_own_way(pre: str, text: str, expected: list[str]) -> None:
    assert pieces(learned(["1234", "abCD", "CD", "(ab"], pre), text) == expected


@pytest.mark.parametrize("pre", ["default", "brandnew", None])
def test_b84_an_unknown_pre_tokenizer_is_refused_by_name(pre: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{pre!r}"):
        tokenizer_from_gguf(byte_level_metadata(tiny_tokenizer(), pre))


@pytest.mark.parametrize("kind", ["bert", "t5", None])
def test_b84_an_unknown_kind_is_refused_by_name(kind: Any) -> None:
    with pytest.raises(UnsupportedModel, match=f"{kind!r}"):
        tokenizer_from_gguf({**byte_level_metadata(tiny_tokenizer(), "gpt-2"), "tokenizer.ggml.model": kind})


def test_b86_bos_by_metadata_else_by_kind() -> None:
    def bos(pre: str, **extra: Any) -> bool:
        metadata = byte_level_metadata(tiny_tokenizer(), pre, **{"ggml.bos_token_id": 0}, **extra)
        return tokenizer_from_gguf(metadata).encode("cache")[0] == 0

    assert not bos("gpt-2")
    assert bos("llama-bpe")
    assert bos("gpt-2", **{"ggml.add_bos_token": True})
    assert not bos("llama-bpe", **{"ggml.add_bos_token": False})
    ends = byte_level_metadata(tiny_tokenizer(), "gpt-2", **{"ggml.add_eos_token": True})
    assert tokenizer_from_gguf(ends).encode("cache")[-1] == 2


def test_b85_every_end_of_text_of_the_metadata_counts() -> None:
    more = {"ggml.eot_token_id": 1, "ggml.eom_token_id": 0}
    assert tokenizer_from_gguf(byte_level_metadata(tiny_tokenizer(), "gpt-2", **more)).eos_ids == (2, 1, 0)


def test_templates_of_the_metadata() -> None:
    more = {"chat_template": CHAT_TEMPLATE, "chat_template.tool_use": "tools!"}
    tokenizer = tokenizer_from_gguf(byte_level_metadata(tiny_tokenizer(), "gpt-2", **more))
    messages = [{"role": "user", "content": "x"}]
    assert tokenizer.render_chat(messages).startswith("<|im_start|>user\nx")
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}]) == "tools!"
    assert not tokenizer_from_gguf(byte_level_metadata(tiny_tokenizer(), "gpt-2")).has_chat_template


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    metadata = byte_level_metadata(tiny_tokenizer(), "gpt-2")
    metadata["tokenizer.ggml.token_type"][1] = USER
    tokenizer = tokenizer_from_gguf(metadata)
    assert 1 in tokenizer.encode("a<|im_start|>b")
    assert tokenizer.decode(tokenizer.encode("a<|im_start|>b<|im_end|>")) == "a<|im_start|>b"


def test_metadata_that_does_not_fit_together_is_an_error() -> None:
    good = byte_level_metadata(tiny_tokenizer(), "gpt-2")
    with pytest.raises(WeightError, match="320 tokens and 3 token types"):
        tokenizer_from_gguf({**good, "tokenizer.ggml.token_type": [1, 1, 1]})
    with pytest.raises(WeightError, match="merges"):
        tokenizer_from_gguf({**good, "tokenizer.ggml.merges": ["no such", "pair s"]})
    tokens = [*good["tokenizer.ggml.tokens"], SPECIAL[1]]
    twice = {**good, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [CONTROL] * len(tokens)}
    with pytest.raises(WeightError, match="more than once"):
        tokenizer_from_gguf(twice)
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        tokenizer_from_gguf({"tokenizer.ggml.model": "gpt2"})


def sentence_piece_metadata(**extra: Any) -> dict[str, Any]:
    """A Llama-2 kind of vocabulary, learned from a text; better merges have better scores, as SentencePiece writes."""
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=160, show_progress=False)
    words = "▁the▁cache▁keeps▁▁the▁keys▁and▁▁▁▁the▁values▁in▁aaaa▁blocks▁ababab▁banana▁of▁sixteen▁tokens▁ééé▁日日"
    trained.train_from_iterator([words, words[::-1], words[5:] * 2], trainer)
    learned_pieces = [piece for piece, _ in sorted(trained.get_vocab().items(), key=lambda item: item[1])]
    fixed = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(learned_pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": fixed + learned_pieces,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [0.0] * len(fixed) + [-float(i) for i in range(len(learned_pieces))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **{f"tokenizer.ggml.{key}": value for key, value in extra.items()},
    }


def sentence_piece(metadata: dict[str, Any], text: str) -> list[int]:
    """SentencePiece's algorithm as its paper has it: join the neighbours whose token scores best, leftmost first."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: i for i, token in enumerate(tokens)}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [
            (-metadata["tokenizer.ggml.scores"][ids[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in ids
        ]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    result = []
    for symbol in symbols:
        result += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return result


def test_b84_sentence_piece_kind_follows_the_scores() -> None:
    metadata = sentence_piece_metadata()
    tokenizer = tokenizer_from_gguf(metadata)
    rng = random.Random(0)
    letters = "aab eé日bnsthe kyv🎉\n"
    texts = [
        "the cache keeps the values",
        " a  b ",
        *("".join(rng.choices(letters, k=rng.randrange(40))) for _ in range(300)),
    ]
    for text in texts:
        assert tokenizer.encode(text, add_special_tokens=False) == sentence_piece(metadata, text), repr(text)
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentence_piece_puts_bos_in_front_and_blanks_as_told() -> None:
    tokenizer = tokenizer_from_gguf(sentence_piece_metadata())
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.token_bytes(tokenizer.encode("the")[1]).startswith(b" ")
    bare = tokenizer_from_gguf(sentence_piece_metadata(add_space_prefix=False, add_bos_token=False))
    assert not bare.token_bytes(bare.encode("the")[0]).startswith(b" ")
    assert bare.decode(bare.encode(" the")) == " the"
    with pytest.raises(WeightError, match="scores"):
        tokenizer_from_gguf({**sentence_piece_metadata(), "tokenizer.ggml.scores": [0.0]})
