"""EngineClient: all that the API knows of engines, be it one in a process of its own or many."""

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
    """What can be said of an engine without asking it."""

    STARTING = "starting"  # the model is being loaded, for the first time or again
    RUNNING = "running"
    DRAINING = "draining"  # what runs goes on, nothing more is taken
    STALLED = "stalled"  # work is queued and no step was committed for too long
    FAILED = "failed"  # it died, and starting it again did not help
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether there is progress, and if not, why not."""

    state: EngineState
    cause: str
    """In words."""
    num_requests: int = 0
    """That have not ended."""
    num_restarts: int = 0

    @property
    def is_alive(self) -> bool:
        """Whether waiting may help: false where somebody has to do something."""
        return self.state in (EngineState.STARTING, EngineState.RUNNING, EngineState.DRAINING)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self.state is EngineState.RUNNING


@dataclass(frozen=True, slots=True)
class PoolMember:
    """A place in a pool, and who fills it now."""

    worker_id: str
    role: Role
    state: EngineState
    cause: str
    """Of a state other than running, in words."""
    pid: int | None
    """Of its process; None while none runs."""
    num_restarts: int
    num_live: int
    """Sequences that need it."""
    formats: Mapping[str, str | int] = field(default_factory=dict[str, str | int])
    """Formats by name. Numerics: element type, KV format, quantization, kernels, device, version. Layout of KV in a
    block: block_size, tensor_parallel_size, kv_order. Empty while no process runs."""


Taker = Callable[[RequestOutput], bool]
"""Is offered an output at the moment when it is there; says whether it took it. It raises nothing."""


class OutputStream:
    """The outputs of one request, for one reader, who shares a loop with the writer.

    Args:
        abandon: ends the request, which nobody reads any more.
    """

    def __init__(self, abandon: Callable[[OutputStream], None]) -> None:
        self._outputs: list[RequestOutput] = []
        self._error: Exception | None = None
        """Comes after the outputs that are there, once."""
        self._wake: Callable[[], object] = _nobody
        self._taker: Taker | None = None
        self._abandon = abandon
        self._is_ended = False
        self.has_begun = False
        """Whether an output was ever handed over."""
        self._patience: asyncio.TimerHandle | None = None

    def put(self, output: RequestOutput) -> None:
        """Hands an output over."""
        self.has_begun = True
        if self._patience is not None:
            self._stop_waiting()
        if output.finished:
            self._is_ended = True
        if self._taker is not None and self._taker(output):
            return
        self._outputs.append(output)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Ends it with an error."""
        self._is_ended = True
        self._error = error
        self._stop_waiting()
        self._wake()

    def take(self) -> list[RequestOutput]:
        """All outputs that are there; it never waits. The last output of a request is `finished`.

        Raises:
            EngineError: the engine died under the request, or had no time for it (Overloaded).
        """
        outputs, self._outputs = self._outputs, []
        if self._error is not None:
            if outputs:  # the reader is told once more
                asyncio.get_running_loop().call_soon(self._wake)
                return outputs
            error, self._error = self._error, None
            raise error
        return outputs

    def listen(self, wake: Callable[[], object], taker: Taker | None = None) -> None:
        """From now on `wake` is called whenever there is something to take, in the loop; it raises nothing.

        With a `taker`, each output is offered to it first: what it takes never lies here to be taken.
        """
        self._wake, self._taker = wake, taker

    def close(self) -> None:
        """Nobody reads on: a request that has not ended is aborted within a step. A second time does nothing."""
        if not self._is_ended:
            self._is_ended = True
            self._outputs = []
            self._stop_waiting()
            self._abandon(self)

    def start_by(self, within_s: float, is_waiting: Callable[[], bool]) -> None:
        """Gives the request up unless something of it has begun by then."""

        def lose_patience() -> None:
            if not self._is_ended and is_waiting():
                self._abandon(self)
                self.fail(Overloaded(f"the request waited {within_s:.1f} s and was not begun; it was given up.", 1))

        self._patience = asyncio.get_running_loop().call_later(max(0.0, within_s), lose_patience)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def _nobody() -> None:
    """Listens while nobody else does."""


class EngineClient(Protocol):
    """Takes prompts, gives back what becomes of them. For one event loop."""

    @property
    def facts(self) -> EngineFacts:
        """Of the engine that runs, or ran last."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Of the model."""
        ...

    @property
    def inputs(self) -> InputProcessor:
        """Checks and encodes prompts, in any thread."""
        ...

    def now_s(self) -> float:
        """The clock on which requests arrive, in seconds."""
        ...

    def health(self) -> EngineHealth:
        """How it is, at once."""
        ...

    def generate(self, submission: Submission) -> OutputStream:
        """Queues a prompt; close what it returns, whatever happens.

        Raises:
            ClientError: the request cannot be run as asked.
            EngineUnavailable: no engine takes requests now; asking again later may help.
        """
        ...

    @property
    def is_idle(self) -> bool:
        """Whether it surely runs, and nothing is queued or running: the next request does not wait."""
        ...

    def load(self, tenant: str, *, background: bool = False) -> EngineLoad:
        """What there is to do before a request of this tenant, of the others' or of the background's."""
        ...

    def abort(self, request_id: str, tenant: str = "") -> bool:
        """Ends a request; whoever reads its stream is told. False where this tenant has none by that name that runs.

        The tenant "" is whoever may end everybody's.
        """
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forgets cached prefixes; those that running requests use stay. False when nothing was cached."""
        ...


class ScalablePools(Protocol):
    """Pools whose sizes can be changed while they serve."""

    def members(self) -> list[PoolMember]:
        """All, those that start and those that leave included."""
        ...

    def suggested_ratio(self) -> SuggestedRatio | None:
        """How many members of each pool the load of the last minute speaks for; None while too little is known."""
        ...

    @property
    def no_room(self) -> str:
        """The reason why the last larger size, asked for or needed by the load, is refused; empty if it is not."""
        ...

    async def check_room(self, sizes: Mapping[Role, int]) -> None:
        """Check that pools may have so many members and, if one grows, that the machines could hold them.

        Raises:
            InvalidParameter: the sizes are not allowed, or the machines could not hold them even when empty.
        """
        ...

    def scale(self, sizes: Mapping[Role, int]) -> None:
        """Gives each named pool so many members that stay. Nothing that runs is lost: who leaves takes no more
        requests, ends those it has, and what it has not ended in time goes on elsewhere.

        Raises:
            InvalidParameter: a pool cannot have so many; no pool was changed.
            EngineUnavailable: the server shuts down.
        """
        ...
