"""RayLauncher: places processes on the nodes of a Ray cluster. No other module depends on Ray.

    gateway                                        some node
    ───────                                        ─────────
    RayLauncher ── creates an actor, by Ray ─────► _EngineActor
                                                     │ starts, as its child
    EngineProcess ◄══ two sockets, with keys ══════► python -m twostroke.cluster.process
                                                     ║ KV, by TCP
                                                     ╚══► processes on other nodes

The engine starts its tensor-parallel ranks if one node has CPUs for all of them. Otherwise each rank gets a node and an
actor of its own, in a placement group; they meet at the first one's address.

Ray finds a node, and reports early when something there has died. No token and no KV passes through it. Its reports
are not needed to notice a death: broken connections and missing heartbeats show it too (decision 024).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import zmq

from twostroke.child_command import child_command
from twostroke.cluster.child import LocalChild, ending_words
from twostroke.cluster.engine_process import COMMAND, EngineProcess
from twostroke.cluster.messages import EngineReady, StartEngine
from twostroke.cluster.process_sockets import NetworkEnd, NetworkSockets
from twostroke.cluster.ray_resources import (
    ResourceRequest,
    Shortage,
    check_reach,
    check_version,
    figures,
    installed_version,
    shortage,
    with_timeout,
)
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig, decode_engine, prefill_engine
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.errors import InvalidParameter, SetupError
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role
from twostroke.version import __version__

log = get_logger(__name__)

_REMEDY = "Ask for fewer, lower --threads, or add a node."
CONNECT_TIMEOUT_S = 45.0
"""Seconds to connect; Ray itself gives up slightly earlier."""
PLACE_TIMEOUT_S = 60.0
"""Seconds to wait for a place for a process."""
KILL_TIMEOUT_S = 0.3
"""Seconds to wait for a node's report of how a killed process ended; then it counts as dead."""


@dataclass(frozen=True, slots=True)
class _ActorProcess:
    """Location and keys of a process on a node."""

    version: str
    host: str
    ports: tuple[int, int]
    pid: int
    engine_key: bytes
    free_port: int
    """A free port of this node; if another process takes it, the engine does not start and is launched again."""


class _EngineActor:
    """The actor: a process on a node with the engine process as its child. When the actor ends, so does the child."""

    async def begin(self, gateway_key: bytes) -> _ActorProcess:
        """Start the child, which listens at this node's address and accepts only the owner of the gateway's key."""
        import ray

        host = ray.util.get_node_ip_address()
        engine_key, secret_key = zmq.curve_keypair()
        listeners = [socket.create_server((host, 0)) for _ in range(2)]
        for listener in listeners:
            listener.setblocking(False)
        folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        descriptors = listeners[0].fileno(), listeners[1].fileno()
        NetworkEnd(descriptors, engine_key, secret_key, gateway_key).write(folder)
        self._child = LocalChild(COMMAND, folder, descriptors).adopt()
        ports = listeners[0].getsockname()[1], listeners[1].getsockname()[1]
        for listener in listeners:
            listener.close()  # the child owns them now: after its end connections are refused
        with socket.create_server((host, 0)) as probe:
            free_port = probe.getsockname()[1]
        return _ActorProcess(__version__, host, ports, self._child.pid, engine_key, free_port)

    async def follow(self, rank: int, size: int, address: str) -> str:
        """Run a rank above 0, and return how it ended. It also ends when rank 0 does."""
        command = child_command("twostroke.startup.rank_process", str(rank), str(size), address)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True
        )
        try:
            return ending_words(await process.wait())
        finally:
            if process.returncode is None:
                process.kill()

    async def clock(self) -> float:
        """Return the time of this machine's monotonic clock."""
        return time.monotonic()

    async def ending(self) -> str:
        """Wait for the child to end; return how it ended, in words."""
        ending = await self._child.ending()
        self._child.forget()
        return ending

    async def kill(self) -> None:
        """Kill the child."""
        self._child.kill()


