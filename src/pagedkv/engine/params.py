"""What a request asks of the sampler: ``SamplingParams`` and ``BeamSearchParams``.

Owns the names, the defaults and the limits (names and meanings as in vLLM and the OpenAI API). Both classes are
frozen and check themselves, so a value that exists is a value that can be served; what depends on the model (is
this id in its vocabulary?) is ``check``. Every refusal is ``InvalidRequest`` with the field, the value and the limit.

Values that look odd and are well-defined here:
- ``temperature`` below ``GREEDY_TEMPERATURE`` is greedy;  ``top_p`` 0 keeps the most likely token only;
- ``top_k`` -1 and 0 are off, and above the vocabulary it keeps everything;  ``seed`` -1 is no seed;
- an id that the model has and the tokenizer has not (a padded embedding) may be named, and is never sampled.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv.engine.structured import StructuredOutputsParams
from pagedkv.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5
MAX_TEMPERATURE = 1e6  # flat long before; the bound keeps float32 arithmetic finite
MAX_N = 128
MAX_BEAM_WIDTH = 64
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_BAD_WORDS = 256
MAX_TOKENS = 2**31 - 1  # no context is longer; a larger number is a mistake of the caller
MAX_TOKEN_ID = 2**31 - 1
MAX_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled, and when it ends.

    n:                     samples from one prompt (their prompt's blocks are shared)
    temperature:           0 is greedy
    top_p, top_k, min_p:   filters, applied in the order temperature, min_p, top_k, top_p
    seed:                  with a seed the tokens depend on the request alone, never on the batch
    stop:                  a string or strings that end the text; not part of it unless ``include_stop_str_in_output``
    stop_token_ids:        ids that end the text as an EOS id does; ``ignore_eos`` does not turn these off
    max_tokens:            None: up to the context length. 0 only together with ``prompt_logprobs`` (scoring)
    min_tokens:            before so many tokens no EOS or stop id can be sampled and no stop string ends the text
    logprobs, prompt_logprobs: how many of the most likely tokens to report beside the chosen one; 0: that one alone
    presence_penalty, frequency_penalty: see the output;  repetition_penalty: sees prompt and output
    logit_bias:            id -> value in [-100, 100], added to the logit
    allowed_token_ids:     only these can be sampled
    bad_words:             strings that are not generated (matched as token sequences, with and without a space before)
    structured_outputs:    a grammar that the whole output follows; it ends when the grammar can only end
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._set("n", _integer("n", self.n, 1, MAX_N))
        self._set("temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        self._set("top_p", _number("top_p", self.top_p, 0.0, 1.0))
        self._set("top_k", _integer("top_k", self.top_k, -1, MAX_TOKEN_ID))
        self._set("min_p", _number("min_p", self.min_p, 0.0, 1.0))
        self._set("presence_penalty", _number("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._set("frequency_penalty", _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._set("repetition_penalty", _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        if self.seed is not None:
            seed = _integer("seed", self.seed, -(2**63), 2**64 - 1)
            self._set("seed", None if seed == -1 else seed)
        self._set("stop", _strings("stop", self.stop, MAX_STOP_STRINGS, MAX_STOP_STRING_CHARS))
        self._set("bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS, MAX_STOP_STRING_CHARS))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKEN_IDS))
        self._set("logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _ids("allowed_token_ids", self.allowed_token_ids, None))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids must name at least one id, got none", field="allowed_token_ids")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 0, MAX_LOGPROBS))
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            _boolean(name, getattr(self, name))
        structured = self.structured_outputs
        if structured is not None and not isinstance(structured, StructuredOutputsParams):
            raise InvalidRequest(
                f"structured_outputs must be StructuredOutputsParams, got {_shown(structured)}",
                field="structured_outputs",
            )
        self._check_length()

    def _check_length(self) -> None:
        self._set("min_tokens", _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is None:
            return
        least = 1 if self.prompt_logprobs is None else 0
        self._set("max_tokens", _integer("max_tokens", self.max_tokens, least, MAX_TOKENS))
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens must be at most max_tokens, got {self.min_tokens} and {self.max_tokens}",
                field="min_tokens",
            )

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # normalised once, while the object is made

    @property
    def greedy(self) -> bool:
        """The most likely token, always: temperature near 0."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """``stop`` as a tuple, whatever form it was given in."""
        return tuple(self.stop or ())


@dataclass(frozen=True)
class BeamSearchParams:
    """Beam search, scored as ``transformers.generate(num_beams=beam_width, early_stopping=False)`` scores it.

    length_penalty: a finished beam of L new tokens scores (sum of log-probabilities) / L ** length_penalty
    temperature:    divides the logits before the log-softmax; near 0 (and 1) leaves them as they are
    ignore_eos:     no id ends a beam; all run to ``max_tokens``
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    temperature: float = 0.0
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "beam_width", _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH))
        object.__setattr__(self, "max_tokens", _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS))
        object.__setattr__(self, "length_penalty", _number("length_penalty", self.length_penalty, -10.0, 10.0))
        object.__setattr__(self, "temperature", _number("temperature", self.temperature, 0.0, MAX_TEMPERATURE))
        _boolean("ignore_eos", self.ignore_eos)


