"""Token budget of the next step under time limits: as many tokens as keep the time between tokens within the limit.

    ITL limit |- - - - - - - - - - - - - - - - - - - - - - - - - -
              |                 ▒▒▒▒▒▒▒▒ chunk: as large as fits
              |        ████████ decodes: always included                   time of the step
              |████████                                              ───────────────────────►

Each decoding request waits one step for a token, so that step must not exceed the limit; and the larger the chunk, the
sooner the prompt is computed. So the largest chunk that fits gives the lowest TTFT among those that keep the limit. Its
time comes from the fitted model (cost/step_model.py), corrected by the latest steps (`StepCorrection`) and stretched:
the limit should hold for 99 of 100 steps, so the stretch follows a percentile of measured / corrected that is a little
above the 99th (`StepSpread`).

A step without decodes delays no running stream, so it may have the largest size; with a TTFT limit it takes at most
half of that limit. With a TTFT limit alone the chunk is the smallest that is computed in time, because a larger one
only makes other requests wait.
"""

from __future__ import annotations

import bisect
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from twostroke.batch import Commit, ScheduledBatch, ScheduledRequest, StepDurations
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.step_cost import Layers, StepWork
from twostroke.cost.step_model import PredictsSteps
from twostroke.request import Request
from twostroke.scheduler.step_correction import StepCorrection
from twostroke.scheduler.step_plan import SchedulerPart

_KEPT = 400
"""Number of latest ratios that count; enough that no single step decides the 99th percentile."""


class StepSpread:
    """An upper quantile of measured / predicted over the latest steps; initially undefined.

    ```
    ratios of the last steps   |   . .:. :..  .       :    |
                                                  ▲ value
    ```

    The value is the k-th largest of n ratios, k = (1 - quantile) (n + 1) rounded down, at least 1. If the next ratio is
    like those before it, it is larger with probability k / (n + 1): at most 1 - quantile once n + 1 is at least
    1 / (1 - quantile). Before that the largest counts. An estimate that approaches the quantile gradually needs more
    late steps to get there than a short run may have.

    >>> spread = StepSpread(0.99)
    >>> spread.value is None
    True
    >>> for ratio in (1.0, 1.3, 0.9): spread.learn(ratio)
    >>> spread.value
    1.3
    """

    __slots__ = ("_latest", "_share", "_sorted")

    def __init__(self, quantile: float) -> None:
        self._share = 1 - quantile
        self._latest: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        """Return the number of ratios."""
        return len(self._sorted)

    @property
    def value(self) -> float | None:
        """The quantile; None before the first step."""
        num = len(self._sorted)
        return self._sorted[num - max(1, int(self._share * (num + 1) + 1e-9))] if num else None

    def learn(self, ratio: float) -> None:
        """Add a step; forget the oldest beyond the window."""
        self._latest.append(ratio)
        bisect.insort(self._sorted, ratio)
        if len(self._latest) > _KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._latest.popleft())]


class LateShare:
    """Share of late steps among the latest."""

    __slots__ = ("_latest", "_num_late")

    def __init__(self) -> None:
        self._latest: deque[bool] = deque(maxlen=_KEPT)
        self._num_late = 0

    @property
    def share(self) -> float:
        """Late steps over the size of the window; missing steps count as in time."""
        return self._num_late / _KEPT

    def learn(self, is_late: bool) -> None:
        """Add a step; forget the oldest beyond the window."""
        if len(self._latest) == _KEPT:
            self._num_late -= self._latest[0]
        self._latest.append(is_late)
        self._num_late += is_late


