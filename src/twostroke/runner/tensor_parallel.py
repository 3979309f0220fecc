"""Several ranks that compute one model together: rank 0 in the engine's process, the others in processes of their own.

Every rank gets the same requests and batches and does the same, but for the rows of matrices and the KV heads that it
has. All of them gather the logits and sample: a token is a function of logits, seed and position, so they agree, and
what follows from tokens (drafts by prompt lookup, the state of a grammar) need not be sent around.

```
rank 0    add_request, submit ── (new requests, batch) ──► ranks 1 ..   once a step
          forward     ◄────────── all-gathers ───────────► forward
          sample                                           sample       the same tokens
```
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.communicator.interface import Communicator
from twostroke.errors import RankLost
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.runner.model_runner import ModelRunner


class _Step(msgspec.Struct, array_like=True):
    """What the other ranks are told."""

    requests: list[NewRequest]
    batch: ScheduledBatch | None
    """None: there are no more."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Step)


class TensorParallelExecutor:
    """Rank 0's executor, which tells the other ranks what it computes.

    A step that fails ends the engine: ranks that have failed at different places cannot go on together.
    """

    max_in_flight = 1

    def __init__(self, runner: ModelRunner, communicator: Communicator, end_ranks: Callable[[], None]) -> None:
        """Takes over the communicator.

        Args:
            runner: this rank's.
            communicator: to the other ranks, which run `follow`.
            end_ranks: called when they have been told to end; waits for their processes.
        """
        self._runner, self._communicator, self._end_ranks = runner, communicator, end_ranks
        self._new: list[NewRequest] = []
        self._results: deque[StepResult] = deque()
        self._is_lost = False

    def add_request(self, request: NewRequest) -> None:
        """See Executor. The other ranks hear of it with the next batch."""
        self._new.append(request)
        self._runner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Computes at once.

        Raises:
            RankLost: another rank is gone.
        """
        try:
            self._communicator.broadcast(_ENCODER.encode(_Step(self._new, batch)))
            self._new = []
            result = self._runner.execute(batch)
            self._communicator.verify()
            self._results.append(result)
        except Exception:
            self._is_lost = True
            self._communicator.close()
            raise

    def collect(self) -> StepResult:
        """See Executor."""
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Never called: the self-check is refused where there are several ranks."""
        raise AssertionError(f"a KV check of {check.request_id} over {self._communicator.size} ranks")

    def close(self) -> None:
        """See Executor. A rank that has died since the last step is no error."""
        if not self._is_lost:
            with suppress(RankLost):
                self._communicator.broadcast(_ENCODER.encode(_Step([], None)))
        self._communicator.close()
        self._end_ranks()
        self._runner.close()


def follow(runner: ModelRunner, communicator: Communicator) -> None:
    """What every rank but rank 0 does: computes the batches that it is told, until there are no more.

    Raises:
        RankLost: another rank is gone.
    """
    while True:
        step = _DECODER.decode(communicator.broadcast(None))
        for request in step.requests:
            runner.add_request(request)
        if step.batch is None:
            return
        runner.execute(step.batch)
