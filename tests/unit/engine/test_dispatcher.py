"""The journal: what counts, what comes too late, and what a sequence costs that ends its workers."""

from __future__ import annotations

from dataclasses import replace

from twostroke.batch import NewRequest, TokenLogprobs
from twostroke.engine.dispatcher import MAX_ATTEMPTS, Dispatcher, LeastBusy, Member, Outcome, Place
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_port import LenderFacts
from twostroke.engine.messages import Add, DropKV, FetchKV, Finish
from twostroke.engine.output_processor import SequenceNews, TokenUpdate
from twostroke.kv_transfer.address import Address
from twostroke.pools.member import Role
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams


def member(name: str, role: Role) -> Member:
    lender = LenderFacts(Address(path=f"/{name}"), 1) if role is Role.PREFILL else None
    return Member(name, role, lender, 4, 8)


def request(name: str = "r", *, max_tokens: int = 8, **given: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **given)
    return GenerationRequest(NewRequest(name, tuple(range(10)), params, 0), 0.0, max_tokens)


def commands(outcome: Outcome) -> list[tuple[str, type]]:
    return [(order.worker_id, type(order.command)) for order in outcome.orders]


def made(name: str, start: int, *token_ids: int, reason: FinishReason | None = None, **news: object) -> TokenUpdate:
    said = SequenceNews(finish_reason=reason, **news) if reason is not None or news else None
    return TokenUpdate(name, 0.0, token_ids, start=start, news=said)


def two_pools() -> Dispatcher:
    dispatcher = Dispatcher(LeastBusy())
    for name in ("d1", "d2"):
        dispatcher.worker_ready(member(name, Role.DECODE))
    dispatcher.worker_ready(member("p", Role.PREFILL))
    return dispatcher


def test_a_prompt_goes_to_one_and_its_tokens_come_from_another() -> None:
    dispatcher = two_pools()
    assert commands(dispatcher.add(request())) == [("p", Add), ("d1", FetchKV)]
    outcome = dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    assert commands(outcome) == [("d1", Add)]
    (order,) = outcome.orders
    assert isinstance(order.command, Add)
    assert order.command.request.new_request.output_token_ids == (5,)
    assert [update.finish_reason for update in outcome.updates] == [None], "it is not over"
    outcome = dispatcher.take_in("d1", [made("r", 1, 6, 7, reason=FinishReason.STOP)])
    assert [update.token_ids for update in outcome.updates] == [(6, 7)]
    assert dispatcher.num_live == 0


def test_a_sequence_that_ends_with_its_first_token_has_nothing_fetched() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    outcome = dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.STOP)])
    assert commands(outcome) == [("d1", DropKV)]
    assert dispatcher.num_live == 0
    outcome = dispatcher.add(request("one", max_tokens=1))
    assert commands(outcome) == [("p", Add)], "nobody else is needed"
    assert outcome.placed == [("one", Place("p", None, "p computes the prompt, and its first token is its last"))]


def test_a_stale_frame_is_dropped_at_the_fence() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.take_in("d1", [made("r", 1, 6)])
    outcome = dispatcher.worker_gone("d1", "it froze")
    assert ("p", Add) in commands(outcome), "another attempt, from what was delivered"
    stale = [
        dispatcher.take_in("d1", [made("r", 2, 99)]),  # the worker that was given up goes on talking
        dispatcher.take_in("d1", [made("r@1", 2, 99)]),  # it does not run this attempt
        dispatcher.take_in("p", [made("r", 2, 99)]),  # another attempt
        dispatcher.take_in("p", [made("r@1", 1, 99)]),  # a place that is delivered already
        dispatcher.take_in("p", [made("r@1", 3, 99)]),  # one that leaves a gap
    ]
    assert not any(outcome.updates or outcome.orders for outcome in stale)
    assert dispatcher.num_fenced == len(stale)
    outcome = dispatcher.take_in("p", [made("r@1", 2, 7, reason=FinishReason.LENGTH)])
    assert [(update.request_id, update.token_ids) for update in outcome.updates] == [("r", (7,))]


def test_a_sequence_that_ends_every_worker_is_given_up() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("d0", Role.DECODE))
    dispatcher.add(request())
    for i in range(MAX_ATTEMPTS):
        outcome = dispatcher.worker_gone(f"d{i}", "it died")
        dispatcher.worker_ready(member(f"d{i + 1}", Role.DECODE))
    assert [name for name, _ in outcome.lost] == ["r"]
    assert "4 times" in outcome.lost[0][1]
    assert dispatcher.num_live == 0


