"""The pools of a server that has some: who is there, and how many there should be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import Response

from twostroke.api.answering import json_response
from twostroke.api.context import ServerContext
from twostroke.api.http_errors import HTTPError
from twostroke.api.openapi import Described
from twostroke.api.protocol.fields import WireObject
from twostroke.api.routing import BodyRoute
from twostroke.client.engine_client import PoolMember, ScalablePools
from twostroke.errors import shown
from twostroke.kv_transfer.geometry import KV_LAYOUT
from twostroke.pools.member import Role

_NO_POOLS: Described = {404: {"description": "One process does everything.", "content": {"application/json": {}}}}


class PoolSizes(WireObject):
    """How many workers each pool should have; one that is left out keeps its size."""

    prefill: int | None = Field(default=None, description="Prefill workers.")
    decode: int | None = Field(default=None, description="Decode workers.")


def pools_router(context: ServerContext) -> APIRouter:
    """The routes."""
    router = APIRouter(tags=["operations"], route_class=BodyRoute)

    @router.get("/pools", responses=_NO_POOLS)
    async def show() -> Response:
        """Show the workers, the differences between the pools, and the ratio that fits the load.

        Each worker has its pool, state, formats and the number of sequences that need it. `no_room` says why the last
        larger size is refused, or is null.
        """
        return _described(_pools(context))

    @router.post("/pools", responses=_NO_POOLS)
    async def resize(body: PoolSizes) -> Response:
        """Change the sizes of the pools while they serve.

        Workers that leave first finish their requests. A size beyond what the nodes of a cluster could hold is refused,
        and nothing changes.

        Where the load decides (--max-prefill, --max-decode), it may decide otherwise later.
        """
        pools = _pools(context)
        if body.unknown_fields:
            raise HTTPError(400, f"there is no pool {shown(body.unknown_fields[0])}; there are prefill and decode.")
        wanted = {Role.PREFILL: body.prefill, Role.DECODE: body.decode}
        sizes = {role: number for role, number in wanted.items() if number is not None}
        await pools.check_room(sizes)
        pools.scale(sizes)
        return _described(pools)

    return router


def _pools(context: ServerContext) -> ScalablePools:
    if context.pools is None:
        raise HTTPError(404, "this server is one process; start it with --prefill and --decode for pools.")
    return context.pools


def _described(pools: ScalablePools) -> Response:
    ratio = pools.suggested_ratio()
    suggested = None if ratio is None else {**dataclasses.asdict(ratio), "prefill_per_decode": ratio.prefill_per_decode}
    members = pools.members()
    workers = [dataclasses.asdict(member) for member in members]
    return json_response(
        {
            "workers": workers,
            "hand_over": _hand_over(members),
            "suggested_ratio": suggested,
            "no_room": pools.no_room or None,
        }
    )


def _hand_over(members: Sequence[PoolMember]) -> dict[str, Any] | None:
    """Return the pools' differences and how a hand-over treats them; None unless both have a running worker."""
    sides = {role: [m.formats for m in members if m.role is role and m.formats] for role in Role}
    prefill, decode = sides[Role.PREFILL], sides[Role.DECODE]
    if not prefill or not decode:
        return None
    differs: dict[str, dict[str, list[str | int]]] = {}
    for name in dict.fromkeys(name for formats in (*prefill, *decode) for name in formats):
        ours, theirs = (list(dict.fromkeys(f[name] for f in side if name in f)) for side in (prefill, decode))
        if ours != theirs or len(ours) > 1:
            differs[name] = {Role.PREFILL.value: ours, Role.DECODE.value: theirs}
    return {
        "differs": differs,
        "converts_kv": any(name in differs for name in KV_LAYOUT),
        "may_drift": any(name not in KV_LAYOUT for name in differs),
    }
