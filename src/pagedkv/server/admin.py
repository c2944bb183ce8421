"""The routes beside generation: health, models, tokens, load, the reset of the prefix cache."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

import pagedkv
from pagedkv.errors import InvalidRequest
from pagedkv.server.chat import plain_messages
from pagedkv.server.errors import error_response
from pagedkv.server.insight import MAX_KEPT
from pagedkv.server.replies import json_reply
from pagedkv.server.route import BodyRoute
from pagedkv.server.schema import (
    Detokenized,
    DetokenizeRequest,
    Explanations,
    Health,
    Load,
    ModelCard,
    ModelList,
    ResetReply,
    Tokenized,
    TokenizeRequest,
    Version,
)
from pagedkv.server.serving import ModelNotServed, Serving, tenant_of

router = APIRouter(route_class=BodyRoute)


@router.get("/health", response_model=Health, responses={503: {"model": Health}})
@router.get("/ping", response_model=Health, responses={503: {"model": Health}})
async def health(request: Request) -> Response:
    """200 while requests are answered; 503 once the engine's thread has died or the server drains."""
    serving: Serving = request.app.state.serving
    if not serving.llm.is_alive:
        state = Health(status="dead", detail="the engine has stopped; the process will exit")
    elif serving.draining:
        state = Health(status="draining", detail="shutting down: running requests finish, new ones are refused")
    else:
        return JSONResponse(Health(status="ok").model_dump(exclude_none=True))
    return JSONResponse(state.model_dump(), status_code=503)


@router.get("/version")
async def version() -> Version:
    return Version(version=pagedkv.__version__)


@router.get("/load")
async def load(request: Request) -> Load:
    return Load(server_load=request.app.state.serving.num_active)


def card(serving: Serving, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=serving.started, root=serving.llm.model_name, max_model_len=serving.llm.max_model_len
    )


@router.get("/v1/models")
async def models(request: Request) -> ModelList:
    serving: Serving = request.app.state.serving
    return ModelList(data=[card(serving, name) for name in serving.names])


@router.get("/v1/models/{name:path}")
async def model(name: str, request: Request) -> ModelCard:
    serving: Serving = request.app.state.serving
    if name not in serving.names:
        raise ModelNotServed(name, serving.names)
    return card(serving, name)


@router.post("/tokenize", response_model=Tokenized)
async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    serving.check_model(body.model)
    tokenizer = serving.llm.tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("prompt: give exactly one of prompt and messages", field="prompt")
    if body.prompt is not None:
        ids = tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    else:
        ids = tokenizer.apply_chat_template(
            plain_messages(body.messages or []),
            tools=[tool.model_dump(exclude_none=True) for tool in body.tools or []] or None,
            add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
            continue_final_message=body.continue_final_message,
            **(body.chat_template_kwargs or {}),
        )
    strings = [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None
    answer = Tokenized(count=len(ids), max_model_len=serving.llm.max_model_len, tokens=ids, token_strs=strings)
    return json_reply(answer)


@router.post("/detokenize", response_model=Detokenized)
async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    serving: Serving = request.app.state.serving
    serving.check_model(body.model)
    size = serving.llm.tokenizer.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < size:
            raise InvalidRequest(f"tokens: id {token_id} is not in the vocabulary of {size}", field="tokens")
    return json_reply(Detokenized(prompt=serving.llm.tokenizer.decode(body.tokens, skip_special_tokens=False)))


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> ResetReply:
    """Forgets every cached prefix. Blocks in use stay until their requests end; ``blocks_in_use`` counts them."""
    success, blocks_in_use = await request.app.state.serving.llm.reset_prefix_cache()
    return ResetReply(success=success, blocks_in_use=blocks_in_use)


@router.get("/v1/requests/{request_id}/explain", response_model=Explanations)
async def explain(request_id: str, request: Request) -> Response | Explanations:
    """Why the prefix cache had no more of a request that was sent with ``"explain": true``; the id is the answer's."""
    serving: Serving = request.app.state.serving
    found = serving.insight.explanations(tenant_of(serving, request), request_id)
    if found:
        return Explanations(id=request_id, explanations=found)
    return error_response(
        404,
        f'request_id: nothing is kept of {request_id[:200]!r}; send a request with "explain": true '
        f"(the last {MAX_KEPT} are kept, once they have ended)",
        param="request_id",
    )
