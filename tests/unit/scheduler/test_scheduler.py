"""One behaviour each, with numbers small enough to follow by hand."""

from __future__ import annotations

import pytest

from factories import make_arrival, make_kv, make_scheduler, one_token_each, scheduled_tokens
from twostroke.batch import CacheEnd, Commit, Limit, Preemption, ScheduledBatch, Stroke
from twostroke.errors import DoesNotFit, InvalidParameter
from twostroke.kv_cache.prefix_cache import hash_blocks
from twostroke.request import FinishReason, Request, RequestStatus
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.step_plan import AdmissionRefusal, TokenBudget


def step(scheduler: Scheduler, finish: tuple[str, ...] = ()) -> ScheduledBatch:
    """Decide a step, and commit a token to every request that samples."""
    batch = scheduler.schedule(0.0)
    if not batch.is_empty:
        scheduler.update(batch.step, one_token_each(batch, finish=finish))
    scheduler.check_invariants()
    return batch


def live(scheduler: Scheduler, request_id: str) -> Request:
    """Return a request that must be live."""
    request = scheduler.get(request_id)
    assert request is not None
    return request


# ---------------------------------------------------------------------- strokes and chunks


def test_a_request_is_a_prefill_and_then_decodes() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a", 5, 3))
    [first] = step(scheduler).requests
    assert (first.stroke, first.num_computed_tokens, first.num_scheduled_tokens) == (Stroke.PREFILL, 0, 5)
    assert first.samples_token
    [second] = step(scheduler).requests
    assert (second.stroke, second.num_computed_tokens, second.num_scheduled_tokens) == (Stroke.DECODE, 5, 1)
    assert second.samples_token
    batch = step(scheduler, finish=("a",))
    assert [r.num_computed_tokens for r in batch.requests] == [6]
    assert not scheduler.has_work
    assert scheduler.schedule(0.0).is_empty


def test_a_prompt_of_one_token_is_a_prefill() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a", 1, 3))
    assert step(scheduler).requests[0].stroke is Stroke.PREFILL
    assert step(scheduler).requests[0].stroke is Stroke.DECODE


@pytest.mark.parametrize(("num_decodes", "num_chunks"), [(0, 8), (32, 9)])
def test_chunks_of_a_long_prompt_when_decodes_share_the_budget(num_decodes: int, num_chunks: int) -> None:
    kv = make_kv(1024, block_size=16, max_model_len=8300)
    scheduler = make_scheduler(kv=kv, max_model_len=8300, max_num_batched_tokens=1024)
    for i in range(num_decodes):
        scheduler.add_request(make_arrival(f"d{i}", 1, 100))
    step(scheduler)
    scheduler.add_request(make_arrival("long", 8192, 2))
    chunks: list[int] = []
    while not chunks or live(scheduler, "long").num_output_tokens == 0:
        batch = step(scheduler)
        assert batch.num_tokens <= 1024
        assert batch.num_decode_tokens == num_decodes, "no decode is delayed"
        chunks.append(scheduled_tokens(batch)["long"])
    assert len(chunks) == num_chunks
    assert sum(chunks) == 8192


def test_only_the_last_chunk_samples() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_arrival("a", 10, 2))
    assert [step(scheduler).requests[0].samples_token for _ in range(3)] == [False, False, True]


def test_both_strokes_share_a_pass() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a"))
    step(scheduler)
    scheduler.add_request(make_arrival("b"))
    batch = step(scheduler)
    assert [(r.request_id, r.stroke) for r in batch.requests] == [("a", Stroke.DECODE), ("b", Stroke.PREFILL)]


def test_a_budget_of_one_token_still_serves_everybody() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=1)
    scheduler.add_request(make_arrival("a", 3, 2))
    scheduler.add_request(make_arrival("b", 1, 1))
    batches = [step(scheduler) for _ in range(3)]
    assert all(scheduled_tokens(b) == {"a": 1} for b in batches)
    assert scheduler.num_running == 1, "no more run than the budget has tokens"
    step(scheduler, finish=("a",))
    assert scheduled_tokens(step(scheduler, finish=("b",))) == {"b": 1}


# ---------------------------------------------------------------------- slots, limits, reasons


def test_a_slot_is_given_on_in_the_very_next_step() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add_request(make_arrival(name))
    first = step(scheduler, finish=("a",))
    assert set(scheduled_tokens(first)) == {"a", "b"}
    assert (first.limited_by, first.wait_reason) == (Limit.SEQS, "seqs: 2 of 2 running")
    second = step(scheduler)
    assert set(scheduled_tokens(second)) == {"b", "c"}
    assert second.finished_request_ids == ("a",)
    assert (second.limited_by, second.num_waiting, second.wait_reason) == (Limit.NONE, 0, "")


