"""Lines that somebody outside can bring about as often as they like."""

from __future__ import annotations

import logging

from twostroke.log import RateLimitFilter


def passed(
    sparingly: RateLimitFilter, time_s: float, message: str, *arguments: object, level: int = logging.WARNING
) -> str:
    """Return what is written of a line that is logged at that time; empty if it is held back."""
    record = logging.LogRecord("server", level, __file__, 1, message, arguments, None)
    record.created = time_s
    return record.getMessage() if sparingly.filter(record) else ""


def test_a_message_passes_once_in_a_while_and_says_how_many_did_not() -> None:
    sparingly = RateLimitFilter(every_s=1.0)
    assert passed(sparingly, 10.0, "bad %s", "one") == "bad one"
    assert [passed(sparingly, 10.0 + i / 2000, "bad %s", i) for i in range(1999)] == [""] * 1999
    assert passed(sparingly, 10.9, "other") == "other"
    assert passed(sparingly, 11.0, "bad %s", "two") == "bad two (1,999 more like it since the last such line)"
    assert passed(sparingly, 11.5, "bad %s", "three") == ""
    assert passed(sparingly, 5.0, "bad %s", "after the clock was set back") != ""


def test_what_is_ours_always_passes() -> None:
    sparingly = RateLimitFilter()
    assert [passed(sparingly, 10.0, "broken", level=logging.ERROR) for _ in range(3)] == ["broken"] * 3


def test_many_messages_are_not_kept_for_ever() -> None:
    sparingly = RateLimitFilter()
    for number in range(1000):
        assert passed(sparingly, 10.0, f"message {number}")
        assert not passed(sparingly, 10.0, f"message {number}")
    assert len(sparingly._passed_s) <= 100
    assert len(sparingly._num_held_back) <= 100
