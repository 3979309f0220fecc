"""The page's state equals the scheduler's account, and deltas lead to the same state as a whole one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from explain_loads import random_load
from pool_log import PoolLog, died_and_resumed
from twostroke.events import Event, RequestArrived, StepCommitted
from twostroke.explain.timeline import timeline_of
from twostroke.live.block_map import BlockState
from twostroke.live.rows import FIELDS
from twostroke.live.state import LiveState, Mask
from twostroke.metrics import families
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.scheduler.replay import scheduler_at_end


class Followed:
    """A state and the metrics that it stands on, fed together as a server does."""

    def __init__(self) -> None:
        self.metrics = FleetMetrics("model", lambda _: None)
        self.state = LiveState(self.metrics)

    def take(self, events: Iterable[Event]) -> None:
        for event in events:
            self.state.observe(event, self.metrics.observe(event))

    def whole(self) -> dict[str, Any]:
        return as_sent(self.state.whole("model", self.state.time_s))


def as_sent(frame: dict[str, Any]) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(frame))


def named(kind: str, rows: Iterable[list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(FIELDS[kind], row, strict=True)) for row in rows]


def states_of(engine: dict[str, Any]) -> list[int]:
    return [state for state, number in engine["blocks"]["runs"] for _ in range(number)]


@pytest.mark.parametrize("seed", range(30))
def test_blocks_and_requests_are_those_of_the_scheduler(seed: int) -> None:
    events = random_load(seed)
    followed, begin = Followed(), 0
    for end in [*sorted(random.Random(seed).sample(range(2, len(events) + 1), 10)), len(events)]:
        followed.take(events[begin:end])
        begin = end
        scheduler = scheduler_at_end(events[:end])
        engine = followed.whole()["engines"]["engine"]
        counts, usage = Counter(states_of(engine)), scheduler._kv.usage()
        assert counts[BlockState.USED] + counts[BlockState.SHARED] + counts[BlockState.HELD] == usage.num_used
        assert counts[BlockState.CACHED] == usage.num_cached
        assert counts[BlockState.OUT_OF_USE] == usage.num_quarantined
        running = [row["id"] for row in named("request", engine["requests"]) if row["state"] == "running"]
        assert sorted(running) == sorted(engine["rows"])
        assert sorted(running) == sorted(request.request_id for request in scheduler._running)
        held: Counter[int] = Counter()
        for request_id in running:
            theirs = [list(row) for row in scheduler.block_tables(request_id)]
            for (first, row), whole_row in zip(engine["rows"][request_id], theirs, strict=True):
                assert row[first:] == whole_row[first : len(row)]
                assert len(row) == len(whole_row)
                held.update(row[first:])
        shared = {block_id for block_id, number in held.items() if number > 1}
        assert {b for b, state in enumerate(states_of(engine)) if state == BlockState.SHARED} == shared


@pytest.mark.parametrize("seed", range(10))
def test_kv_by_tenant_is_what_the_scheduler_gave_its_requests(seed: int) -> None:
    events = [_of_one_of_three_tenants(event) for event in random_load(seed)]
    tenants = {event.request_id: event.arrival.tenant for event in events if isinstance(event, RequestArrived)}
    followed, begin, num_held = Followed(), 0, 0
    for end in sorted(random.Random(seed).sample(range(2, len(events) + 1), 10)):
        followed.take(events[begin:end])
        begin = end
        usage = scheduler_at_end(events[:end])._kv.usage()
        num_usable = usage.num_used + usage.num_cached + usage.num_free
        ((labels, together),) = followed.state.kv_shares(lambda _: "all")
        assert labels == {"model_name": "model", "engine": "0"}
        assert together.get("all", 0.0) == usage.num_used / num_usable
        held: dict[str, set[int]] = {}
        for request_id, rows in followed.whole()["engines"]["engine"]["rows"].items():
            for first, row in rows:
                held.setdefault(tenants[request_id], set()).update(row[first:])
        ((_, apart),) = followed.state.kv_shares(str)
        assert apart == {tenant: len(blocks) / num_usable for tenant, blocks in held.items()}
        num_held += len(apart)
    assert num_held > 0


def _of_one_of_three_tenants(event: Event) -> Event:
    if not isinstance(event, RequestArrived):
        return event
    tenant = f"tenant-{len(event.request_id) % 2}" if event.arrival.num_prompt_tokens % 3 else ""
    return replace(event, arrival=replace(event.arrival, tenant=tenant))


class Page:
    """State that a browser derives from the frames (as page/live_model.js does)."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def apply(self, delta: dict[str, Any]) -> None:
        assert delta["seq"] == self.state["seq"] + 1
        self.state["seq"] = delta["seq"]
        for place, changes in delta["engines"].items():
            if changes.pop("whole", False):
                self.state["engines"][place] = changes
            else:
                self._merge(self.state["engines"][place], changes)
        self.state["links"] = delta["links"]

    def _merge(self, engine: dict[str, Any], changes: dict[str, Any]) -> None:
        for name in ("figures", "waiting_by_reason", "histograms"):
            engine[name] = changes[name]
        steps = {row[0]: row for row in [*engine["steps"], *changes["steps"]]}
        engine["steps"] = [steps[number] for number in sorted(steps)][-240:]
        gone = set(changes["gone"])
        requests = {row[0]: row for row in [*engine["requests"], *changes["requests"]] if row[0] not in gone}
        engine["requests"] = list(requests.values())
        for request_id, parts in changes["rows"].items():
            rows = engine["rows"].setdefault(request_id, [[0, []] for _ in parts])
            for row, (start, first, ids) in zip(rows, parts, strict=True):
                row[1] = [*row[1][:start], *[0] * max(0, start - len(row[1])), *ids]
                row[0] = first
        for row in named("request", requests.values()):
            if row["state"] != "running":
                engine["rows"].pop(row["id"], None)
        for request_id in gone:
            engine["rows"].pop(request_id, None)
        if "blocks" in changes:
            states = states_of(engine)
            for first, number, state in changes["blocks"]["set"]:
                states[first : first + number] = [state] * number
            engine["blocks"] = {"runs": [[state, 1] for state in states], "written": changes["blocks"]["written"]}