def test_the_budget_as_limit() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_arrival("a", 4))
    scheduler.add_request(make_arrival("b", 4))
    batch = step(scheduler)
    assert (batch.limited_by, batch.wait_reason) == (Limit.TOKENS, "tokens: the budget of 4 is used up")
    assert batch.num_waiting == 1


def test_a_prefill_cut_short_is_limited_by_tokens_though_nobody_waits() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add_request(make_arrival("a", 6))
    batch = step(scheduler)
    assert (batch.limited_by, batch.num_waiting, batch.wait_reason) == (Limit.TOKENS, 0, "")


def test_blocks_as_limit_and_nobody_slips_past_the_head() -> None:
    scheduler = make_scheduler(8)
    scheduler.add_request(make_arrival("a", 20, 8))
    scheduler.add_request(make_arrival("large", 16, 4))
    scheduler.add_request(make_arrival("small", 1, 1))
    batch = step(scheduler)
    assert set(scheduled_tokens(batch)) == {"a"}
    assert (batch.limited_by, batch.wait_reason) == (Limit.KV, "kv: needs 4 blocks, 3 are free")
    assert (batch.num_waiting, batch.head_request_id) == (2, "large")
    assert (batch.num_running, batch.num_free_blocks) == (1, 3)


def test_a_batch_says_why_no_more_was_cached() -> None:
    tokens = list(range(24))
    kv = make_kv(6, max_model_len=24)
    scheduler = make_scheduler(kv=kv, max_model_len=24)

    def cached(name: str, num_tokens: int, hashes: tuple[bytes, ...], **given: object) -> tuple[int, CacheEnd]:
        scheduler.add_request(make_arrival(name, num_tokens, 1, block_hashes=hashes, **given))
        batch = step(scheduler, finish=(name,))
        (admitted,) = batch.admitted
        assert (admitted.request_id, admitted.num_tokens) == (name, num_tokens)
        return admitted.num_cached_tokens, admitted.cache_end

    assert cached("first", 16, hash_blocks(tokens[:16], 4)) == (0, CacheEnd.UNKNOWN)
    assert cached("again", 16, hash_blocks(tokens[:16], 4)) == (12, CacheEnd.COMPLETE), "the last block is computed"
    assert cached("longer", 18, hash_blocks(tokens[:18], 4)) == (16, CacheEnd.COMPLETE)
    diverging = hash_blocks([*tokens[:8], *([99] * 8)], 4)
    assert cached("other end", 16, diverging) == (8, CacheEnd.UNKNOWN)
    assert cached("unread", 16, hash_blocks(tokens[:16], 4), reads_prefix_cache=False) == (0, CacheEnd.NOT_READ)
    cached("large", 23, hash_blocks([7] * 23, 4))
    assert cached("first, later", 16, hash_blocks(tokens[:16], 4)) == (0, CacheEnd.EVICTED)

    scheduler = make_scheduler(kv=make_kv(8, enable_prefix_caching=False))
    assert cached("no cache", 16, hash_blocks(tokens[:16], 4)) == (0, CacheEnd.DISABLED)


def test_blocks_promised_to_a_running_prefill_are_not_promised_again() -> None:
    scheduler = make_scheduler(10, max_num_batched_tokens=4)
    scheduler.add_request(make_arrival("a", 26, 4))
    assert scheduled_tokens(step(scheduler)) == {"a": 4}
    for _ in range(5):
        assert scheduled_tokens(step(scheduler)) == {"a": 4}
    scheduler.add_request(make_arrival("b", 16, 3))
    batch = step(scheduler)
    assert scheduled_tokens(batch) == {"a": 2}, "two tokens of the budget are left, three blocks are free"
    assert batch.wait_reason == "kv: needs 4 blocks, 3 are free"

    scheduler = make_scheduler(10, max_num_batched_tokens=8)
    scheduler.add_request(make_arrival("a", 1, 30))
    scheduler.add_request(make_arrival("b", 24, 4))
    assert scheduled_tokens(step(scheduler)) == {"a": 1, "b": 7}
    scheduler.add_request(make_arrival("c", 16, 4))
    scheduler.add_request(make_arrival("d", 1, 4))
    for num_tokens in (7, 7):
        assert scheduled_tokens(step(scheduler)) == {"a": 1, "b": num_tokens}
    batch = step(scheduler)
    # b takes its last three tokens; of ten blocks a holds one and b six
    assert scheduled_tokens(batch) == {"a": 1, "b": 3}
    assert batch.wait_reason == "kv: needs 4 blocks, 3 are free"


