"""Every moment of every request has one label, and the label is right where the cause is known."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import pytest

from explain_loads import random_load, times_of
from factories import make_layout
from fakes import FakeEngine
from twostroke.batch import Commit, DraftDecision, DraftReason, ScheduledBatch, Stroke
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter
from twostroke.events import (
    Event,
    EventRing,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.explain.merging import StepDrafts, drafts_in_words
from twostroke.explain.segments import Label, Lane, Segment
from twostroke.explain.timeline import timeline_of
from twostroke.request import FinishReason


def make_engine(
    num_blocks: int = 64, *, max_model_len: int = 64, caching: bool = True, **settings: object
) -> FakeEngine:
    """Return an engine with blocks of four tokens, whose steps take a second."""
    return FakeEngine(
        make_layout(block_size=4),
        num_blocks,
        max_model_len=max_model_len,
        scheduler_config=SchedulerConfig(**settings),
        cache_config=CacheConfig(block_size=4, enable_prefix_caching=caching),
        log=EventRing(100_000),
    )


def checking_engine(corruption_chance: float) -> FakeEngine:
    """Return the same engine with a check of every prefix cache hit, which takes half a second."""
    return FakeEngine(
        make_layout(block_size=4),
        64,
        max_model_len=64,
        cache_config=CacheConfig(block_size=4, kv_check_rate=1.0),
        corruption_chance=corruption_chance,
        check_time_s=0.5,
        log=EventRing(100_000),
    )


def events_of(engine: FakeEngine) -> list[Event]:
    assert isinstance(engine.log, EventRing)
    return list(engine.log)


def explained(engine: FakeEngine, request_id: str) -> Lane:
    (lane,) = timeline_of(events_of(engine), request_id).lanes
    return lane


def labels(lane: Lane) -> list[Label]:
    return [segment.label for segment in lane.segments]


def the(lane: Lane, label: Label) -> Segment:
    (segment,) = [segment for segment in lane.segments if segment.label is label]
    return segment


def names(segment: Segment) -> list[str]:
    return [culprit.request_id for culprit in segment.because_of]


# ---------------------------------------------------------------------- nothing is left out


@pytest.mark.parametrize("seed", range(60))
def test_segments_cover_every_request_of_a_random_load_exactly(seed: int) -> None:
    events = random_load(seed)
    times = times_of(events)
    assert len(times) == 25
    for sequence_id, mine in times.items():
        (lane,) = timeline_of(events, sequence_id).lanes
        assert lane.is_complete
        assert lane.segments[0].start_s == lane.begin_s == mine.arrival_s
        end_s = mine.token_times_s[-1] if mine.finish_s is None else mine.finish_s
        assert lane.segments[-1].end_s == lane.end_s == end_s
        for before, after in itertools.pairwise(lane.segments):
            assert before.end_s == after.start_s, f"a gap behind {before}"
        total = sum(Fraction(s.end_s) - Fraction(s.start_s) for s in lane.segments)
        assert total == Fraction(lane.end_s) - Fraction(lane.begin_s)
        assert all(s.duration_s >= 0 and s.reason for s in lane.segments)
        assert lane.num_output_tokens == len(mine.token_times_s)
        assert lane.num_preemptions == mine.num_preemptions
        assert lane.num_preemptions >= labels(lane).count(Label.PREEMPTED)
        if mine.token_times_s:
            assert lane.ttft_s == mine.ttft_s
        generated = [s for s in lane.segments if s.label in (Label.DECODE, Label.STALLED)]
        assert sum(s.num_tokens for s in generated) <= lane.num_output_tokens


def test_random_loads_are_not_too_easy() -> None:
    seen: set[Label] = set()
    for seed in range(60):
        events = random_load(seed)
        for sequence_id in times_of(events):
            (lane,) = timeline_of(events, sequence_id).lanes
            seen |= set(labels(lane))
    assert seen >= set(Label) - {Label.END, Label.TRANSFER, Label.RESUME}, f"never seen: {set(Label) - seen}"


# ---------------------------------------------------------------------- constructed cases


def test_a_prompt_behind_a_long_one_waits_for_tokens_and_says_whose() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.submit("long", list(range(24)), 2)
    engine.submit("short", [90], 2)
    engine.run()
    wait = the(explained(engine, "short"), Label.WAIT_TOKENS)
    assert (wait.start_s, wait.end_s, wait.num_steps) == (0.0, 3.0, 3)
    assert wait.reason == "the budget of 8 is used up"
    assert [(c.request_id, c.num_tokens) for c in wait.because_of] == [("long", 24)]


def test_a_decode_beside_a_long_prompt_is_stalled_by_it() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.submit("talker", [1, 2], 20)
    engine.step()
    engine.step()
    engine.submit("long", list(range(100, 121)), 1)
    engine.run()
    lane = explained(engine, "talker")
    assert labels(lane) == [Label.PREFILL, Label.DECODE, Label.STALLED, Label.DECODE]
    stall = the(lane, Label.STALLED)
    assert (stall.start_s, stall.end_s, stall.num_steps, stall.num_tokens) == (2.0, 5.0, 3, 3)
    assert stall.reason == "by the prefill of long with 21 tokens; 3 steps, 3 tokens"


def test_a_check_of_a_cached_block_delays_whoever_runs_and_says_for_whom() -> None:
    engine = checking_engine(corruption_chance=0.0)
    engine.submit("talker", list(range(10)), 8)
    engine.step()
    engine.submit("hit", list(range(10)), 2)
    engine.run()
    assert labels(explained(engine, "talker")) == [Label.PREFILL, Label.KV_CHECK, Label.STALLED, Label.DECODE]
    assert labels(explained(engine, "hit")) == [Label.KV_CHECK, Label.PREFILL, Label.DECODE]
    for name in ("talker", "hit"):
        lane = explained(engine, name)
        check = the(lane, Label.KV_CHECK)
        assert (check.start_s, check.end_s, names(check)) == (1.0, 1.5, ["hit"])
        assert check.reason == "block 1 of the cached prefix of hit was computed again; as stored"
        assert lane.duration_s == {"talker": 8.5, "hit": 2.5}[name]


def test_several_checks_of_a_step_are_one_segment() -> None:
    engine = checking_engine(corruption_chance=0.0)
    engine.submit("first", list(range(10)), 1)
    engine.run()
    for name in ("a", "b", "c"):
        engine.submit(name, list(range(10)), 2)
    engine.run()
    for name in ("a", "b", "c"):
        check = the(explained(engine, name), Label.KV_CHECK)
        assert (check.duration_s, names(check)) == (1.5, ["a", "b", "c"])
        assert check.reason == "3 blocks of cached prefixes were computed again; as stored"


def test_a_block_that_had_gone_bad_ends_whoever_answered_from_it_and_starts_the_others_over() -> None:
    engine = checking_engine(corruption_chance=1.0)
    engine.submit("talker", list(range(10)), 8)
    engine.submit("bystander", [90], 8)
    engine.step()
    engine.submit("hit", list(range(10)), 2)
    engine.run()
    talker, bystander, hit = (explained(engine, name) for name in ("talker", "bystander", "hit"))
    assert (talker.finish_reason, talker.end_s, labels(talker)[-1]) == (FinishReason.ERROR, 1.5, Label.KV_CHECK)
    assert bystander.finish_reason is FinishReason.LENGTH
    assert hit.finish_reason is FinishReason.LENGTH
    assert labels(hit) == [Label.KV_CHECK, Label.WAIT_STEP, Label.PREFILL, Label.DECODE]
    wait = the(hit, Label.WAIT_STEP)
    assert (wait.start_s, wait.end_s) == (1.5, 2.5)
    assert wait.reason == "starts over: block 1 of its cached prefix was corrupt"
    assert "corrupt, and out of use" in the(hit, Label.KV_CHECK).reason
    assert "found corrupt" in " ".join(hit.notes)
    assert not bystander.notes


def test_a_short_prompt_beside_many_decodes_stalls_nobody() -> None:
    engine = make_engine(max_num_batched_tokens=16)
    for number in range(6):
        engine.submit(f"talker {number}", [number], 10)
    engine.step()
    engine.submit("short", [90, 91], 2)
    engine.run()
    assert labels(explained(engine, "talker 0")) == [Label.PREFILL, Label.DECODE]


def test_prompts_that_go_first_stall_those_who_decode() -> None:
    engine = make_engine(max_num_batched_tokens=8, mixing="prefill_first")
    engine.submit("talker", [1, 2], 3)
    engine.step()
    engine.submit("long", list(range(100, 116)), 1)
    engine.run()
    stall = the(explained(engine, "talker"), Label.STALLED)
    assert (stall.duration_s, stall.num_tokens) == (2.0, 0)
    assert stall.reason == "by the prefill of long with 16 tokens; prompts went first"


def test_slots() -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.submit(name, [ord(name)], 4)
    engine.run()
    wait = the(explained(engine, "c"), Label.WAIT_SLOTS)
    assert (wait.start_s, wait.end_s, wait.reason) == (0.0, 4.0, "2 of 2 running")
    assert names(wait) == ["a", "b"]


def test_kv_memory_and_who_holds_it() -> None:
    engine = make_engine(8, max_model_len=32)
    engine.submit("holder", list(range(20)), 3)
    engine.submit("large", list(range(50, 66)), 1)
    engine.submit("small", [99], 1)
    engine.run()
    wait = the(explained(engine, "large"), Label.WAIT_KV)
    assert (wait.duration_s, wait.reason) == (3.0, "needs 4 blocks, 2 are free")
    assert [(c.request_id, c.num_tokens) for c in wait.because_of] == [("holder", 22)]
    behind = the(explained(engine, "small"), Label.WAIT_KV)
    assert behind.reason == "behind large in the queue: needs 4 blocks, 2 are free"


def test_priority_names_those_who_came_later_and_went_first() -> None:
    engine = make_engine(max_num_seqs=1, policy="priority", ageing_s=100.0)
    engine.submit("running", [1], 2, priority=1)
    engine.step()
    engine.submit("patient", [2], 1, priority=1)
    engine.now_s += 0.5
    engine.submit("urgent", [3], 3, priority=0)
    engine.submit("equal", [4], 1, priority=1)
    engine.run()
    lane = explained(engine, "patient")
    assert labels(lane) == [Label.WAIT_STEP, Label.WAIT_PRIORITY, Label.PREFILL]
    wait = the(lane, Label.WAIT_PRIORITY)
    assert (wait.start_s, wait.end_s) == (1.5, 5.5)
    assert names(wait) == ["urgent"]
    assert labels(explained(engine, "equal"))[0] is Label.WAIT_SLOTS, "an earlier request has not overtaken"


def test_one_that_came_earlier_and_was_ready_later_has_not_been_overtaken_by_priority() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.now_s = 1.0
    engine.submit("quick", [1], 3, arrival_time_s=0.5)
    engine.step()
    engine.submit("slow to tokenize", [2], 1, arrival_time_s=0.25)
    engine.run()
    assert labels(explained(engine, "slow to tokenize")) == [Label.PREPARE, Label.WAIT_SLOTS, Label.PREFILL]


def test_one_that_was_preempted_holds_no_memory() -> None:
    engine = make_engine(8, max_model_len=32, caching=False)
    engine.submit("first", list(range(14)), 18)
    engine.submit("second", list(range(50, 63)), 16)
    while not engine.batches or not engine.batches[-1].preemptions:
        engine.step()
    engine.submit("third", list(range(20, 36)), 1)
    engine.run()
    assert names(the(explained(engine, "third"), Label.WAIT_KV)) == ["first"]


def test_preemption_names_who_needed_the_blocks_and_what_is_computed_again() -> None:
    engine = make_engine(8, max_model_len=32, caching=False)
    engine.submit("first", list(range(14)), 18)
    engine.submit("second", list(range(50, 63)), 16)
    engine.run()
    lane = explained(engine, "second")
    assert labels(lane) == [Label.PREFILL, Label.DECODE, Label.PREEMPTED, Label.RECOMPUTE, Label.DECODE]
    gone = the(lane, Label.PREEMPTED)
    assert gone.reason == "first needed a block, and no request was less urgent"
    assert names(gone) == ["first"]
    assert gone.end_s == explained(engine, "first").end_s
    again = the(lane, Label.RECOMPUTE)
    assert again.reason == "chunk 1 of 1, 16 tokens; none cached: prefix caching is off"


def test_the_least_urgent_gives_way_to_nobody_but_itself() -> None:
    engine = make_engine(8, max_model_len=32, caching=False)
    engine.submit("first", list(range(12)), 20)
    engine.submit("second", list(range(50, 66)), 16)
    engine.run()
    gone = the(explained(engine, "second"), Label.PREEMPTED)
    assert gone.reason == "no block was left for its next token, and no request was less urgent"
    assert gone.because_of == ()


def test_chunks_are_numbered_and_the_first_says_what_was_cached() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.submit("before", list(range(8)), 1)
    engine.run()
    engine.submit("a", [*range(8), *range(50, 62)], 2)
    engine.run()
    reasons = [segment.reason for segment in explained(engine, "a").segments]
    assert (
        reasons
        == [
            "for the next step to be decided",
            "chunk 1 of 2, 8 tokens; 8 of 20 tokens cached; from token 8 on no recently computed prompt matches",
            "chunk 2 of 2, 4 tokens",
            "1 step, 1 token",
        ][1:]
    )


def test_what_the_engine_took_in_late_waited_for_the_step_that_was_running() -> None:
    engine = make_engine()
    engine.submit("long", list(range(30)), 1)
    engine.step()
    engine.submit("late", [99], 1, arrival_time_s=0.25)
    engine.now_s += 0.125
    engine.run()
    events = events_of(engine)
    (lane,) = timeline_of(events, "late").lanes
    assert [(s.label, s.duration_s) for s in lane.segments] == [
        (Label.PREPARE, 0.75),
        (Label.WAIT_STEP, 0.125),
        (Label.PREFILL, 1.0),
    ]

    handed_over = [
        replace(event, submitted_time_s=0.5) if isinstance(event, RequestArrived) else event for event in events
    ]
    (lane,) = timeline_of(handed_over, "late").lanes
    assert labels(lane) == [Label.PREPARE, Label.WAIT_STEP, Label.PREFILL]
    wait = the(lane, Label.WAIT_STEP)
    assert (wait.start_s, wait.end_s) == (0.5, 1.125)
    assert wait.reason == "a step was running that computed 30 prompt tokens of other requests"
    assert [(c.request_id, c.num_tokens) for c in wait.because_of] == [("long", 30)]


# ---------------------------------------------------------------------- drafts


@pytest.mark.parametrize("seed", range(60))
def test_drafts_of_every_request_of_a_random_load_are_counted(seed: int) -> None:
    events = random_load(seed)
    passes: dict[str, list[Commit]] = {}
    ended: set[str] = set()
    for event in events:
        if isinstance(event, StepCommitted):
            for commit in event.commits:
                if commit.request_id not in ended and commit.num_tokens:
                    passes.setdefault(commit.request_id, []).append(commit)
                if commit.finish_reason is not None:
                    ended.add(commit.request_id)
        elif isinstance(event, RequestFinishedByCaller):
            ended.add(event.request_id)
        elif isinstance(event, KVBlockChecked):
            ended.update(event.suspects.ended)
    for sequence_id in times_of(events):
        (lane,) = timeline_of(events, sequence_id).lanes
        mine = passes.get(sequence_id, [])
        verified = [commit for commit in mine if commit.num_draft_tokens]
        if not verified:
            assert lane.drafts is None
            continue
        assert lane.drafts is not None
        assert lane.drafts.num_passes == len(mine)
        assert lane.drafts.num_verifying_passes == len(verified)
        assert lane.drafts.num_draft_tokens == sum(commit.num_draft_tokens for commit in verified)
        assert lane.drafts.num_accepted_tokens == sum(commit.num_tokens - 1 for commit in verified)
        assert lane.drafts.num_tokens == lane.num_output_tokens == len(mine) + lane.drafts.num_accepted_tokens
        told = [re.search(r"; ([\d,]+) of ([\d,]+) drafts? accepted", segment.reason) for segment in lane.segments]
        assert sum(int(found[1]) for found in told if found) == lane.drafts.num_accepted_tokens
        assert sum(int(found[2]) for found in told if found) == lane.drafts.num_draft_tokens


def drafting_engine(step_time_s: Callable[[ScheduledBatch], float]) -> FakeEngine:
    """Return an engine whose gate decides by the times of the steps."""
    return FakeEngine(
        make_layout(block_size=4),
        64,
        max_model_len=64,
        max_drafts="auto",
        step_time_s=step_time_s,
        log=EventRing(100_000),
    )


@pytest.mark.parametrize(
    ("step_time_s", "told", "figures"),
    [
        (lambda batch: 1.0, "paid in", ""),
        (
            lambda batch: 1.0 + batch.num_tokens**2,
            "did not pay in",
            r" \(1\.\d\d tokens expected for 2\.50x the time\)",
        ),
    ],
    ids=["for nothing", "dear"],
)
def test_a_decode_says_what_the_gate_decided(
    step_time_s: Callable[[ScheduledBatch], float], told: str, figures: str
) -> None:
    engine = drafting_engine(step_time_s)
    engine.submit("a", [7], 50)
    engine.run()
    lane = explained(engine, "a")
    reasons = [batch.drafts.reason for batch in engine.batches if batch.drafts is not None]
    assert lane.draft_decisions == Counter(reasons)
    assert set(reasons) > {DraftReason.UNKNOWN}
    found = re.search(rf"drafting .*{told} (\d+) steps?{figures}", the(lane, Label.DECODE).reason)
    assert found, the(lane, Label.DECODE).reason
    meant = DraftReason.PAYS if told == "paid in" else DraftReason.DOES_NOT_PAY
    assert int(found[1]) == reasons.count(meant) > 3
    assert "waited for 3 steps to be timed without it" in the(lane, Label.DECODE).reason


@pytest.mark.parametrize("seed", range(60))
def test_every_decision_of_a_random_load_is_in_the_lanes_of_its_requests(seed: int) -> None:
    """A step belongs to those who decode in it and have not ended before its result."""
    events = random_load(seed)
    expected: dict[str, Counter[DraftReason]] = {}
    ended: set[str] = set()
    batches = {event.batch.step: event.batch for event in events if isinstance(event, StepScheduled)}
    for event in events:
        if isinstance(event, StepCommitted):
            batch = batches[event.step]
            decoding = {share.request_id for share in batch.requests if share.stroke is Stroke.DECODE}
            for commit in event.commits:
                if commit.request_id in decoding - ended and batch.drafts is not None:
                    expected.setdefault(commit.request_id, Counter())[batch.drafts.reason] += 1
            ended |= {commit.request_id for commit in event.commits if commit.finish_reason is not None}
    for sequence_id in times_of(events):
        (lane,) = timeline_of(events, sequence_id).lanes
        if lane.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert lane.draft_decisions == expected.get(sequence_id, {})


DID_NOT_PAY = "did not pay in 1 step (1.20 tokens expected for 1.35x the time)"


def decision(reason: DraftReason, tokens: float = 1.2, seconds: float = 1.35) -> DraftDecision:
    return DraftDecision(reason, 0, tokens, seconds, 1.0)


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], ""),
        ([StepDrafts()], ""),
        ([StepDrafts(3, 1, 4), StepDrafts(1, 0, 4)], "; 1 of 4 drafts accepted"),
        (
            [StepDrafts(4, 4, 4, decision(DraftReason.PAYS), 2), StepDrafts(0, 0, 0, decision(DraftReason.PAYS), 2)],
            "; 4 of 4 drafts accepted; drafting paid in 2 steps (1 with none of its own)",
        ),
        (
            [StepDrafts(1, 0, 1, decision(DraftReason.PROBE), 1), StepDrafts(0, 0, 0, decision(DraftReason.PROBE), 1)],
            f"; 0 of 1 draft accepted; drafting {DID_NOT_PAY}, was tried in 1 step",
        ),
        (
            [StepDrafts(0, 0, 0, decision(DraftReason.DOES_NOT_PAY, 2.4), 2)],
            f"; drafting {DID_NOT_PAY}",
        ),
        (
            [StepDrafts(0, 0, 0, decision(DraftReason.DOES_NOT_PAY, 1.0, 1.0), 1)],
            "; drafting did not pay in 1 step (none was expected to be accepted)",
        ),
        ([StepDrafts(0, 0, 0, decision(DraftReason.DOES_NOT_PAY))], "; drafting did not pay in 1 step"),
        (
            [StepDrafts(0, 0, 0, decision(DraftReason.UNKNOWN), 1)],
            "; drafting waited for 1 step to be timed without it",
        ),
        (
            [StepDrafts(0, 0, 0, decision(DraftReason.OWES), 1)] * 2,
            "; drafting was off in 2 steps to make up for time that it had cost",
        ),
    ],
)
def test_drafts_in_words(steps: list[StepDrafts], words: str) -> None:
    assert drafts_in_words(steps) == words


# ---------------------------------------------------------------------- ends


def test_an_abort_in_the_queue_ends_in_the_wait() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.submit("a", [1], 9)
    engine.submit("b", [2], 9)
    engine.step()
    engine.now_s += 0.5
    engine.abort("b")
    lane = explained(engine, "b")
    assert lane.finish_reason is FinishReason.ABORT
    assert [(s.label, s.duration_s) for s in lane.segments] == [(Label.WAIT_SLOTS, 1.5)]
    assert lane.ttft_s is None


def test_tokens_behind_a_stop_string_are_cut_off() -> None:
    engine = make_engine()
    engine.submit("a", [1], 9)
    for _ in range(4):
        engine.step()
    # the text of the second token had the stop string, which was noticed after the fourth
    events = [*events_of(engine), RequestFinishedByCaller(4.5, "fake", "a", FinishReason.STOP, 2)]
    (lane,) = timeline_of(events, "a").lanes
    assert (lane.end_s, lane.num_output_tokens, lane.finish_reason) == (2.0, 2, FinishReason.STOP)
    assert [(s.label, s.num_tokens) for s in lane.segments] == [(Label.PREFILL, 1), (Label.DECODE, 1)]
    assert lane.notes == ("2 tokens after the stop string not counted",)


def test_a_request_that_lives_is_explained_up_to_now() -> None:
    engine = make_engine()
    engine.submit("a", [1], 9)
    for _ in range(3):
        engine.step()
    lane = explained(engine, "a")
    assert not lane.is_complete
    assert (lane.finish_reason, lane.end_s, lane.num_output_tokens) == (None, 3.0, 3)


def test_an_engine_that_starts_again_ends_what_ran() -> None:
    engine = make_engine()
    engine.submit("a", [1], 9)
    engine.step()
    events = events_of(engine)
    (lane,) = timeline_of([*events, events[0]], "a").lanes
    assert lane.finish_reason is FinishReason.ERROR


# ---------------------------------------------------------------------- names


def test_names_numbers_and_lanes() -> None:
    engine = make_engine()
    for sequence_id in ("mine#0.0", "mine#0.1", "mine#1.0", "other#2.0"):
        engine.now_s += 0.25 * (sequence_id == "mine#1.0")
        engine.submit(sequence_id, [1], 2)
    engine.run()
    events = events_of(engine)

    def lanes(name: str) -> list[str]:
        return [lane.sequence_id for lane in timeline_of(events, name).lanes]

    assert lanes("mine#0") == ["mine#0.0", "mine#0.1"]
    assert lanes("mine#0.1") == ["mine#0.1"]
    assert lanes("mine") == ["mine#1.0"], "of several requests of a name the last is meant"
    with pytest.raises(InvalidParameter, match="request_id='nobody': is in none of these events"):
        timeline_of(events, "nobody")