class RayLauncher:
    """A launcher of processes on the nodes of a Ray cluster.

    Args:
        config: of each engine.
        pools: initial sizes of the pools, and the cluster's address.
        nodes: returns the resources of each live node; tests pass their own.

    Raises:
        SetupError: Ray is not installed, or its version is not supported.
    """

    def __init__(
        self,
        config: EngineConfig,
        pools: PoolConfig,
        nodes: Callable[[], Sequence[Mapping[str, float]]] | None = None,
    ) -> None:
        self._nodes = nodes or _nodes
        assert pools.cluster is not None, "no cluster"
        check_version(installed_version())
        self._address: str = pools.cluster
        self._pools = pools
        loads = {Role.DECODE: decode_engine(config, pools).load, Role.PREFILL: prefill_engine(config, pools).load}
        self._num_cpus = {role: load.threads or 1 for role, load in loads.items()}
        self._num_ranks = {role: load.tensor_parallel_size for role, load in loads.items()}
        self._most_cpus = 0.0
        """CPUs of the largest node."""
        self._placed: set[str] = set()
        """Places that have had a process before."""

    async def open(self) -> None:
        """Connect to the cluster, and check that it has room.

        Raises:
            SetupError: there is no cluster at the address, or it has no room.
        """
        if self._address != "auto":
            await asyncio.to_thread(check_reach, self._address)
        await with_timeout(lambda: _connect(self._address), CONNECT_TIMEOUT_S, f"--cluster {self._address}")
        try:
            nodes = await asyncio.to_thread(self._nodes)
            self._most_cpus = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
            self._check_start(nodes)
        except BaseException:
            await self.close()
            raise

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Check the sizes against the present nodes, as if nothing else ran on them."""
        nodes = await asyncio.to_thread(self._nodes)
        self._most_cpus = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        lack = self._shortage(nodes, sizes)
        if lack is not None:
            limit = f"asks for {lack.num_wanted} x {lack.request}; {self._has(lack, nodes)}"
            raise InvalidParameter(" and ".join(lack.wanted), lack.num_wanted, limit, _REMEDY)

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverSettings) -> EngineProcess:
        place = name.rpartition(".")[0]
        if place not in self._placed:  # a process that was placed before waits for its node to return
            await self._check_that_a_node_holds(name, role)
        public_key, secret_key = zmq.curve_keypair()
        request = self._resources_for(role)
        seats = await asyncio.to_thread(_EngineActors.create, name, request)
        actor = seats.actors[0]
        try:
            seated = await asyncio.wait_for(_result(actor.begin.remote(public_key)), PLACE_TIMEOUT_S)
            _check_same_version(seated)
            ahead_s = await _clock_ahead_s(actor)
            self._placed.add(place)
        except BaseException as error:
            await asyncio.to_thread(seats.discard)
            if isinstance(error, TimeoutError):
                raise SetupError(
                    f"the cluster at {self._address} has found no place for {name} ({request}) in "
                    f"{PLACE_TIMEOUT_S:g} s. End something there, or add a node."
                ) from None
            if isinstance(error, Exception) and not isinstance(error, SetupError):
                raise SetupError(f"{name} could not be placed in the cluster ({_first_lines(error)}).") from error
            raise
        if port.lends_at is not None:
            port = msgspec.structs.replace(port, lends_at=msgspec.structs.replace(port.lends_at, host=seated.host))
        load = replace(config.load, threads=self._num_cpus[role])
        if request.is_spread:
            load = replace(load, tensor_parallel_address=f"{seated.host}:{seated.free_port}")
            port = msgspec.structs.replace(port, fetches=False)  # ranks on several hosts hand no KV over
        config = replace(config, load=load)
        sockets = NetworkSockets(seated.host, seated.ports, seated.engine_key, public_key, secret_key)
        process = EngineProcess(_ActorChild(seats, seated, load.tensor_parallel_address), sockets, final_reports_s=0.0)
        process.send(StartEngine(config, port, ahead_s))
        return process

    def is_loaded(self, ready: EngineReady) -> None:
        """Keep nothing: the next process may run on another machine."""

    async def close(self) -> None:
        """Disconnect from the cluster; Ray ends our remaining actors."""
        import ray

        await asyncio.to_thread(ray.shutdown)

    async def _check_that_a_node_holds(self, name: str, role: Role) -> None:
        """Refuse at once a process that would wait in vain for a node.

        Raises:
            SetupError: no node could hold the process, even when empty.
        """
        nodes = await asyncio.to_thread(self._nodes)
        lack = self._shortage(nodes, {role: 1})
        if lack is not None:
            raise SetupError(
                f"{name} asks for {lack.request}, and no node holds it: {self._has(lack, nodes)}. {_REMEDY}"
            )

    def _resources_for(self, role: Role) -> ResourceRequest:
        """Return the resources that a process of a pool needs."""
        num_ranks, name = self._num_ranks[role], role.value if self._pools.cluster_roles else None
        is_spread = num_ranks > 1 and num_ranks * self._num_cpus[role] > self._most_cpus
        return ResourceRequest(num_ranks, self._num_cpus[role], name, is_spread)

    def _check_start(self, nodes: Sequence[Mapping[str, float]]) -> None:
        """Check that the cluster could hold all processes when empty; resources in use there may become free.

        Raises:
            SetupError: it could not.
        """
        wanted = {Role.PREFILL: self._pools.prefill, Role.DECODE: self._pools.decode}
        if self._pools.prefill and any(self._resources_for(role).is_spread for role in wanted):
            raise SetupError(
                f"--prefill {self._pools.prefill} with ranks on several nodes: engines whose ranks are on several "
                f"hosts hand no KV over, and no node has CPUs for all ranks of one ({self._most_cpus:g} CPUs are the "
                "most). Leave --prefill out, or lower --threads."
            )
        lack = self._shortage(nodes, wanted)
        if lack is not None:
            what = " and ".join(f"--{role.value} {number}" for role, number in lack.wanted.items())
            raise SetupError(f"{what} asks for {lack.num_wanted} x {lack.request}; {self._has(lack, nodes)}. {_REMEDY}")

    def _shortage(self, nodes: Sequence[Mapping[str, float]], wanted: Mapping[Role, int]) -> Shortage | None:
        requests = {role: self._resources_for(role) for role in wanted}
        may_share = len({replace(request, role=None) for request in requests.values()}) == 1
        return shortage(nodes, wanted, requests, may_share=may_share)

    def _has(self, lack: Shortage, nodes: Sequence[Mapping[str, float]]) -> str:
        has = "; ".join(figures(node, with_roles=self._pools.cluster_roles) for node in nodes)
        room = f"has room for {lack.num_fitting} of them, were it empty"
        return f"the cluster at {self._address} {room} ({len(nodes)} nodes: {has})"


@dataclass(frozen=True, slots=True)
class _EngineActors:
    """The actors of one process: one, or one per rank if the ranks are spread over nodes."""

    actors: tuple[Any, ...]
    group: Any
    """The placement group; None if there is one actor."""

    @classmethod
    def create(cls, name: str, request: ResourceRequest) -> _EngineActors:
        """Request the actors; Ray places them when there is room."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = placement_group(request.resources, strategy="STRICT_SPREAD") if request.is_spread else None
        actors: list[Any] = []
        for rank, resources in enumerate(request.resources):
            strategy = "SPREAD" if group is None else PlacementGroupSchedulingStrategy(group, rank)
            options: dict[str, Any] = {
                "name": f"twostroke-{name}" + (f".rank-{rank}" if rank else ""),
                "num_cpus": resources["CPU"],
                "resources": {kind: number for kind, number in resources.items() if kind != "CPU"},
                "max_restarts": 0,  # the pool restarts it
                "scheduling_strategy": strategy,
            }
            actors.append(ray.remote(**options)(_EngineActor).remote())
        return cls(tuple(actors), group)

    def discard(self) -> None:
        """Kill the actors and their children."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if self.group is not None:
            with contextlib.suppress(Exception):
                remove_placement_group(self.group)


class _ActorChild:
    """The child of an actor; with several ranks, that of the first one."""

    def __init__(self, seats: _EngineActors, seated: _ActorProcess, meeting: str | None) -> None:
        """Watch the actors; `meeting` is the address where the ranks meet, if they have actors of their own."""
        self.pid = seated.pid
        self._seats, self._actor = seats, seats.actors[0]
        self._host = seated.host
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = {asyncio.create_task(self._read_reports())}
        for rank, actor in enumerate(seats.actors[1:], 1):
            self._begin(self._follow(actor, rank, meeting))

    async def ending(self) -> str:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        self._begin(self._kill())

    def forget(self) -> None:
        self._begin(asyncio.to_thread(self._seats.discard))

    async def _read_reports(self) -> None:
        try:
            self._end(await _result(self._actor.ending.remote()))
        except Exception as error:
            self._end(f"on {self._host} was lost ({_first_lines(error)})")

    async def _follow(self, actor: Any, rank: int, meeting: str | None) -> None:
        """Run another rank to its end, and then kill the engine, which would otherwise wait for the rank."""
        try:
            ending = await _result(actor.follow.remote(rank, len(self._seats.actors), meeting))
        except Exception as error:
            ending = f"was lost ({_first_lines(error)})"
        if not self._ended.done():
            log.warning("rank %d of %s %s", rank, self._host, ending)
            await self._kill()

    async def _kill(self) -> None:
        """Kill the child by its actor, which then reports how it ended; wait only briefly, because the node may be
        gone."""
        with contextlib.suppress(Exception):
            self._actor.kill.remote()
        await asyncio.wait((self._ended,), timeout=KILL_TIMEOUT_S)
        self._end(f"on {self._host} was given up: the node does not answer")

    def _end(self, ending: str) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)

    def _begin(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_same_version(seated: _ActorProcess) -> None:
    if seated.version != __version__:
        raise SetupError(
            f"the node {seated.host} has twostroke {seated.version}, and this one {__version__}. "
            "Install the same on every node."
        )


def _connect(address: str) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns that it handles no signals in a thread
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except Exception as error:
        raise SetupError(f"--cluster {address}: Ray cannot connect ({_first_lines(error)}).") from error


async def _result(reference: Any) -> Any:
    """Return the result of an actor's call."""
    return await reference


async def _clock_ahead_s(actor: Any) -> float:
    """Return by how many seconds the actor's clock is ahead of ours; take the fastest of some answers, and its
    midpoint."""
    answers: list[tuple[float, float]] = []
    for _ in range(5):
        asked_s = time.monotonic()
        told_s = await _result(actor.clock.remote())
        answered_s = time.monotonic()
        answers.append((answered_s - asked_s, told_s - (asked_s + answered_s) / 2))
    return min(answers)[1]


def _nodes() -> list[Mapping[str, float]]:
    """Return the resources of each live node."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _first_lines(error: BaseException) -> str:
    """Return the relevant lines of Ray's long error texts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] + lines[-1:] if len(lines) > 3 else lines)[:500] or reason_of(error)
