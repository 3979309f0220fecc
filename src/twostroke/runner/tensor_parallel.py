"""Several ranks that compute one model together: rank 0 in the engine's process, the rest in processes of their own.

Every rank gets the same requests and batches and does the same work, except for its own rows of matrices and KV heads.
All ranks gather the logits and sample. A token is a function of logits, seed and position, so they agree, and what
follows from tokens (drafts by prompt lookup, the state of a grammar) need not be sent.

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


class _RankMessage(msgspec.Struct, array_like=True):
    """Message from rank 0 to the ranks after it, once a step."""

    requests: list[NewRequest]
    batch: ScheduledBatch | None
    """Batch to compute; None at the end."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_RankMessage)


class TensorParallelExecutor:
    """Executor of rank 0, which broadcasts batches to the ranks after it.

    A step that fails ends the engine: ranks that failed at different places cannot continue together.
    """

    max_in_flight = 1

    def __init__(self, runner: ModelRunner, communicator: Communicator, end_ranks: Callable[[], None]) -> None:
        """Take the communicator.

        Args:
            runner: runner of this rank.
            communicator: connects to the ranks that run `run_follower_rank`.
            end_ranks: called after they were told to end; waits for their processes.
        """
        self._runner, self._communicator, self._end_ranks = runner, communicator, end_ranks
        self._new: list[NewRequest] = []
        self._results: deque[StepResult] = deque()
        self._has_failed = False

    def add_request(self, request: NewRequest) -> None:
        """Announce a request; it is broadcast with the next batch."""
        self._new.append(request)
        self._runner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Compute a batch at once.

        Raises:
            RankLost: another rank is gone.
        """
        try:
            self._communicator.broadcast(_ENCODER.encode(_RankMessage(self._new, batch)))
            self._new = []
            result = self._runner.execute(batch)
            self._communicator.verify()
            self._results.append(result)
        except Exception:
            self._has_failed = True
            self._communicator.close()
            raise

    def collect(self) -> StepResult:
        return self._results.popleft()

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Raise AssertionError: the KV check is refused where there are several ranks."""
        raise AssertionError(f"a KV check of {check.request_id} over {self._communicator.size} ranks")

    def close(self) -> None:
        """Release memory and workers. A rank that has died since the last step is no error."""
        if not self._has_failed:
            with suppress(RankLost):
                self._communicator.broadcast(_ENCODER.encode(_RankMessage([], None)))
        self._communicator.close()
        self._end_ranks()
        self._runner.close()


def run_follower_rank(runner: ModelRunner, communicator: Communicator) -> None:
    """Compute the batches that rank 0 broadcasts, until it sends none; runs on every rank but rank 0.

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
