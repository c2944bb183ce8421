"""A tokenizer from the metadata of a GGUF file.

GGUF keeps the vocabulary, merges or scores, and the *name* of the pre-tokenizer; the rules behind a name are here. Each
is written as the Hugging Face tokenizer of that family has it. An unknown name is refused: splitting a text in another
way than in training gives other tokens, and worse answers, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from pagedkv.errors import UnsupportedModel, WeightError
from pagedkv.model.tokenizer import Tokenizer, TokenizerParts

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=use_regex)


def _by_pattern(pattern: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
    return pre_tokenizers.Sequence([split, _byte_level(use_regex=False)])


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return _byte_level(use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)])


# tokenizer.ggml.pre -> how a text is cut before merging
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "starcoder": _single_digits,
    "refact": _single_digits,
    "codeshell": _single_digits,
    "command-r": _single_digits,
    "llama-bpe": lambda: _by_pattern(_LLAMA3),
    "llama3": lambda: _by_pattern(_LLAMA3),
    "llama-v3": lambda: _by_pattern(_LLAMA3),
    "qwen2": lambda: _by_pattern(_QWEN2),
    "deepseek-r1-qwen": lambda: _by_pattern(_QWEN2),
    "tekken": lambda: _by_pattern(_TEKKEN),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")
_WHOLE_WORDS_FIRST = (*_LLAMA3_NAMES, "tekken")  # a word that is a token is not merged piece by piece
_NFC = ("qwen2", "deepseek-r1-qwen")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer. Raises UnsupportedModel for a kind or a pre-tokenizer that is not built here."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise UnsupportedModel("the GGUF file has no tokenizer: name one, a directory with a tokenizer.json")
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise WeightError(f"the GGUF file has {len(tokens)} tokens and {len(kinds)} token types")
    if kind == "gpt2":
        backend = _byte_pair(metadata, tokens)
        adds_bos = metadata.get("tokenizer.ggml.pre") in (*_LLAMA3_NAMES, "tekken")
    elif kind == "llama":
        backend = _sentence_piece(metadata, tokens)
        adds_bos = True
    else:
        raise UnsupportedModel(f"tokenizer.ggml.model {kind!r} is not supported; there are gpt2, llama")
    _add_marked_tokens(backend, tokens, kinds)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    return Tokenizer(
        TokenizerParts(
            backend,
            {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)},
            tuple(i for n in ("eot", "eom") if (i := metadata.get(f"tokenizer.ggml.{n}_token_id")) is not None),
            add_bos=metadata.get("tokenizer.ggml.add_bos_token", adds_bos),
            add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
            templates=_templates(metadata),
        )
    )


def _byte_pair(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    """GPT-2's byte-level BPE: merges in the file, bytes written in its alphabet."""
    pre = metadata.get("tokenizer.ggml.pre")
    make_pre_tokenizer = _PRE_TOKENIZERS.get(str(pre))
    if make_pre_tokenizer is None:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise UnsupportedModel(f"tokenizer.ggml.pre {pre!r} is not supported; there are {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=pre in _WHOLE_WORDS_FIRST)
    except Exception as error:  # the package raises plain Exception
        raise WeightError(f"the merges of the GGUF file do not fit its vocabulary: {error}") from error
    backend = Backend(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = make_pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> Backend:
    """SentencePiece's BPE (Llama 2, Mistral): of all neighbours, join the pair whose token has the best score.

    tokenizers wants a ranked list of pairs. Every split of a token into two tokens is one, ranked by the token's score.
    """
    scores: list[float] = metadata.get("tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise WeightError(f"the GGUF file has {len(tokens)} tokens and {len(scores)} scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = []
    for token, i in vocab.items():
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[i], left, right))
    pairs.sort()
    merges = [(tokens[left], tokens[right]) for _, left, right in pairs]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(vocab=vocab, merges=merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    blank = normalizers.Replace(" ", "\u2581")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), blank]) if prefix else blank
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    return backend


def _add_marked_tokens(backend: Backend, tokens: list[str], kinds: list[int]) -> None:
    """Tokens that are matched as a whole: control tokens (special), and those that a user defined (not)."""
    marked = [i for i, kind in enumerate(kinds) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    added = [AddedToken(tokens[i], special=kinds[i] != _USER_DEFINED, normalized=False) for i in marked]
    backend.add_tokens(added)
    moved = [tokens[i] for i in marked if backend.token_to_id(tokens[i]) != i]
    if moved:
        raise WeightError(f"the GGUF file has token {moved[0]!r} more than once")


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {"default": metadata[prefix]} if metadata.get(prefix) else {}
    found.update({key[len(prefix) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{prefix}.")})
    return found