def test_a_promise_counts_before_it_is_taken() -> None:
    scheduler = make_scheduler(10, max_num_batched_tokens=8, policy="priority")
    scheduler.add_request(make_arrival("a", 28, 4))
    scheduler.add_request(make_arrival("b", 13, 4))
    scheduler.schedule(0.0)
    prefills = [live(scheduler, "a")]
    budget = TokenBudget(8)
    verdict = scheduler._admission.consider(live(scheduler, "b"), budget, 1, prefills)
    # a holds two blocks and was promised seven: 10 - 2 - 5 = 3
    assert verdict == AdmissionRefusal(Limit.KV, "kv: needs 4 blocks, 3 are free")


# ---------------------------------------------------------------------- order


def test_priority_goes_first_but_not_for_ever() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority", ageing_s=10.0)
    scheduler.add_request(make_arrival("low", priority=1, arrival_time_s=0.0))
    scheduler.add_request(make_arrival("soon", priority=0, arrival_time_s=9.0))
    scheduler.add_request(make_arrival("late", priority=0, arrival_time_s=11.0))
    served = [next(iter(scheduled_tokens(step(scheduler, finish=("low", "soon", "late"))))) for _ in range(3)]
    assert served == ["soon", "low", "late"]


def test_blocks_are_taken_from_the_least_urgent_who_goes_on_where_he_was() -> None:
    scheduler = make_scheduler(8, max_model_len=32)
    scheduler.add_request(make_arrival("a", 12, 20))
    scheduler.add_request(make_arrival("b", 16, 16))
    step(scheduler)
    for _ in range(4):
        step(scheduler)
    # a: 12 + 4 tokens in 4 blocks; b: 16 + 4 tokens would need a fifth beside a's fifth, 8 are there
    assert live(scheduler, "b").num_preemptions == 1
    assert live(scheduler, "b").status is RequestStatus.PREEMPTED
    outputs = live(scheduler, "b").num_output_tokens
    assert live(scheduler, "b").num_computed_tokens == 0
    scheduler.finish("a", FinishReason.STOP)
    batch = step(scheduler)
    assert scheduled_tokens(batch) == {"b": 16 + outputs}
    assert batch.requests[0].stroke is Stroke.PREFILL, "its own output is known now"
    assert live(scheduler, "b").num_output_tokens == outputs + 1


def test_a_share_is_taken_back_when_its_request_gives_way_in_the_same_step() -> None:
    scheduler = make_scheduler(28, block_size=1, max_model_len=24, max_num_batched_tokens=4, policy="priority")
    for name in ("d1", "d2"):
        scheduler.add_request(make_arrival(name, 1, 20, priority=3))
    step(scheduler)
    scheduler.add_request(make_arrival("p", 20, 2))
    batch = step(scheduler)
    while not batch.preempted_request_ids:
        batch = step(scheduler)
    # d2 had its token already; p got the blocks, and the token of the budget stays unused
    assert batch.preemptions == (Preemption("d2", by_request_id="p"),)
    assert set(scheduled_tokens(batch)) == {"d1", "p"}
    assert (batch.limited_by, batch.wait_reason) == (Limit.KV, "kv: no block was left, preempted 1")
    assert live(scheduler, "d2").num_pending_tokens == 0


def test_a_preempted_request_finds_its_own_blocks_again() -> None:
    kv = make_kv(8)
    scheduler = make_scheduler(kv=kv)
    tokens = list(range(16))
    scheduler.add_request(make_arrival("a", 12, 20))
    scheduler.add_request(make_arrival("b", 16, 16, block_hashes=hash_blocks(tokens, 4)))
    while live(scheduler, "b").status is not RequestStatus.PREEMPTED:
        step(scheduler)
    scheduler.finish("a", FinishReason.ABORT)
    [scheduled] = step(scheduler).requests
    assert scheduled.num_computed_tokens >= 12
    assert live(scheduler, "b").num_cached_tokens == 0, "nothing was cached when it first came"


# ---------------------------------------------------------------------- ends


