"""Workers that are threads of this process: the engine's loop as it is, with its sockets, where a child would be.

For notebooks, tests and a server in one process. What a process gives and a thread cannot:

- A thread cannot be killed. One that hangs is *left*: nothing that it says is heard any more, what it did goes on
  elsewhere, and when it comes round after all it ends by itself. Until then its memory stays taken, so only a few may
  be left at a time.
- Its heart beats in another thread, which is alive whatever the engine does. So a loop that has not come round for
  `STEP_PATIENCE_S` is said to be alive no longer.
- Engines compute in turn: the native kernels have one pool of threads (csrc/threads.cpp). Whoever hangs inside a kernel
  stops all.
- What ends the process ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from twostroke.cluster.engine_process import EngineProcess
from twostroke.cluster.messages import EngineReady, StartEngine
from twostroke.cluster.process import Channel, run
from twostroke.cluster.wires import FolderWires
from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.handover_port import HandoverPort
from twostroke.errors import SetupError
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role
from twostroke.runner.model_runner import Executor

log = get_logger(__name__)

STEP_PATIENCE_S = 30.0
"""A step is a chunk of a prompt or a token each; the longest takes seconds."""
MOST_LEFT = 2
"""Threads that were left and have not come round; each has a whole engine's memory."""


class ThreadLauncher:
    """Starts threads of this process; see Launcher.

    Args:
        around_executor: puts another executor around the one that computes; tests inject faults there.
        step_patience_s: a loop that has not come round for so long hangs.
    """

    def __init__(
        self,
        around_executor: Callable[[Executor], Executor] | None = None,
        step_patience_s: float = STEP_PATIENCE_S,
    ) -> None:
        self._around_executor = around_executor
        self._step_patience_s = step_patience_s
        self._machine: MachineLimits | None = None
        self._children: list[ThreadChild] = []

    async def open(self) -> None:
        """See Launcher."""

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Accept every size: this process starts as many workers as asked."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverPort) -> EngineProcess:
        """See Launcher.

        Raises:
            SetupError: too many threads hang.
        """
        del role
        self._children = [child for child in self._children if child.is_running]
        num_left = sum(child.is_left for child in self._children)
        if num_left >= MOST_LEFT:
            raise SetupError(
                f"{num_left} workers hang in threads of this process, which nothing can end. Start the process again, "
                "or use --pool-workers process."
            )
        folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        child = ThreadChild(name, folder, self._around_executor, self._step_patience_s)
        self._children.append(child)
        process = EngineProcess(child, FolderWires(folder), last_words_s=0.0)
        process.send(StartEngine(config, port, machine=self._machine))
        return process

    def is_loaded(self, ready: EngineReady) -> None:
        """See Launcher: what is measured while others serve is not what the machine can do."""
        self._machine = self._machine or ready.machine

    async def close(self) -> None:
        """See Launcher."""


class ThreadChild:
    """A thread that runs an engine; see Child.

    Args:
        name: of the worker.
        folder: of its sockets; it is removed at its end.
        around_executor: see ThreadLauncher.
        step_patience_s: see ThreadLauncher.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        around_executor: Callable[[Executor], Executor] | None = None,
        step_patience_s: float = math.inf,
    ) -> None:
        self._name = name
        self._folder = folder
        self._around_executor = around_executor
        self._step_patience_s = step_patience_s
        self._channel = Channel(folder)
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"twostroke-{name}")
        self._thread.start()

    @property
    def pid(self) -> int:
        """See Child: this process's."""
        return os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether the thread is there, left or not."""
        return self._thread.is_alive()

    @property
    def is_left(self) -> bool:
        """Whether it was given up."""
        return self._channel.is_left

    async def ending(self) -> str:
        """See Child."""
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """See Child: it is left; who waits for its end need not wait."""
        if not self._ending.done():
            self._channel.leave()
            self._ended("was left: a thread cannot be ended")

    def forget(self) -> None:
        """See Child."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            code = run(
                self._channel, self._around_executor, is_whole_process=False, step_patience_s=self._step_patience_s
            )
            how = "has ended" if code == 0 else "has stopped"
        except BaseException as error:
            log.exception("%s has died", self._name)
            how = f"has died ({reason_of(error)})"
        if self._channel.is_left:
            log.warning("%s, which was left, has come round and ended", self._name)
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._ended, how)

    def _ended(self, how: str) -> None:
        if not self._ending.done():
            self._ending.set_result(how)
