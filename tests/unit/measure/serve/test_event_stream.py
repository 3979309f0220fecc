"""Events come out whole wherever the transport cuts the stream."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.measure.serve import openai_wire as event_stream
from twostroke.measure.serve.openai_wire import EventReader

STREAM = b'data: {"a": 1}\n\n: a comment\n\nevent: ping\ndata:two\ndata: lines\nid: 7\n\r\ndata: [DONE]\r\n\r\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM))))
def test_cuts_do_not_matter(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    parts = [STREAM[a:b] for a, b in pairwise(places)]
    stream = EventReader()
    assert [data for part in parts for data in stream.feed(part)] == EVENTS


def test_an_event_that_has_not_ended_is_held_back() -> None:
    assert list(EventReader().feed(b'data: {"a": 1}\n')) == []


def test_a_stream_without_line_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_EVENT_BYTES", 100)
    stream = EventReader()
    assert list(stream.feed(b"d" * 100)) == []
    with pytest.raises(ValueError, match="longer than 100 bytes"):
        list(stream.feed(b"d"))
