"""Calls by url: body schema, handler and routes. Batch files use the same calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.answering import Call, json_response, respond, respond_whole
from twostroke.api.chat import Chat
from twostroke.api.completions import Completion
from twostroke.api.context import ServerContext
from twostroke.api.conversation import ParameterNames, with_client_names
from twostroke.api.embeddings import Embeddings
from twostroke.api.generation import input_size, run_in_thread_if_large
from twostroke.api.messages import MessageCall, chat_from_messages
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.sampling import CompletionRequest, EmbeddingRequest, SamplingFields
from twostroke.api.responses import ResponseCall, chat_from_response
from twostroke.api.routing import BodyRoute
from twostroke.config.server import ServerConfig

Body = TypeVar("Body", bound=SamplingFields)
Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CallKind(Generic[Body]):
    """Body schema and handler of one url."""

    body: type[Body]
    call: Callable[[ServerContext, Body], Call]
    """Factory of the call; it raises HTTPError if the model does not exist."""


def completion(context: ServerContext, body: CompletionRequest) -> Completion:
    """Return the call that continues a text."""
    return Completion(context.engine, body, context.head("cmpl", body.model, body.request_id))


def chat(context: ServerContext, body: ChatRequest) -> Chat:
    """Return the call that answers a conversation."""
    head = context.head("chatcmpl", body.model, body.request_id)
    return Chat(context.engine, limited(body, context.config), context.dialect, head)


def checked(context: ServerContext, request: ChatRequest, words: ParameterNames) -> ChatRequest:
    """Return a chat from another API's request with the server's limits applied.

    Args:
        context: context of the server.
        request: the equivalent chat.
        words: the client's names of parameters.

    Raises:
        InvalidParameter: its parameters are too long.
    """
    with with_client_names(words):
        context.admission.check_items(request)
    return limited(request, context.config)


def limited(request: ChatRequest, config: ServerConfig) -> ChatRequest:
    """Return the request with the server's default output limit, if it sets none itself."""
    limit = config.default_max_tokens
    if limit is None or request.max_tokens is not None or request.max_completion_tokens is not None:
        return request
    return request.model_copy(update={"max_tokens": max(limit, request.min_tokens or 0)})


CALLS: Mapping[str, CallKind[Any]] = {
    "/v1/completions": CallKind(CompletionRequest, completion),
    "/v1/chat/completions": CallKind(ChatRequest, chat),
}
"""Urls that batch files may use."""


def generate_router(context: ServerContext) -> APIRouter:
    """Return the routes of OpenAI's completions and chat APIs."""
    router = APIRouter(tags=["generate"], route_class=BodyRoute)

    @router.post("/v1/completions", responses=EVENTS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text."""
        headers = context.check_fields(body)
        call, caller = completion(context, body), context.caller(request, "text_completion", body)
        return await respond(call, request, caller, streams=bool(body.stream), headers=headers)

    @router.post("/v1/chat/completions", responses=EVENTS)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        headers, call = await run_in_thread_if_large(
            lambda: (context.check_fields(body), chat(context, body)), input_size(body)
        )
        caller = context.caller(request, "chat", body)
        return await respond(call, request, caller, streams=bool(body.stream), headers=headers)

    return router


def messages_router(context: ServerContext) -> APIRouter:
    """Return the routes of Anthropic's API."""
    router = APIRouter(tags=["messages"], route_class=BodyRoute)

    def begun(body: CountTokensRequest) -> tuple[Headers, MessageCall]:
        """Return headers for the response, and the call."""
        asked = chat_from_messages(body)
        headers = context.check_fields(body, asked)
        request = checked(context, asked, MessageCall.words)
        return headers, MessageCall(context.engine, request, context.dialect, context.head("msg", body.model))

    @router.post("/v1/messages", responses=EVENTS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        headers, call = await run_in_thread_if_large(lambda: begun(body), input_size(body))
        caller, streams = context.caller(request, "chat", call.request), bool(body.stream)
        return await respond(call, request, caller, streams=streams, headers=headers, on_error=call.failure)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Count the prompt tokens that a message would have."""
        headers, counted = await run_in_thread_if_large(lambda: begun(body), input_size(body))
        return json_response({"input_tokens": await counted.count_tokens()}, headers)

    return router


def responses_router(context: ServerContext) -> APIRouter:
    """Return the route of the Responses API."""
    router = APIRouter(tags=["responses"], route_class=BodyRoute)

    def begun(body: ResponsesRequest) -> tuple[Headers, ChatRequest, ResponseCall]:
        """Return headers for the response, the equivalent chat, and the call."""
        asked = chat_from_response(body)
        headers = context.check_fields(body, asked)
        request, head = checked(context, asked, ResponseCall.words), context.head("resp", body.model)
        return headers, asked, ResponseCall(context.engine, request, context.dialect, head, body)

    @router.post("/v1/responses", responses=EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that is sent in full; nothing is stored."""
        headers, asked, call = await run_in_thread_if_large(lambda: begun(body), input_size(body))
        caller, streams = context.caller(request, "chat", asked), bool(body.stream)
        return await respond(call, request, caller, streams=streams, headers=headers, on_error=call.failure)

    return router


def embeddings_router(context: ServerContext) -> APIRouter:
    """Return the route of embeddings."""
    router = APIRouter(tags=["embeddings"], route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Embed texts as the model's hidden state of the last token."""
        headers = context.check_fields(body)
        body.check_refused()
        call = Embeddings(context.engine, body, context.head("embd", body.model))
        caller = context.caller(request, "embeddings")
        with caller.admission.preparing():
            await call.open(caller)
        return await respond_whole(call, request, headers)

    return router
