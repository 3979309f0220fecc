"""The routes that generate: completions and chats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.answering import EventStream, close_on_disconnect, failure
from twostroke.api.calls import Call, WholeCall, chat, completion
from twostroke.api.context import ServerContext
from twostroke.api.generation import Abandoned, Caller, amount_of, beside_the_loop
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.sampling import CompletionRequest
from twostroke.api.routing import BodyRoute

CLIENT_CLOSED_REQUEST = 499
"""Nobody receives it; the access log shows it."""


def generate_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["generate"], route_class=BodyRoute)

    @router.post("/v1/completions", responses=EVENTS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        headers = context.check_fields(body)
        call = completion(context, body)
        return await respond(
            call, request, context.caller(request, "text_completion", body), streams=bool(body.stream), headers=headers
        )

    @router.post("/v1/chat/completions", responses=EVENTS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        headers, call = await beside_the_loop(
            lambda: (context.check_fields(body), chat(context, body)), amount_of(body)
        )
        return await respond(
            call, request, context.caller(request, "chat", body), streams=bool(body.stream), headers=headers
        )

    return router


async def respond(
    call: Call,
    request: Request,
    caller: Caller,
    *,
    streams: bool,
    headers: Mapping[str, str],
    on_error: Callable[[Exception], bytes] = failure,
) -> Response:
    """Runs a call and answers; a client that leaves ends it within a step.

    `on_error` gives the last bytes of a stream that cannot go on.
    """
    with caller.admission.preparing():
        await call.open(caller)
    if streams:
        return EventStream(call, on_error=on_error, headers=headers)
    return await respond_whole(call, request, headers)


async def respond_whole(call: WholeCall, request: Request, headers: Mapping[str, str]) -> Response:
    """Answers a call that is open; a client that leaves ends it within a step."""
    watch = asyncio.ensure_future(close_on_disconnect(request.receive, call))
    try:
        return json_response(await call.answer(), headers)
    except Abandoned:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    finally:
        watch.cancel()
        call.close()


def json_response(body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> Response:
    """A JSON answer, written by the fast encoder."""
    content = msgspec.json.encode(body)
    return Response(content, status_code=status, media_type="application/json", headers=dict(headers or {}))