@pytest.mark.parametrize("seed", range(20))
def test_deltas_lead_where_the_whole_is(seed: int) -> None:
    check_deltas(random_load(seed), random.Random(seed))


def test_deltas_of_pools_lead_there_too() -> None:
    log = PoolLog()
    check_deltas(_resumed(), random.Random(0))
    for number in range(4):
        log.handed_over(f"a#{number}.0", 20.0 + 3 * number, problem="broken" if number == 2 else "")
    check_deltas(log.events, random.Random(0))
    followed = Followed()
    followed.take(log.events)
    whole = followed.whole()
    assert [(link["to"], link["num_failed"]) for link in whole["links"]] == [("decode-0", 1)]
    for place in ("prefill-0", "decode-0"):
        engine = whole["engines"][place]
        assert engine["figures"]["running"] == 0
        assert {row["finish"] for row in named("request", engine["requests"])} <= {"moved", "length", "error"}


def test_what_a_process_took_with_it_is_lost_there_and_no_error() -> None:
    """Other workers take over the requests of a pool, and no client got an error."""
    followed = Followed()
    followed.take(_resumed())
    ends = [
        (row["id"].partition("@")[1], row["finish"])
        for engine in followed.whole()["engines"].values()
        for row in named("request", engine["requests"])
    ]
    assert ("", "lost") in ends
    assert "error" not in {finish for _, finish in ends}


def _resumed() -> list[Event]:
    log = PoolLog()
    died_and_resumed(log, "b#2.0")
    return log.events


