"""AsyncModelRunner: launches a step before the host knows the tokens of the previous one.

HostCopy copies a small tensor to the host: the copy starts at once and is waited for later.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from twostroke.batch import ScheduledBatch, StepResult
from twostroke.runner.input_batch import InputBatch, build_input_batch
from twostroke.runner.launched_step import Draw, LaunchedStep
from twostroke.runner.model_runner import ModelRunner
from twostroke.sampling.sampler import SampledTokens


class HostCopy:
    """Copy of a tensor as it is after the work enqueued so far.

    Waiting for it waits only for that work. `tensor.tolist()` would also wait for all work enqueued since: for a whole
    step, if one is enqueued after this one.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy; the tensor may not change before `wait` returns. On a CPU nothing is copied."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """Wait for the copy and return it."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(slots=True, eq=False)
class AsyncStep(LaunchedStep):
    """Step that the next one may follow before it has ended.

    ```
    device   |= pass n =|draw n|= pass n+1 ====|draw n+1|
    host      … launch n+1 |finish n| account n, decide n+2 | launch n+2 |finish n+1| …
    ```
    """

    token_ids: torch.Tensor | None = None
    """int64 [R], enqueued; -1 where they must be drawn again (Sampler.draw_early). None if nothing is drawn yet."""
    copy: HostCopy | None = None
    """Copy of `token_ids` to the host."""
    places: dict[int, int] = field(default_factory=dict[int, int])
    """Index in `token_ids` of the next token, by row of the table."""
    early_tokens_differ: bool = False
    """Whether a final token differs from the early one that the device continued with."""
    outcome: StepResult | Exception | None = None
    """Result or exception of the step; None until it has ended."""


class AsyncModelRunner(ModelRunner):
    """Runner of decided batches that passes the tokens of a step to the next one on the device."""

    _last: AsyncStep | None = None
    """Last step launched."""

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch a step without waiting for it, then finish the previous one."""
        before = self._last
        if before is not None and before.token_ids is None:
            self._finish_once(before)  # the device holds no tokens for the next step
        self._prepare_pass(batch)
        inputs = build_input_batch(batch, self._table)
        input_ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)
        early_indices = self._early_token_indices(inputs, before)
        if early_indices is not None and before is not None:
            input_ids = _with_early_tokens(input_ids, before, self._to_device(early_indices))
        begin_s = time.perf_counter()
        forward = self._prepare(inputs, positions)
        hidden = forward(input_ids)
        if before is not None:
            self._finish_once(before)
            if early_indices is not None and before.early_tokens_differ:  # K and V are written to the same slots again
                known = build_input_batch(batch, self._table)
                hidden = forward(self._to_device(known.input_ids))
        step = AsyncStep(batch, inputs, hidden, begin_s)
        if len(inputs.sampling_seqs):
            states = [inputs.rows[seq].sampling for seq in inputs.sampling_seqs.tolist()]
            step.draw = Draw(self._logits(hidden, inputs.last_tokens(inputs.sampling_seqs)), states)
            step.token_ids = self._sampler.draw_early(step.draw.logits, states)
        if step.token_ids is not None:
            step.copy = HostCopy(step.token_ids)
            step.places = {inputs.rows[seq].index: place for place, seq in enumerate(inputs.sampling_seqs.tolist())}
        self._last = step
        return step

    @torch.inference_mode()
    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for the oldest unfinished step."""
        assert isinstance(step, AsyncStep), f"{step}"
        self._finish_once(step)
        if isinstance(step.outcome, Exception):
            raise step.outcome
        assert step.outcome is not None
        return step.outcome

    def close(self) -> None:
        """Release the last step, too."""
        super().close()
        self._last = None

    def _early_token_indices(self, inputs: InputBatch, before: AsyncStep | None) -> np.ndarray | None:
        """Return each token's index among the tokens drawn by the previous step, -1 for tokens known on the host.

        int64 [num_tokens]; None if all are known.
        """
        if before is None or before.outcome is not None:
            return None
        lens = np.diff(inputs.query_start_loc)
        is_unknown = inputs.positions >= np.repeat(self._table.num_tokens[inputs.row_indexes], lens)
        if not is_unknown.any():
            return None
        # a row whose step failed has no place; its results in this step are dropped
        places = np.array([before.places.get(row.index, 0) for row in inputs.rows], np.int64)
        return np.where(is_unknown, np.repeat(places, lens), -1)

    def _finish_once(self, step: AsyncStep) -> None:
        """Wait for a step and keep its outcome; do nothing if that was done."""
        if step.outcome is not None:
            return
        if self._last is step:
            self._last = None
        try:
            step.outcome = self._result_of(step)
        except Exception as error:  # raised again when this step is collected
            step.outcome = error

    def _sampled(self, step: LaunchedStep, draw: Draw) -> SampledTokens:
        """Wait for tokens drawn early; draw now if that could not be enqueued."""
        assert isinstance(step, AsyncStep), f"{step}"
        early = None if step.copy is None else step.copy.wait()
        if step.token_ids is not None and early is not None and bool((early >= 0).all()):
            scored = self._sampler.score(draw.logits, step.token_ids, draw.states)
            return replace(scored, token_ids=early)
        step.early_tokens_differ = early is not None
        return self._sampler.sample(draw.logits, draw.states)


def _with_early_tokens(input_ids: torch.Tensor, before: AsyncStep, places: torch.Tensor) -> torch.Tensor:
    """Replace ids by the tokens that the previous step drew, where the places are not -1."""
    assert before.token_ids is not None
    drawn = before.token_ids.index_select(0, places.clamp(min=0)).clamp_(min=0)
    return torch.where(places < 0, input_ids, drawn)
