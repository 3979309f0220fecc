"""Route that describes the server's capabilities to programs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.parsers.chat_parser import REASONING_FAMILIES
from twostroke.api.parsers.families import TOOL_CALL_FAMILIES
from twostroke.api.protocol.fields import FieldTreatment, field_treatments
from twostroke.api.protocol.sampling import StructuredOutputsField
from twostroke.api.reference import ENDPOINTS
from twostroke.version import __version__


def capabilities_router(context: ServerContext) -> APIRouter:
    """Return the route of /v1/capabilities."""
    router = APIRouter(tags=["operations"])

    @router.get("/v1/capabilities")
    async def capabilities(request: Request) -> Response:
        """Return model, limits, parsers, endpoints, and the treatment of each request field."""
        paths: dict[str, dict[str, Any]] = request.app.openapi()["paths"]
        endpoints = {
            path: {"methods": sorted(method.upper() for method in methods), **_fields(path)}
            for path, methods in paths.items()
        }
        return json_response({"version": __version__, **_abilities(context), "endpoints": endpoints})

    return router


def _abilities(context: ServerContext) -> dict[str, Any]:
    facts, dialect = context.engine.facts, context.dialect
    tool_choice = ["none", "required", "named", *(["auto"] if dialect.tool_call_parser is not None else [])]
    return {
        "model": _model(context),
        "limits": {
            "max_model_len": facts.max_model_len,
            "max_num_seqs": facts.max_num_seqs,
            "max_logprobs": facts.max_logprobs,
            "max_body_bytes": context.config.max_body_bytes,
            "default_max_tokens": context.config.default_max_tokens,
        },
        "inputs": ["text", "tokens"],
        "outputs": ["text", "embeddings"],
        "structured_outputs": [name for name, _, _ in field_treatments(StructuredOutputsField)],
        "tool_calls": {
            "parser": dialect.tool_call_parser,
            "known_parsers": sorted(TOOL_CALL_FAMILIES),
            "tool_choice": tool_choice,
        },
        "reasoning": {"parser": dialect.reasoning_parser, "known_parsers": sorted(REASONING_FAMILIES)},
        "priority": facts.uses_priority,
    }


def _model(context: ServerContext) -> dict[str, Any]:
    facts = context.engine.facts
    return {
        "names": context.model_names,
        "root": facts.model,
        "vocab_size": facts.vocab_size,
        "embedding_dimensions": facts.hidden_size,
        "has_chat_template": "default" in context.engine.tokenizer.chat_templates,
    }


def _fields(path: str) -> dict[str, Any]:
    """Return the fields of an endpoint by their treatment, with the reason for refused ones."""
    kind = ENDPOINTS.get(f"POST {path}")
    if kind is None:
        return {}
    found = list(field_treatments(kind))
    return {
        "supported": sorted(name for name, standing, _ in found if standing is FieldTreatment.ACTS),
        "bookkeeping": sorted(name for name, standing, _ in found if standing is FieldTreatment.BOOKKEEPING),
        "refused": {name: why for name, standing, why in sorted(found) if standing is FieldTreatment.REFUSED},
    }