def check_deltas(events: list[Event], dice: random.Random) -> None:
    followed = Followed()
    place = dice.randint(1, len(events) // 2)
    followed.take(events[:place])
    followed.state.watch(True)
    page = Page(followed.whole())
    while place < len(events):
        more = dice.choice([1, 1, 3, 20])
        followed.take(events[place : place + more])
        place += more
        delta = followed.state.changes(followed.state.time_s)
        assert delta is not None
        page.apply(as_sent(delta))
        whole = followed.whole()
        for name, engine in whole["engines"].items():
            shown = page.state["engines"][name]
            assert states_of(shown) == states_of(engine)
            assert shown["blocks"]["written"] == engine["blocks"]["written"]
            assert {row[0]: row for row in shown["requests"]} == {row[0]: row for row in engine["requests"]}
            assert shown["steps"] == engine["steps"]
            for key in ("figures", "histograms", "waiting_by_reason"):
                assert shown[key] == engine[key]
            for request_id, rows in engine["rows"].items():
                held = [row[first:] for first, row in rows]
                # the page gets rejected drafts with the next change of the row
                unknown = [[0, []]] * len(held)  # the page never gets a request without blocks
                for (first, row), theirs in zip(shown["rows"].get(request_id, unknown), held, strict=True):
                    assert row[first : first + len(theirs)] == theirs
    assert followed.state.changes(followed.state.time_s) is None


def test_figures_are_those_of_the_metrics() -> None:
    followed = Followed()
    followed.take(random_load(1))
    engine = followed.whole()["engines"]["engine"]
    metrics = followed.metrics.of("engine").instruments
    assert engine["figures"]["generation_tokens"] == metrics[families.GENERATION_TOKENS].value > 0
    assert engine["figures"]["num_steps"] == metrics[families.ENGINE_STEPS].value > 0
    itl = engine["histograms"]["itl"]
    assert sum(itl["counts"]) == itl["count"] == metrics[families.INTER_TOKEN_LATENCY].count > 0


def test_rates_go_to_zero_when_nothing_comes_any_more() -> None:
    followed = Followed()
    followed.state.watch(True)
    followed.take(random_load(2))
    now_s = followed.state.time_s
    assert followed.state.changes(now_s) is not None
    assert followed.state.changes(now_s + 0.5) is None
    settled = followed.state.changes(now_s + 2)
    assert settled is not None
    assert settled["engines"]["engine"]["figures"]["decode_tokens_per_s"] == 0
    assert followed.state.changes(now_s + 3) is None


def test_a_tenant_sees_the_names_of_its_own_requests_alone() -> None:
    events = random_load(4)
    tenants = {event.request_id: "a" if i % 2 else "b" for i, event in enumerate(arrivals(events))}
    followed = Followed()
    followed.take(events[: len(events) // 2])
    mask = Mask("a", tenants.get)
    text = msgspec.json.encode(mask.applied(followed.state.whole("model", 0.0))).decode()
    shown = {row[0] for row in followed.whole()["engines"]["engine"]["requests"]}
    assert any(tenants[request_id] == "a" for request_id in shown)
    for request_id, tenant in tenants.items():
        if request_id in shown:
            assert (f'"{request_id}"' in text) == (tenant == "a")


def test_a_tenant_hears_which_of_its_own_requests_are_gone() -> None:
    """Their tenant is no longer known once they leave the table."""
    tenants = {"mine": "a", "theirs": "b"}
    mask = Mask("a", tenants.get)
    followed = Followed()
    followed.take(random_load(4))
    (name,) = followed.whole()["engines"]
    whole = followed.state.whole("model", 0.0)
    row = whole["engines"][name]["requests"][0]
    rows = [msgspec.structs.replace(row, id=request_id) for request_id in tenants]
    engine = {"requests": rows, "steps": [], "rows": {}}
    shown = mask.applied({"engines": {name: engine}})["engines"][name]["requests"]
    assert [one.id for one in shown] == ["mine", "another tenant's 1"]
    tenants.clear()
    gone = {"requests": [], "steps": [], "rows": {}, "gone": ["theirs", "mine"]}
    assert mask.applied({"engines": {name: gone}})["engines"][name]["gone"] == ["another tenant's 1", "mine"]


def arrivals(events: list[Event]) -> list[RequestArrived]:
    return [event for event in events if isinstance(event, RequestArrived)]


def test_a_history_without_its_beginning_shows_what_it_knows() -> None:
    events = random_load(3)
    followed = Followed()
    middle = next(i for i, event in enumerate(events) if isinstance(event, StepCommitted) and i > len(events) // 2)
    followed.take([events[0], *events[middle:]])
    engine = followed.whole()["engines"]["engine"]
    assert engine["figures"]["running"] == 0
    assert all(state in set(BlockState) for state in states_of(engine))


@pytest.mark.parametrize("seed", range(8))
def test_found_in_the_cache_is_what_timelines_say(seed: int) -> None:
    """The first admission counts; blocks found after a preemption are the request's own."""
    events = random_load(seed)
    followed = Followed()
    followed.take(events)
    for row in named("request", followed.whole()["engines"]["engine"]["requests"]):
        (lane,) = timeline_of(events, row["id"].partition("#")[0]).lanes
        if lane.num_cached_tokens is not None:
            assert row["num_cached"] == lane.num_cached_tokens, row["id"]


def test_nothing_piles_up_for_viewers_who_are_not_there() -> None:
    followed = Followed()
    followed.take(random_load(5))
    (engine,) = followed.state._engines.values()  # pyright: ignore
    unseen = engine._changes
    assert [len(kept) for kept in (unseen.requests, unseen.ended, unseen.grown, unseen.gone)] == [0, 0, 0, 0]
