"""Routes for an engine's state and history: state, changes, metrics, timelines, trace, events and kept prompts.

They include the abort of a request. A request id in a path is any name that a caller may choose, including slashes
and line breaks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from starlette.convertors import Convertor, register_url_convertor
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import EVENTS, Described
from twostroke.api.prompt_texts import PromptTexts
from twostroke.errors import InvalidParameter, shown
from twostroke.event_codec import to_json
from twostroke.events import Event
from twostroke.explain.segments import Timeline
from twostroke.explain.text import timeline_text
from twostroke.explain.timeline import timeline_for_tenant, timeline_of
from twostroke.explain.trace import trace_of
from twostroke.metrics.exposition import CONTENT_TYPE

ID = "request_id:request"
"""Path parameter of a request id: `/v1/requests/{request_id:request}/timeline`."""
OF_SEVERAL = "For a request with several prompts use one id per prompt: ID-0, ID-1."
"""Hint in the errors about unknown ids."""


class _RequestIds(Convertor[str]):
    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("request", _RequestIds())


_JSON_OR_TEXT: Described = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_NO_TEXT: Described = {
    404: {"description": "No prompt with that id is kept for your key.", "content": {"application/json": {}}}
}
_LINES: Described = {200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}}
Events = Callable[[], Iterable[Event]]
"""Function that reads the events from the first one on; callable in any thread."""


def history_router(events: Events, texts: PromptTexts | None = None, *, why_no_texts: str = "") -> APIRouter:
    """Return the routes for past events.

    Args:
        events: reads the past events.
        texts: kept prompts, if any are kept.
        why_no_texts: message if no prompts are kept.
    """
    router = APIRouter(tags=["observe"])

    @router.get(f"/v1/requests/{{{ID}}}/timeline", responses=_JSON_OR_TEXT)
    async def timeline(
        request: Request, request_id: str, format: Annotated[Literal["json", "text"], Query()] = "json"
    ) -> Response:
        """Return a request's timeline by the id of its answer: labelled segments with reasons for every millisecond.

        If keys are set, a request is visible to its own tenant and to the administrator; only the latter sees the
        names of other tenants' requests.
        """
        tenant: str = getattr(request.state, "tenant", "")
        found = await asyncio.to_thread(_timeline, events, request_id, tenant)
        if format == "text":
            return PlainTextResponse(timeline_text(found))
        return json_response(found.to_dict())

    @router.get(f"/v1/requests/{{{ID}}}/prompt", responses=_NO_TEXT)
    async def prompt(request: Request, request_id: str) -> Response:
        """Return a request's prompt, after the chat template, by the id of its answer; needs --live-text.

        If keys are set, it is visible to its own tenant and to the administrator.
        """
        if texts is None:
            raise HTTPError(404, why_no_texts, code="no_texts")
        kept = texts.of(request_id, getattr(request.state, "tenant", ""))
        if kept is None:
            message = f"no prompt of your request {shown(request_id)} is kept; it may be too old. {OF_SEVERAL}"
            raise HTTPError(404, message, code="request_not_found", param="request_id")
        is_text = isinstance(kept.content, str)
        return json_response({"request_id": request_id, "prompt" if is_text else "prompt_token_ids": kept.content})

    @router.get("/v1/trace")
    async def trace() -> Response:
        """Return the engine's last minutes as a Chrome trace, for Perfetto."""
        return json_response(await asyncio.to_thread(lambda: trace_of(events())))

    @router.get("/flight_recorder", response_class=StreamingResponse, responses=_LINES)
    async def flight_recorder() -> Response:
        """Return the engine's last minutes as an event log, with counts and ids but no text."""
        headers = {"content-disposition": 'attachment; filename="twostroke-flight.jsonl"'}
        return StreamingResponse(_lines(events), media_type="application/jsonl", headers=headers)

    return router


def _timeline(events: Events, request_id: str, tenant: str) -> Timeline:
    try:
        if tenant:
            return timeline_for_tenant(events(), request_id, tenant)
        return timeline_of(events(), request_id)
    except InvalidParameter as error:
        raise HTTPError(404, str(error), code="request_not_found", param="request_id") from error


def _lines(events: Events) -> Iterator[str]:
    return (f"{to_json(event)}\n" for event in events())


_UNKNOWN: Described = {
    404: {"description": "You have no running request of that id.", "content": {"application/json": {}}}
}


def live_router(context: ServerContext) -> APIRouter:
    """Return the routes for the current state."""
    router = APIRouter(tags=["observe"])
    feed = context.observation.feed

    @router.get("/live/state")
    async def state(request: Request) -> Response:
        """Return the current batch, blocks, queue and requests; docs/page.md describes the fields.

        It has ids and counts, no texts. If keys are set, a tenant does not see the names of other tenants' requests.
        """
        if "step" in request.query_params:
            raise HTTPError(400, "step: only for recordings (twostroke view); this is a running engine.", param="step")
        return json_response(feed.snapshot(request.state.tenant))

    @router.get("/live/events", response_class=StreamingResponse, responses=EVENTS)
    async def events(request: Request) -> Response:
        """Stream the current state, then its changes, at most ten times a second."""
        if feed.is_full:
            raise HTTPError(503, "too many viewers; close another page.", code="too_many_viewers")
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(feed.events(request.state.tenant), media_type="text/event-stream", headers=headers)

    @router.post(f"/v1/requests/{{{ID}}}/abort", responses=_UNKNOWN)
    async def abort(request: Request, request_id: str) -> Response:
        """Abort a request by the id of its answer; the client that reads the answer gets an error."""
        if not context.engine.abort(request_id, request.state.tenant):
            message = f"you have no running request {shown(request_id)}; it may have ended. {OF_SEVERAL}"
            raise HTTPError(404, message, code="request_not_found", param="request_id")
        return json_response({"request_id": request_id, "aborted": True})

    return router


def observe_router(context: ServerContext) -> APIRouter:
    """Return the route of /metrics."""
    router = APIRouter(tags=["observe"])
    observation = context.observation

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics for Prometheus. A tenant sees no other tenant's name; the administrator sees all."""
        return Response(observation.exposition(request.state.tenant), media_type=CONTENT_TYPE)

    return router
