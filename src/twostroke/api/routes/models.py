"""Routes for the served model and its tokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response, StreamingResponse

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.generation import input_size, run_in_thread_if_long
from twostroke.api.protocol.chat import ChatTool, Conversation
from twostroke.api.protocol.fields import MAX_TOOLS, AtMost, TokenId, WireObject, as_sent
from twostroke.api.routing import BodyRoute
from twostroke.client.chat_inputs import ChatInputs
from twostroke.errors import InvalidParameter, InvalidPrompt
from twostroke.tokenizer.tokenizer import Tokenizer

_SLICE = 4096
"""Tokens whose JSON is encoded at once, which takes about a millisecond."""


class TokenizeRequest(WireObject):
    """Text or conversation to tokenize."""

    model: str | None = Field(default=None, description="The served model's name.")
    prompt: str | None = Field(default=None, description="A text.")
    messages: Conversation | None = Field(default=None, description="A conversation.")
    add_special_tokens: bool | None = Field(default=None, description="Default true for a text, false for a chat.")
    add_generation_prompt: bool | None = Field(default=None, description="With messages; default true.")
    continue_final_message: bool | None = Field(default=None, description="With messages.")
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="With messages.")
    tools: Annotated[list[ChatTool], AtMost(MAX_TOOLS)] | None = Field(default=None, description="With messages.")
    return_token_strs: bool | None = Field(default=None, description="Return the tokens as strings beside the ids.")


class DetokenizeRequest(WireObject):
    """Tokens to decode to text."""

    model: str | None = Field(default=None, description="The served model's name.")
    tokens: Annotated[list[TokenId], AtMost(2**20)]


def models_router(context: ServerContext) -> APIRouter:
    """Return the routes for the model and its tokenizer."""
    router = APIRouter(tags=["models"], route_class=BodyRoute)

    def described(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.started_s,
            "owned_by": "twostroke",
            "root": context.engine.facts.model,
            "parent": None,
            "max_model_len": context.engine.facts.max_model_len,
        }

    @router.get("/v1/models")
    @router.get("/v1/models/", include_in_schema=False)
    async def models() -> Response:
        """List the served model under each of its names."""
        return json_response({"object": "list", "data": [described(name) for name in context.model_names]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """Describe one model."""
        known = name if name in context.model_names else name.removesuffix("/")
        return json_response(described(context.check_model(known)))

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Tokenize a text or a conversation as the engine would."""
        headers = context.check_fields(body)
        context.check_model(body.model)
        amount = input_size(body.prompt, body.messages, body.tools, body.chat_template_kwargs)
        renders = body.messages is not None
        token_ids = await run_in_thread_if_long(lambda: _token_ids(context, body), amount, renders=renders)
        tokenizer = context.engine.tokenizer if body.return_token_strs else None
        written = _written(token_ids, context.engine.facts.max_model_len, tokenizer)
        if len(token_ids) <= _SLICE:
            content = b"".join([piece async for piece in written])
            return Response(content, headers=dict(headers), media_type="application/json")
        return StreamingResponse(written, headers=dict(headers), media_type="application/json")

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Decode tokens to text, special tokens included."""
        headers = context.check_fields(body)
        context.check_model(body.model)
        text = await run_in_thread_if_long(lambda: _text(context, body.tokens), len(body.tokens))
        return json_response({"prompt": text}, headers)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return the tokenizer facts that evaluation harnesses request before they count tokens."""
        tokenizer = context.engine.tokenizer
        return json_response(
            {
                **tokenizer.named_tokens,
                "chat_template": tokenizer.chat_templates.get("default"),
                "vocab_size": tokenizer.vocab_size,
                "model_max_length": context.engine.facts.max_model_len,
                "tokenizer_class": "PreTrainedTokenizerFast",
            }
        )

    return router


async def _written(token_ids: Sequence[int], max_model_len: int, tokenizer: Tokenizer | None) -> AsyncIterator[bytes]:
    """Yield the answer as JSON in slices, so that a long one is never in memory as a whole.

    Args:
        token_ids: tokens of the text.
        max_model_len: limit of the engine.
        tokenizer: writes the tokens as texts; None if those are not wanted.
    """
    yield b'{"count":%d,"max_model_len":%d,"tokens":' % (len(token_ids), max_model_len)
    async for piece in _list_of(token_ids, list):
        yield piece
    yield b',"token_strs":'
    if tokenizer is None:
        yield b"null"
    else:
        async for piece in _list_of(token_ids, tokenizer.tokens):
            yield piece
    yield b"}"


async def _list_of(token_ids: Sequence[int], items_of: Callable[[Sequence[int]], list[Any]]) -> AsyncIterator[bytes]:
    """Yield the JSON of a list with an item for each token; other tasks run after each slice."""
    yield b"["
    for begin in range(0, len(token_ids), _SLICE):
        if begin:
            await asyncio.sleep(0)
            yield b","
        yield msgspec.json.encode(items_of(token_ids[begin : begin + _SLICE]))[1:-1]
    yield b"]"


def _text(context: ServerContext, token_ids: list[int]) -> str:
    most = context.engine.facts.vocab_size
    if token_ids and max(token_ids) >= most:
        raise InvalidParameter("tokens", max(token_ids), f"must be from 0 to {most - 1} for this model")
    return context.engine.tokenizer.decode(token_ids, skip_special_tokens=False)


def _token_ids(context: ServerContext, body: TokenizeRequest) -> Sequence[int]:
    inputs = context.engine.inputs
    if (body.messages is None) == (body.prompt is None):
        raise InvalidPrompt("send either prompt or messages.")
    if body.messages is not None:
        continues = bool(body.continue_final_message)
        chat = ChatInputs(
            body.messages,
            tools=[as_sent(tool) for tool in body.tools] if body.tools else None,
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=body.chat_template_kwargs,
        )
        return inputs.encode(inputs.render_chat(chat), add_special_tokens=bool(body.add_special_tokens))
    return inputs.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)
