"""RunnerAhead: the loop that launches a step before the tokens of the one before it are known here.

A small tensor's way to the host, begun at once and waited for later.
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
    """A copy of a tensor, as it is behind the work that has been enqueued so far.

    Waiting for it waits for that work alone. `tensor.tolist()` would wait for all that was enqueued since, too: with a
    step enqueued behind this one, for a whole step.
    """

    def __init__(self, tensor: Tensor) -> None:
        """Begins it; the tensor may not change before `wait` returns. On a CPU there is nothing to copy."""
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> Tensor:
        """The copy, complete."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


@dataclass(slots=True, eq=False)
class StepAhead(LaunchedStep):
    """A step that the next one may follow before it has ended.

    ```
    device   |= pass n =|draw n|= pass n+1 ====|draw n+1|
    host      … launch n+1 |finish n| account n, decide n+2 | launch n+2 |finish n+1| …
    ```
    """

    token_ids: torch.Tensor | None = None
    """int64 [R], enqueued; -1 where they must be drawn again (Sampler.draw_early). None: nothing is drawn yet."""
    copy: HostCopy | None = None
    """Of the same."""
    places: dict[int, int] = field(default_factory=dict[int, int])
    """Where in `token_ids` the next token of a row of the table is."""
    drew_otherwise: bool = False
    """Whether a token turned out to be another one than the device was given to go on with."""
    outcome: StepResult | Exception | None = None
    """How it ended; None: it has not."""


class RunnerAhead(ModelRunner):
    """Executes decided batches; the device hands the tokens of a step on to the next one itself."""

    _last: StepAhead | None = None
    """The last step launched."""

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Give the device a step without waiting for it; then the step before it is over."""
        before = self._last
        if before is not None and before.token_ids is None:
            self._end(before)  # nothing on the device could be handed on
        self._begin(batch)
        inputs = build_input_batch(batch, self._table)
        input_ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)
        handed_on = self._places_handed_on(inputs, before)
        if handed_on is not None and before is not None:
            input_ids = _with_handed_on(input_ids, before, self._to_device(handed_on))
        begin_s = time.perf_counter()
        forward = self._prepare(inputs, positions)
        hidden = forward(input_ids)
        if before is not None:
            self._end(before)
            if handed_on is not None and before.drew_otherwise:  # all is written to the same places again
                known = build_input_batch(batch, self._table)
                hidden = forward(self._to_device(known.input_ids))
        step = StepAhead(batch, inputs, hidden, begin_s)
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
        """Wait for a step, the oldest that has not ended."""
        assert isinstance(step, StepAhead), f"{step}"
        self._end(step)
        if isinstance(step.outcome, Exception):
            raise step.outcome
        assert step.outcome is not None
        return step.outcome

    def close(self) -> None:
        """Let go of the last step, too."""
        super().close()
        self._last = None

    def _places_handed_on(self, inputs: InputBatch, before: StepAhead | None) -> np.ndarray | None:
        """Return where among the tokens drawn by the step before each token of this step is; -1: it is known here.

        int64 [num_tokens]; None where all are known.
        """
        if before is None or before.outcome is not None:
            return None
        lens = np.diff(inputs.query_start_loc)
        is_unknown = inputs.positions >= np.repeat(self._table.num_tokens[inputs.row_indexes], lens)
        if not is_unknown.any():
            return None
        # a row whose step failed has none: what is computed for it is nobody's
        places = np.array([before.places.get(row.index, 0) for row in inputs.rows], np.int64)
        return np.where(is_unknown, np.repeat(places, lens), -1)

    def _end(self, step: StepAhead) -> None:
        """Wait for a step and keep how it went, once."""
        if step.outcome is not None:
            return
        if self._last is step:
            self._last = None
        try:
            step.outcome = self._result_of(step)
        except Exception as error:  # it is the step's, whoever waits for it
            step.outcome = error

    def _sampled(self, step: LaunchedStep, draw: Draw) -> SampledTokens:
        """Wait for what was drawn early; what could not be enqueued is drawn now."""
        assert isinstance(step, StepAhead), f"{step}"
        early = None if step.copy is None else step.copy.wait()
        if step.token_ids is not None and early is not None and bool((early >= 0).all()):
            scored = self._sampler.score(draw.logits, step.token_ids, draw.states)
            return replace(scored, token_ids=early)
        step.drew_otherwise = early is not None
        return self._sampler.sample(draw.logits, draw.states)


def _with_handed_on(input_ids: torch.Tensor, before: StepAhead, places: torch.Tensor) -> torch.Tensor:
    """Return the ids with the tokens that the step before drew, where the places are not -1."""
    assert before.token_ids is not None
    drawn = before.token_ids.index_select(0, places.clamp(min=0)).clamp_(min=0)
    return torch.where(places < 0, input_ids, drawn)