def test_an_abort_frees_blocks_within_the_step() -> None:
    scheduler = make_scheduler(8)
    scheduler.add_request(make_arrival("a", 20, 8))
    scheduler.add_request(make_arrival("b", 20, 8))
    in_flight = scheduler.schedule(0.0)
    assert set(scheduled_tokens(in_flight)) == {"a"}
    scheduler.finish("a", FinishReason.ABORT)
    scheduler.check_invariants()
    batch = scheduler.schedule(0.0)
    assert set(scheduled_tokens(batch)) == {"b"}
    assert batch.finished_request_ids == ("a",)
    scheduler.update(in_flight.step, one_token_each(in_flight))
    scheduler.update(batch.step, one_token_each(batch))
    assert scheduler.get("a") is None
    assert live(scheduler, "b").num_output_tokens == 1


def test_the_runner_hears_only_of_ends_it_can_know_and_never_in_an_empty_batch() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add_request(make_arrival("a"))
    scheduler.add_request(make_arrival("b"))
    step(scheduler, finish=("a",))
    scheduler.finish("b", FinishReason.ABORT)
    scheduler.finish("b", FinishReason.ABORT)
    scheduler.finish("nobody", FinishReason.ABORT)
    assert scheduler.schedule(0.0).finished_request_ids == ()
    scheduler.add_request(make_arrival("a"))
    batch = step(scheduler)
    assert (batch.finished_request_ids, set(scheduled_tokens(batch))) == (("a",), {"a"})


def test_what_a_failed_request_computed_is_not_found() -> None:
    kv = make_kv()
    scheduler = make_scheduler(kv=kv)
    hashes = hash_blocks(list(range(8)), 4)
    scheduler.add_request(make_arrival("a", 8, 8, block_hashes=hashes))
    batch = scheduler.schedule(0.0)
    scheduler.update(batch.step, [Commit("a", 0, finish_reason=FinishReason.ERROR)])
    assert not scheduler.has_work
    assert kv.find_cached(hashes, 9).num_tokens == 0
    assert kv.usage().num_free == kv.num_blocks


def test_the_second_request_computes_only_its_own_tail() -> None:
    scheduler = make_scheduler()
    hashes = hash_blocks(list(range(10)), 4)
    scheduler.add_request(make_arrival("a", 10, 4, block_hashes=hashes))
    step(scheduler)
    scheduler.add_request(make_arrival("b", 10, 4, block_hashes=hashes))
    scheduler.add_request(make_arrival("c", 10, 4, block_hashes=hashes, reads_prefix_cache=False))
    assert scheduled_tokens(step(scheduler)) == {"a": 1, "b": 2, "c": 10}
    assert live(scheduler, "b").num_cached_tokens == 8


# ---------------------------------------------------------------------- running ahead, drafts


def test_a_step_may_be_decided_before_the_last_one_is_known() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a", 4, 3))
    batches = [scheduler.schedule(0.0) for _ in range(4)]
    assert [[r.num_computed_tokens for r in b.requests] for b in batches] == [[0], [4], [5], []], (
        "three tokens, no more"
    )
    for batch in batches[:2]:
        scheduler.update(batch.step, one_token_each(batch))
    scheduler.update(batches[2].step, one_token_each(batches[2], finish=("a",)))
    assert not scheduler.has_work


def test_results_come_in_order_and_whole() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a"))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match=r"step 1; in flight: \[0, 1\]"):
        scheduler.update(second.step, one_token_each(second))
    with pytest.raises(AssertionError, match=r"no commit for \['a'\]"):
        scheduler.update(first.step, [])


def test_the_result_of_a_share_whose_blocks_are_gone_counts_tokens_and_nothing_else() -> None:
    kv = make_kv(8)
    scheduler = make_scheduler(kv=kv)
    hashes = hash_blocks(list(range(16)), 4)
    scheduler.add_request(make_arrival("a", 16, 16))
    scheduler.add_request(make_arrival("b", 16, 16, block_hashes=hashes))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert set(scheduled_tokens(first)) == {"a", "b"}
    assert second.preempted_request_ids == ("b",)
    scheduler.finish("a", FinishReason.ABORT)
    third = scheduler.schedule(0.0)
    assert scheduled_tokens(third) == {"b": 17}, "its sample is in flight, and the runner has it"
    scheduler.update(first.step, one_token_each(first))
    assert kv.find_cached(hashes, 17).num_tokens == 0, "b's new blocks are not computed yet"
    scheduler.update(second.step, one_token_each(second))
    scheduler.update(third.step, one_token_each(third))
    assert kv.find_cached(hashes, 17).num_tokens == 16
    assert live(scheduler, "b").num_output_tokens == 2
    scheduler.check_invariants()


