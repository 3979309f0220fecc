"""The route of embeddings."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from twostroke.api import calls
from twostroke.api.context import ServerContext
from twostroke.api.protocol.sampling import EmbeddingRequest
from twostroke.api.routes.generate import respond_whole
from twostroke.api.routing import BodyRoute


def embeddings_router(context: ServerContext) -> APIRouter:
    """The route."""
    router = APIRouter(tags=["embeddings"], route_class=BodyRoute)

    @router.post("/v1/embeddings")
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Texts as vectors: the model's hidden state of the last token."""
        headers = context.check_fields(body)
        body.check_refused()
        call, caller = calls.embeddings(context, body), context.caller(request, "embeddings")
        with caller.admission.preparing():
            await call.open(caller)
        return await respond_whole(call, request, headers)

    return router
