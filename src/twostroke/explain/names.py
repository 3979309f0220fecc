"""What sequences and processes are called in an event log, and what belongs together by its name.

my name#12.0@2     the caller's name, which request of all, which of its n sequences, at which attempt to run it
prefill-0.1        role and place of a process, and the how-manieth it is there
engine-4711        an engine that is one process, by its pid
"""

from __future__ import annotations

import re

GATEWAY = "gateway"
"""The process that keeps the journal of pools; what it writes is about sequences, whoever runs them."""
ENGINE = "engine"
"""The place of an engine that is one process."""

_SEQUENCE_ID = re.compile(r"(?P<name>.*)#(?P<number>\d+)\.(?P<index>\d+)(?:@(?P<attempt>\d+))?", re.DOTALL)
"""What OutputProcessor.add makes of a caller's name and the dispatcher of that; other users have ids of their own."""
_POOL_PROCESS = re.compile(r"(?P<place>(?:prefill|decode)-\d+)\.\d+")


def request_of(sequence_id: str) -> str:
    """What the sequences of one request have in common.

    >>> request_of("my name#12.0"), request_of("my name#12.1@2"), request_of("plain")
    ('my name#12', 'my name#12', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else f"{match['name']}#{match['number']}"


def sequence_of(sequence_id: str) -> str:
    """What the attempts to run one sequence have in common.

    >>> sequence_of("my name#12.0"), sequence_of("my name#12.1@2"), sequence_of("plain@2")
    ('my name#12.0', 'my name#12.1', 'plain@2')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None or match["attempt"] is None else sequence_id.rpartition("@")[0]


def name_of(sequence_id: str) -> str:
    """What the caller named the request.

    >>> name_of("my name#12.0@1"), name_of("plain")
    ('my name', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else match["name"]


def index_of(sequence_id: str) -> int:
    """Which of its request's sequences it is.

    >>> index_of("my name#12.1"), index_of("plain")
    (1, 0)
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return 0 if match is None else int(match["index"])


def place_of(process: str) -> str:
    """What processes that came one after the other have in common.

    >>> place_of("prefill-0.1"), place_of("gateway"), place_of("engine-4711")
    ('prefill-0', 'gateway', 'engine')
    """
    match = _POOL_PROCESS.fullmatch(process)
    if match is not None:
        return match["place"]
    return GATEWAY if process == GATEWAY else ENGINE


def is_of_pool(process: str) -> bool:
    """Whether what it runs can go on elsewhere.

    >>> is_of_pool("decode-1.3"), is_of_pool("engine-4711")
    (True, False)
    """
    return _POOL_PROCESS.fullmatch(process) is not None
