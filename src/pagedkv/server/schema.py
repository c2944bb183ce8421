"""What a request may carry: OpenAI's fields and the ones that vLLM's users add.

Types are strict (``"5"`` is not a number), infinities and NaN are refused, and a field that is not known is
ignored, as OpenAI's clients expect. Ranges are not checked here: :class:`~pagedkv.engine.params.SamplingParams`
does it once for every front door, and its error names the field.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenIds = list[int]
Prompt = str | TokenIds | list[str] | list[TokenIds]
Stop = str | Annotated[list[str], Field(max_length=64)]

MAX_PROMPTS = 256
"""Prompts in one completion request; each becomes a request of its own in the engine's queue."""


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body):
    """Exactly one of these, as vLLM names them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Body):
    """The fields that completions and chat completions share."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Stop | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = False
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = True
    include_stop_str_in_output: bool | None = False
    return_token_ids: bool | None = False
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)
    priority: int | None = None
    request_id: str | None = None
    explain: bool | None = False
    user: str | None = None


class CompletionRequest(GenerationBody):
    prompt: Prompt
    max_tokens: int | None = 16
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = True


class FunctionCall(Body):
    name: str
    arguments: str


class ToolCall(Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ContentPart(Body):
    type: str
    text: str | None = None


class Message(Body):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: NamedFunction


class ChatCompletionRequest(GenerationBody):
    messages: list[Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """Either ``prompt`` or ``messages``."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: list[int]


# ---------------------------------------------------------------------------------------------- what comes back


class Reply(BaseModel):
    model_config = ConfigDict(populate_by_name=True)


class PromptTokensDetails(Reply):
    cached_tokens: int


class Usage(Reply):
    """``prompt_tokens_details.cached_tokens``: prompt tokens whose KV was found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt: int, completion: int, cached: int) -> Usage:
        return cls(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )


class CompletionLogprobs(Reply):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(Reply):
    """Also a stream's chunk, whose ``usage`` is null but for the last one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[TokenLogprob] | None = None


class FunctionReply(Reply):
    name: str | None = None
    arguments: str | None = None


class ToolCallReply(Reply):
    """A whole call, or in a stream the part of it that is new; ``index`` says which call it belongs to."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionReply


class ChatMessage(Reply):
    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class ChatDelta(Reply):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDelta]
    usage: Usage | None = None


class ErrorBody(Reply):
    message: str
    type: str
    param: str | None = None
    code: str | int | None = None


class ErrorReply(Reply):
    error: ErrorBody


class ModelCard(Reply):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "pagedkv"
    root: str
    max_model_len: int


class ModelList(Reply):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokenized(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(Reply):
    prompt: str


class Health(Reply):
    status: Literal["ok", "dead", "draining"]
    detail: str | None = None


class Version(Reply):
    version: str


class Load(Reply):
    """``server_load``: requests that the server is answering now."""

    server_load: int


class ResetReply(Reply):
    success: bool
    blocks_in_use: int


class Explanation(Reply):
    """Of one prompt: ``reason`` is a StopReason's words, ``position`` the first token that was not reused."""

    prompt_tokens: int
    cached_tokens: int
    reason: str
    position: int
    text: str


class Explanations(Reply):
    id: str
    explanations: list[Explanation]
