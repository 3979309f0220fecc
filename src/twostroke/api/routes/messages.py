"""The routes of Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.calls import conversation, message
from twostroke.api.context import ServerContext
from twostroke.api.messages_input import chat_of_messages
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.routes.generate import json_response, respond


def messages_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["messages"])

    @router.post("/v1/messages", responses=EVENTS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        headers = context.check_fields(body)
        chat = chat_of_messages(body)
        call = message(context, chat)
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
        headers = context.check_fields(body)
        context.check_model(body.model)
        counted = conversation(context, chat_of_messages(body), "count")
        return json_response({"input_tokens": await counted.count_tokens()}, headers)

    return router
