"""Names of sequences and processes in an event log, and their parts.

my name#12.0@2     caller's name, number of the request, index of the sequence in the request, attempt to run it
prefill-0.1        role and place of a process, and its number at that place
engine-4711        an engine that is one process, by its pid
"""

from __future__ import annotations

import re

GATEWAY = "gateway"
"""Process that keeps the journal of pools; its events are about sequences on any process."""
ENGINE = "engine"
"""Place of an engine that is one process."""

_SEQUENCE_ID = re.compile(r"(?P<name>.*)#(?P<number>\d+)\.(?P<index>\d+)(?:@(?P<attempt>\d+))?", re.DOTALL)
"""Ids made by OutputProcessor.add from a caller's name, and by the dispatcher; other callers have ids of their own."""
_POOL_PROCESS = re.compile(r"(?P<place>(?:prefill|decode)-\d+)\.\d+")


def request_of(sequence_id: str) -> str:
    """Return the common name of all sequences of one request.

    >>> request_of("my name#12.0"), request_of("my name#12.1@2"), request_of("plain")
    ('my name#12', 'my name#12', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else f"{match['name']}#{match['number']}"


def sequence_of(sequence_id: str) -> str:
    """Return the common name of all attempts to run one sequence.

    >>> sequence_of("my name#12.0"), sequence_of("my name#12.1@2"), sequence_of("plain@2")
    ('my name#12.0', 'my name#12.1', 'plain@2')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None or match["attempt"] is None else sequence_id.rpartition("@")[0]


def name_of(sequence_id: str) -> str:
    """Return the caller's name of the request.

    >>> name_of("my name#12.0@1"), name_of("plain")
    ('my name', 'plain')
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return sequence_id if match is None else match["name"]


def index_of(sequence_id: str) -> int:
    """Return the index of a sequence in its request.

    >>> index_of("my name#12.1"), index_of("plain")
    (1, 0)
    """
    match = _SEQUENCE_ID.fullmatch(sequence_id)
    return 0 if match is None else int(match["index"])


def place_of(process: str) -> str:
    """Return the place of a process, which it shares with its predecessors and successors.

    >>> place_of("prefill-0.1"), place_of("gateway"), place_of("engine-4711")
    ('prefill-0', 'gateway', 'engine')
    """
    match = _POOL_PROCESS.fullmatch(process)
    if match is not None:
        return match["place"]
    return GATEWAY if process == GATEWAY else ENGINE


def is_pool_process(process: str) -> bool:
    """Return whether sequences of a process can go on in another process.

    >>> is_pool_process("decode-1.3"), is_pool_process("engine-4711")
    (True, False)
    """
    return _POOL_PROCESS.fullmatch(process) is not None
