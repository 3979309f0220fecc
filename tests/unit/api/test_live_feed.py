"""Rate of frames to viewers: it depends on the time to make one, and is at least one a second."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator

import pytest

from twostroke.api import live_feed
from twostroke.api.live_feed import LiveFeed
from twostroke.live.state import LiveState
from twostroke.metrics.engine_metrics import FleetMetrics


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.0, 0.1), (0.001, 0.2), (0.06, 1.0)])
def test_what_takes_long_comes_less_often_but_comes(
    took_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    clock: Iterator[float] = itertools.accumulate(itertools.cycle((0.0, took_s)))

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.Event().wait()

    async def watch() -> None:
        feed = LiveFeed(LiveState(FleetMetrics("model", lambda _: None)), "model", lambda: 0.0, lambda: None)
        events = feed.events("")
        assert (await anext(events)).startswith(b"event: state")
        while not pauses:
            await asyncio.get_running_loop().run_in_executor(None, lambda: None)
        await events.aclose()  # type: ignore[attr-defined]

    monkeypatch.setattr(live_feed.time, "thread_time", lambda: next(clock))
    monkeypatch.setattr(live_feed.asyncio, "sleep", pause)
    asyncio.run(watch())
    assert pauses == [pytest.approx(pause_s)]


def test_masks_are_kept_while_somebody_looks() -> None:
    feed = LiveFeed(LiveState(FleetMetrics("model", lambda _: None)), "model", lambda: 0.0, lambda: None)
    feed.snapshot("a tenant")
    assert not feed._masks  # pyright: ignore
