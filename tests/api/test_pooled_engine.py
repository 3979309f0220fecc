"""Two pools of real processes: the same answers as one process, whatever happens to them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from benchmarks.drill import Drill, Faults, ask, prompts, run
from factories import submitted
from forked_process import forked_engines
from twostroke.api.routes.operations import pools_router
from twostroke.client.engine_client import EngineState
from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.launcher import LocalLauncher
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.cluster.ray_resources import ResourceRequest, shortage
from twostroke.cluster.routed_placer import LeastBusy
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.errors import InvalidParameter, SetupError, UnknownParameter
from twostroke.event_codec import PackedEvent, unpack
from twostroke.events import RequestRouted
from twostroke.outputs import NumericDrift
from twostroke.pools.member import Role
from twostroke.sampling_params import SamplingParams

CONFIG = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=2000)
REQUESTS = prompts(12)


@pytest.fixture(autouse=True, scope="module")
def forking() -> Iterator[None]:
    """Let the engines' processes be forked."""
    with forked_engines():
        yield


@pytest.fixture(scope="module")
def undisturbed() -> Drill:
    """Answers of one process that does everything."""
    return asyncio.run(run(CONFIG, PoolConfig(decode=1), REQUESTS))


def test_two_pools_answer_like_one_process(undisturbed: Drill, transport: Any) -> None:
    workers = "thread" if transport == "inproc" else "process"
    pools = PoolConfig(prefill=1, decode=1, kv_transport=transport, pool_workers=workers)
    found = asyncio.run(run(CONFIG, pools, REQUESTS))
    assert found.token_ids == undisturbed.token_ids
    assert found.logprobs == undisturbed.logprobs
    assert found.texts == undisturbed.texts
    assert found.num_handed_over > 0


@pytest.mark.parametrize("block_size", [8, 64])
def test_prefill_workers_with_blocks_of_another_size(undisturbed: Drill, block_size: int) -> None:
    found = asyncio.run(run(CONFIG, PoolConfig(prefill=1, decode=1, prefill_block_size=block_size), REQUESTS))
    assert (found.token_ids, found.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)
    assert found.num_handed_over > 0


@pytest.mark.parametrize(("ranks", "ranks_there"), [(1, 2), (2, 1), (2, None)])
def test_workers_of_several_ranks(undisturbed: Drill, ranks: int, ranks_there: int | None) -> None:
    config = replace(CONFIG, load=replace(CONFIG.load, tensor_parallel_size=ranks))
    pools = PoolConfig(prefill=1, decode=1, prefill_tensor_parallel_size=ranks_there)
    found = asyncio.run(run(config, pools, REQUESTS))
    assert (found.token_ids, found.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)
    assert found.num_handed_over > 0


