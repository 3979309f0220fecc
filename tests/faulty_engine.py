"""An engine process with faults: `python -m faulty_engine FOLDER`, run instead of twostroke.cluster.process.

A prompt that holds one of these tokens meets the fault: POISON has an embedding of NaN, so that its keys, values
and logits are none either; a step with HANG never returns; one with BREAK fails in the engine's own books; before a
step with ROT every block of the KV memory that has been written to loses a bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from twostroke.batch import NewRequest, ScheduledBatch, StepResult
from twostroke.cluster.process import main
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.runner.model_runner import Executor

POISON, HANG, BREAK, ROT = 4001, 4002, 4003, 4004


class FaultyExecutor:
    """Around the real one."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        model: Any = inner._runner._model  # type: ignore[attr-defined]
        embed = model.embed

        def poisoned(input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
            hidden = embed(input_ids, positions)
            hidden[input_ids == POISON] = math.nan
            return hidden

        model.embed = poisoned
        self.faults: dict[str, int] = {}

    @property
    def max_in_flight(self) -> int:
        return self.inner.max_in_flight

    def add_request(self, request: NewRequest) -> None:
        """Record the fault that the request causes."""
        for token_id in request.prompt_token_ids:
            if token_id in (HANG, BREAK, ROT):
                self.faults[request.request_id] = token_id
        self.inner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Submit the batch, or hang if the fault says so."""
        self.step = [self.faults.get(request.request_id) for request in batch.requests]
        if HANG in self.step:
            time.sleep(3600)
        if ROT in self.step and batch.requests[0].num_computed_tokens == 0:
            kv: Any = self.inner._runner._kv  # type: ignore[attr-defined]
            heads = kv.tensors[0][: kv.num_blocks, 0, 0, 0]  # uint8 [num_blocks, bytes per head]: the first layer's K
            heads[heads.any(1), 1] ^= 0x40  # an exponent
        self.inner.submit(batch)

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        return self.inner.check_kv(check, token_ids)

    def collect(self) -> StepResult:
        """Return the result, unless the step fails."""
        assert BREAK not in self.step, "a broken step"
        return self.inner.collect()

    def close(self) -> None:
        self.inner.close()


if __name__ == "__main__":
    main(FaultyExecutor)
