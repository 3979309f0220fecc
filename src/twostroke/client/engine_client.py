"""EngineClient: the API's interface to engines, be it one in its own process or many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from twostroke.client.input_processor import InputProcessor
from twostroke.client.load import EngineLoad
from twostroke.client.submission import Submission
from twostroke.engine.facts import EngineFacts
from twostroke.errors import Overloaded
from twostroke.outputs import RequestOutput
from twostroke.pools.member import Role
from twostroke.pools.ratio import SuggestedRatio
from twostroke.tokenizer.tokenizer import Tokenizer


class EngineState(StrEnum):
    """State of an engine, as known without asking it."""

    STARTING = "starting"  # the model is being loaded, for the first time or again
    RUNNING = "running"
    DRAINING = "draining"  # running requests continue, no more are accepted
    STALLED = "stalled"  # work is queued and no step was committed for too long
    FAILED = "failed"  # it died, and restarts did not help
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """State of an engine with its cause."""

    state: EngineState
    cause: str
    """Cause of the state, in words."""
    num_requests: int = 0
    """Number of requests that have not ended."""
    num_restarts: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether waiting may help; False if an operator has to act."""
        return self.state in (EngineState.STARTING, EngineState.RUNNING, EngineState.DRAINING)

    @property
    def is_ready(self) -> bool:
        """Whether requests are accepted now."""
        return self.state is EngineState.RUNNING


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A place in a pool, and the worker that fills it now."""

    worker_id: str
    role: Role
    state: EngineState
    cause: str
    """Cause of a state other than running, in words."""
    pid: int | None
    """Id of its process; None while none runs."""
    num_restarts: int
    num_live: int
    """Number of sequences that need it."""
    formats: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    """Formats by name. Numerics: element type, KV format, quantization, kernels, device, version. Layout of KV in a
    block: block_size, tensor_parallel_size, kv_order. Empty while no process runs."""


OutputHandler = Callable[[RequestOutput], bool]
"""Function that is offered each new output, and returns whether it takes it. It raises nothing."""


class OutputStream:
    """The outputs of one request, for one reader in the writer's event loop.

    Args:
        abandon: ends the request when it is not read any more.
    """

    def __init__(self, abandon: Callable[[OutputStream], None]) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        """Error to raise once, after the outputs that are there."""
        self._wake: Callable[[], object] = _ignore
        self._handler: OutputHandler | None = None
        self._abandon = abandon
        self._is_ended = False
        self.has_begun = False
        """Whether any output was put."""
        self._start_deadline: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Add an output."""
        self.has_begun = True
        if self._start_deadline is not None:
            self._stop_waiting()
        if output.finished:
            self._is_ended = True
        if self._handler is not None and self._handler(output):
            return
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error."""
        self._is_ended = True
        self._error = error
        self._stop_waiting()
        self._wake()

    def take(self) -> list[RequestOutput]:
        """Return all outputs that are there, without waiting. The last output of a request is `finished`.

        Raises:
            EngineError: the engine died during the request, or had no time for it (Overloaded).
        """
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            if outputs:  # wake the reader again for the error
                asyncio.get_running_loop().call_soon(self._wake)
                return outputs
            error, self._error = self._error, None
            raise error
        return outputs

    def listen(self, wake: Callable[[], object], handler: OutputHandler | None = None) -> None:
        """Call `wake` in the event loop whenever there is something to take, from now on; it must raise nothing.

        With a `handler`, each output is offered to it first; an output that it takes is not stored here.
        """
        self._wake, self._handler = wake, handler

    def close(self) -> None:
        """Stop reading: a request that has not ended is aborted within a step. A second call does nothing."""
        if not self._is_ended:
            self._is_ended = True
            self._outputs = []
            self._stop_waiting()
            self._abandon(self)

    def start_by(self, within_s: float, is_waiting: Callable[[], bool]) -> None:
        """Give the request up unless one of its sequences has begun by then."""

        def give_up_waiting() -> None:
            if not self._is_ended and is_waiting():
                self._abandon(self)
                self.fail(Overloaded(f"the request waited {within_s:.1f} s and was not begun; it was aborted.", 1))

        self._start_deadline = asyncio.get_running_loop().call_later(max(0.0, within_s), give_up_waiting)

    def _stop_waiting(self) -> None:
        if self._start_deadline is not None:
            self._start_deadline.cancel()
            self._start_deadline = None


def _ignore() -> None:
    """Do nothing, while there is no listener."""


class EngineClient(Protocol):
    """A source of answers to prompts, for one event loop."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about the running engine, or the last one."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model."""
        ...

    @property
    def inputs(self) -> InputProcessor:
        """Processor that checks and encodes prompts, in any thread."""
        ...

    def now_s(self) -> float:
        """Return the time in seconds on the clock of request arrivals."""
        ...

    def health(self) -> EngineHealth:
        """Return the engine's state, without waiting."""
        ...

    def generate(self, submission: Submission) -> OutputStream:
        """Queue a prompt and return its stream, which the caller must close in any case.

        Raises:
            ClientError: the request cannot be run as asked.
            EngineUnavailable: no engine accepts requests now; asking again later may help.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """Whether the engine certainly runs without any request, so that the next one does not wait."""
        ...

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """Return the load before a request of this tenant, of the foreground or of the background."""
        ...

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """End a request and its stream; return False if this tenant has no running request of this name.

        The tenant "" may end all tenants' requests.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; those that running requests use stay. Return False if nothing was cached."""
        ...


class ScalablePools(Protocol):
    """Pools whose sizes can be changed while they serve."""

    def members(self) -> list[PoolMember]:
        """Return all members, including those that start or leave."""
        ...

    def suggested_ratio(self) -> SuggestedRatio | None:
        """Return the sizes of the pools that fit the load of the last minute; None while too little is known."""
        ...

    @property
    def no_room(self) -> str:
        """Reason why the last larger size, requested or needed by the load, is refused; empty if it is not."""
        ...

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Check that pools may have so many members and, if one grows, that the machines could hold them.

        Raises:
            InvalidParameter: the sizes are not allowed, or the machines could not hold them even when empty.
        """
        ...

    def scale(self, sizes: Mapping[Role, int]) -> None:
        """Set the number of members of each named pool.

        Nothing that runs is lost: a member that leaves accepts no more requests and ends those it has; the rest resumes
        elsewhere after a time limit.

        Raises:
            InvalidParameter: a size is not allowed; no pool was changed.
            EngineUnavailable: the server shuts down.
        """
        ...
