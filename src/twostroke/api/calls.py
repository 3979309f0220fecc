"""Calls by their urls: what a body has to be, and who answers it. One table for requests over HTTP and from files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from twostroke.api.answering import StreamedCall
from twostroke.api.chat import Chat
from twostroke.api.completions import Completion
from twostroke.api.context import ServerContext
from twostroke.api.conversation import Conversation, Words, in_words
from twostroke.api.embeddings import Embeddings
from twostroke.api.generation import Caller
from twostroke.api.messages import MESSAGES_WORDS, MessageCall
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.responses import ResponsesRequest
from twostroke.api.protocol.sampling import CompletionRequest, EmbeddingRequest, SamplingFields
from twostroke.api.responses import RESPONSES_WORDS, ResponseCall
from twostroke.config.server import ServerConfig

Body = TypeVar("Body", bound=SamplingFields)


class WholeCall(Protocol):
    """One request on its way through the engine."""

    async def open(self, caller: Caller) -> None:
        """Checks and queues it."""
        ...

    async def answer(self) -> dict[str, Any]:
        """The whole answer."""
        ...

    def close(self) -> None:
        """Nobody waits any more."""
        ...


class Call(WholeCall, StreamedCall, Protocol):
    """One that may be streamed."""


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


def message(context: ServerContext, chat: ChatRequest) -> MessageCall:
    """Answer in Anthropic's words a conversation that came in them."""
    answer_id = context.answer_id("msg", None)
    return MessageCall(
        conversation(context, chat, answer_id, MESSAGES_WORDS),
        answer_id=answer_id,
        model=context.check_model(chat.model),
    )


def response(context: ServerContext, body: ResponsesRequest, chat: ChatRequest) -> ResponseCall:
    """Answer in items a conversation that came in them, and is this chat."""
    answer_id = context.answer_id("resp", None)
    return ResponseCall(
        body,
        conversation(context, chat, answer_id, RESPONSES_WORDS),
        answer_id=answer_id,
        model=context.check_model(body.model),
        created=context.created(),
    )


def embeddings(context: ServerContext, body: EmbeddingRequest) -> Embeddings:
    """Texts as vectors."""
    return Embeddings(
        context.engine,
        body,
        answer_id=context.answer_id("embd", None),
        model=context.check_model(body.model),
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
