"""The route of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.calls import response
from twostroke.api.context import ServerContext
from twostroke.api.generation import amount_of, beside_the_loop
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.responses import ResponseCall, chat_of_response
from twostroke.api.routes.generate import respond
from twostroke.api.routing import BodyRoute


def responses_router(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["responses"], route_class=BodyRoute)

    @router.post("/v1/responses", responses=EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that comes as a whole: nothing is stored."""
        headers, chat, call = await beside_the_loop(lambda: _begun(context, body), amount_of(body))
        return await respond(
            call,
            request,
            context.caller(request, "chat", chat),
            streams=bool(body.stream),
            headers=headers,
            on_error=call.failure,
        )

    return router


def _begun(context: ServerContext, body: ResponsesRequest) -> tuple[Mapping[str, str], ChatRequest, ResponseCall]:
    """Return headers for the answer, the chat that asks for the same, and its call."""
    chat = chat_of_response(body)
    headers = context.check_fields(body, chat)
    return headers, chat, response(context, body, chat)
