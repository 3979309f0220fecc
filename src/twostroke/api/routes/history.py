"""What an engine does and did: state, changes, metrics, timelines, a trace, events, prompts that are kept.

Also the end of a request that somebody points at. Ids of requests within paths are whatever a caller may have named
them, slashes and line breaks too.
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
"""The part of a route's path that is one: `/v1/requests/{request_id:request}/timeline`."""
OF_SEVERAL = "Answers to several prompts are known one by one: ID-0, ID-1."
"""Said where an id is unknown."""


class _RequestIds(Convertor[str]):
    regex = "(?s:.+)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("request", _RequestIds())


_JSON_OR_TEXT: Described = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
_NO_TEXT: Described = {
    404: {"description": "No prompt of yours is kept by that id.", "content": {"application/json": {}}}
}
_LINES: Described = {200: {"content": {"application/jsonl": {"schema": {"type": "string"}}}}}
Events = Callable[[], Iterable[Event]]
"""Reads them from the first on; in any thread."""


def history_router(events: Events, texts: PromptTexts | None = None, *, why_no_texts: str = "") -> APIRouter:
    """The routes.

    Args:
        events: of the past.
        texts: prompts, where they are kept.
        why_no_texts: said to who asks for one where they are not.
    """
    router = APIRouter(tags=["observe"])

    @router.get(f"/v1/requests/{{{ID}}}/timeline", responses=_JSON_OR_TEXT)
    async def timeline(
        request: Request, request_id: str, format: Annotated[Literal["json", "text"], Query()] = "json"
    ) -> Response:
        """Every millisecond of a request, by the id of its answer, in one labelled segment with its reason.

        Where keys are set a request is shown to its own tenant and to the administrator, and only the latter sees
        others by their names.
        """
        tenant: str = getattr(request.state, "tenant", "")
        found = await asyncio.to_thread(_timeline, events, request_id, tenant)
        if format == "text":
            return PlainTextResponse(timeline_text(found))
        return json_response(found.to_dict())

    @router.get(f"/v1/requests/{{{ID}}}/prompt", responses=_NO_TEXT)
    async def prompt(request: Request, request_id: str) -> Response:
        """What a request asked, after the chat template, by the id of its answer; with --live-text.

        Where keys are set it is shown to its own tenant and to the administrator.
        """
        if texts is None:
            raise HTTPError(404, why_no_texts, code="no_texts")
        kept = texts.of(request_id, getattr(request.state, "tenant", ""))
        if kept is None:
            message = (
                f"no prompt of a request {shown(request_id)} of yours is kept; it may be too long ago. {OF_SEVERAL}"
            )
            raise HTTPError(404, message, code="request_not_found", param="request_id")
        is_text = isinstance(kept.content, str)
        return json_response({"request_id": request_id, "prompt" if is_text else "prompt_token_ids": kept.content})

    @router.get("/v1/trace")
    async def trace() -> Response:
        """The engine's last minutes as a Chrome trace, for Perfetto."""
        return json_response(await asyncio.to_thread(lambda: trace_of(events())))

    @router.get("/flight_recorder", response_class=StreamingResponse, responses=_LINES)
    async def flight_recorder() -> Response:
        """The engine's last minutes as an event log: counts and ids, no text."""
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


def observe_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["observe"])
    observation = context.observation

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics for Prometheus. A tenant sees no other tenant's name; the administrator sees all."""
        return Response(observation.exposition(request.state.tenant), media_type=CONTENT_TYPE)

    return router
