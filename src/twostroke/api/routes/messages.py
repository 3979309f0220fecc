"""The routes of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.calls import conversation, message
from twostroke.api.context import ServerContext
from twostroke.api.conversation import Conversation
from twostroke.api.generation import amount_of, beside_the_loop
from twostroke.api.messages import MESSAGES_WORDS, MessageCall, chat_of_messages
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.routes.generate import json_response, respond
from twostroke.api.routing import BodyRoute


def messages_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["messages"], route_class=BodyRoute)

    @router.post("/v1/messages", responses=EVENTS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        headers, chat, call = await beside_the_loop(lambda: _begun(context, body), amount_of(body))
        return await respond(
            call,
            request,
            context.caller(request, "chat", chat),
            streams=bool(body.stream),
            headers=headers,
            on_error=call.failure,
        )

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Tokens of the prompt that a message would have."""
        headers, counted = await beside_the_loop(lambda: _counted(context, body), amount_of(body))
        return json_response({"input_tokens": await counted.count_tokens()}, headers)

    return router


def _begun(context: ServerContext, body: MessagesRequest) -> tuple[Mapping[str, str], ChatRequest, MessageCall]:
    """Return headers for the answer, the chat that asks for the same, and its call."""
    chat = chat_of_messages(body)
    headers = context.check_fields(body, chat)
    return headers, chat, message(context, chat)


def _counted(context: ServerContext, body: CountTokensRequest) -> tuple[Mapping[str, str], Conversation]:
    chat = chat_of_messages(body)
    headers = context.check_fields(body, chat)
    context.check_model(body.model)
    return headers, conversation(context, chat, "count", MESSAGES_WORDS)
