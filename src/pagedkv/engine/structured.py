"""Structured outputs: a grammar says which tokens may come next.

The grammars (JSON schema, regular expression, choice, Lark) are compiled and followed by llguidance, which walks
the whole vocabulary's trie in tens of microseconds a token; what is ours is where the mask is applied and that a
sequence's state goes with it. It is an optional extra: ``pip install 'pagedkv[structured]'``.

States of a ``Grammar``: running (``mask`` gives the tokens that may come next) -> finished (only EOS is left).
It moves by ``accept``, once for every token the sequence appends, so preemption and recomputation do not touch it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions as JsonStyle

MAX_GRAMMAR_CHARS = 1 << 18
# One way to space JSON, the one that json.dumps has: where any white space may come, small models write it without end.
JSON_STYLE: JsonStyle = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_MISSING = "structured_outputs: needs llguidance, which is not installed: pip install 'pagedkv[structured]'"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of these, as vLLM names them.

    json:        a JSON schema, as a dictionary or as its text;  json_object: any JSON object
    regex:       the whole output matches it;  choice: the output is one of these strings
    grammar:     a grammar in Lark's notation (llguidance's dialect)
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [kind for kind in kinds if getattr(self, kind) not in (None, False)]
        if len(given) != 1:
            raise InvalidRequest(
                f"structured_outputs: exactly one of {', '.join(kinds)} must be given, got {given or 'none'}",
                field="structured_outputs",
            )
        if isinstance(self.json, str):
            try:
                json.loads(self.json)
            except ValueError as error:
                raise InvalidRequest(
                    f"structured_outputs.json: not valid JSON: {error}", field="structured_outputs"
                ) from None
        if self.choice is not None and (not self.choice or not all(isinstance(c, str) and c for c in self.choice)):
            raise InvalidRequest("structured_outputs.choice: needs non-empty strings", field="structured_outputs")

    def source(self) -> str:
        """The grammar as llguidance takes it; also what makes two requests share one compilation."""
        from llguidance import LLMatcher

        if self.json is not None:
            schema = self.json if isinstance(self.json, str) else json.dumps(self.json)
            source = LLMatcher.grammar_from_json_schema(schema, overrides=JSON_STYLE)
        elif self.json_object:
            source = LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_STYLE)
        elif self.regex is not None:
            source = LLMatcher.grammar_from_regex(self.regex)
        elif self.choice is not None:
            source = LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in self.choice))
        else:
            source = LLMatcher.grammar_from_lark(self.grammar or "")
        if len(source) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest(
                f"structured_outputs: a grammar of {len(source)} characters; the limit is {MAX_GRAMMAR_CHARS}",
                field="structured_outputs",
            )
        return source


class Grammar:
    """Where one sequence stands in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def mask(self, row: NDArray[np.int32]) -> None:
        """Sets bit ``t % 32`` of ``row[t // 32]`` (contiguous) for each token t that may come next."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token_id: int) -> bool:
        """Moves on by a token that was sampled under ``mask``; False if the grammar does not allow it."""
        return bool(self._matcher.consume_token(token_id))

    @property
    def finished(self) -> bool:
        """Nothing but the end can follow."""
        return bool(self._matcher.is_stopped())

    def fork(self) -> Grammar:
        return Grammar(self._matcher.deep_copy())


class Vocabulary(Protocol):
    """What a grammar needs to know of a tokenizer (``model.tokenizer.Tokenizer`` has it)."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...


class _Wrapped:
    """A tokenizer in the shape that llguidance asks for."""

    def __init__(self, tokenizer: Vocabulary, eos_id: int) -> None:
        special = tokenizer.special_ids
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self.tokens = [
            b"" if i in special and i != eos_id else tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = sorted(special)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        plain = text if isinstance(text, str) else text.decode(errors="replace")
        return self._tokenizer.encode(plain, add_special_tokens=False)


class GrammarCompiler:
    """Compiles each grammar once; the vocabulary's trie is built at the first use.

    vocab_size: columns of the model's logits (ids that the tokenizer lacks are never allowed)
    """

    def __init__(self, tokenizer: Vocabulary, vocab_size: int, eos_ids: Sequence[int], *, keep: int = 64) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._keep = keep
        self._trie: Any = None
        self._compiled: dict[str, Any] = {}

    def start(self, params: StructuredOutputsParams) -> Grammar:
        """A fresh state.

        Raises:
            InvalidRequest: the grammar does not compile (the message says where), or llguidance is missing.
        """
        try:
            from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
        except ImportError:
            raise InvalidRequest(_MISSING, field="structured_outputs") from None
        if not self._eos_ids:
            raise InvalidRequest(
                "structured_outputs: this model has no EOS token to end with", field="structured_outputs"
            )
        try:
            source = params.source()
            if source not in self._compiled:
                if self._trie is None:
                    wrapper = TokenizerWrapper(_Wrapped(self._tokenizer, self._eos_ids[0]))
                    self._trie = LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=self._eos_ids)
                matcher = LLMatcher(self._trie, source, log_level=0)
                if matcher.is_error():
                    raise ValueError(matcher.get_error())
                while len(self._compiled) >= self._keep:
                    self._compiled.pop(next(iter(self._compiled)))
                self._compiled[source] = matcher
        except ValueError as error:
            reason = str(error).strip().splitlines()[0][:500]
            raise InvalidRequest(f"structured_outputs: {reason}", field="structured_outputs") from None
        return Grammar(self._compiled[source].deep_copy())
