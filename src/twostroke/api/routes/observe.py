"""What a server's engine has counted, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from twostroke.api.context import ServerContext
from twostroke.metrics.exposition import CONTENT_TYPE


def observe_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    observation = context.observation

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics for Prometheus. A tenant sees no other tenant's name; the administrator sees all."""
        return Response(observation.exposition(request.state.tenant), media_type=CONTENT_TYPE)

    return router
