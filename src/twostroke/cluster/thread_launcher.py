"""Workers as threads of this process: the same engine loop and sockets as in a child process.

For notebooks, tests and a server in one process. Compared with processes, threads have these limits:

- A thread cannot be killed. A thread that hangs is *abandoned*: its reports are dropped, its sequences resume
  elsewhere, and it ends by itself if its step ever returns. Until then its memory stays in use, so only a few may be
  abandoned at a time.
- The heartbeat comes from another thread, which runs whatever the engine does. So no heartbeat is sent once a loop has
  not finished a pass for `STEP_TIMEOUT_S`.
- Engines compute one after the other: the native kernels have one thread pool (csrc/threads.cpp). A thread that hangs
  inside a kernel stops all engines.
- If the process ends, all workers end.
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
from twostroke.cluster.process_sockets import FolderSockets
from twostroke.config.engine import EngineConfig
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.handover_messages import HandoverSettings
from twostroke.errors import SetupError
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.pools.member import Role
from twostroke.runner.model_runner import Executor

log = get_logger(__name__)

STEP_TIMEOUT_S = 30.0
"""Seconds that a pass of the loop may take. A step is a chunk of a prompt or a token each; the longest takes
seconds."""
MAX_ABANDONED = 2
"""Most threads that may be abandoned and still hang; each has a whole engine's memory."""


class ThreadLauncher:
    """A launcher of workers as threads of this process.

    Args:
        wrap_executor: wraps the executor that computes; tests inject faults there.
        step_timeout_s: seconds without a pass of the loop after which it counts as hanging.
    """

    def __init__(
        self,
        wrap_executor: Callable[[Executor], Executor] | None = None,
        step_timeout_s: float = STEP_TIMEOUT_S,
    ) -> None:
        self._wrap_executor = wrap_executor
        self._step_timeout_s = step_timeout_s
        self._machine: MachineLimits | None = None
        self._children: list[ThreadChild] = []

    async def open(self) -> None:
        """Do nothing: threads need no preparation."""

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Accept every size: this process starts as many workers as asked."""

    async def launch(self, name: str, role: Role, config: EngineConfig, port: HandoverSettings) -> EngineProcess:
        """Start a worker as a thread.

        Raises:
            SetupError: too many threads hang.
        """
        del role
        self._children = [child for child in self._children if child.is_running]
        num_left = sum(child.is_abandoned for child in self._children)
        if num_left >= MAX_ABANDONED:
            raise SetupError(
                f"{num_left} workers hang in threads of this process and cannot be ended. Restart the process, "
                "or use --pool-workers process."
            )
        folder = Path(tempfile.mkdtemp(prefix="twostroke-"))  # for this user only
        child = ThreadChild(name, folder, self._wrap_executor, self._step_timeout_s)
        self._children.append(child)
        process = EngineProcess(child, FolderSockets(folder), final_reports_s=0.0)
        process.send(StartEngine(config, port, machine=self._machine))
        return process

    def is_loaded(self, ready: EngineReady) -> None:
        """Keep the first measurement of the machine; later ones would be made while other workers serve."""
        self._machine = self._machine or ready.machine

    async def close(self) -> None:
        """Do nothing: threads hold nothing beyond their own end."""


class ThreadChild:
    """A thread that runs an engine, in the role of a child process.

    Args:
        name: of the worker.
        folder: folder of its sockets, removed at its end.
        wrap_executor: see ThreadLauncher.
        step_timeout_s: see ThreadLauncher.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        wrap_executor: Callable[[Executor], Executor] | None = None,
        step_timeout_s: float = math.inf,
    ) -> None:
        self._name = name
        self._folder = folder
        self._wrap_executor = wrap_executor
        self._step_timeout_s = step_timeout_s
        self._channel = Channel(folder)
        self._loop = asyncio.get_running_loop()
        self._ending: asyncio.Future[str] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"twostroke-{name}")
        self._thread.start()

    @property
    def pid(self) -> int:
        """Id of this process."""
        return os.getpid()

    @property
    def is_running(self) -> bool:
        """Whether the thread still runs, even if it was abandoned."""
        return self._thread.is_alive()

    @property
    def is_abandoned(self) -> bool:
        """Whether the thread was abandoned."""
        return self._channel.is_abandoned

    async def ending(self) -> str:
        return await asyncio.shield(self._ending)

    def kill(self) -> None:
        """Abandon the thread, and report its end at once."""
        if not self._ending.done():
            self._channel.abandon()
            self._ended("was abandoned: a thread cannot be killed")

    def forget(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        try:
            code = run(self._channel, self._wrap_executor, is_whole_process=False, step_timeout_s=self._step_timeout_s)
            how = "has ended" if code == 0 else "has stopped"
        except BaseException as error:
            log.exception("%s has died", self._name)
            how = f"has died ({reason_of(error)})"
        if self._channel.is_abandoned:
            log.warning("%s, which was abandoned, has now ended", self._name)
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._ended, how)

    def _ended(self, how: str) -> None:
        if not self._ending.done():
            self._ending.set_result(how)
