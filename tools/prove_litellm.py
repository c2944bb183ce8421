"""litellm against a running server: plain, async, streamed, JSON schema, tools, text completions, an error.

python prove_litellm.py URL MODEL       (prove_server.py runs it)
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Capital(BaseModel):
    city: str
    country: str


def show(what: str, text: object) -> None:
    print(f"{what:<22}{text}", flush=True)


def plain(common: dict[str, Any]) -> None:
    for turn in ("chat", "chat again"):
        answer = litellm.completion(messages=QUESTION, max_tokens=16, temperature=0, **common)
        cached = answer.usage.prompt_tokens_details.cached_tokens
        show(
            turn, f"{answer.choices[0].message.content!r}; {answer.usage.prompt_tokens} prompt tokens, {cached} cached"
        )
    answer = asyncio.run(litellm.acompletion(messages=QUESTION, max_tokens=16, temperature=0, **common))
    show("async", repr(answer.choices[0].message.content))


def streamed(common: dict[str, Any]) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=QUESTION, max_tokens=16, temperature=0, **options, **common))
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    show("streamed", f"{whole.choices[0].message.content!r} in {len(chunks)} chunks; {whole.usage.total_tokens} tokens")


def shaped(common: dict[str, Any]) -> None:
    answer = litellm.completion(messages=QUESTION, max_tokens=60, temperature=0, response_format=Capital, **common)
    show("JSON schema", repr(Capital.model_validate_json(answer.choices[0].message.content)))
    choice = {"type": "function", "function": {"name": "weather"}}
    asked = [{"role": "user", "content": "How is the weather in Paris?"}]
    for stream in (False, True):
        options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 60, "temperature": 0, "stream": stream}
        answer = litellm.completion(messages=asked, **options, **common)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=asked)
        (call,) = answer.choices[0].message.tool_calls
        arguments = json.loads(call.function.arguments)
        assert set(arguments) == {"city"}
        show("tool call, streamed" if stream else "tool call", f"{call.function.name}({arguments})")


def text(url: str, model: str) -> None:
    common = {"model": f"text-completion-openai/{model}", "api_base": url, "api_key": "none"}
    answer = litellm.text_completion(prompt="The capital of France is", max_tokens=8, temperature=0, **common)
    show("text completion", repr(answer.choices[0].text))


def refused(common: dict[str, Any]) -> None:
    try:
        litellm.completion(messages=QUESTION, max_tokens=8, temperature=-1, **common)
    except litellm.BadRequestError as error:
        show("temperature=-1", f"BadRequestError: {error.message}")
    else:
        raise AssertionError("temperature=-1 was taken")


def main() -> None:
    litellm.suppress_debug_info = True
    url, model = f"{sys.argv[1]}/v1", sys.argv[2]
    common = {"model": f"openai/{model}", "api_base": url, "api_key": "none", "num_retries": 0, "timeout": 60}
    plain(common)
    streamed(common)
    shaped(common)
    text(url, model)
    refused(common)


if __name__ == "__main__":
    main()
