"""The six stories of the page's experiments, each run as by its button: whether the promised effect is visible.

A story succeeds if its figure in all runs of one side is on the promised side of all runs of the other, and if it
takes less than a minute. The result keeps the verdict's sentences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.alternating import alternate
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from twostroke.errors import SetupError
from twostroke.lab.lab import Lab
from twostroke.lab.settings import Side
from twostroke.lab.stories import STORIES, Story
from twostroke.measure.report import median

GOAL_S = 60.0
"""Longest duration of a story, in seconds."""
_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class StoryRun:
    """One run of a story."""

    took_s: float
    ratio: float
    """Ratio of its figure's medians: the second side to the first."""
    is_apart: bool
    """Whether the sides differ as promised."""
    num_equal: int
    """Requests with the same tokens on both sides, in all runs."""
    num_requests: int
    verdict: Mapping[str, Any]
    figures: Mapping[str, Any]
    """Figures of both sides, each with its range."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Run one story after the other, in full several times each.

    Raises:
        SetupError: a story failed.
    """
    if options.model != "embedded":
        refusal = f"stories are told by the embedded model, not by {options.model_name}: nothing was run"
        return Reproduction(remarks=(refusal,))
    num_times = 3 if options.full else 1
    stories = STORIES if options.full else STORIES[:1]  # a quick run takes half a minute
    its_own = (
        "stories have seeds of their own, and half of the cores for each process: --seed and --threads change nothing"
    )
    named = {story.name: story for story in stories}
    told = alternate(num_times, named, lambda name, _: asyncio.run(tell(named[name])))
    return Reproduction(
        claims=tuple(claim for story in stories for claim in _claims(story, told[story.name], options)),
        config={story.name: {"a": dict(story.a), "b": dict(story.b)} for story in stories},
        workload={story.name: asdict(story.workload) for story in stories},
        details={
            name: [{"took_s": one.took_s, "verdict": one.verdict, "figures": one.figures} for one in all_times]
            for name, all_times in told.items()
        },
        remarks=(its_own,) if options.seed or options.threads else (),
        repeats=num_times,
    )


async def tell(story: Story) -> StoryRun:
    """Run a story to its end.

    Raises:
        SetupError: it failed.
    """
    lab = Lab()
    begin_s = time.perf_counter()
    try:
        lab.start({"story": story.name})
        while (status := lab.status())["state"] == "running":
            await asyncio.sleep(_POLL_INTERVAL_S)
    finally:
        await lab.stop()
    if status["state"] != "done":
        raise SetupError(f"the story {story.name!r} {status['state']}: {status.get('problem', '')}")
    figures = {side: status["results"][side]["figures"] for side in ("a", "b")}
    before, after = (figures[side][story.figure]["median"] for side in ("a", "b"))
    verdict = status["verdict"]
    return StoryRun(
        took_s=time.perf_counter() - begin_s,
        ratio=after / before,
        is_apart=verdict["apart"][story.figure] == (1 if story.promise.should_rise else -1),
        num_equal=verdict["num_equal"],
        num_requests=verdict["num_requests"],
        verdict=verdict,
        figures=figures,
    )


def _claims(story: Story, told: list[StoryRun], options: ReproduceOptions) -> Iterator[Claim]:
    yield Claim.reported(
        f"{story.title}: {story.figure_title}, {story.b_title} / {story.a_title}", median([one.ratio for one in told])
    )
    num_apart = sum(one.is_apart for one in told)
    yield Claim.at_least(f"{story.title}: times its runs came apart as told", len(told), num_apart).judged(options.full)
    num_equal, num_requests = min(one.num_equal for one in told), told[0].num_requests
    tokens = f"{story.title}: requests with equal tokens, of {num_requests}"
    yield Claim.equal(tokens, num_requests, num_equal) if _is_exact(story) else Claim.reported(tokens, num_equal)
    took_s = max(one.took_s for one in told)
    yield Claim.at_most(f"{story.title}: seconds it took, at most", GOAL_S, took_s).judged(options.full)


def _is_exact(story: Story) -> bool:
    """Return whether both sides keep K and V in the same format, so that their tokens must be the same."""
    a, b = (Side.of(settings).engine.cache.kv_cache_dtype for settings in (story.a, story.b))
    return a == b
