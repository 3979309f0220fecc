"""The engine at work: its state, what changes of it, and the end of a request that somebody points at."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import EVENTS, Described
from twostroke.api.routes.request_ids import ID, OF_SEVERAL
from twostroke.errors import shown

_UNKNOWN: Described = {404: {"description": "Nobody of yours runs by that id.", "content": {"application/json": {}}}}


def live_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    feed = context.observation.feed

    @router.get("/live/state")
    async def state(request: Request) -> Response:
        """Batch, blocks, queue and requests as they are now; what it means is said in docs/page.md.

        There are ids and counts in it, no texts. Where keys are set, a tenant sees others without their names.
        """
        if "step" in request.query_params:
            raise HTTPError(400, "step: of a recording (twostroke view); this is an engine at work.", param="step")
        return json_response(feed.snapshot(request.state.tenant))

    @router.get("/live/events", response_class=StreamingResponse, responses=EVENTS)
    async def events(request: Request) -> Response:
        """The same, and then what changes of it, at most ten times a second."""
        if feed.is_full:
            raise HTTPError(503, "too many watch already; close another page.", code="too_many_viewers")
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(feed.events(request.state.tenant), media_type="text/event-stream", headers=headers)

    @router.post(f"/v1/requests/{{{ID}}}/abort", responses=_UNKNOWN)
    async def abort(request: Request, request_id: str) -> Response:
        """Ends a request, by the id of its answer; whoever reads the answer is told so."""
        if not context.engine.abort(request_id, request.state.tenant):
            message = f"no request {shown(request_id)} of yours runs; it may have ended. {OF_SEVERAL}"
            raise HTTPError(404, message, code="request_not_found", param="request_id")
        return json_response({"request_id": request_id, "aborted": True})

    return router
