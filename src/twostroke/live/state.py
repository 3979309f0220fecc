"""`LiveState`: all processes of a server as its page shows them; docs/page.md describes the messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from twostroke.config.sizes import seconds
from twostroke.events import EngineStarted, Event, KVImportEnded
from twostroke.explain.names import GATEWAY
from twostroke.explain.run_state import EventChanges
from twostroke.live.engine import LiveEngine
from twostroke.live.rows import FIELDS, SequenceRow, StepRow
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.version import __version__

VERSION = 1
"""Version of the messages."""


@dataclass(slots=True)
class _Link:
    """Totals of the KV transfers from the prefill pool to one process."""

    to: str
    num_transfers: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    last_problem: str = ""

    def record(self, event: KVImportEnded) -> None:
        """Count a transfer that ended, successful or not."""
        self.num_transfers += 1
        self.num_bytes += event.num_bytes
        self.busy_s += event.busy_s
        if event.problem:
            self.num_failed += 1
            self.last_problem = event.problem


class LiveState:
    """State of a server, updated event by event.

    Args:
        metrics: metrics of the server; they must count each event before it is passed here.
    """

    def __init__(self, metrics: FleetMetrics) -> None:
        self._metrics = metrics
        self._pools: Callable[[], list[dict[str, Any]] | None] = _no_pools
        self._engines: dict[str, LiveEngine] = {}
        self._links: dict[str, _Link] = {}
        self._slo: dict[str, float | None] = {"ttft_s": None, "itl_s": None}
        self._sent_pools: list[dict[str, Any]] | None = None
        self._is_watched = False
        self._seq = 0
        self.time_s = 0.0
        """Time of the last event."""

    def show_pools(self, members: Callable[[], list[dict[str, Any]] | None]) -> None:
        """Set the function that returns the members of the server's pools."""
        self._pools = members

    def observe(self, event: Event, taken: EventChanges) -> None:
        """Apply the next event and the changes that the metrics derived from it."""
        self.time_s = event.time_s
        place = taken.place.name
        if place == GATEWAY:
            return
        engine = self._engines.get(place)
        if engine is None:
            engine = self._engines[place] = LiveEngine(self._metrics.of(place), taken.place)
            if self._is_watched:
                engine.watch()
        engine.observe(event, taken)
        if isinstance(event, KVImportEnded):
            self._links.setdefault(place, _Link(place)).record(event)
        elif isinstance(event, EngineStarted):
            self._slo = {"ttft_s": _limit(event, "ttft_slo"), "itl_s": _limit(event, "itl_slo")}

    def watch(self, is_watched: bool) -> None:
        """Start or stop recording changes; they are recorded only while a viewer is connected."""
        self._is_watched = is_watched
        for engine in self._engines.values():
            if is_watched:
                engine.watch()
                engine.clear_changes()
            else:
                engine.is_watched = False

    def tenant_of(self, request_id: str) -> str | None:
        """Return the tenant of a shown request, or None if unknown."""
        return next((e.tenants[request_id] for e in self._engines.values() if request_id in e.tenants), None)

    def kv_shares(self, name_of: Callable[[str], str]) -> list[tuple[Mapping[str, str], Mapping[str, float]]]:
        """Return, for each engine, the labels of its metrics and the share of its KV blocks by `name_of(tenant)`."""
        return [(engine.labels, engine.kv_shares(name_of)) for engine in self._engines.values()]

    def whole(self, model: str, now_s: float) -> dict[str, Any]:
        """Return a "State"; later deltas continue from it."""
        return {
            "v": VERSION,
            "seq": self._seq,
            "time_s": now_s,
            "model": model,
            "version": __version__,
            "recording": None,
            "fields": FIELDS,
            "slo": self._slo,
            "engines": {place: engine.whole(now_s) for place, engine in self._engines.items()},
            "links": self._shown_links(),
            "pools": self._pools(),
        }

    def changes(self, now_s: float) -> dict[str, Any] | None:
        """Return a "Delta", or None if nothing has changed since the last one."""
        engines = {place: engine.changes(now_s) for place, engine in self._engines.items()}
        changed = {place: changes for place, changes in engines.items() if changes is not None}
        pools = self._pools()
        if not changed and pools == self._sent_pools:
            return None
        self._sent_pools = pools
        self._seq += 1
        return {"seq": self._seq, "time_s": now_s, "engines": changed, "links": self._shown_links(), "pools": pools}

    def _shown_links(self) -> list[dict[str, Any]]:
        return [{"from": "prefill", **asdict(link)} for _, link in sorted(self._links.items())]


def _no_pools() -> None:
    """Return None: the server has no pools."""


def _limit(started: EngineStarted, name: str) -> float | None:
    """Return a configured limit in seconds, in whatever unit it was given."""
    given = started.scheduler.get(name)
    return None if given is None else seconds(name, given)


# ---------------------------------------------------------------------- what one tenant may see


class Mask:
    """Replacement of other tenants' request ids by numbers that stay the same from frame to frame.

    Args:
        tenant: the tenant who views the page.
        tenant_of: returns the tenant of a request, or None if unknown.
    """

    def __init__(self, tenant: str, tenant_of: Callable[[str], str | None]) -> None:
        self._tenant = tenant
        self._tenant_of = tenant_of
        self._numbers: dict[str, str] = {}
        self._num_given = 0
        self._mine: set[str] = set()
        """Ids of the viewer's own requests, kept because their tenant is no longer known once they are gone."""

    def applied(self, frame: dict[str, Any]) -> dict[str, Any]:
        """Return a State or a Delta as the tenant may see it."""
        engines: dict[str, dict[str, Any]] = frame["engines"]
        shown = {**frame, "engines": {place: self._engine(engine) for place, engine in engines.items()}}
        for engine in engines.values():
            for request_id in engine.get("gone", ()):
                self._numbers.pop(request_id, None)
                self._mine.discard(request_id)
        return shown

    def _engine(self, engine: dict[str, Any]) -> dict[str, Any]:
        requests: Iterable[SequenceRow] = engine["requests"]
        steps: Iterable[StepRow] = engine["steps"]
        rows: dict[str, Any] = engine["rows"]
        return {
            **engine,
            "requests": [self._request(row) for row in requests],
            "steps": [self._step(row) for row in steps],
            "rows": {self._name(request_id): row for request_id, row in rows.items()},
            **({"gone": [self._name(request_id) for request_id in engine["gone"]]} if "gone" in engine else {}),
        }

    def _request(self, row: SequenceRow) -> SequenceRow:
        shown = self._name(row.id)
        if shown == row.id:
            self._mine.add(row.id)
            return row
        return msgspec.structs.replace(row, id=shown, tenant_is_other=True)

    def _step(self, row: StepRow) -> StepRow:
        head = self._name(row.head) if row.head else ""
        preempted = tuple(map(self._name, row.preempted))
        return msgspec.structs.replace(row, head=head, preempted=preempted)

    def _name(self, request_id: str) -> str:
        if request_id in self._mine or self._tenant_of(request_id) == self._tenant:
            return request_id
        if request_id not in self._numbers:
            self._num_given += 1
            self._numbers[request_id] = f"another tenant's {self._num_given}"
        return self._numbers[request_id]