def test_a_request_with_drafts_is_not_scheduled_ahead_of_its_results() -> None:
    scheduler = make_scheduler(num_drafts=2)
    scheduler.add_request(make_arrival("a", 4, 20))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert [r.num_draft_tokens for r in second.requests] == [2], "the runner knows the sample in flight"
    assert scheduler.schedule(0.0).is_empty, "nobody knows yet how many of them stand"
    scheduler.update(first.step, [Commit("a", 1)])
    assert scheduler.schedule(0.0).is_empty
    scheduler.update(second.step, [Commit("a", 3, num_draft_tokens=2)])
    assert [r.num_computed_tokens for r in scheduler.schedule(0.0).requests] == [7]


def test_drafts_are_verified_and_the_rejected_ones_rolled_back() -> None:
    kv = make_kv()
    scheduler = make_scheduler(kv=kv, num_drafts=3)
    scheduler.add_request(make_arrival("a", 6, 20))
    batch = scheduler.schedule(0.0)
    scheduler.update(batch.step, [Commit("a", 1)])
    batch = scheduler.schedule(0.0)
    [scheduled] = batch.requests
    assert (scheduled.num_scheduled_tokens, scheduled.num_draft_tokens) == (4, 3)
    assert kv.num_blocks_held("a") == 3
    scheduler.update(batch.step, [Commit("a", 2, num_draft_tokens=3)])
    assert live(scheduler, "a").num_computed_tokens == 8
    assert kv.num_blocks_held("a") == 2
    scheduler.check_invariants()
    [scheduled] = scheduler.schedule(0.0).requests
    assert (scheduled.num_computed_tokens, scheduled.num_draft_tokens) == (8, 3)


def test_places_of_drafts_that_nobody_guessed_are_given_back() -> None:
    kv = make_kv()
    scheduler = make_scheduler(kv=kv, num_drafts=9)
    scheduler.add_request(make_arrival("a", 6, 20))
    step(scheduler)
    batch = scheduler.schedule(0.0)
    assert kv.num_blocks_held("a") == 4
    scheduler.update(batch.step, [Commit("a", 1, num_draft_tokens=0)])
    assert kv.num_blocks_held("a") == 2
    assert live(scheduler, "a").num_computed_tokens == 7
    scheduler.check_invariants()


def test_drafts_never_reach_beyond_the_last_token() -> None:
    scheduler = make_scheduler(num_drafts=5)
    scheduler.add_request(make_arrival("a", 4, 3))
    step(scheduler)
    assert [r.num_draft_tokens for r in scheduler.schedule(0.0).requests] == [1], "two may come: one draft, one more"


def test_drafts_leave_a_token_for_everybody_else() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4, num_drafts=3)
    for name in "ab":
        scheduler.add_request(make_arrival(name, 1, 8))
    step(scheduler)
    assert scheduled_tokens(scheduler.schedule(0.0)) == {"a": 3, "b": 1}


def test_nobody_gives_way_for_drafts() -> None:
    scheduler = make_scheduler(8, max_model_len=32, num_drafts=3)
    for name in "ab":
        scheduler.add_request(make_arrival(name, 14, 16))
    step(scheduler)
    batch = scheduler.schedule(0.0)
    assert scheduled_tokens(batch) == {"a": 1, "b": 1}
    assert batch.preempted_request_ids == ()


# ---------------------------------------------------------------------- settings that cannot work


def test_a_pool_too_small_for_one_request_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFit, match=r"max_model_len=32 needs 8 KV blocks .* there are 7"):
        make_scheduler(7)
    make_scheduler(8)


def test_chunks_need_a_cache() -> None:
    kv = make_kv(enable_kv_cache=False, enable_prefix_caching=False)
    with pytest.raises(InvalidParameter, match="enable_chunked_prefill=true: needs the KV cache"):
        make_scheduler(kv=kv)
    make_scheduler(kv=kv, enable_chunked_prefill=False)


def test_mistakes_of_ours_are_caught() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_arrival("a"))
    with pytest.raises(AssertionError, match="a is not unique"):
        scheduler.add_request(make_arrival("a"))
    with pytest.raises(AssertionError, match="33 tokens, at most 32"):
        scheduler.add_request(make_arrival("b", 30, 3))
    batch = scheduler.schedule(0.0)
    with pytest.raises(AssertionError, match="a: 2 tokens of"):
        scheduler.update(batch.step, [Commit("a", 2)])
