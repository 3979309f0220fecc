"""The journal: what counts, what comes too late, and what a sequence costs that ends its workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from twostroke.batch import NewRequest, TokenLogprobs
from twostroke.cluster.dispatcher import MAX_ATTEMPTS, Dispatcher, DispatchResult
from twostroke.cluster.messages import Add, Finish
from twostroke.cluster.routed_placer import LeastBusy, Place, ReadyWorker
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import DropKV, FetchKV, LenderAddress
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.kv_transfer.address import Address
from twostroke.pools.member import Role
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams


def member(name: str, role: Role) -> ReadyWorker:
    lender = LenderAddress(Address(path=f"/{name}"), 1) if role is Role.PREFILL else None
    return ReadyWorker(name, role, lender, 4)


def request(name: str = "r", *, max_tokens: int = 8, **given: object) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, **given)
    return GenerationRequest(NewRequest(name, tuple(range(10)), params, 0), 0.0, max_tokens)


def commands(outcome: DispatchResult) -> list[tuple[str, type]]:
    return [(order.worker_id, type(order.command)) for order in outcome.commands]


def made(name: str, start: int, *token_ids: int, reason: FinishReason | None = None, **status: object) -> TokenUpdate:
    said = SequenceStatus(finish_reason=reason, **status) if reason is not None or status else None
    return TokenUpdate(name, 0.0, token_ids, start=start, status=said)


def two_pools() -> Dispatcher:
    dispatcher = Dispatcher(LeastBusy())
    for name in ("d1", "d2"):
        dispatcher.worker_ready(member(name, Role.DECODE))
    dispatcher.worker_ready(member("p", Role.PREFILL))
    return dispatcher


def drifting_pools(kernels: str = "amx") -> Dispatcher:
    dispatcher = Dispatcher(LeastBusy())
    for name, role in (("d1", Role.DECODE), ("d2", Role.DECODE), ("p", Role.PREFILL)):
        numerics = {"kernels": "avx2" if role is Role.DECODE else kernels}
        dispatcher.worker_ready(replace(member(name, role), numerics=numerics))
    return dispatcher


def test_a_prompt_goes_to_one_and_its_tokens_come_from_another() -> None:
    dispatcher = two_pools()
    assert commands(dispatcher.add(request())) == [("p", Add), ("d1", FetchKV)]
    outcome = dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    assert commands(outcome) == [("d1", Add)]
    (order,) = outcome.commands
    assert isinstance(order.command, Add)
    assert order.command.request.new_request.output_token_ids == (5,)
    assert [update.finish_reason for update in outcome.updates] == [None], "it is not over"
    outcome = dispatcher.process_updates("d1", [made("r", 1, 6, 7, reason=FinishReason.STOP)])
    assert [update.token_ids for update in outcome.updates] == [(6, 7)]
    assert dispatcher.num_live == 0


def test_a_sequence_that_ends_with_its_first_token_has_nothing_fetched() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    outcome = dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.STOP)])
    assert commands(outcome) == [("d1", DropKV)]
    assert dispatcher.num_live == 0
    outcome = dispatcher.add(request("one", max_tokens=1))
    assert commands(outcome) == [("p", Add)], "no other worker is needed"
    assert outcome.placed == [("one", Place("p", None, "p computes the prompt and the only token left"))]


def test_a_stale_frame_is_dropped_at_the_fence() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.process_updates("d1", [made("r", 1, 6)])
    outcome = dispatcher.worker_gone("d1", "it froze")
    assert ("p", Add) in commands(outcome), "another attempt, from what was delivered"
    stale = [
        dispatcher.process_updates("d1", [made("r", 2, 99)]),  # the worker that was given up still sends reports
        dispatcher.process_updates("d1", [made("r@1", 2, 99)]),  # it does not run this attempt
        dispatcher.process_updates("p", [made("r", 2, 99)]),  # another attempt
        dispatcher.process_updates("p", [made("r@1", 1, 99)]),  # a place that is delivered already
        dispatcher.process_updates("p", [made("r@1", 3, 99)]),  # one that leaves a gap
    ]
    assert not any(outcome.updates or outcome.commands for outcome in stale)
    assert dispatcher.num_late_updates == len(stale)
    outcome = dispatcher.process_updates("p", [made("r@1", 2, 7, reason=FinishReason.LENGTH)])
    assert [(update.request_id, update.token_ids) for update in outcome.updates] == [("r", (7,))]


def test_a_prefill_worker_decodes_until_a_decode_worker_is_back() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("p", Role.PREFILL))
    dispatcher.worker_ready(member("d0", Role.DECODE))
    dispatcher.add(request(max_tokens=20))
    dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.process_updates("d0", [made("r", 1, 6)])
    outcome = dispatcher.worker_gone("d0", "it died")
    assert commands(outcome) == [("p", Add)], "at once"
    (order,) = outcome.commands
    assert isinstance(order.command, Add)
    moved = order.command.request
    assert (moved.new_request.output_token_ids, moved.max_tokens, moved.lend_as) == ((5, 6), 20, None)
    assert [update.token_ids for update in dispatcher.process_updates("p", [made("r@1", 2, 7)]).updates] == [(7,)]
    assert commands(dispatcher.add(request("new"))) == [("p", Add)]
    outcome = dispatcher.worker_ready(member("d1", Role.DECODE))
    once = [("p", Finish), ("p", Add), ("d1", FetchKV)]
    assert commands(outcome) == [*once, *once], "both go on there, with the KV that the prefill worker has"
    assert not commands(dispatcher.worker_ready(member("d2", Role.DECODE))), "no request is moved twice"
    dispatcher.process_updates("p", [made("r@2", 3, 8, reason=FinishReason.LENGTH)])
    outcome = dispatcher.process_updates("d1", [made("r@2", 4, 9, reason=FinishReason.STOP)])
    assert [update.token_ids for update in outcome.updates] == [(9,)]


def test_a_request_of_one_token_stays_with_its_prefill_worker() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("p", Role.PREFILL))
    dispatcher.worker_ready(member("d0", Role.DECODE))
    assert commands(dispatcher.add(request(max_tokens=1))) == [("p", Add)]
    assert not commands(dispatcher.worker_ready(member("d1", Role.DECODE)))
    assert dispatcher.num_resumed == 0


class OnlyOnce:
    """Placer that finds room once; workers that join later are too small."""

    def __init__(self) -> None:
        self._num_placed = 0

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place | None:
        del request, token_ids, num_live
        self._num_placed += 1
        return Place(members[0].worker_id) if self._num_placed == 1 else None


def test_a_stand_in_keeps_what_fits_nowhere_else() -> None:
    dispatcher = Dispatcher(OnlyOnce())
    dispatcher.worker_ready(member("p", Role.PREFILL))
    assert commands(dispatcher.add(request(max_tokens=20))) == [("p", Add)]
    assert not commands(dispatcher.worker_ready(member("d", Role.DECODE)))
    assert [update.token_ids for update in dispatcher.process_updates("p", [made("r", 0, 5)]).updates] == [(5,)]


def test_who_waits_for_any_worker_takes_the_first_that_comes() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    for name in ("d1", "d2"):
        dispatcher.worker_gone(name, "it died")
    assert not dispatcher.worker_gone("p", "it died").commands
    assert commands(dispatcher.worker_ready(member("p2", Role.PREFILL))) == [("p2", Add)]


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
        dispatcher.process_updates(f"d{i}", [made(name, i, 1)])
        assert not dispatcher.worker_gone(f"d{i}", "it died").lost
        dispatcher.worker_ready(member(f"d{i + 1}", Role.DECODE))
    assert dispatcher.num_resumed == 20


def test_a_cancel_reaches_everybody_who_has_heard_of_it() -> None:
    dispatcher = two_pools()
    dispatcher.add(request("a"))
    assert commands(dispatcher.finish("a", FinishReason.ABORT)) == [("p", Finish), ("d1", DropKV)]
    dispatcher.add(request("b"))
    dispatcher.process_updates("p", [made("b", 0, 5, reason=FinishReason.LENGTH)])
    assert commands(dispatcher.finish("b", FinishReason.ABORT)) == [("d1", Finish)]
    assert not dispatcher.finish("b", FinishReason.ABORT).commands


def test_scores_of_a_prompt_are_told_once_whoever_computes_it() -> None:
    dispatcher = Dispatcher(LeastBusy())
    dispatcher.worker_ready(member("d0", Role.DECODE))
    dispatcher.worker_ready(member("p", Role.PREFILL))
    assert commands(dispatcher.add(request(prompt_logprobs=1))) == [("d0", Add)], "scores do not travel"
    scores = tuple(TokenLogprobs((i,), (0.0,), 1) for i in range(1, 10))
    first = dispatcher.process_updates("d0", [made("r", 0, prompt_logprobs=scores[:4])])
    dispatcher.worker_gone("d0", "it died")
    dispatcher.worker_ready(member("d1", Role.DECODE))
    second = dispatcher.process_updates(
        "d1", [made("r@2", 0, 5, prompt_logprobs=scores)]
    )  # meanwhile p had the sequence
    told = [update.status for outcome in (first, second) for update in outcome.updates]
    assert [(status.prompt_logprobs_start, len(status.prompt_logprobs)) for status in told if status] == [
        (1, 4),
        (5, 5),
    ]


def test_a_worker_that_is_not_needed_any_more_gets_nothing_new_and_ends_what_it_has() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.retire("d1")
    assert commands(dispatcher.add(request("next"))) == [("p", Add), ("d2", FetchKV)]
    assert dispatcher.live_on("d1") == 1
    dispatcher.process_updates("d1", [made("r", 1, 6, reason=FinishReason.STOP)])
    assert dispatcher.live_on("d1") == 0, "now it may go"


def test_what_a_worker_that_leaves_has_not_ended_in_time_goes_on_elsewhere() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    dispatcher.process_updates("d1", [made("r", 1, 6)])
    dispatcher.retire("d1")
    outcome = dispatcher.migrate("d1")
    assert commands(outcome) == [("d1", Finish), ("p", Add), ("d2", FetchKV)]
    assert dispatcher.process_updates("d1", [made("r", 2, 7)]).updates == [], "it was told, and may not have heard yet"
    assert dispatcher.process_updates("p", [made("r@1", 2, 7, reason=FinishReason.LENGTH)]).updates[0].token_ids == (7,)


def test_a_prefill_worker_is_needed_until_its_kv_has_been_used() -> None:
    dispatcher = two_pools()
    dispatcher.add(request())
    dispatcher.retire("p")
    dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)])
    assert dispatcher.live_on("p") == 1, "its blocks are on loan"
    assert commands(dispatcher.migrate("p")) == [], "who decodes computes what does not come"
    dispatcher.process_updates("d1", [made("r", 1, 6)])
    assert dispatcher.live_on("p") == 0


def test_who_goes_on_by_other_numerics_is_named() -> None:
    dispatcher = Dispatcher(LeastBusy())
    for name, kernels in (("d1", "amx"), ("d2", "avx2")):
        dispatcher.worker_ready(replace(member(name, Role.DECODE), numerics={"kernels": kernels}))
    assert dispatcher.add(request()).drifted == []
    dispatcher.process_updates("d1", [made("r", 0, 5)])
    assert dispatcher.worker_gone("d1", "it died").drifted == [("r", {"kernels": ["amx", "avx2"]})]


def test_a_hand_over_by_other_numerics_is_named() -> None:
    dispatcher = drifting_pools()
    outcome = dispatcher.add(request())
    assert outcome.drifted == [("r", {"kernels": ["amx", "avx2"]})]
    ((_, place),) = outcome.placed
    assert place.reason == "a prefill worker is ready; numerics differ: kernels amx and avx2"
    assert dispatcher.add(request("one", max_tokens=1)).drifted == [], "no worker has to decode"


def test_kv_of_other_numerics_has_names_of_its_own() -> None:
    """A request that runs where it decodes, or in pools of equal numerics, keeps its own salt."""

    def salts(dispatcher: Dispatcher) -> list[str | None]:
        orders = dispatcher.add(request()).commands
        orders += dispatcher.process_updates("p", [made("r", 0, 5, reason=FinishReason.LENGTH)]).commands
        found: list[str | None] = []
        for order in orders:
            match order.command:
                case Add(asked):
                    found.append(asked.cache_salt)
                case FetchKV():
                    found.append(order.command.cache_salt)
                case _:
                    raise AssertionError(order.command)
        return found

    assert salts(two_pools()) == [None, None, None]
    drifting = salts(drifting_pools())
    assert len(set(drifting)) == 1
    assert drifting[0] is not None
    others = drifting_pools("avx512")
    assert salts(others)[0] != drifting[0], "of other numerics, other names"
    others.worker_gone("p", "it died")
    (again,) = others.worker_gone("d1", "it died").commands
    assert isinstance(again.command, Add)
    assert (again.worker_id, again.command.request.cache_salt) == ("d2", None), "it computes all of it itself"
