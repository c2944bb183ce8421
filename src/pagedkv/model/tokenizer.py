"""Text <-> token ids, and messages -> token ids.

Owns: which tokens are special, what stands before and after a text, the exact bytes of every token, the choice of the
chat template. The splitting itself is done by the ``tokenizers`` package; from tokenizer.json, or from the metadata of
a GGUF file (``gguf_tokenizer.py``).

Rules:
- A prompt (``encode``) gets the tokens that the tokenizer puts around a text, most often one BOS in front.
- A chat (``apply_chat_template``) gets what its template writes and nothing else, so never two BOS.
- The text of a special token ("<|im_end|>") is that token wherever it stands, also inside a user's message, as in
  transformers and vLLM: a cached prefix of a chat equals the same text sent as a prompt. Who serves strangers and
  wants their text to be text only must take such words out first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from pagedkv.errors import ChatTemplateError, InvalidRequest, ModelError, UnsupportedModel
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.config import read_json

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True)
class TokenizerParts:
    """What a source of tokenizers (files, GGUF metadata) hands over.

    special_tokens: "bos_token" -> its text, ...; extra_eos_ids: ends of text beside eos_token;
    add_bos, add_eos: None where the backend's own post-processor decides; templates: name -> source.
    """

    backend: Backend
    special_tokens: Mapping[str, str]
    extra_eos_ids: tuple[int, ...] = ()
    add_bos: bool | None = None
    add_eos: bool | None = None
    templates: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """A tokenizer with its chat template.

    vocab_size: one more than the highest id; bos_id; eos_ids: the tokenizer's own ends of text;
    special_ids: tokens that ``decode`` leaves out when asked to.
    """

    def __init__(self, parts: TokenizerParts) -> None:
        backend = parts.backend
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_tokens = dict(parts.special_tokens)
        self._templates = dict(parts.templates)
        self._compiled: dict[str, ChatTemplate] = {}
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self.vocab_size = max([backend.get_vocab_size(), *(i + 1 for i in self._added)])
        self.bos_id = self._id_of("bos_token")
        eos = self._id_of("eos_token")
        self.eos_ids = tuple(dict.fromkeys(i for i in (eos, *parts.extra_eos_ids) if i is not None))
        self._before, self._after = _frame(backend)
        if parts.add_bos is not None:
            self._before = () if self.bos_id is None or not parts.add_bos else (self.bos_id,)
        if parts.add_eos is not None:
            self._after = () if eos is None or not parts.add_eos else (eos,)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``. Raises InvalidRequest for text that is not Unicode (lone surrogates)."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidRequest(f"the prompt is not valid Unicode text: {error}", field="prompt") from error
        return [*self._before, *ids, *self._after] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD, ids without a token nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Exactly the bytes that a token stands for inside a text (a leading blank included); b"" for no token."""
        added = self._added.get(token_id)
        if added is not None:
            return str(added.content).encode()
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling.bytes_of(token)

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text, U+FFFD where they are not UTF-8."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def template_takes_tools(self) -> bool:
        """Whether a chat template would show tools to the model; one that does not name them drops them."""
        return "tool_use" in self._templates or "tools" in self._templates.get("default", "")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The text of a conversation. chat_template: a template, or the name of one of the checkpoint's.

        ``variables`` are the template's own switches. Raises ChatTemplateError.
        """
        template = self._template(chat_template, bool(tools))
        return template.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of ``render_chat(messages, **options)``: what the template writes, with nothing put around it."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)

    def _template(self, wanted: str | None, has_tools: bool) -> ChatTemplate:
        source = self._templates.get(wanted, wanted) if wanted is not None else None
        if wanted is None:
            if not self._templates:
                raise ChatTemplateError(
                    "the model has no chat template (a base model?): use completions, or pass chat_template"
                )
            names = ("tool_use", "default") if has_tools else ("default",)
            source = next((self._templates[name] for name in names if name in self._templates), None)
        if source is None:
            raise ChatTemplateError(
                f"the model has chat templates {', '.join(sorted(self._templates))}, none of them the default: name one"
            )
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source, self._special_tokens)
        return self._compiled[source]

    def _id_of(self, name: str) -> int | None:
        text = self._special_tokens.get(name)
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def _spelling(self) -> _Spelling:
        return _Spelling(self._backend)


def tokenizer_from_files(directory: Path) -> Tokenizer:
    """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and the chat templates of a checkpoint."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise UnsupportedModel(f"{directory} has no tokenizer.json; other forms of a tokenizer are not read here")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    config: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            config.update(read_json(directory / name))
    special = {name: _text_of(config[name]) for name in SPECIAL_NAMES if config.get(name)}
    return Tokenizer(
        TokenizerParts(
            backend,
            special,
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
            templates=_templates(directory, config),
        )
    )


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The template files, which win, or ``chat_template``: one string, or a list of named ones."""
    found = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").is_file():
        found["default"] = directory / "chat_template.jinja"
    if found:
        return {name: path.read_text(encoding="utf-8") for name, path in found.items()}
    inside = config.get("chat_template")
    if isinstance(inside, list):
        return {entry["name"]: entry["template"] for entry in inside}
    return {"default": inside} if inside else {}


def _text_of(token: Any) -> str:
    """A special token is spelled as a string or as {"content": ...}."""
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


def _frame(backend: Backend) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the post-processor of tokenizer.json puts before and after a text."""
    bare = backend.encode("a", add_special_tokens=False).ids
    framed = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return tuple(framed[:start]), tuple(framed[start + len(bare) :])
    raise UnsupportedModel("the post-processor of tokenizer.json changes more than the two ends of a text")


class _Spelling:
    """How a vocabulary writes bytes: GPT-2's alphabet of visible characters, or SentencePiece's U+2581 and <0x0A>."""

    def __init__(self, backend: Backend) -> None:
        decoder = backend.decoder
        state = json.loads(decoder.__getstate__()) if decoder is not None else {}
        steps = state.get("decoders", [state])
        kinds = {step.get("type") for step in steps}
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else None
        self._blank = "Metaspace" in kinds or any(
            step.get("type") == "Replace" and step.get("pattern") == {"String": "\u2581"} for step in steps
        )
        self._fallback = "ByteFallback" in kinds
        if self._alphabet is None and not self._blank and not self._fallback and kinds - {"Fuse", None}:
            raise UnsupportedModel(f"the bytes of tokens are not known for the decoder {sorted(kinds - {None})}")

    def bytes_of(self, token: str) -> bytes:
        if self._alphabet is not None:
            return b"".join(bytes([self._alphabet[c]]) if c in self._alphabet else c.encode() for c in token)
        if self._fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return (token.replace("\u2581", " ") if self._blank else token).encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's one visible character for each byte: printable Latin-1 stands for itself, the rest from U+0100 up."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in shown}
    hidden = [byte for byte in range(256) if byte not in shown]
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet
