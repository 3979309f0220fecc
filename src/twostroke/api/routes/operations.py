"""How the server is, and what an operator may do to it."""

from __future__ import annotations

import dataclasses
import time

from fastapi import APIRouter
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.openapi import Described
from twostroke.version import __version__

_NOT_NOW: Described = {
    503: {"description": "No engine runs now; the cause is in words.", "content": {"application/json": {}}}
}


def operations_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["operations"])

    @router.get("/health", responses=_NOT_NOW)
    @router.get("/ping", include_in_schema=False)
    async def health() -> Response:
        """Alive: steps are committed while work is queued. 503 says in words why not."""
        found = context.engine.health()
        body = {"status": found.state, "cause": found.cause, "num_requests": found.num_requests}
        return json_response(body, status=200 if found.is_alive else 503)

    @router.get("/ready", responses=_NOT_NOW)
    async def ready() -> Response:
        """Whether requests are taken now."""
        found = context.engine.health()
        return json_response({"status": found.state, "cause": found.cause}, status=200 if found.is_ready else 503)

    @router.get("/version")
    async def version() -> Response:
        """Of Twostroke."""
        return json_response({"version": __version__})

    @router.get("/server_info")
    async def server_info() -> Response:
        """What runs here, and how it was set up; no secrets."""
        facts, found = context.engine.facts, context.engine.health()
        return json_response(
            {
                "version": __version__,
                "uptime_s": round(time.time() - context.started_s, 1),
                "models": context.model_names,
                "engine": {**dataclasses.asdict(facts), "tokenizer_path": None},
                "health": dataclasses.asdict(found),
                "settings": {
                    field.name: _shown(field.name, getattr(context.config, field.name))
                    for field in dataclasses.fields(context.config)
                },
            }
        )

    @router.post("/reset_prefix_cache", responses=_NOT_NOW)
    async def reset_prefix_cache() -> Response:
        """Forget cached prefixes; what running requests use stays theirs."""
        return json_response({"success": True, "had_blocks": await context.engine.reset_prefix_cache()})

    return router


def _shown(name: str, value: object) -> object:
    if "key" in name and name != "ssl_keyfile":
        return None if not value else "set"
    return value if isinstance(value, str | int | float | bool | tuple) or value is None else str(value)