def test_speculation_and_routing_change_no_token(undisturbed: Drill) -> None:
    config = EngineConfig.from_keywords(
        model="embedded",
        threads=1,
        num_kv_blocks=2000,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    found = asyncio.run(run(config, PoolConfig(prefill=1, decode=1), REQUESTS, hands_over=False))
    assert (found.token_ids, found.logprobs) == (undisturbed.token_ids, undisturbed.logprobs)


def test_workers_that_die_and_freeze_cost_a_pause_and_nothing_else(undisturbed: Drill) -> None:
    """A tenth of the drill; all of it is `python -m benchmarks drill`."""
    pools = PoolConfig(prefill=1, decode=2, heartbeat_timeout_s=1.0)
    found = asyncio.run(run(CONFIG, pools, REQUESTS, faults=Faults(5, seed=3)))
    assert found.token_ids == undisturbed.token_ids
    assert found.logprobs == undisturbed.logprobs
    assert found.num_killed + found.num_frozen == 5
    assert found.num_resumed > 0


def test_workers_come_and_leave_while_streams_run(undisturbed: Drill) -> None:
    """Without time to end what they have, and with it; a pool that was not there is added."""
    begun = asyncio.Event()

    async def ask_all(engine: PooledEngine) -> dict[str, list[int]]:
        begun.clear()
        asked = (ask(engine, str(i), *request, delivered=lambda *_: begun.set()) for i, request in enumerate(REQUESTS))
        return {str(i): token_ids for i, (token_ids, _, _) in enumerate(await asyncio.gather(*asked))}

    async def scenario() -> list[set[str]]:
        seen = []
        engine = PooledEngine(CONFIG, PoolConfig(decode=2), drain_timeout_s=0.0, placer=LeastBusy())
        await engine.start()
        try:
            for sizes in ({Role.DECODE: 1}, {Role.PREFILL: 1}, {Role.PREFILL: 0, Role.DECODE: 2}):
                asking = asyncio.create_task(ask_all(engine))
                await begun.wait()
                engine.scale(sizes)
                assert await asking == undisturbed.token_ids
                while not all(has(engine, role, number) for role, number in sizes.items()):
                    await asyncio.sleep(0.05)
                seen.append({member.worker_id for member in engine.members()})
            with pytest.raises(InvalidParameter, match="decode=0: must be a whole number, 1 to 64"):
                engine.scale({Role.PREFILL: 3, Role.DECODE: 0})
            assert not running(engine, Role.PREFILL), "nothing is changed where a part of it cannot be"
            for number in (3, 1):
                engine.scale({Role.DECODE: number})
                while len(running(engine, Role.DECODE)) != number:
                    await asyncio.sleep(0.05)
            assert running(engine, Role.DECODE) == ["decode-2.1"], "which has run nothing"
            assert engine.suggested_ratio() is not None, "the load of the last minute is known all the same"
            return seen
        finally:
            await engine.close()

    def running(engine: PooledEngine, role: Role) -> list[str]:
        return [m.worker_id for m in engine.members() if m.role is role and m.state is EngineState.RUNNING]

    def has(engine: PooledEngine, role: Role, number: int) -> bool:
        """Return whether so many workers run; in a pool that is given up, whether the last one has ended."""
        is_gone = not any(member.role is role for member in engine.members())
        return len(running(engine, role)) == number and (number > 0 or is_gone)

    first, second, third = asyncio.run(scenario())
    assert len(first) == 1
    assert second == first | {"prefill-0.1"}
    (stayed,) = first
    left = "decode-1" if stayed == "decode-0.1" else "decode-0"
    assert third == first | {f"{left}.2"}, "a place is filled again, by a process with a name of its own"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching"),
        ({"kv_check_rate": 0.5}, "kv_check_rate"),
        ({"tensor_parallel_size": 2, "tensor_parallel_address": "10.0.0.1:5555"}, "tensor_parallel_address"),
        ({"device": "cuda"}, "device"),
    ],
)
def test_settings_that_do_not_go_with_pools_are_refused(given: dict[str, Any], what: str) -> None:
    async def make() -> None:
        PooledEngine(EngineConfig.from_keywords(model="embedded", **given), PoolConfig(prefill=1, decode=1))

    with pytest.raises(InvalidParameter, match=what):
        asyncio.run(make())


def test_a_worker_that_was_added_takes_over_when_nobody_else_is_left(undisturbed: Drill) -> None:
    """The new worker is the first of its place and the only one that decodes; the requests are older than it."""

    async def scenario() -> dict[str, list[int]]:
        engine = PooledEngine(CONFIG, PoolConfig(decode=1))
        await engine.start()
        try:
            begun = asyncio.Event()
            asked = [
                asyncio.create_task(ask(engine, str(i), *request, delivered=lambda *_: begun.set()))
                for i, request in enumerate(REQUESTS)
            ]
            await begun.wait()
            engine.scale({Role.DECODE: 2})
            os.kill(engine.pids["decode-0.1"], signal.SIGKILL)
            return {str(i): token_ids for i, (token_ids, _, _) in enumerate(await asyncio.gather(*asked))}
        finally:
            await engine.close()

    assert asyncio.run(scenario()) == undisturbed.token_ids


class Routes:
    """Event sink that notes the decode worker of each request."""

    def __init__(self) -> None:
        self.decoders: list[str] = []

    def append(self, packed: PackedEvent) -> None:
        """Take one event, in order."""
        event = unpack(packed)
        if isinstance(event, RequestRouted):
            self.decoders.append(event.decode)