def test_one_that_makes_progress_is_never_given_up() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("d0", Role.DECODE))
    dispatcher.add(request(max_tokens=100))
    for i in range(20):
        name = f"r@{i}" if i else "r"
        dispatcher.take_in(f"d{i}", [made(name, i, 1)])
        assert not dispatcher.worker_gone(f"d{i}", "it died").lost
        dispatcher.worker_ready(member(f"d{i + 1}", Role.DECODE))
    assert dispatcher.num_resumed == 20


def test_a_cancel_reaches_everybody_who_has_heard_of_it() -> None:
    dispatcher = two_pools()
    dispatcher.add(request("a"))
    assert commands(dispatcher.finish("a", FinishReason.ABORT)) == [("p", Finish), ("d1", DropKV)]
    dispatcher.add(request("b"))
    dispatcher.take_in("p", [made("b", 0, 5, reason=FinishReason.LENGTH)])
    assert commands(dispatcher.finish("b", FinishReason.ABORT)) == [("d1", Finish)]
    assert not dispatcher.finish("b", FinishReason.ABORT).orders


def test_scores_of_a_prompt_are_told_once_whoever_computes_it() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("d0", Role.DECODE))
    dispatcher.worker_ready(member("p", Role.PREFILL))
    assert commands(dispatcher.add(request(prompt_logprobs=1))) == [("d0", Add)], "scores do not travel"
    scores = tuple(TokenLogprobs((i,), (0.0,), 1) for i in range(1, 10))
    first = dispatcher.take_in("d0", [made("r", 0, prompt_logprobs=scores[:4])])
    dispatcher.worker_gone("d0", "it died")
    dispatcher.worker_ready(member("d1", Role.DECODE))
    second = dispatcher.take_in("d1", [made("r@1", 0, 5, prompt_logprobs=scores)])
    told = [update.news for outcome in (first, second) for update in outcome.updates]
    assert [(news.prompt_logprobs_start, len(news.prompt_logprobs)) for news in told if news] == [(1, 4), (5, 5)]


def test_a_worker_that_is_not_needed_any_more_gets_nothing_new_and_ends_what_it_has() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.retire("d1")
    assert commands(dispatcher.add(request("next"))) == [("p", Add), ("d2", FetchKV)]
    assert dispatcher.live_on("d1") == 1
    dispatcher.take_in("d1", [made("r", 1, 6, reason=FinishReason.STOP)])
    assert dispatcher.live_on("d1") == 0, "now it may go"


def test_what_a_worker_that_leaves_has_not_ended_in_time_goes_on_elsewhere() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.take_in("d1", [made("r", 1, 6)])
    dispatcher.retire("d1")
    outcome = dispatcher.migrate("d1")
    assert commands(outcome) == [("d1", Finish), ("p", Add), ("d2", FetchKV)]
    assert dispatcher.take_in("d1", [made("r", 2, 7)]).updates == [], "it was told, and may not have heard yet"
    assert dispatcher.take_in("p", [made("r@1", 2, 7, reason=FinishReason.LENGTH)]).updates[0].token_ids == (7,)


def test_a_prefill_worker_is_needed_until_its_kv_has_been_used() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.retire("p")
    dispatcher.take_in("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    assert dispatcher.live_on("p") == 1, "its blocks are on loan"
    assert commands(dispatcher.migrate("p")) == [], "who decodes computes what does not come"
    dispatcher.take_in("d1", [made("r", 1, 6)])
    assert dispatcher.live_on("p") == 0


def test_who_goes_on_by_other_numerics_is_named() -> None:
    dispatcher = Dispatcher(LeastBusy())
    for name, kernels in (("d1", "amx"), ("d2", "avx2")):
        dispatcher.worker_ready(replace(member(name, Role.DECODE), numerics={"kernels": kernels}))
    assert dispatcher.add(request()).drifted == []
    dispatcher.take_in("d1", [made("r", 0, 5)])
    assert dispatcher.worker_gone("d1", "it died").drifted == [("r", "kernels is amx here and avx2 there")]


def test_a_hand_over_by_other_numerics_is_named() -> None:
    dispatcher = two_pools()
    dispatcher.worker_ready(replace(member("p", Role.PREFILL), numerics={"kernels": "amx"}))
    assert [name for name, _ in dispatcher.add(request()).drifted] == ["r"]
