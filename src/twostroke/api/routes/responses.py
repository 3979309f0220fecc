"""The route of the Responses API."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.context import ServerContext
from twostroke.api.conversation import Conversation
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.responses import ResponseCall
from twostroke.api.responses_input import chat_of_response
from twostroke.api.routes.generate import respond


def responses_router(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["responses"])

    @router.post("/v1/responses")
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that comes as a whole: nothing is stored."""
        headers = context.check_fields(body)
        answer_id = context.answer_id("resp", None)
        call = ResponseCall(
            body,
            Conversation(context.engine, chat_of_response(body), context.dialect, answer_id),
            answer_id=answer_id,
            model=context.check_model(body.model),
            created=context.created(),
        )
        return await respond(
            call,
            request,
            context.caller(request),
            streams=bool(body.stream),
            headers=headers,
            on_error=call.failure,
        )

    return router
