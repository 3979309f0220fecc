"""The engine requests behind one answer: one per prompt, opened together, read together, closed together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from twostroke.api.admission import Admission
from twostroke.engine.client import EngineClient, OutputStream
from twostroke.engine.garbage import give_back_what_is_free
from twostroke.engine.input_processor import PromptInput
from twostroke.engine.output_processor import OutputKind
from twostroke.errors import EngineError
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason

Result = TypeVar("Result")
INLINE_LENGTH = 4096
"""Prompts of so many characters or token ids are prepared at once; longer ones in a thread, while the others' tokens
are sent."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, and what the engine has to know of that."""

    arrival_time_s: float
    """When the request was fully read, on the engine's clock."""
    admission: Admission
    """Says whether there is room for the request."""
    tenant: str = ""
    """Whose key it was; empty where no keys are set."""
    announce: Callable[[str], object] = str
    """Called with the name of each engine request that was queued; whoever traces it takes note."""
    patience_s: float | None = None
    """How long after its arrival a first token is of use; None: as long as the server lets anybody wait."""


HUGE_LENGTH = 1 << 18
"""Preparing so many takes memory that is worth giving back."""
_COMPILERS = ThreadPoolExecutor(2, thread_name_prefix="twostroke-grammar")
"""Grammars are tried by child processes, so many at once: not one for every stranger who sends a new one."""


async def prepared(
    prepare: Callable[[], list[PromptInput]], length: int, *, compiles: bool = False
) -> list[PromptInput]:
    """What `prepare` returns, in a thread when that may take long.

    Args:
        prepare: makes the prompts.
        length: characters and token ids.
        compiles: whether a grammar is compiled, too, which takes a child process and up to half a second.
    """
    if compiles:
        return await asyncio.get_running_loop().run_in_executor(_COMPILERS, prepare)
    return await off_the_loop(prepare, length)


async def off_the_loop(work: Callable[[], Result], length: int) -> Result:
    """What `work` returns of a text of that length: made at once when it is short, else in a thread."""
    if length <= INLINE_LENGTH:
        return work()
    try:
        return await asyncio.to_thread(work)
    finally:
        if length > HUGE_LENGTH:
            await asyncio.to_thread(give_back_what_is_free)


class Generation:
    """Prompts in the engine.

    Args:
        engine: that runs them.
        prompts: checked.
        answer_id: of the answer; the engine's requests are called by it, numbered when there are several.
        caller: who asks.
        priority: lower is served earlier.
        cache_salt: for the prefix cache.
        kind: deltas for a stream, the whole otherwise.

    Raises:
        ClientError: one cannot be run; none runs then.
        EngineUnavailable: no engine takes requests now, or it has too much to do.
    """

    def __init__(
        self,
        engine: EngineClient,
        prompts: Sequence[PromptInput],
        answer_id: str,
        caller: Caller,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind,
    ) -> None:
        self._streams: list[OutputStream] = []
        caller.admission.admit(prompts, caller.tenant, caller.patience_s)
        try:
            for index, prompt in enumerate(prompts):
                request_id = answer_id if len(prompts) == 1 else f"{answer_id}-{index}"
                stream = engine.generate(
                    prompt,
                    request_id=request_id,
                    arrival_time_s=caller.arrival_time_s,
                    priority=priority,
                    cache_salt=caller.admission.cache_salt(caller.tenant, cache_salt),
                    tenant=caller.tenant,
                    start_by_s=caller.arrival_time_s + caller.admission.longest_wait_s(caller.patience_s),
                    kind=kind,
                )
                self._streams.append(stream)
                caller.announce(request_id)  # no event of it can have come yet, and one that is refused has none
        except BaseException:
            self.close()
            raise
        self._unread = set(range(len(self._streams)))
        self._pending: dict[asyncio.Task[list[RequestOutput]], int] = {}

    async def whole(self) -> list[RequestOutput]:
        """One output per prompt, in their order; for kind "final".

        Raises:
            EngineError: it died, or a request failed.
            Abandoned: it was closed meanwhile.
        """
        outputs: list[RequestOutput] = []
        for stream in self._streams:
            taken = await stream.take()
            if not taken:
                raise Abandoned
            outputs.append(_checked(taken[-1]))
        return outputs

    async def take(self) -> list[tuple[int, RequestOutput]]:
        """Outputs that are there, each with the number of its prompt; empty after the last.

        Raises what `whole` raises.
        """
        if len(self._streams) > 1:
            return await self._take_any()
        outputs = await self._streams[0].take()
        if outputs and outputs[-1].finished:  # only the last can be
            _checked(outputs[-1])
        return [(0, output) for output in outputs]

    def close(self) -> None:
        """Nobody reads on; what still runs is aborted."""
        for stream in self._streams:
            stream.close()

    async def _take_any(self) -> list[tuple[int, RequestOutput]]:
        """Of several streams: whichever have something."""
        for index in self._unread.difference(self._pending.values()):
            self._pending[asyncio.ensure_future(self._streams[index].take())] = index
        if not self._pending:
            return []
        done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
        found: list[tuple[int, RequestOutput]] = []
        for task in sorted(done, key=lambda task: self._pending[task]):
            index = self._pending.pop(task)
            outputs = task.result()
            if not outputs or outputs[-1].finished:
                self._unread.discard(index)
            found += [(index, _checked(output)) for output in outputs]
        if not found:
            raise Abandoned  # a stream that ends without an end was closed
        return found


class Abandoned(Exception):
    """The caller has left; there is nobody to answer."""


def _checked(output: RequestOutput) -> RequestOutput:
    """The output, unless it is the last of a request that failed or was ended by somebody else."""
    if output.finished:
        if output.error is not None:
            raise EngineError(output.error)
        if any(part.finish_reason is FinishReason.ABORT for part in output.outputs):
            raise EngineError("the request was aborted by the server's administrator or its shutdown.")
    return output
