"""Signs of features in a run, from its events wherever they show them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from compatibility.engines import BLOCK_SIZE, PROMPTS, Run
from compatibility.features import Feature, Sign
from compatibility.models import NUM_KV_HEADS
from twostroke.batch import ScheduledBatch, ScheduledRequest
from twostroke.events import EngineStarted, KVBlockChecked, KVImportEnded, RequestArrived, StepCommitted, StepScheduled
from twostroke.kv_check import Verdict


def batches(run: Run) -> list[ScheduledBatch]:
    return [event.batch for event in run.events if isinstance(event, StepScheduled) and event.batch.requests]


def scheduled(run: Run) -> list[ScheduledRequest]:
    return [request for batch in batches(run) for request in batch.requests]


def started(run: Run) -> EngineStarted:
    return next(event for event in run.events if isinstance(event, EngineStarted))


def is_overtaken(run: Run, feature: Feature) -> bool:
    """Return whether a request was admitted before one that arrived earlier."""
    del feature
    order = list(dict.fromkeys(a.request_id for batch in batches(run) for a in batch.admitted))
    return order != sorted(order)


def gives_way(run: Run, feature: Feature) -> bool:
    """Return whether background work was overtaken or preempted."""
    del feature
    arrivals = [event for event in run.events if isinstance(event, RequestArrived)]
    background = {event.request_id for event in arrivals if event.arrival.background}
    arrived = list(dict.fromkeys(event.request_id for event in arrivals))
    order = list(dict.fromkeys(a.request_id for batch in batches(run) for a in batch.admitted))
    overtaken = {
        late
        for late, soon in itertools.combinations(arrived, 2)
        if late in order and soon in order and order.index(soon) < order.index(late)
    }
    made_room = {one.request_id for batch in batches(run) for one in batch.preemptions}
    return bool(background & (overtaken | made_room))


def is_decided_ahead(run: Run, feature: Feature) -> bool:
    """Return whether a step was decided before the result of the previous one."""
    del feature
    decided = [event for event in run.events if isinstance(event, StepCommitted | StepScheduled)]
    kinds = [type(event) for event in decided if isinstance(event, StepCommitted) or event.batch.requests]
    return any(one is other is StepScheduled for one, other in itertools.pairwise(kinds))


def is_contiguous(run: Run, feature: Feature) -> bool:
    del feature
    tables = [table.block_ids for request in scheduled(run) for table in request.block_tables if table.block_ids]
    return all(ids == tuple(range(ids[0], ids[0] + len(ids))) for ids in tables)


def keeps_slots_empty(run: Run, feature: Feature) -> bool:
    del feature
    num_slots = started(run).scheduler["max_num_seqs"]
    return any(b.num_waiting and b.num_running < num_slots and not b.admitted for b in batches(run))


def are_checked(run: Run, feature: Feature) -> bool:
    del feature
    verdicts = [event.verdict for event in run.events if isinstance(event, KVBlockChecked)]
    return bool(verdicts) and set(verdicts) == {Verdict.EXACT}


def sizes(run: Run) -> Iterable[int]:
    return (sum(request.num_scheduled_tokens for request in batch.requests) for batch in batches(run))


SIGNS: Mapping[Sign, Callable[[Run, Feature], bool]] = {
    Sign.CHUNKS: lambda run, feature: max(sizes(run)) <= feature.settings["max_num_batched_tokens"],
    Sign.WHOLE_PROMPTS: lambda run, _: max(sizes(run)) >= max(map(len, PROMPTS)),
    Sign.STATIC: keeps_slots_empty,
    Sign.PREFILL_FIRST: lambda run, _: all(len({r.stroke for r in batch.requests}) == 1 for batch in batches(run)),
    Sign.PRIORITY: is_overtaken,
    Sign.FAIR: is_overtaken,
    Sign.LIMIT: lambda run, _: started(run).step_times is not None,
    Sign.AHEAD: is_decided_ahead,
    Sign.GIVES_WAY: gives_way,
    Sign.CACHE_HITS: lambda run, _: any(
        admitted.num_cached_tokens >= BLOCK_SIZE for batch in batches(run) for admitted in batch.admitted
    ),
    Sign.PREEMPTIONS: lambda run, _: any(batch.preemptions for batch in batches(run)),
    Sign.CONTIGUOUS: is_contiguous,
    Sign.RECOMPUTED: lambda run, _: all(request.num_computed_tokens == 0 for request in scheduled(run)),
    Sign.CHECKS: are_checked,
    Sign.BROUGHT_BACK: lambda run, _: any(
        b.kv_moves and b.kv_moves.loads + b.kv_moves.prefetches for b in batches(run)
    ),
    Sign.KV_FORMAT: lambda run, feature: any(
        isinstance(e, EngineStarted) and e.layout["kv_format"] == feature.settings["kv_cache_dtype"] for e in run.events
    ),
    Sign.DRAFTS: lambda run, _: sum(answer.num_draft_tokens for answer in run.answers.values()) > 0,
    Sign.SEVERAL_ANSWERS: lambda run, _: len(run.answers) > len(PROMPTS),
    Sign.PROMPT_SCORES: lambda run, _: any(answer.prompt_logprobs for answer in run.answers.values()),
    Sign.HIDDEN_STATES: lambda run, _: any(answer.hidden_state for answer in run.answers.values()),
    Sign.RESUMED: lambda run, _: run.num_resumed > 0,
    Sign.CONVERTED: lambda run, _: any(
        isinstance(e, KVImportEnded) and not e.problem and "kv_cache_dtype is" in e.drift for e in run.events
    ),
    Sign.HANDED_OVER: lambda run, _: any(isinstance(e, KVImportEnded) and not e.problem for e in run.events),
    Sign.SHARES: lambda run, feature: (
        started(run).layout["groups"][0]["spec"]["num_kv_heads"] * feature.settings["tensor_parallel_size"]
        == NUM_KV_HEADS
    ),
}
"""All but OTHER_NUMBERS, for which it takes two runs."""