def test_a_prefill_worker_takes_the_streams_of_the_last_decode_worker(undisturbed: Drill) -> None:
    """The prefill worker does so before another decode worker has started, and takes new requests."""

    async def scenario() -> dict[str, list[int]]:
        routes = Routes()
        engine = PooledEngine(CONFIG, PoolConfig(prefill=1, decode=1), listeners=(routes,))
        await engine.start()
        try:
            begun = asyncio.Event()

            def asked(first: int, end: int) -> list[asyncio.Task[Any]]:
                named = list(enumerate(REQUESTS))[first:end]
                return [
                    asyncio.create_task(ask(engine, str(i), *request, delivered=lambda *_: begun.set()))
                    for i, request in named
                ]

            before = asked(0, 6)
            await begun.wait()
            os.kill(engine.pids["decode-0.1"], signal.SIGKILL)
            while "prefill-0.1" not in routes.decoders:
                await asyncio.sleep(0.01)
            assert "decode-0.2" not in routes.decoders
            health = engine.health()
            assert health.is_ready
            assert "is starting" in health.cause
            after = asked(6, 12)
            answers = await asyncio.gather(*before, *after)
            return {str(i): token_ids for i, (token_ids, _, _) in enumerate(answers)}
        finally:
            await engine.close()

    assert asyncio.run(scenario()) == undisturbed.token_ids


