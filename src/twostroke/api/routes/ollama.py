"""Routes of Ollama's API, for its clients: chat, generate, embed, and what they ask about the served model."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api.answering import Call, json_response, respond, respond_whole
from twostroke.api.calls import checked
from twostroke.api.context import ServerContext
from twostroke.api.conversation import with_client_names
from twostroke.api.generation import AnswerHead, input_size, run_in_thread_if_large
from twostroke.api.ollama import (
    WORDS,
    OllamaChat,
    OllamaEmbeddings,
    OllamaRawGenerate,
    OllamaTemplatedGenerate,
    chat_from_ollama,
    failure,
    loaded,
    model_name,
)
from twostroke.api.openapi import LINES
from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.fields import WireObject
from twostroke.api.protocol.ollama import (
    OllamaAnswerRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaRequest,
    OllamaShowRequest,
)
from twostroke.api.routing import BodyRoute
from twostroke.engine.facts import EngineFacts
from twostroke.version import __version__

Object = dict[str, Any]
_LINES = "application/x-ndjson"


def ollama_router(context: ServerContext) -> APIRouter:
    """Return the routes of Ollama's API."""
    router = APIRouter(tags=["ollama"], route_class=BodyRoute)

    async def answered(
        body: OllamaAnswerRequest, call: Call, request: Request, headers: Mapping[str, str], asked: WireObject
    ) -> Response:
        caller, streams = context.caller(request, "chat", asked), body.stream is not False
        return await respond(
            call, request, caller, streams=streams, headers=headers, on_error=failure, media_type=_LINES
        )

    def templated(
        body: OllamaChatRequest | OllamaGenerateRequest, kind: type[OllamaChat]
    ) -> tuple[Mapping[str, str], OllamaChat]:
        with with_client_names(WORDS):
            asked = chat_from_ollama(body, context.engine.facts.max_model_len)
        headers, named = _head(context, body, asked)
        request = checked(context, asked, WORDS)
        return headers, kind(context.engine, request, context.dialect, named)

    @router.post("/api/chat", responses=LINES)
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        if not body.messages:
            headers, named = _head(context, body)
            return json_response(loaded(body, named.model), headers)
        headers, call = await run_in_thread_if_large(lambda: templated(body, OllamaChat), input_size(body))
        return await answered(body, call, request, headers, call.request)

    @router.post("/api/generate", responses=LINES)
    async def generate(body: OllamaGenerateRequest, request: Request) -> Response:
        """Answer a prompt, with the model's chat template if it has one."""
        if not body.prompt:
            headers, named = _head(context, body)
            return json_response(loaded(body, named.model), headers)
        if body.raw or not context.engine.tokenizer.chat_templates:
            headers, named = _head(context, body)
            return await answered(
                body,
                OllamaRawGenerate(context.engine, body, named, context.config.default_max_tokens),
                request,
                headers,
                body,
            )
        headers, call = await run_in_thread_if_large(lambda: templated(body, OllamaTemplatedGenerate), input_size(body))
        return await answered(body, call, request, headers, call.request)

    return router


def ollama_models_router(context: ServerContext) -> APIRouter:
    """Return the routes of Ollama's API for embeddings and about the served model."""
    router = APIRouter(tags=["ollama"], route_class=BodyRoute)

    async def embedded(body: OllamaEmbedRequest | OllamaEmbeddingsRequest, request: Request) -> Response:
        headers, named = _head(context, body)
        call = OllamaEmbeddings(context.engine, body, named)
        caller = context.caller(request, "embeddings")
        with caller.admission.preparing():
            await call.open(caller)
        return await respond_whole(call, request, headers)

    @router.post("/api/embed")
    async def embed(body: OllamaEmbedRequest, request: Request) -> Response:
        """Embed texts as the model's hidden state of the last token."""
        return await embedded(body, request)

    @router.post("/api/embeddings")
    async def embeddings(body: OllamaEmbeddingsRequest, request: Request) -> Response:
        """Embed one text."""
        return await embedded(body, request)

    @router.get("/api/tags")
    async def tags() -> Response:
        """List the served model under each of its names."""
        return json_response({"models": [_listed(context, name) for name in context.model_names]})

    @router.get("/api/ps")
    async def running() -> Response:
        """List the loaded model."""
        more = {"expires_at": _NEVER, "size_vram": 0, "context_length": context.engine.facts.max_model_len}
        return json_response({"models": [{**_listed(context, context.model_names[0]), **more}]})

    @router.post("/api/show")
    async def show(body: OllamaShowRequest) -> Response:
        """Describe the served model."""
        headers = context.check_fields(body)
        context.check_model(known_name(context, body.model or body.name))
        return json_response(_described(context), headers)

    @router.get("/api/version")
    async def version() -> Response:
        """Return this server's version."""
        return json_response({"version": __version__})

    return router


def _head(
    context: ServerContext, body: OllamaRequest, chat: ChatRequest | None = None
) -> tuple[Mapping[str, str], AnswerHead]:
    """Return headers for the response, and the answer's head; `chat` is the equivalent chat, if there is one."""
    return context.check_fields(body, chat), context.head("ollama", known_name(context, body.model))


_NEVER = "2318-04-11T23:47:16Z"
"""Time at which the served model is unloaded, for clients that need a time: far in the future, as Ollama writes it."""


def known_name(context: ServerContext, given: str | None) -> str | None:
    """Return the model's name without a tag that a client has added."""
    return None if given is None else model_name(given, context.model_names.__contains__)


def _family(facts: EngineFacts) -> str:
    """Return the family's name: qwen3 of Qwen3ForCausalLM."""
    return facts.architecture.removesuffix("ForCausalLM").lower()


def _details(context: ServerContext) -> Object:
    facts = context.engine.facts
    is_large, family = facts.num_parameters >= 1e9, _family(facts)
    return {
        "parent_model": "",
        "format": "gguf" if facts.model.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{facts.num_parameters / (1e9 if is_large else 1e6):.1f}{'B' if is_large else 'M'}",
        "quantization_level": facts.quantization or facts.dtype,
    }


def _listed(context: ServerContext, name: str) -> Object:
    facts = context.engine.facts
    identity = f"{facts.model} {facts.architecture} {facts.num_parameters} {facts.weight_bytes}"
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(context.started_s, UTC).isoformat(),
        "size": facts.weight_bytes,
        "digest": hashlib.sha256(identity.encode()).hexdigest(),  # not of the content: that would be a read of the file
        "details": _details(context),
    }


def _described(context: ServerContext) -> Object:
    facts, dialect = context.engine.facts, context.dialect
    family = _family(facts)
    templates = context.engine.tokenizer.chat_templates
    has_template = bool(templates)
    capabilities = [
        "completion",
        *(["tools"] if has_template and dialect.tool_call_parser is not None else []),
        *(["thinking"] if has_template and dialect.reasoning_parser is not None else []),
        "embedding",
    ]
    return {
        "modelfile": "",
        "parameters": "",
        "template": templates.get("default", ""),
        "modified_at": datetime.fromtimestamp(context.started_s, UTC).isoformat(),
        "details": _details(context),
        "model_info": {
            "general.parameter_count": facts.num_parameters,
            "general.architecture": family,
            f"{family}.context_length": facts.max_model_len,
            f"{family}.embedding_length": facts.hidden_size,
            f"{family}.block_count": facts.num_layers,
        },
        "capabilities": capabilities,
    }
