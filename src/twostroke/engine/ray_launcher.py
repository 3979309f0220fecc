"""RayLauncher: places processes on the nodes of a Ray cluster. Everything that knows Ray is here.

    gateway                                        some node
    ───────                                        ─────────
    RayLauncher ── makes an actor, by Ray ───────► _Seat
                                                     │ starts, as its child
    EngineProcess ◄══ two sockets, with keys ══════► python -m twostroke.engine.process
                                                     ║ KV, by TCP
                                                     ╚══► those on other nodes

Ray finds a node and tells early when something there has died. No token and no KV goes through it, and nobody waits
for it to notice a death: connections that break and heartbeats that stay away say the same (decision 024).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import logging
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.child import LocalChild
from twostroke.engine.engine_process import COMMAND, EngineProcess
from twostroke.engine.handover_port import HandoverPort
from twostroke.engine.messages import Ready, Start
from twostroke.engine.wires import NetworkEnd, NetworkWires
from twostroke.errors import SetupError
from twostroke.log import get_logger
from twostroke.pools.member import Role
from twostroke.version import __version__

log = get_logger(__name__)

RAY_VERSIONS = ((2, 50), (3, 0))
"""From the first on, before the second."""
REMEDY = "Run: pip install 'twostroke[ray]'"
REACH_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 45.0
"""Ray itself gives up a moment earlier."""
PLACE_TIMEOUT_S = 60.0
"""A process for which there is no place so long has none now."""
KILL_TIMEOUT_S = 0.3
"""So long a node may take to say how a process ended that was killed there; it counts as dead then."""
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Seated:
    """Where a process runs."""

    version: str
    host: str
    ports: tuple[int, int]
    pid: int
    engine_key: bytes


class _Seat:
    """The actor: a process of one node that has the engine's as its child. When it ends, the child does."""

    async def begin(self, gateway_key: bytes) -> _Seated:
        """Starts the child, which listens at this node's own address to who has this key."""
        import ray

        host = ray.util.get_node_ip_address()
        engine_key, secret_key = zmq.curve_keypair()
        listeners = [socket.create_server((host, 0)) for _ in range(2)]
        for listener in listeners:
            listener.setblocking(False)
        folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        descriptors = listeners[0].fileno(), listeners[1].fileno()
        NetworkEnd(descriptors, engine_key, secret_key, gateway_key).write(folder)
        self._child = await LocalChild.start(COMMAND, folder, descriptors)
        ports = listeners[0].getsockname()[1], listeners[1].getsockname()[1]
        for listener in listeners:
            listener.close()  # they are the child's now: when it has ended, nobody can connect
        return _Seated(__version__, host, ports, self._child.pid, engine_key)

    async def clock(self) -> float:
        """This machine's."""
        return time.monotonic()

    async def ending(self) -> str:
        """See Child."""
        ending = await self._child.ending()
        self._child.forget()
        return ending

    async def kill(self) -> None:
        """Ends the child."""
        self._child.kill()


