"""Stop strings against a brute-force oracle: look at the text after every token, find, cut."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

import text_fakes
from tiers import examples
from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import StoppingStream
from twostroke.client.stop_strings import StopStrings
from twostroke.engine.token_update import SequenceStatus, TokenUpdate
from twostroke.outputs import RequestTimes
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.tokenizer.tokenizer import Tokenizer

QUICK = settings(max_examples=examples(400), deadline=None)
LETTERS = st.text("ab ", max_size=12)
STOPS = st.lists(st.text("ab ", min_size=1, max_size=5), min_size=1, max_size=4)


def first_end(text: str, stops: list[str], after: int) -> tuple[int, str] | None:
    """The earliest end beyond `after` of any stop string, and the longest one that ends there."""
    for end in range(after + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return end, max(ending, key=len)
    return None


@QUICK
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS, passing=st.integers(0, 10))
@example(pieces=["abcd"], stops=["abcd", "bc"], passing=0)
@example(pieces=["aaaa", "aaa"], stops=["aa"], passing=1)
def test_stop_strings_equal_the_oracle(pieces: list[str], stops: list[str], passing: int) -> None:
    checker = StopStrings(stops)
    seen, released = "", ""
    for number, piece in enumerate(pieces):
        may_stop = number >= passing
        expected = first_end(seen + piece, stops, len(seen)) if may_stop else None
        text, match = checker.push(piece, may_stop)
        seen += piece
        if expected is not None:
            assert match is not None
            end, stop = expected
            assert match.stop == stop
            assert released + text == seen
            assert len(released) + match.end == end
            assert match.end - match.start == len(stop)
            return
        assert match is None
        released += text
        # Exactly the text that could still become a stop string is held back.
        held = max(n for n in range(len(seen) + 1) if not n or any(s[:n] == seen[-n:] and n < len(s) for s in stops))
        assert released == seen[: len(seen) - held]
    assert (released + checker.finish()[0], checker.finish()[1]) == (seen, None)


@QUICK
@given(pieces=st.lists(LETTERS, max_size=10), stops=STOPS, sizes=st.lists(st.integers(1, 4), min_size=1))
def test_pieces_do_not_matter(pieces: list[str], stops: list[str], sizes: list[int]) -> None:
    def run(parts: list[str]) -> tuple[str, str | None]:
        checker, text = StopStrings(stops), ""
        for part in parts:
            released, match = checker.push(part)
            if match is not None:
                return text + released[: match.start], match.stop
            text += released
        return text + checker.finish()[0], None

    whole = "".join(pieces)
    cycle = itertools.cycle(sizes)
    cut = ["".join(map(chr, chunk)) for chunk in text_fakes.chunked([ord(c) for c in whole], cycle)]
    assert run(pieces) == run([whole]) == run(cut)


def test_long_stop_strings_cost_little() -> None:
    checker = StopStrings(["a" * 20_000 + "b"])
    for _ in range(3_000):
        assert checker.push("aaaaaaaa" * 2)[1] is None
    assert checker.push("b")[1] is not None


@dataclass
class Outcome:
    text: str
    num_tokens: int
    reason: str | int | None


def oracle(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> Outcome:
    """Decode from scratch after each token; a U+FFFD at the end may be half a character and is ignored."""
    seen = 0
    for count in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:count], params.skip_special_tokens)
        text = text if count == len(ids) else text.rstrip("\ufffd")
        if (found := first_end(text, list(params.stop), seen)) and count > params.min_tokens:
            end, stop = found
            return Outcome(text[: end if params.include_stop_str_in_output else end - len(stop)], count, stop)
        seen = max(seen, len(text))
    return Outcome(tokenizer.decode(ids, params.skip_special_tokens), len(ids), None)


@settings(max_examples=examples(200), deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(("byte_level", "metaspace", "wordpiece")),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
)
def test_streams_equal_the_oracle(data: st.DataObject, kind: str, include: bool, min_tokens: int) -> None:
    """Stop strings are cut out of the text itself, so that they span tokens and begin inside them."""
    tokenizer = text_fakes.tokenizer(kind)
    line = data.draw(st.sampled_from([*text_fakes.UNICODE_LINES[:8], "def hello(self):\n    return self.hello"]))
    ids = [i for i in tokenizer.encode(line, add_special_tokens=False) if i not in tokenizer.special_token_ids]
    text = tokenizer.decode(ids)
    spans = st.tuples(st.integers(0, max(0, len(text) - 1)), st.integers(1, 6))
    stops = [text[a : a + n] for a, n in data.draw(st.lists(spans, max_size=3)) if text[a : a + n]]
    params = SamplingParams(
        stop=[*stops, "never there"], include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None
    )
    expected = oracle(tokenizer, ids, params)
    stream = StoppingStream(tokenizer, PromptInput("", (0,), params), index=0, seed=0, times=RequestTimes(0.0))
    sizes = itertools.cycle(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    deltas: list[str] = []
    chunks = list(text_fakes.chunked(ids, sizes))
    for number, chunk in enumerate(chunks, start=1):
        finish = FinishReason.LENGTH if number == len(chunks) else None
        stream.push(TokenUpdate("s", float(number), tuple(chunk), status=SequenceStatus(finish_reason=finish)))
        deltas.append(stream.take_delta().text)
        assert not any(stop in "".join(deltas) for stop in params.stop) or include or min_tokens
        if stream.finish_reason is not None:
            break
    assert "".join(deltas) == expected.text
    assert stream.stop_reason == expected.reason
    if ids:
        assert stream.num_tokens == expected.num_tokens
        assert stream.finish_reason is (FinishReason.LENGTH if expected.reason is None else FinishReason.STOP)
