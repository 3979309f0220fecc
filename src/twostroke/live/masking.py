"""What one tenant may see of everybody's requests: that they are there, what they take, and none of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from twostroke.live.rows import SequenceRow, StepRow


class Mask:
    """Gives the requests of others numbers for names, the same from frame to frame.

    Args:
        tenant: who looks.
        tenant_of: whose a request is; None where nobody knows.
    """

    def __init__(self, tenant: str, tenant_of: Callable[[str], str | None]) -> None:
        self._tenant = tenant
        self._tenant_of = tenant_of
        self._numbers: dict[str, str] = {}
        self._num_given = 0
        self._mine: set[str] = set()
        """Shown by their names: when they are gone, nobody else knows any more whose they were."""

    def applied(self, frame: dict[str, Any]) -> dict[str, Any]:
        """A State or a Delta as the tenant may see it."""
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