def check(params: SamplingParams, *, vocab_size: int, num_decodable: int | None = None) -> None:
    """Refuse what this model cannot serve: ids outside its vocabulary, text where there is no tokenizer.

    vocab_size:    columns of the model's logits; the bound for every id in the request
    num_decodable: ids that the tokenizer can turn into text (None: there is no tokenizer). The rest is never sampled,
                   so an allowed set must hold at least one id below it.
    """
    for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
        if texts and num_decodable is None:
            raise InvalidRequest(f"{name}: this engine has no tokenizer; give token ids instead", field=name)
    for name, ids in (
        ("stop_token_ids", params.stop_token_ids or ()),
        ("allowed_token_ids", params.allowed_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
    ):
        check_ids(ids, vocab_size, field=name)
    limit = vocab_size if num_decodable is None else min(vocab_size, num_decodable)
    if params.allowed_token_ids is not None and min(params.allowed_token_ids) >= limit:
        raise InvalidRequest(
            f"allowed_token_ids must name an id below {limit}, the tokenizer's size; "
            f"the least is {min(params.allowed_token_ids)}",
            field="allowed_token_ids",
        )


def check_ids(ids: Iterable[int], vocab_size: int, *, field: str) -> None:
    """Every id is in ``[0, vocab_size)``; also for a prompt that came as ids."""
    for value in ids:
        if not 0 <= value < vocab_size:
            raise InvalidRequest(f"{field} holds {value}; ids must be in [0, {vocab_size - 1}]", field=field)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool):
        raise InvalidRequest(f"{name} must be an integer, got {value}", field=name)
    try:
        number = operator.index(value)  # accepts numpy's integers, refuses 1.0 and "1"
    except TypeError:
        raise InvalidRequest(f"{name} must be an integer, got {_shown(value)}", field=name) from None
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must be in [{low}, {high}], got {_shown(number)}", field=name)
    return number


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise InvalidRequest(f"{name} must be a number, got {_shown(value)}", field=name)
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):
        raise InvalidRequest(f"{name} must be a finite number, got {_shown(value)}", field=name) from None
    if not math.isfinite(number):
        raise InvalidRequest(f"{name} must be finite, got {number}", field=name)
    if not low <= number <= high:
        raise InvalidRequest(f"{name} must be in [{low:g}, {high:g}], got {number:g}", field=name)
    return number


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name} must be true or false, got {_shown(value)}", field=name)


def _strings(name: str, value: Any, most: int, most_chars: int) -> tuple[str, ...]:
    if value is None:
        return ()
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple, set, frozenset)):
        raise InvalidRequest(f"{name} must be a string or a list of strings, got {_shown(value)}", field=name)
    if len(values) > most:
        raise InvalidRequest(f"{name} must hold at most {most} strings, got {len(values)}", field=name)
    for text in values:
        if not isinstance(text, str) or not text:
            raise InvalidRequest(f"{name} must hold non-empty strings, got {_shown(text)}", field=name)
        if len(text) > most_chars:
            raise InvalidRequest(
                f"a string in {name} must have at most {most_chars} characters, got {len(text)}", field=name
            )
    return tuple(values)


def _ids(name: str, values: Any, most: int | None) -> tuple[int, ...]:
    if isinstance(values, (str, bytes, Mapping)) or not isinstance(values, Iterable):
        raise InvalidRequest(f"{name} must be a list of token ids, got {_shown(values)}", field=name)
    ids = tuple(_integer(name, value, 0, MAX_TOKEN_ID) for value in values)
    if most is not None and len(ids) > most:
        raise InvalidRequest(f"{name} must hold at most {most} ids, got {len(ids)}", field=name)
    return ids


def _bias(bias: Any) -> dict[int, float] | None:
    """JSON has string keys only, so ``{"50256": -100}`` is taken as well."""
    if bias is None:
        return None
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {_shown(bias)}", field="logit_bias")
    result: dict[int, float] = {}
    for key, value in bias.items():
        plain = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) <= 10
        token_id = _integer("logit_bias", int(key) if plain else key, 0, MAX_TOKEN_ID)
        result[token_id] = _number("logit_bias", value, -MAX_BIAS, MAX_BIAS)
    return result


def _shown(value: Any) -> str:
    """A value in a message, cut so that a huge one does not make a huge message."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
