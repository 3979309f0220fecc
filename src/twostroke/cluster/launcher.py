"""Who starts the processes of the pools: this machine, or a cluster; or nobody, where threads do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from twostroke.cluster.engine_process import COMMAND, EngineProcess
from twostroke.cluster.forking import ForkServer, can_fork
from twostroke.cluster.messages import EngineReady, StartEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.handover_port import HandoverPort
from twostroke.pools.member import Role


class Launcher(Protocol):
    """Starts processes; they are watched, and started again, by whoever asked for them."""

    async def open(self) -> None:
        """Before the first process.

        Raises:
            SetupError: there is no place for them.
        """
        ...

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Check that the machines could hold so many processes if they were empty.

        Args:
            sizes: number of processes of each pool.

        Raises:
            InvalidParameter: they could not.
        """
        ...

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverPort) -> EngineProcess:
        """A process that loads what the config says; who is cancelled leaves nothing behind.

        Args:
            name: of the process.
            role: which pool it is for.
            config: of the engine.
            port: where its KV goes and comes from.

        Raises:
            SetupError: there is no place for it now.
        """
        ...

    def is_loaded(self, ready: EngineReady) -> None:
        """A process has loaded its model; what it found out about its machine, others need not find out again."""
        ...

    async def close(self) -> None:
        """After the last process."""
        ...


class LocalLauncher:
    """Starts children of this process, forked from one that has imported everything where the system lets them be.

    Args:
        command: starts one in another way, from nothing; benchmarks and tests put something around it.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = COMMAND if command is None else tuple(command)
        self._forks = ForkServer() if command is None and can_fork() else None
        self._machine: MachineLimits | None = None

    async def open(self) -> None:
        """See Launcher."""

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Accept every size: this machine starts as many processes as asked."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverPort) -> EngineProcess:
        """See Launcher."""
        del name, role
        start = StartEngine(config, port, machine=self._machine)
        return await EngineProcess.spawn(start, self._command, forks=self._forks, last_words_s=0.0)

    def is_loaded(self, ready: EngineReady) -> None:
        """See Launcher: what is measured while others serve is not what the machine can do."""
        self._machine = self._machine or ready.machine

    async def close(self) -> None:
        """See Launcher."""
        if self._forks is not None:
            await self._forks.close()


def launcher_for(config: EngineConfig, pools: PoolConfig) -> Launcher:
    """The one that was asked for.

    Raises:
        SetupError: what it needs is not installed.
    """
    if pools.pool_workers == "thread":
        from twostroke.cluster.thread_launcher import ThreadLauncher  # brings torch, where a gateway has none

        return ThreadLauncher()
    if pools.cluster is None:
        return LocalLauncher()
    from twostroke.cluster.ray_launcher import RayLauncher  # Ray is an extra, and takes a while

    return RayLauncher(config, pools)
