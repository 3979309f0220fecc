"""Where time goes: metrics, the timeline of a request, the engine's last minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import Described
from twostroke.api.routes.generate import json_response
from twostroke.errors import InvalidParameter
from twostroke.events import to_json
from twostroke.explain.recorder import FlightRecorder
from twostroke.explain.segments import Timeline
from twostroke.explain.tenant_view import timeline_for_tenant
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_of
from twostroke.explain.trace import trace_of
from twostroke.metrics.exposition import CONTENT_TYPE

_JSON_OR_TEXT: Described = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_LINES: Described = {200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}}


def observe_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    observation = context.observation

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(observation.exposition(), media_type=CONTENT_TYPE)

    @router.get("/v1/requests/{request_id:path}/timeline", responses=_JSON_OR_TEXT)
    async def timeline(
        request: Request, request_id: str, format: Annotated[Literal["json", "text"], Query()] = "json"
    ) -> Response:
        """Every millisecond of a request, by the id of its answer, in one labelled segment with its reason.

        Where keys are set a request is shown to its own tenant and to the administrator, and only the latter sees
        others by their names.
        """
        found = await asyncio.to_thread(_timeline, observation.recorder, request_id, request.state.tenant)
        if format == "text":
            return PlainTextResponse(timeline_text(found))
        return json_response(found.to_dict())

    @router.get("/v1/trace")
    async def trace() -> Response:
        """The engine's last minutes as a Chrome trace, for Perfetto."""
        return json_response(await asyncio.to_thread(lambda: trace_of(observation.recorder.events())))

    @router.get("/flight_recorder", response_class=StreamingResponse, responses=_LINES)
    async def flight_recorder() -> Response:
        """The engine's last minutes as an event log: counts and ids, no text."""
        headers = {"content-disposition": 'attachment; filename="twostroke-flight.jsonl"'}
        return StreamingResponse(_lines(observation.recorder), media_type="application/jsonl", headers=headers)

    return router


def _timeline(recorder: FlightRecorder, request_id: str, tenant: str) -> Timeline:
    try:
        if tenant:
            return timeline_for_tenant(recorder.events(), request_id, tenant)
        return timeline_of(recorder.events(), request_id)
    except InvalidParameter as error:
        raise HTTPError(404, str(error), code="request_not_found", param="request_id") from error


def _lines(recorder: FlightRecorder) -> Iterator[str]:
    return (f"{to_json(event)}\n" for event in recorder.events())
