"""From tokens of steps to what a caller sees."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import text_fakes
from tiers import examples
from twostroke.batch import TokenLogprobs
from twostroke.client.input_processor import InputProcessor
from twostroke.client.output_processor import (
    EndedSequence,
    OutputKind,
    OutputProcessor,
    decode_logprobs,
)
from twostroke.client.prompt_scores import PromptScores
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.outputs import RequestMetrics, RequestOutput, RequestTimes
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams

TOKENIZER = text_fakes.tokenizer("byte_level")
EOS = TOKENIZER.token_id("<|end|>")
assert EOS is not None


def update_of(request_id: str, time_s: float, *made: Any, **extra: Any) -> TokenUpdate:
    """Return an update as the engine sends it; a sequence with tokens was scheduled before."""
    return TokenUpdate(request_id, time_s, *made, status=SequenceStatus(scheduled_time_s=10.25, **extra))


def begin(kind: OutputKind = OutputKind.FINAL, **params: Any) -> tuple[OutputProcessor, tuple[str, ...]]:
    inputs = InputProcessor(TOKENIZER, max_model_len=64, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS])
    prompt = inputs.process("def f", SamplingParams(**{"max_tokens": None} | params))
    processor = OutputProcessor(TOKENIZER)
    ids = processor.add("r", prompt, seeds=range(100, 100 + prompt.params.n), arrival_time_s=10.0, kind=kind)
    return processor, ids


def run(processor: OutputProcessor, request_id: str, ids: list[int], **last: Any) -> list[RequestOutput]:
    """Run one token per step, one second apart."""
    outputs: list[RequestOutput] = []
    for step, token_id in enumerate(ids):
        extra = last if step == len(ids) - 1 else {}
        done = processor.process([update_of(request_id, 11.0 + step, (token_id,), **extra)])
        outputs += done.outputs
        if done.ended:
            break
    return outputs


def test_final_output() -> None:
    processor, (request_id,) = begin()
    ids = TOKENIZER.encode(" hello 日本 👍")
    (output,) = run(processor, request_id, ids, finish_reason=FinishReason.LENGTH, num_cached_tokens=2)
    assert output.finished
    assert (output.request_id, output.prompt, output.num_cached_tokens) == ("r", "def f", 2)
    assert output.prompt_token_ids == tuple(TOKENIZER.encode("def f"))
    (completion,) = output.outputs
    assert completion.text == " hello 日本 👍"
    assert completion.token_ids == tuple(ids)
    assert (completion.finish_reason, completion.stop_reason, completion.seed) == ("length", None, 100)
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None
    assert processor.num_requests == 0


def test_end_of_text_is_a_token_but_no_text() -> None:
    processor, (request_id,) = begin(skip_special_tokens=False)
    ids = [*TOKENIZER.encode("ab"), EOS]
    (output,) = run(processor, request_id, ids, finish_reason=FinishReason.STOP)
    assert output.outputs[0].text == "ab"
    assert output.outputs[0].token_ids == tuple(ids)
    assert output.outputs[0].stop_reason is None


def test_stop_token_is_a_token_but_no_text() -> None:
    ids = TOKENIZER.encode("ab import")
    processor, (request_id,) = begin(stop_token_ids=[ids[-1]])
    (output,) = run(processor, request_id, ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1])
    assert output.outputs[0].text == TOKENIZER.decode(ids[:-1])
    assert output.outputs[0].token_ids == tuple(ids)
    assert output.outputs[0].stop_reason == ids[-1]


def test_stop_string_within_a_step_of_many_tokens() -> None:
    """Drafts were accepted beyond the stop string: they are committed, and no part of the output."""
    ids = TOKENIZER.encode("one two three")
    processor, (request_id,) = begin(stop="two", logprobs=0)
    logprobs = tuple(TokenLogprobs((i,), (-1.0,), 1) for i in ids)
    update = update_of(request_id, 11.0, tuple(ids), logprobs, finish_reason=FinishReason.LENGTH)
    done = processor.process([update])
    completing = next(n for n in range(len(ids) + 1) if "two" in TOKENIZER.decode(ids[:n]))
    assert done.ended == [EndedSequence(request_id, FinishReason.STOP, completing)]
    (completion,) = done.outputs[0].outputs
    assert completion.stop_reason == "two"
    assert completion.text == "one "
    assert completion.token_ids == tuple(ids[:completing])
    assert completion.logprobs is not None
    assert len(completion.logprobs) == completing
    assert completion.cumulative_logprob == -float(completing)


def test_drafts_count_as_far_as_their_tokens_do() -> None:
    ids = TOKENIZER.encode("one two three")
    processor, (request_id,) = begin(stop="two")
    processor.process([update_of(request_id, 11.0, (ids[0],)), TokenUpdate(request_id, 12.0)])
    (output,) = processor.process([TokenUpdate(request_id, 12.0, tuple(ids[1:]), num_draft_tokens=len(ids))]).outputs
    num_tokens = len(output.outputs[0].token_ids)
    assert num_tokens < len(ids)
    assert output.metrics is not None
    drafts = output.metrics.drafts
    assert drafts is not None
    assert (drafts.num_passes, drafts.num_verifying_passes, drafts.num_tokens) == (2, 1, num_tokens)
    assert (drafts.num_draft_tokens, drafts.num_accepted_tokens) == (len(ids), num_tokens - 2)


@pytest.mark.parametrize(("min_tokens", "text"), [(3, ""), (4, "abcd"), (7, "abcd"), (8, "abcdabcd")])
def test_a_stop_string_counts_behind_the_first_min_tokens(min_tokens: int, text: str) -> None:
    """A stop string that token number min_tokens completes is ignored, as in vLLM."""
    ids = [i for letter in "abcdabcd" for i in TOKENIZER.encode(letter)]
    assert len(ids) == 8
    processor, (request_id,) = begin(stop="abcd", min_tokens=min_tokens, max_tokens=8)
    outputs = run(processor, request_id, ids, finish_reason=FinishReason.LENGTH)
    assert outputs[-1].outputs[0].text == text


@pytest.mark.parametrize(("min_tokens", "text"), [(1, "a"), (2, "a\ufffd")])
def test_text_that_the_end_token_releases_is_that_of_the_token_before(min_tokens: int, text: str) -> None:
    ids = [*TOKENIZER.encode("a👍")[:2], EOS]
    processor, (request_id,) = begin(stop="\ufffd", min_tokens=min_tokens)
    (output,) = run(processor, request_id, ids, finish_reason=FinishReason.STOP)
    assert output.outputs[0].text == text


def test_held_text_comes_at_the_end() -> None:
    processor, (request_id,) = begin(OutputKind.DELTA, stop="two")
    outputs = run(processor, request_id, TOKENIZER.encode("one tw"), finish_reason=FinishReason.LENGTH)
    assert "tw" not in "".join(o.outputs[0].text for o in outputs[:-1])
    assert "".join(o.outputs[0].text for o in outputs) == "one tw"


def test_half_a_character_at_the_end() -> None:
    processor, (request_id,) = begin(OutputKind.DELTA)
    ids = TOKENIZER.encode("a👍")[:-1]
    outputs = run(processor, request_id, ids, finish_reason=FinishReason.LENGTH)
    assert "".join(o.outputs[0].text for o in outputs) == TOKENIZER.decode(ids)


@settings(max_examples=examples(60), deadline=None)
@given(ids=st.lists(st.integers(0, TOKENIZER.max_token_id), min_size=1, max_size=20), size=st.integers(1, 4))
def test_deltas_add_up_to_the_final_output(ids: list[int], size: int) -> None:
    answers: dict[OutputKind, list[RequestOutput]] = {}
    for kind in OutputKind:
        processor, (request_id,) = begin(kind, logprobs=0, stop="self")
        answers[kind] = []
        for start in range(0, len(ids), size):
            chunk = tuple(ids[start : start + size])
            logprobs = tuple(TokenLogprobs((i,), (-0.5,), 1) for i in chunk)
            finish = FinishReason.LENGTH if start + size >= len(ids) else None
            done = processor.process([update_of(request_id, 11.0, chunk, logprobs, finish_reason=finish)])
            answers[kind] += done.outputs
            if done.ended:
                break
    (final,) = answers[OutputKind.FINAL]
    assert answers[OutputKind.CUMULATIVE][-1] == final
    whole, deltas = final.outputs[0], [output.outputs[0] for output in answers[OutputKind.DELTA]]
    assert "".join(delta.text for delta in deltas) == whole.text
    assert tuple(i for delta in deltas for i in delta.token_ids) == whole.token_ids
    assert [entry for delta in deltas for entry in delta.logprobs or []] == whole.logprobs
    assert deltas[-1].finish_reason == whole.finish_reason
    assert deltas[-1].cumulative_logprob == whole.cumulative_logprob
    texts = [output.outputs[0].text for output in answers[OutputKind.CUMULATIVE]]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert [output.finished for output in answers[OutputKind.DELTA]].count(True) == 1


def test_n_sequences() -> None:
    processor, ids = begin(OutputKind.DELTA, n=3)
    assert len(set(ids)) == 3
    assert all(sequence_id.startswith("r#") for sequence_id in ids), "a reader of the event log wants to know whose"
    done = processor.process([update_of(i, 11.0, (70,)) for i in ids[:2]])
    (output,) = done.outputs
    assert [completion.index for completion in output.outputs] == [0, 1]
    done = processor.process([update_of(ids[1], 12.0, (EOS or 0,), finish_reason=FinishReason.STOP)])
    (output,) = done.outputs
    assert not output.finished
    assert [(c.index, c.seed, c.finish_reason) for c in output.outputs] == [(1, 101, "stop")]
    assert processor.live_sequence_ids("r") == (ids[0], ids[2])
    updates = [update_of(i, 13.0 + n, (70, 71), finish_reason=FinishReason.LENGTH) for n, i in enumerate(ids[::2])]
    (output,) = processor.process(updates).outputs
    assert output.finished
    assert output.metrics is not None
    assert output.metrics.e2e_s == 4.0
    assert processor.num_requests == 0


def test_final_waits_for_all_sequences() -> None:
    processor, ids = begin(n=2)
    assert not run(processor, ids[0], TOKENIZER.encode("one"), finish_reason=FinishReason.LENGTH)
    (output,) = run(processor, ids[1], TOKENIZER.encode("two"), finish_reason=FinishReason.LENGTH)
    assert [completion.text for completion in output.outputs] == ["one", "two"]


def test_abort() -> None:
    processor, (request_id,) = begin(stop="abort")
    run(processor, request_id, TOKENIZER.encode("some ab"))
    output = processor.abort("r", 20.0)
    assert output is not None
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "some ab"
    assert output.metrics is not None
    assert output.metrics.e2e_s == 10.0
    assert processor.abort("r", 21.0) is None
    assert processor.live_sequence_ids("r") == ()
    assert processor.num_requests == 0


def test_abort_before_the_first_token() -> None:
    processor, _ = begin(n=2)
    output = processor.abort("r", 20.0)
    assert output is not None
    assert [completion.finish_reason for completion in output.outputs] == ["abort", "abort"]
    assert output.metrics is None


def test_error_of_one_request() -> None:
    processor, (request_id,) = begin()
    done = processor.process(
        [update_of(request_id, 11.0, finish_reason=FinishReason.ERROR, error="logits are not finite")]
    )
    assert done.outputs[0].error == "logits are not finite"
    assert done.outputs[0].outputs[0].finish_reason == "error"


def test_chunks_that_do_not_sample_are_silent() -> None:
    processor, (request_id,) = begin(OutputKind.DELTA)
    done = processor.process([update_of(request_id, 11.0)])
    assert not done.outputs
    assert not done.ended


def test_prompt_logprobs_by_position() -> None:
    processor, (request_id,) = begin(OutputKind.DELTA, prompt_logprobs=1)
    prompt = TOKENIZER.encode("def f")
    entries = [TokenLogprobs((token_id, 7), (-2.0, -1.0), 3) for token_id in prompt]
    for start in range(1, len(prompt)):
        processor.process([update_of(request_id, 12.0, prompt_logprobs=(entries[start],), prompt_logprobs_start=start)])
    (first,) = processor.process([update_of(request_id, 13.0, (70,))]).outputs
    assert first.prompt_logprobs is not None
    assert first.prompt_logprobs[0] is None
    assert [next(iter(position or {})) for position in first.prompt_logprobs[1:]] == prompt[1:]
    (second,) = processor.process([update_of(request_id, 14.0, (71,))]).outputs
    assert second.prompt_logprobs is None


@pytest.mark.parametrize(
    ("token_ids", "rank", "expected"),
    [
        ((9,), 4, {9: 4}),
        ((9, 5, 6), 4, {9: 4, 5: 1, 6: 2}),
        ((5, 5, 6), 1, {5: 1, 6: 2}),
        ((6, 5, 6, 7), 2, {6: 2, 5: 1, 7: 3}),
        ((6, 5, 7), 2, {6: 2, 5: 1, 7: 3}),
        ((5, 6, 7), 1, {5: 1, 6: 2, 7: 3}),
    ],
)
def test_logprobs_have_the_chosen_token_first(token_ids: tuple[int, ...], rank: int, expected: dict[int, int]) -> None:
    entry = TokenLogprobs(token_ids, tuple(-float(i) for i in token_ids), rank)
    decoded = decode_logprobs(entry, TOKENIZER)
    assert next(iter(decoded)) == token_ids[0]
    assert {token_id: logprob.rank for token_id, logprob in decoded.items()} == expected
    assert all(logprob.logprob == -float(token_id) for token_id, logprob in decoded.items())
    assert decoded[token_ids[0]].decoded_token == TOKENIZER.decoded_token(token_ids[0])


def test_metrics() -> None:
    #       arrival 10, scheduled 10.5, one token at 11, two at 12, one at 14
    metrics = RequestMetrics.of([RequestTimes(10.0, 10.5, [11.0, 12.0, 12.0, 14.0], num_preemptions=1)])
    assert metrics is not None
    assert metrics.queue_time_s == 0.5
    assert metrics.ttft_s == 1.0
    assert metrics.itl_s == (1.0, 0.0, 2.0)
    assert metrics.e2e_s == 4.0
    assert metrics.tpot_s == (metrics.e2e_s - metrics.ttft_s) / 3 == sum(metrics.itl_s) / 3
    assert metrics.num_preemptions == 1
    assert RequestTimes(10.0, 10.5, [11.0]).tpot_s is None


@given(gaps=st.lists(st.floats(0, 5), min_size=2, max_size=20), queue=st.floats(0, 5))
def test_tpot_is_the_mean_gap(gaps: list[float], queue: float) -> None:
    times = [100.0 + queue + sum(gaps[: n + 1]) for n in range(len(gaps))]
    metrics = RequestTimes(100.0, 100.0 + queue, times, times[-1])
    assert metrics.tpot_s is not None
    assert math.isclose(metrics.tpot_s, sum(metrics.itl_s) / len(metrics.itl_s), rel_tol=1e-9, abs_tol=1e-9)
    assert math.isclose(metrics.e2e_s, metrics.ttft_s + sum(metrics.itl_s), rel_tol=1e-9, abs_tol=1e-9)


def test_metrics_of_several_sequences_are_what_the_caller_lived_through() -> None:
    first = RequestTimes(10.0, 10.5, [11.0, 12.0], finish_s=12.0, num_preemptions=1)
    second = RequestTimes(10.0, 12.5, [13.0, 16.0], finish_s=16.0, num_preemptions=1)
    aborted = RequestTimes(10.0, finish_s=16.5, num_preemptions=2)
    metrics = RequestMetrics.of([first, second, aborted])
    assert metrics is not None
    assert (metrics.queue_time_s, metrics.ttft_s, metrics.e2e_s) == (0.5, 1.0, 6.0)
    assert (metrics.tpot_s, metrics.itl_s, metrics.num_preemptions) == (3.0, (3.0,), 4)
    assert RequestMetrics.of([aborted]) is None


def test_metrics_come_with_the_end() -> None:
    processor, (request_id,) = begin(OutputKind.DELTA)
    first = processor.process([update_of(request_id, 11.0, (70,))])
    assert first.outputs[0].metrics is None
    last = processor.process([update_of(request_id, 13.0, (71,), finish_reason=FinishReason.LENGTH)])
    metrics = last.outputs[0].metrics
    assert metrics is not None
    assert (metrics.queue_time_s, metrics.ttft_s, metrics.e2e_s, metrics.tpot_s) == (0.25, 1.0, 3.0, 2.0)


def test_no_two_sequences_are_called_the_same() -> None:
    """Whatever callers make up: names that look like sequences of another request, and names used again."""
    inputs = InputProcessor(TOKENIZER, max_model_len=64, vocab_size=TOKENIZER.vocab_size, eos_token_ids=[EOS])
    processor = OutputProcessor(TOKENIZER)
    seen: list[str] = []
    for name, n in [("a", 2), ("a-0", 1), ("a#0.0", 1), ("a#0", 2), ("a", 2), ("a#4", 1)]:
        if processor.is_live(name):
            processor.abort(name, 11.0)
        prompt = inputs.process("def f", SamplingParams(n=n))
        seen += processor.add(name, prompt, seeds=range(n), arrival_time_s=10.0)
    assert len(set(seen)) == len(seen)


def test_a_discarded_request_leaves_nothing_behind() -> None:
    processor, _ = begin(n=2)
    processor.discard("r")
    assert processor.num_requests == 0
    assert processor.abort("r", 11.0) is None
    assert not processor._owner


def test_no_score_of_a_prompt_is_decoded_before_it_is_read() -> None:
    processor, (request_id,) = begin(OutputKind.FINAL, prompt_logprobs=1)
    prompt = TOKENIZER.encode("def f")
    entries = tuple(TokenLogprobs((token_id, 7), (-2.0, -1.0), 3) for token_id in prompt[1:])
    processor.process([update_of(request_id, 12.0, prompt_logprobs=entries)])
    (output,) = processor.process([update_of(request_id, 13.0, (70,), finish_reason=FinishReason.LENGTH)]).outputs
    found = output.prompt_logprobs
    assert isinstance(found, PromptScores)
    assert found.num_decoded == 0
    assert [next(iter(position or {})) for position in found[1:]] == prompt[1:]
