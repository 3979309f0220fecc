"""Who starts the processes of the pools: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.engine_process import COMMAND, EngineProcess
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

    async def close(self) -> None:
        """After the last process."""
        ...


class LocalLauncher:
    """Starts children of this process.

    Args:
        command: starts one; tests put another around it.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = tuple(command)

    async def open(self) -> None:
        """See Launcher."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverPort) -> EngineProcess:
        """See Launcher."""
        del name, role
        return await EngineProcess.spawn(config, self._command, port, last_words_s=0.0)

    async def close(self) -> None:
        """See Launcher."""


def launcher_for(config: EngineConfig, pools: PoolConfig) -> Launcher:
    """The one that was asked for.

    Raises:
        SetupError: what it needs is not installed.
    """
    if pools.cluster is None:
        return LocalLauncher()
    from twostroke.engine.ray_launcher import RayLauncher  # Ray is an extra, and takes a while

    return RayLauncher(config, pools)