# ------------------------------------------------------------------ the largest count that fits


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count that fits, by bisection.

    Args:
        fits: whether a count fits; if one does, so do all below it.
        most: largest count to try.

    Returns:
        From 0, which always fits, to `most`.
    """
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


MIN_CHUNK = 16
"""Prompt tokens that go into a step regardless of the limit, so that prompts make progress."""
QUANTILE = 0.99
_SPREAD = 0.995
"""Quantile of the ratios, a little above 0.99, because few ratios exceed their own quantile more often than many do."""
_MIN_PROMPT_STEPS = 100
"""Steps with a prompt that suffice for a quantile; until then, steps without a prompt count too."""
_OWN_STEP = 0.5
"""Share of the TTFT limit that a step without decodes may take."""
MAX_CHUNK_INTERVAL = 4
"""Longest interval, in steps, between chunks of a prompt if even MIN_CHUNK is too much."""
_STRETCH = (0.3, 10.0)
"""Limits of the stretch; beyond them the chunk is not what makes steps long."""


class Prompt(NamedTuple):
    """A prompt that is, or would be, computed next."""

    start: int
    """Tokens already computed."""
    num_left: int
    arrival_s: float


class _StepInFlight(NamedTuple):
    """A step in flight."""

    work: StepWork
    num_prompt_tokens: int
    num_decodes: int


class SloBudget(SchedulerPart):
    """Token budget per step that keeps the time limits.

    Args:
        max_num_batched_tokens: of any step.
        step_times: of the model, on this machine.
        layers: of the model.
        itl_slo_s: limit of the time between two tokens; None: no limit.
        ttft_slo_s: limit of the time to the first token, if the time between tokens has none.
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        step_times: PredictsSteps,
        layers: Layers,
        *,
        itl_slo_s: float | None = None,
        ttft_slo_s: float | None = None,
    ) -> None:
        self._most = max_num_batched_tokens
        self._step_times = step_times
        self._layers = layers
        self._itl_slo_s = itl_slo_s
        self._ttft_slo_s = ttft_slo_s
        self._in_flight: dict[int, _StepInFlight] = {}
        self._late_share = LateShare()
        """Lateness of steps with decodes."""
        self._num_spared = 0
        """Steps without a prompt since the last with one."""
        self._correction = StepCorrection()
        self._beside_prompts, self._alone = StepSpread(_SPREAD), StepSpread(_SPREAD)
        """Spread of steps with decodes and a prompt chunk, measured / corrected; and of decode-only steps, seconds
        beyond the prediction."""

    @property
    def stretch(self) -> float:
        """Measured / corrected time, at the quantile that keeps the limit."""
        least, most = _STRETCH
        return min(max(self._beside_prompts.value or 1.0, least), most)

    @property
    def excess_s(self) -> float:
        """Seconds by which a decode-only step exceeds its prediction, at the quantile that keeps the limit.

        0 once enough steps with prompts were measured.
        """
        return 0.0 if len(self._beside_prompts) >= _MIN_PROMPT_STEPS else max(0.0, self._alone.value or 0.0)

    def tokens(self, now_s: float, running: Iterable[Request], head: Request | None) -> int:
        """Return the token budget of the step that is decided now.

        Args:
            now_s: the engine's clock.
            running: running requests, most urgent first.
            head: head of the queue.
        """
        decodes, prompt, num_queued = _seen(running, head)
        if prompt is None or not (decodes or self._ttft_slo_s):
            return self._most
        beside = self._layers.work((start, 1, 1) for start in decodes)
        room = max(1, min(self._most - len(decodes), num_queued))

        stretch, excess_s = self.stretch, self.excess_s

        def seconds(chunk: int) -> float:
            """Return the seconds of a step with a chunk of so many tokens."""
            work = beside + self._layers.work([(prompt.start, chunk, 1)])
            usual_s = self._correction.seconds(self._step_times.seconds(work))
            return max(stretch * usual_s, usual_s + excess_s)

        if not decodes:  # no request waits for a token, but one that arrives now waits for this step, then for another
            most = largest(lambda n: seconds(n) <= _OWN_STEP * (self._ttft_slo_s or 0.0), self._most)
            return max(most, min(MIN_CHUNK, self._most))
        if self._itl_slo_s is not None:
            limit_s = self._itl_slo_s
            chunk = largest(lambda n: seconds(n) <= limit_s, room)
        else:
            assert self._ttft_slo_s is not None, "a budget by limits has one"
            left_s = prompt.arrival_s + self._ttft_slo_s - now_s
            chunk = _smallest(lambda n: math.ceil(num_queued / n) * seconds(n) <= left_s, room)
        least = min(MIN_CHUNK, room)
        if chunk < least and self._must_skip_prompts():
            return len(decodes)
        self._num_spared = 0
        return len(decodes) + max(chunk, least)

    def _must_skip_prompts(self) -> bool:
        """Return whether this step must have no prompt: too many steps were late, and the last prompt is recent.

        On a machine whose step times vary, even the smallest chunk may exceed the limit; with fewer chunks the
        quantile stays within it.
        """
        self._num_spared += 1
        is_late = self._ttft_slo_s is None and self._late_share.share > 1 - QUANTILE
        return is_late and self._num_spared < MAX_CHUNK_INTERVAL

    def on_batch(self, batch: ScheduledBatch) -> None:
        """Remember the work of a step, to compare its time with the prediction."""
        if not batch.is_empty:
            work = self._layers.work_of(batch)
            self._in_flight[batch.step] = _StepInFlight(work, batch.num_prefill_tokens, batch.num_decode_tokens)

    def learn(
        self, step: int, requests: Sequence[ScheduledRequest], commits: Sequence[Commit], seconds: StepDurations
    ) -> None:
        """Learn the duration of a step, without its drafting."""
        self.took(step, seconds.step_s - seconds.draft_s)

    def took(self, step: int, seconds: float) -> None:
        """Learn the duration of a step, from its decision to its result."""
        decided = self._in_flight.pop(step, None)
        if decided is None or seconds <= 0 or not decided.work.num_logits_rows:
            return
        predicted_s = self._step_times.seconds(decided.work)
        if decided.num_decodes:
            if self._itl_slo_s is not None:
                self._late_share.learn(seconds > self._itl_slo_s)
            usual_s = self._correction.seconds(predicted_s)
            if decided.num_prompt_tokens:
                self._beside_prompts.learn(seconds / usual_s)
            else:
                self._alone.learn(seconds - usual_s)
        self._correction.learn(predicted_s, seconds)