class Unlike(LocalLauncher):
    """Decode processes of the second place compute by other kernels."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverSettings) -> EngineProcess:
        if name.startswith("decode-1"):
            config = replace(config, load=replace(config.load, kernels="reference"))
        return await super().launch(name, role, config, port)


def test_processes_that_compute_other_bits_are_refused_or_named() -> None:
    """The answers themselves are not compared: the reference kernels may have the same bits here."""

    async def start() -> None:
        engine = PooledEngine(CONFIG, PoolConfig(decode=2), launcher=Unlike())
        await engine.start()

    with pytest.raises(
        SetupError, match=r"decode-\d.1 \(here\) and decode-\d.1 \(there\): numerics differ: kernels is"
    ):
        asyncio.run(start())

    async def is_moved() -> list[NumericDrift]:
        pools = PoolConfig(decode=2, allow_numeric_drift=True)
        engine = PooledEngine(CONFIG, pools, launcher=Unlike(), placer=LeastBusy())
        await engine.start()
        try:
            params = SamplingParams(max_tokens=300, ignore_eos=True)
            prompt = engine.inputs.process("def f(x):\n", params)
            stream = engine.generate(submitted(engine, prompt, "r"))
            wake = asyncio.Event()
            stream.listen(wake.set)
            drifts: list[NumericDrift] = []
            while True:
                await wake.wait()
                wake.clear()
                for output in stream.take():
                    drifts.append(output.numeric_drift)
                    if output.finished:
                        return drifts
                if drifts and engine.pids.keys() >= {"decode-0.1", "decode-1.1"}:
                    (runs,) = (member for member in engine.members() if member.num_live)
                    os.kill(engine.pids[runs.worker_id], signal.SIGKILL)
        finally:
            await engine.close()

    drifts = asyncio.run(is_moved())
    assert drifts[0] == {}
    assert list(drifts[-1]) == ["kernels"]
    assert "reference" in drifts[-1]["kernels"]


def test_a_model_that_is_not_there_is_told_once() -> None:
    async def start() -> None:
        engine = PooledEngine(
            EngineConfig.from_keywords(model="no-such-folder/at-all"), PoolConfig(prefill=1, decode=1)
        )
        await engine.start()

    with pytest.raises(SetupError, match="no-such-folder"):
        asyncio.run(start())


def test_what_was_never_started_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder does not exist yet. A fault removed the current folder in its place when a log could not be opened."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("to keep")

    async def close() -> None:
        await PooledEngine(CONFIG, PoolConfig(prefill=1, decode=1)).close()

    asyncio.run(close())
    assert (tmp_path / "mine").read_text() == "to keep"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"prefill": 1}, "prefill"),
        ({"prefill": -1}, "prefill"),
        ({"decode": 65}, "decode"),
        ({"decode": 1, "prefill": 1, "kv_transport": "pigeon"}, "kv_transport"),
        ({"kv_transport": "tcp"}, "kv_transport"),
        ({"decode": 1, "prefill": 1, "kv_transport": "inproc"}, "kv_transport='inproc': .* threads of one process"),
        ({"decode": 1, "pool_workers": "fibre"}, "pool_workers"),
        (
            {"decode": 1, "pool_workers": "thread", "cluster": "auto"},
            "pool_workers='thread': a cluster needs processes",
        ),
        ({"prefill_block_size": 16}, "prefill_block_size"),
        ({"prefill_config": {"dtype": "bfloat16"}}, "prefill_config=.*: needs more than one process"),
        ({"decode": 1, "prefill": 1, "decode_config": "int8"}, "decode_config='int8': must be an object"),
        (
            {"decode": 1, "prefill": 1, "prefill_block_size": 8, "prefill_config": {"block_size": 16}},
            "prefill_block_size=8: prefill_config also sets block_size",
        ),
        ({"decode": 1, "prefill": 1, "prefill_block_size": 24}, "prefill_block_size=24.* power of two"),
        ({"decode": 1, "prefill": 1, "prefill_block_size": 256}, "prefill_block_size"),
        ({"heartbeat_timeout_s": 0.0, "decode": 1}, "heartbeat_timeout_s"),
        ({"heartbeat_timeout_s": 1.0}, "heartbeat_timeout_s=1.0: needs more than one process"),
        ({"step_timeout_s": 0.5}, "step_timeout_s"),
    ],
)
def test_pools_that_cannot_be_are_refused(given: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidParameter, match=what):
        PoolConfig(**given)


def test_one_process_has_a_step_timeout_too() -> None:
    assert PoolConfig(step_timeout_s=3.0).num_workers == 0


@pytest.mark.parametrize("name", ["model", "max_model_len", "enable_prefix_caching", "block_sizes"])
def test_what_both_pools_share_is_no_setting_of_one(name: str) -> None:
    with pytest.raises(UnknownParameter, match=f"decode_config has no parameter '{name}'"):
        PoolConfig(prefill=1, decode=1, decode_config={name: 1})


class OneProcessor(LocalLauncher):
    """A cluster of one node with one processor, which a decode process takes."""

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        lack = shortage([{"CPU": 1.0}], sizes, dict.fromkeys(sizes, ResourceRequest(1, 1, None, False)), may_share=True)
        if lack is not None:
            limit = f"asks for {lack.num_wanted} x {lack.request}; there is room for {lack.num_fitting}"
            raise InvalidParameter(" and ".join(lack.wanted), lack.num_wanted, limit, "Add a node.")


def test_a_size_that_no_node_holds_is_told_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """An administrator asks for the size, then the load does."""
    few_blocks = EngineConfig.from_keywords(model="embedded", threads=1, num_kv_blocks=80)
    pools = PoolConfig(decode=1, max_decode=2, scaling_interval_s=0.05)

    async def scenario() -> tuple[Any, Any]:
        engine = PooledEngine(few_blocks, pools, launcher=OneProcessor())
        app, context = FastAPI(), SimpleNamespace(pools=engine)
        app.include_router(pools_router(context))  # type: ignore[arg-type]
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server")
        await engine.start()
        try:
            with pytest.raises(InvalidParameter, match="decode=3: asks for 3 x 1 CPU; there is room for 1"):
                await client.post("/pools", json={"decode": 3})
            asked_for = (await client.get("/pools")).json()
            assert (await client.post("/pools", json={"decode": 1})).json()["no_room"] == asked_for["no_room"]
            asked = [asyncio.create_task(ask(engine, str(i), *request)) for i, request in enumerate(REQUESTS)]
            while "decode=2" not in engine.no_room:
                assert not all(task.done() for task in asked), "the load does not speak for a second worker"
                await asyncio.sleep(0.01)
            await asyncio.gather(*asked)
            return asked_for, (await client.get("/pools")).json()
        finally:
            await engine.close()
            await client.aclose()

    with caplog.at_level("WARNING", logger="twostroke"):
        for found, number in zip(asyncio.run(scenario()), (3, 2), strict=True):
            assert f"decode={number}: asks for {number} x 1 CPU; there is room for 1" in found["no_room"]
            assert [worker["worker_id"] for worker in found["workers"]] == ["decode-0.1"]
    told = [record.getMessage() for record in caplog.records if "cannot grow as far as asked" in record.getMessage()]
    assert len(told) == 2, "once for each, however often the load is looked at"
