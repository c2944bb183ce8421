"""One conversation partner for ``chat`` and ``complete``: a model in this process, or a server behind a URL."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from pagedkv.errors import InvalidRequest

if TYPE_CHECKING:
    from pagedkv.llm import LLM

Message = Mapping[str, str]
DEFAULT_MODEL = "smollm2-135m"


@dataclass
class Usage:
    """Of the answer that ended last. ``cached_tokens``: prompt tokens that were not computed again."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None


class Partner(Protocol):
    usage: Usage

    def chat(self, messages: Sequence[Message], **params: Any) -> Iterator[str]:
        """The answer, piece by piece. Closing the iterator stops it."""

    def complete(self, prompt: str, **params: Any) -> Iterator[str]:
        """The text after ``prompt``, piece by piece."""

    def close(self) -> None:
        """Gives back what it holds."""


class LocalModel:
    """The engine in this process."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.usage = Usage()

    def chat(self, messages: Sequence[Message], **params: Any) -> Iterator[str]:
        return self._stream({"prompt_token_ids": self._llm.chat_prompt(messages)}, params)

    def complete(self, prompt: str, **params: Any) -> Iterator[str]:
        return self._stream(prompt, params)

    def close(self) -> None:
        """Nothing outlives the object."""

    def _stream(self, prompt: Any, params: Mapping[str, Any]) -> Iterator[str]:
        from pagedkv.engine.params import SamplingParams
        from pagedkv.errors import RequestFailed

        sent = 0
        for output in self._llm.stream([prompt], SamplingParams(**params)):
            if output.error is not None:
                raise RequestFailed(output.error)
            choice = output.outputs[0]
            tokens = len(output.prompt_token_ids), output.num_cached_tokens, len(choice.token_ids)
            self.usage = Usage(*tokens, choice.finish_reason)
            yield choice.text[sent:]
            sent = len(choice.text)


class RemoteModel:
    """An OpenAI-compatible server."""

    def __init__(self, url: str, api_key: str | None, model: str | None) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        base = url.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(base_url=base, headers=headers, timeout=httpx.Timeout(10, read=None))
        self.usage = Usage()
        try:
            self._model = model or self._first_model()
        except InvalidRequest:
            self.close()
            raise

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def _first_model(self) -> str:
        answer = self._send("GET", "/v1/models", None)
        name: str = answer["data"][0]["id"]
        return name

    def chat(self, messages: Sequence[Message], **params: Any) -> Iterator[str]:
        for event in self._events("/v1/chat/completions", {"messages": list(messages), **params}):
            yield from (choice["delta"].get("content") or "" for choice in event["choices"])

    def complete(self, prompt: str, **params: Any) -> Iterator[str]:
        for event in self._events("/v1/completions", {"prompt": prompt, **params}):
            yield from (choice["text"] for choice in event["choices"])

    def _send(self, method: str, path: str, body: Any) -> Any:
        import httpx

        try:
            answer = self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise InvalidRequest(f"{self._http.base_url}: {error or type(error).__name__}", field="url") from None
        if answer.status_code != 200:
            raise InvalidRequest(_message(answer.text, answer.status_code), field="url")
        return answer.json()

    def _events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx

        body |= {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        reason = None
        try:
            with self._http.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    raise InvalidRequest(_message(answer.read().decode(), answer.status_code), field="url")
                for line in answer.iter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event: dict[str, Any] = json.loads(line[len("data: ") :])
                    if "error" in event:
                        raise InvalidRequest(event["error"]["message"])
                    reason = next((c["finish_reason"] for c in event["choices"] if c["finish_reason"]), reason)
                    if event.get("usage"):
                        self._count(event["usage"], reason)
                    yield event
        except httpx.HTTPError as error:
            raise InvalidRequest(f"{self._http.base_url}: {error or type(error).__name__}", field="url") from None

    def _count(self, usage: Mapping[str, Any], reason: str | None) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self.usage = Usage(usage["prompt_tokens"], cached, usage["completion_tokens"], reason)


def _message(text: str, status: int) -> str:
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}: {text[:200]}"


def partner(model: str | None, url: str | None, api_key: str | None, engine: dict[str, Any]) -> Partner:
    """Whoever answers: the server at ``url`` if there is one, else ``model`` loaded here."""
    if url is not None:
        if engine:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in engine)
            raise InvalidRequest(f"{flags}: the engine is the server's; leave out with --url", field="url")
        return RemoteModel(url, api_key, model)
    from pagedkv.cli.progress import loading

    name = model or DEFAULT_MODEL
    with loading(name) as progress:
        from pagedkv.llm import LLM

        return LocalModel(LLM(name, progress=progress, **engine))