def make_slo_budget(
    config: SchedulerConfig, step_times: PredictsSteps | None, layers: Layers | None
) -> SloBudget | None:
    """Return the time-based budget; None if the settings have no limit.

    Args:
        config: with or without limits.
        step_times: needed for limits.
        layers: needed for limits.
    """
    if not config.has_slo:
        return None
    assert step_times is not None, "limits need a model of step times"
    assert layers is not None, "limits need the model's layers"
    return SloBudget(
        config.max_num_batched_tokens,
        step_times,
        layers,
        itl_slo_s=config.itl_slo_s,
        ttft_slo_s=config.ttft_slo_s,
    )


def _seen(running: Iterable[Request], head: Request | None) -> tuple[list[int], Prompt | None, int]:
    """Return the positions of decoding requests, the next prompt, and the tokens left of all prompts in progress."""
    decodes: list[int] = []
    prompt: Prompt | None = None
    num_queued = 0
    for request in running:
        num_left = request.num_prefill_tokens - request.num_computed_tokens
        if num_left <= 0:
            decodes.append(request.num_computed_tokens)
            continue
        num_queued += num_left
        prompt = prompt or Prompt(request.num_computed_tokens, num_left, request.arrival.arrival_time_s)
    if head is not None:
        num_left = head.num_tokens + head.num_pending_tokens
        num_queued += num_left
        prompt = prompt or Prompt(0, num_left, head.arrival.arrival_time_s)
    return decodes, prompt, num_queued


def _smallest(fits: Callable[[int], bool], most: int) -> int:
    """Return the smallest count that fits; `most` if none does.

    A chunk that is too small pays the fixed cost of a step too often; one that is too large makes no step shorter.
    Therefore the function tries doublings, one after the other.
    """
    count = MIN_CHUNK
    while count < most:
        if fits(count):
            return count
        count *= 2
    return most
