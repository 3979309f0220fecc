"""What a server's engine has counted, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import PlainTextResponse, Response

from twostroke.api.context import ServerContext
from twostroke.metrics.exposition import CONTENT_TYPE


def observe_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    observation = context.observation

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(observation.exposition(), media_type=CONTENT_TYPE)

    return router
