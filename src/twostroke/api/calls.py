"""Calls by their urls: what a body has to be, who answers it, and the routes. Files of requests use the same calls."""

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
from twostroke.api.conversation import Conversation, Words, in_words
from twostroke.api.embeddings import Embeddings
from twostroke.api.generation import amount_of, beside_the_loop
from twostroke.api.messages import MESSAGES_WORDS, MessageCall, chat_of_messages
from twostroke.api.openapi import EVENTS
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.messages import CountTokensRequest, MessagesRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.sampling import CompletionRequest, EmbeddingRequest, SamplingFields
from twostroke.api.responses import RESPONSES_WORDS, ResponseCall, chat_of_response
from twostroke.api.routing import BodyRoute
from twostroke.config.server import ServerConfig

Body = TypeVar("Body", bound=SamplingFields)
Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class CallKind(Generic[Body]):
    """What one url takes and does."""

    body: type[Body]
    call: Callable[[ServerContext, Body], Call]
    """Raises HTTPError where there is no such model."""


def completion(context: ServerContext, body: CompletionRequest) -> Completion:
    """Continue a text."""
    return Completion(
        context.engine,
        body,
        answer_id=context.answer_id("cmpl", body.request_id),
        model=context.check_model(body.model),
        created=context.created(),
    )


def chat(context: ServerContext, body: ChatRequest) -> Chat:
    """Answer a conversation."""
    answer_id = context.answer_id("chatcmpl", body.request_id)
    return Chat(
        Conversation(context.engine, limited(body, context.config), context.dialect, answer_id),
        answer_id=answer_id,
        model=context.check_model(body.model),
        created=context.created(),
    )


def conversation(context: ServerContext, request: ChatRequest, answer_id: str, words: Words) -> Conversation:
    """One that came in other words than those of chats; the limits on parameters are checked here.

    Args:
        context: of the server.
        request: the chat that asks for the same.
        answer_id: of the answer.
        words: what the client calls parameters.

    Raises:
        InvalidParameter: its parameters are too long.
    """
    with in_words(words):
        context.admission.check_items(request)
    return Conversation(context.engine, limited(request, context.config), context.dialect, answer_id, words=words)


def limited(request: ChatRequest, config: ServerConfig) -> ChatRequest:
    """Return the request with the server's limit on its output, where it sets none itself."""
    limit = config.default_max_tokens
    if limit is None or request.max_tokens is not None or request.max_completion_tokens is not None:
        return request
    return request.model_copy(update={"max_tokens": max(limit, request.min_tokens or 0)})


CALLS: Mapping[str, CallKind[Any]] = {
    "/v1/completions": CallKind(CompletionRequest, completion),
    "/v1/chat/completions": CallKind(ChatRequest, chat),
}
"""What files may ask for."""


def generate_router(context: ServerContext) -> APIRouter:
    """The routes of OpenAI's older APIs."""
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
        headers, call = await beside_the_loop(
            lambda: (context.check_fields(body), chat(context, body)), amount_of(body)
        )
        caller = context.caller(request, "chat", body)
        return await respond(call, request, caller, streams=bool(body.stream), headers=headers)

    return router


def messages_router(context: ServerContext) -> APIRouter:
    """The routes of Anthropic's API."""
    router = APIRouter(tags=["messages"], route_class=BodyRoute)

    def begun(body: CountTokensRequest, answer_id: str) -> tuple[Headers, ChatRequest, Conversation, str]:
        """Return headers for the answer, the chat that asks for the same, its conversation, and the model's name."""
        asked = chat_of_messages(body)
        headers = context.check_fields(body, asked)
        found = conversation(context, asked, answer_id, MESSAGES_WORDS)
        return headers, asked, found, context.check_model(body.model)

    @router.post("/v1/messages", responses=EVENTS)
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation."""
        answer_id = context.answer_id("msg", None)
        headers, asked, found, model = await beside_the_loop(lambda: begun(body, answer_id), amount_of(body))
        call, caller = MessageCall(found, answer_id=answer_id, model=model), context.caller(request, "chat", asked)
        streams = bool(body.stream)
        return await respond(call, request, caller, streams=streams, headers=headers, on_error=call.failure)

    @router.post("/v1/messages/count_tokens")
    async def count_tokens(body: CountTokensRequest) -> Response:
        """Tokens of the prompt that a message would have."""
        headers, _, counted, _ = await beside_the_loop(lambda: begun(body, "count"), amount_of(body))
        return json_response({"input_tokens": await counted.count_tokens()}, headers)

    return router


def responses_router(context: ServerContext) -> APIRouter:
    """The route of the Responses API."""
    router = APIRouter(tags=["responses"], route_class=BodyRoute)

    def begun(body: ResponsesRequest) -> tuple[Headers, ChatRequest, ResponseCall]:
        """Return headers for the answer, the chat that asks for the same, and its call."""
        asked = chat_of_response(body)
        headers = context.check_fields(body, asked)
        answer_id = context.answer_id("resp", None)
        found = conversation(context, asked, answer_id, RESPONSES_WORDS)
        model = context.check_model(body.model)
        return headers, asked, ResponseCall(body, found, answer_id=answer_id, model=model, created=context.created())

    @router.post("/v1/responses", responses=EVENTS)
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that comes as a whole: nothing is stored."""
        headers, asked, call = await beside_the_loop(lambda: begun(body), amount_of(body))
        caller, streams = context.caller(request, "chat", asked), bool(body.stream)
        return await respond(call, request, caller, streams=streams, headers=headers, on_error=call.failure)

    return router


def embeddings_router(context: ServerContext) -> APIRouter:
    """The route of embeddings."""
    router = APIRouter(tags=["embeddings"], route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors: the model's hidden state of the last token."""
        headers = context.check_fields(body)
        body.check_refused()
        answer_id, model = context.answer_id("embd", None), context.check_model(body.model)
        call = Embeddings(context.engine, body, answer_id=answer_id, model=model)
        caller = context.caller(request, "embeddings")
        with caller.admission.preparing():
            await call.open(caller)
        return await respond_whole(call, request, headers)

    return router
