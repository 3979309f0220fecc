"""Launchers of the pools' processes: on this machine or a cluster, or as threads of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from twostroke.cluster.engine_process import COMMAND, EngineProcess
from twostroke.cluster.forking import ForkServer, can_fork
from twostroke.cluster.messages import EngineReady, StartEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.pools.member import Role


class Launcher(Protocol):
    """A starter of processes; its caller watches and restarts them."""

    async def open(self) -> None:
        """Prepare to start processes; called before the first one.

        Raises:
            SetupError: they cannot be started.
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

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverSettings) -> EngineProcess:
        """Start a process that loads an engine; if cancelled, it leaves nothing behind.

        Args:
            name: of the process.
            role: pool that it belongs to.
            config: of the engine.
            port: hand-over settings.

        Raises:
            SetupError: there is no room for it now.
        """
        ...

    def is_loaded(self, ready: EngineReady) -> None:
        """Record that a process has loaded its model; others reuse what it measured of its machine."""
        ...

    async def close(self) -> None:
        """Release resources after the last process."""
        ...


class LocalLauncher:
    """A launcher of child processes, forked from one that has imported everything if the system supports it.

    Args:
        command: command line that starts a process without forking; benchmarks and tests wrap it.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = COMMAND if command is None else tuple(command)
        self._forks = ForkServer() if command is None and can_fork() else None
        self._machine: MachineLimits | None = None

    async def open(self) -> None:
        """Do nothing: this machine needs no preparation."""

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Accept every size: this machine starts as many processes as asked."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverSettings) -> EngineProcess:
        del name, role
        start = StartEngine(config, port, machine=self._machine)
        return await EngineProcess.spawn(start, self._command, forks=self._forks, final_reports_s=0.0)

    def is_loaded(self, ready: EngineReady) -> None:
        """Keep the first measurement of the machine; later ones would be made while other processes serve."""
        self._machine = self._machine or ready.machine

    async def close(self) -> None:
        if self._forks is not None:
            await self._forks.close()


def launcher_for(config: EngineConfig, pools: PoolConfig) -> Launcher:
    """Return the launcher that the configuration asks for.

    Raises:
        SetupError: a library that it needs is not installed.
    """
    if pools.pool_workers == "thread":
        from twostroke.cluster.thread_launcher import ThreadLauncher  # imports torch, which a gateway does not

        return ThreadLauncher()
    if pools.cluster is None:
        return LocalLauncher()
    from twostroke.cluster.ray_launcher import RayLauncher  # Ray is optional and slow to import

    return RayLauncher(config, pools)