class RayLauncher:
    """See Launcher.

    Args:
        config: of each engine.
        pools: how many there are at first, and which cluster.

    Raises:
        SetupError: Ray is not installed, or another version.
    """

    def __init__(self, config: EngineConfig, pools: PoolConfig) -> None:
        assert pools.cluster is not None, "no cluster"
        check_version(_installed())
        self._address: str = pools.cluster
        self._pools = pools
        self._num_cpus = config.load.threads or 1

    async def open(self) -> None:
        """Connects, and looks whether there is room.

        Raises:
            SetupError: there is no cluster at the address, or it has no room.
        """
        if self._address != "auto":
            await asyncio.to_thread(_reach, self._address)
        await _in_time(lambda: _connect(self._address), CONNECT_TIMEOUT_S, f"--cluster {self._address}")
        try:
            self._check_room(await asyncio.to_thread(_nodes))
        except BaseException:
            await self.close()
            raise

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverPort) -> EngineProcess:
        """See Launcher."""
        public_key, secret_key = zmq.curve_keypair()
        actor = await asyncio.to_thread(self._new_seat, name, role)
        try:
            seated = await asyncio.wait_for(_result(actor.begin.remote(public_key)), PLACE_TIMEOUT_S)
            _check_same_version(seated)
            ahead_s = await _clock_ahead_s(actor)
        except BaseException as error:
            await asyncio.to_thread(_discard, actor)
            if isinstance(error, TimeoutError):
                raise SetupError(
                    f"the cluster at {self._address} has found no place for {name} ({self._asked(role)}) in "
                    f"{PLACE_TIMEOUT_S:g} s. End something there, or add a node."
                ) from None
            if isinstance(error, Exception) and not isinstance(error, SetupError):
                raise SetupError(f"{name} could not be placed in the cluster ({_first_lines(error)}).") from error
            raise
        if port.lends_at is not None:
            port = msgspec.structs.replace(port, lends_at=msgspec.structs.replace(port.lends_at, host=seated.host))
        config = replace(config, load=replace(config.load, threads=self._num_cpus))
        wires = NetworkWires(seated.host, seated.ports, seated.engine_key, public_key, secret_key)
        process = EngineProcess(_SeatedChild(actor, seated), wires, last_words_s=0.0)
        process.send(Start(config, port, ahead_s))
        return process

    def is_loaded(self, ready: Ready) -> None:
        """See Launcher: the next one may run on another machine."""

    async def close(self) -> None:
        """Leaves the cluster; Ray ends there what is left of ours."""
        import ray

        await asyncio.to_thread(ray.shutdown)

    def _new_seat(self, name: str, role: Role) -> Any:
        import ray

        options: dict[str, Any] = {
            "name": f"twostroke-{name}",
            "num_cpus": self._num_cpus,
            "max_restarts": 0,  # whoever asked for it asks again, and knows when
            "scheduling_strategy": "SPREAD",
        }
        if self._pools.cluster_roles:
            options["resources"] = {role.value: 1}
        return ray.remote(**options)(_Seat).remote()

    def _asked(self, role: Role) -> str:
        cpus = f"{self._num_cpus} CPU" + ("s" if self._num_cpus > 1 else "")
        return f"{cpus} and one {role.value!r}" if self._pools.cluster_roles else cpus

    def _check_room(self, nodes: list[Mapping[str, float]]) -> None:
        """Whether the cluster would hold all, were it empty; what others use there may become free.

        Raises:
            SetupError: it would not.
        """

        def places(roles: tuple[Role, ...]) -> int:
            total = 0
            for node in nodes:
                by_cpus = int(node.get("CPU", 0) // self._num_cpus)
                by_role = sum(int(node.get(role.value, 0)) for role in roles)
                total += min(by_cpus, by_role) if self._pools.cluster_roles else by_cpus
            return total

        wanted = {Role.PREFILL: self._pools.prefill, Role.DECODE: self._pools.decode}
        for roles in ((Role.PREFILL,), (Role.DECODE,), (Role.PREFILL, Role.DECODE)):
            asked, there = sum(wanted[role] for role in roles), places(roles)
            if asked > there:
                what = " and ".join(f"--{role.value} {wanted[role]}" for role in roles if wanted[role])
                has = "; ".join(_figures(node, with_roles=self._pools.cluster_roles) for node in nodes)
                raise SetupError(
                    f"{what} asks for {asked} x {self._asked(roles[0])}; the cluster at {self._address} has room for "
                    f"{there} of them ({len(nodes)} nodes: {has}). Ask for fewer, lower --threads, or add a node."
                )


class _SeatedChild:
    """See Child: an actor's."""

    def __init__(self, actor: Any, seated: _Seated) -> None:
        self.pid = seated.pid
        self._actor = actor
        self._host = seated.host
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = {asyncio.create_task(self._hear())}

    async def ending(self) -> str:
        """See Child."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """See Child."""
        self._begin(self._kill())

    def forget(self) -> None:
        """See Child."""
        self._begin(asyncio.to_thread(_discard, self._actor))

    async def _hear(self) -> None:
        try:
            self._end(await _result(self._actor.ending.remote()))
        except Exception as error:
            self._end(f"on {self._host} was lost ({_first_lines(error)})")

    async def _kill(self) -> None:
        """By its actor, which knows how it ended; a node that is not there says nothing, and nobody waits for it."""
        with contextlib.suppress(Exception):
            self._actor.kill.remote()
        await asyncio.wait((self._ended,), timeout=KILL_TIMEOUT_S)
        self._end(f"on {self._host} was given up: nothing comes from there")

    def _end(self, ending: str) -> None:
        if not self._ended.done():
            self._ended.set_result(ending)

    def _begin(self, what: Any) -> None:
        task = asyncio.ensure_future(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def check_version(installed: str | None) -> None:
    """Refuses a Ray that this was not made for.

    >>> check_version("2.60.0")

    Raises:
        SetupError: it is another, or None.
    """
    low, high = (".".join(map(str, version)) for version in RAY_VERSIONS)
    if installed is None:
        raise SetupError(f"--cluster needs Ray (from {low} on, before {high}), which is not installed. {REMEDY}")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    version = tuple(map(int, numbers.groups())) if numbers else (0, 0)
    if not RAY_VERSIONS[0] <= version < RAY_VERSIONS[1]:
        raise SetupError(f"--cluster needs Ray from {low} on, before {high}; {installed} is installed. {REMEDY}")


def _installed() -> str | None:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def _check_same_version(seated: _Seated) -> None:
    if seated.version != __version__:
        raise SetupError(
            f"the node {seated.host} has twostroke {seated.version}, and this one {__version__}. "
            "Install the same on every node."
        )


def _reach(address: str) -> None:
    """Whether anybody listens there; Ray would ask for most of a minute."""
    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1"):
        return  # Ray puts this node's own address in its place
    try:
        socket.create_connection((host, int(port)), REACH_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise SetupError(
            f"--cluster {address}: nobody answers there ({error}). Start it with: ray start --head --port={port}"
        ) from None


def _connect(address: str) -> None:
    import ray

    logging.getLogger("ray").setLevel(logging.ERROR)  # it warns of being started in a thread, where it takes no signals
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except Exception as error:
        raise SetupError(f"--cluster {address}: Ray does not connect ({_first_lines(error)}).") from error


async def _in_time(call: Callable[[], _T], timeout_s: float, what: str) -> _T:
    """The result of a call that may hang, and is then left behind: in a thread that nobody waits for at the end."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[_T] = loop.create_future()

    def tell(value: _T | None, error: Exception | None) -> None:
        if not result.done():
            if error is None:
                result.set_result(value)  # pyright: ignore[reportArgumentType]
            else:
                result.set_exception(error)

    def run() -> None:
        try:
            value, error = call(), None
        except Exception as caught:
            value, error = None, caught
        with contextlib.suppress(RuntimeError):  # nobody waits any more
            loop.call_soon_threadsafe(tell, value, error)

    threading.Thread(target=run, daemon=True, name="twostroke-ray").start()
    try:
        return await asyncio.wait_for(result, timeout_s)
    except TimeoutError:
        raise SetupError(f"{what}: Ray has not answered within {timeout_s:g} s. Is a cluster there?") from None


async def _result(reference: Any) -> Any:
    """Of a call of an actor's."""
    return await reference


async def _clock_ahead_s(actor: Any) -> float:
    """How far its machine's clock is ahead of ours, by the quickest of some answers: its middle is when it was said."""
    answers: list[tuple[float, float]] = []
    for _ in range(5):
        asked_s = time.monotonic()
        told_s = await _result(actor.clock.remote())
        answered_s = time.monotonic()
        answers.append((answered_s - asked_s, told_s - (asked_s + answered_s) / 2))
    return min(answers)[1]


def _nodes() -> list[Mapping[str, float]]:
    """The resources of each node that lives."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _figures(node: Mapping[str, float], *, with_roles: bool) -> str:
    names = ("CPU", *(role.value for role in (Role.PREFILL, Role.DECODE) if with_roles))
    return ", ".join(f"{node.get(name, 0):g} {name}" for name in names)


def _discard(actor: Any) -> None:
    import ray

    with contextlib.suppress(Exception):
        ray.kill(actor)


def _first_lines(error: BaseException) -> str:
    """What matters of Ray's long texts."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2] + lines[-1:] if len(lines) > 3 else lines)[:500] or type(error).__name__
