"""The route of the Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.calls import response
from twostroke.api.context import ServerContext
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.responses_input import chat_of_response
from twostroke.api.routes.generate import respond


def responses_router(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["responses"])

    @router.post("/v1/responses", responses=EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that comes as a whole: nothing is stored."""
        headers = context.check_fields(body)
        chat = chat_of_response(body)
        call = response(context, body, chat)
        return await respond(
            call,
            request,
            context.caller(request, "chat", chat),
            streams=bool(body.stream),
            headers=headers,
            on_error=call.failure,
        )

    return router
