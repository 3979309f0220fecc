"""Requests and engine settings of random schedules, each a function of its seed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from twostroke.sampling_params import SamplingParams

LONGEST_PROMPT, MAX_TOKENS = 60, 20
MAX_MODEL_LEN = LONGEST_PROMPT + MAX_TOKENS
LONG_PROMPTS, LONG_MODEL_LEN = (520, 600), 640
"""More than a partition of attention's keys (512), so that threads may share one request."""
NUM_SHORT, MOST_AT_ONCE = 64, 64
PERIOD = 48
"""Each so many schedules one has long requests, and one has `MOST_AT_ONCE`; the others are small and short of KV."""
_LONG, _CROWDED = 5, 11
"""Places of these two in a period."""
_MOST_DRAFTS = 16
_SMALL_BUDGET = 5
"""With fewer tokens a step, and for long prompts with fewer than 16, a schedule of many requests has hundreds of steps,
each like the one before."""
_STEMS = (0, 0, 20, 40)
"""Tokens that every fourth request begins with, so that the prefix cache finds something."""


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """A prompt, and how it is sampled."""

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class DrawnSchedule:
    """One schedule: settings of the engine, and the order in which requests arrive.

    Attributes:
        settings: of the engine.
        arrivals: indices of requests, the first to arrive last.
        priorities: of these requests.
        pause: probability that a step runs before the next arrival.
    """

    settings: dict[str, Any]
    arrivals: list[int]
    priorities: list[int]
    pause: float

    def num_blocks(self, window: int) -> int:
        """Return the number of KV blocks: as drawn, and for layers with a window those of one request."""
        chosen, size = self.settings["num_kv_blocks"], self.settings["block_size"]
        seen = min(window + self.settings["max_num_batched_tokens"] + _MOST_DRAFTS, self.settings["max_model_len"])
        return chosen + (-(-seen // size) + 1 if window else 0)


def draw_requests() -> list[FuzzRequest]:
    """Return the requests of every schedule: greedy and sampled, some with penalties or scores of their prompts."""
    rng = Random(11)
    stems = [tuple(rng.randrange(256) for _ in range(n)) for n in _STEMS]
    made: list[FuzzRequest] = []
    for i in range(NUM_SHORT + len(LONG_PROMPTS)):
        stem = stems[i % len(stems)]
        num_own = rng.randrange(1, LONGEST_PROMPT - max(_STEMS)) if i < NUM_SHORT else LONG_PROMPTS[i - NUM_SHORT]
        own = tuple(rng.randrange(256) for _ in range(num_own if i < NUM_SHORT else num_own - len(stem)))
        params = SamplingParams(
            max_tokens=rng.randrange(1, MAX_TOKENS),
            temperature=rng.choice((0.0, 0.8, 1.2)),
            top_p=rng.choice((1.0, 0.9)),
            repetition_penalty=rng.choice((1.0, 1.1)),
            seed=i,
            ignore_eos=True,
            logprobs=1,
            prompt_logprobs=0 if i % 5 == 4 else None,
        )
        made.append(FuzzRequest(stem + own, params))
    return made


def draw_schedule(seed: int) -> DrawnSchedule:
    """Return the schedule of a seed: long, crowded or small."""
    rng = Random(seed)
    is_long, is_crowded = seed % PERIOD == _LONG, seed % PERIOD == _CROWDED
    settings = _engine_settings(rng, LONG_MODEL_LEN if is_long else MAX_MODEL_LEN)
    settings["max_num_seqs"] = MOST_AT_ONCE if is_crowded else rng.choice((1, 2, 4, 8, 8))
    has_small_budget = settings["max_num_batched_tokens"] < _SMALL_BUDGET
    num_requests = rng.randrange(1, 4) if has_small_budget else rng.randrange(3, 9)
    if is_crowded:
        num_requests = MOST_AT_ONCE
    long_ones = list(range(NUM_SHORT, NUM_SHORT + len(LONG_PROMPTS))) if is_long else []
    arrivals = rng.sample(range(NUM_SHORT), num_requests) + long_ones
    return DrawnSchedule(
        settings=settings,
        arrivals=arrivals,
        priorities=[rng.randrange(-2, 3) if settings["policy"] == "priority" else 0 for _ in arrivals],
        pause=rng.choice((0.0, 0.5, 0.9)),
    )


def _engine_settings(rng: Random, max_model_len: int) -> dict[str, Any]:
    block_size = rng.choice((1, 2, 4, 8, 16, 32, 64, 128))
    blocks_of_longest = -(-max_model_len // block_size)
    chosen = {
        "max_num_batched_tokens": rng.choice((1, 2, 5, 16, 17, 48, 64, 200)),
        "block_size": block_size,
        "num_kv_blocks": rng.choice(
            (blocks_of_longest, blocks_of_longest, blocks_of_longest * 3 // 2, 12 * blocks_of_longest)
        ),
        "enable_prefix_caching": rng.random() < 0.6,
        "policy": rng.choice(("fcfs", "priority")),
        "mixing": rng.choice(("mixed", "prefill_first")),
        "threads": rng.choice((1, 1, 1, 2)),
    }
    if max_model_len == LONG_MODEL_LEN:
        chosen["max_num_batched_tokens"] = max(chosen["max_num_batched_tokens"], 16)
    if chosen["enable_prefix_caching"] and rng.random() < 0.5:
        chosen["kv_offloading_size"] = rng.choice((1 << 19, 1 << 23))
    return {**chosen, "max_model_len": max_model_len}
