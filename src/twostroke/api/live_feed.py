"""Live feed: events for the page's viewers, made once for all of them and only while there are viewers."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from twostroke.api.answering import named_event
from twostroke.live.state import LiveState, Mask

INTERVAL_S = 0.1
"""Minimum seconds between two frames."""
MAX_SHARE = 0.005
"""Share of a processor that frames may take; a slow frame delays the next one."""
MAX_INTERVAL_S = 1.0
"""Maximum seconds between two frames, even if they are slow to make."""
MAX_BEHIND = 20
"""Frames that may wait for a viewer; a viewer further behind gets a new snapshot."""
KEEP_ALIVE_S = 3.0
"""Seconds of silence until a keep-alive; the page shows an error after three missed ones."""
MAX_VIEWERS = 32
_KEEP_ALIVE = b": still here\n\n"


class _Viewer:
    """Viewer of the page, with its queue of frames."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.frames: deque[bytes] = deque()
        self.lags = False
        self.ready = asyncio.Event()


class LiveFeed:
    """Feed of one event loop.

    Args:
        state: live state of the server.
        model: name of the model for clients.
        now_s: the engine's clock.
        catch_up: folds the events that the state has not received yet.
    """

    def __init__(
        self, state: LiveState, model: str, now_s: Callable[[], float], catch_up: Callable[[], object]
    ) -> None:
        self._state = state
        self._catch_up = catch_up
        self._model = model
        self._now_s = now_s
        self._viewers: list[_Viewer] = []
        self._masks: dict[str, Mask] = {}
        self._task: asyncio.Task[None] | None = None
        self._is_over = False

    @property
    def is_full(self) -> bool:
        """Whether the maximum number of viewers is reached."""
        return len(self._viewers) >= MAX_VIEWERS

    def snapshot(self, tenant: str) -> dict[str, Any]:
        """Return the state as this tenant may see it; "" sees everything."""
        self._catch_up()
        return self._masked(self._state.whole(self._model, self._now_s()), tenant)

    async def events(self, tenant: str) -> AsyncIterator[bytes]:
        """Yield server-sent events until the viewer or the server leaves: a state, then its changes."""
        viewer = _Viewer(tenant)
        self._viewers.append(viewer)
        if self._task is None:
            self._catch_up()  # earlier events are part of the first state
            self._state.watch(True)
            self._task = asyncio.create_task(self._make_frames(), name="twostroke-live-feed")
        try:
            yield named_event("state", self.snapshot(tenant))
            while not self._is_over:
                try:
                    await asyncio.wait_for(viewer.ready.wait(), KEEP_ALIVE_S)
                except TimeoutError:
                    yield _KEEP_ALIVE
                    continue
                viewer.ready.clear()
                if viewer.lags:
                    viewer.lags = False
                    yield named_event("state", self.snapshot(tenant))
                while viewer.frames:
                    yield viewer.frames.popleft()
        finally:
            self._viewers.remove(viewer)
            if not self._viewers:
                self._rest()

    def close(self) -> None:
        """End all feeds, because the server is ending."""
        self._is_over = True
        for viewer in self._viewers:
            viewer.ready.set()

    def _rest(self) -> None:
        """Stop making frames: there are no viewers."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._state.watch(False)
        self._masks.clear()

    async def _make_frames(self) -> None:
        while True:
            begin_s = time.thread_time()  # on busy cores wall time is much longer than the computation
            self._catch_up()
            changes = self._state.changes(self._now_s())
            if changes is not None:
                self._send(changes)
            took_s = time.thread_time() - begin_s
            await asyncio.sleep(min(MAX_INTERVAL_S, max(INTERVAL_S, took_s / MAX_SHARE)))

    def _send(self, changes: dict[str, Any]) -> None:
        encoded: dict[str, bytes] = {}
        for viewer in self._viewers:
            if viewer.tenant not in encoded:
                encoded[viewer.tenant] = named_event("delta", self._masked(changes, viewer.tenant))
            if len(viewer.frames) >= MAX_BEHIND:
                viewer.frames.clear()
                viewer.lags = True
            if not viewer.lags:
                viewer.frames.append(encoded[viewer.tenant])
            viewer.ready.set()

    def _masked(self, frame: dict[str, Any], tenant: str) -> dict[str, Any]:
        if not tenant:
            return frame
        mask = self._masks.get(tenant) or Mask(tenant, self._state.tenant_of)
        if self._viewers:  # keep the masked names stable across frames while there are viewers
            self._masks[tenant] = mask
        return mask.applied(frame)
