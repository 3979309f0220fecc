"""Mooncake traces as requests of a simulation: lengths, arrivals, and shared prompt prefixes.

A hash id stands for 512 prompt tokens and all tokens before them, so it names its blocks without any token ids:

    hash ids            7                  9
    tokens     |------- 512 -------|------- 512 -------|
    blocks     | 7.0 | 7.1 | … 7.31| 9.0 | 9.1 | …            of 16 tokens
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

from twostroke.config.checks import check_int, check_number
from twostroke.errors import InvalidParameter
from twostroke.request import Arrival, FinishReason
from twostroke.simulation.requests import SimulatedRequest

TRACE_BLOCK = 512
"""Prompt tokens per hash id."""

MAX_LENGTH = 1 << 24
"""Limit for the tokens of a prompt or an output; larger values are taken for typing errors."""
MAX_HASH_ID = (1 << 63) - 1

_LENGTH_FIELDS = {"input_length", "output_length", "hash_ids"}
"""Fields by which a trace differs from the other files that can be replayed."""
_REMEDY = (
    'Each line is {"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [one per 512 prompt '
    "tokens]}, in the order of arrival."
)


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a Mooncake trace."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    """Hash ids, one per 512 prompt tokens, the last one for the remainder; an equal id means an equal prompt up to
    there."""


def is_trace(path: Path) -> bool:
    """Return whether a file looks like a Mooncake trace, even with fields missing; False if it cannot be read."""
    try:
        with path.open(encoding="utf-8") as lines:
            row: object = json.loads(next((line for line in lines if line.strip()), ""))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(row, dict) and not _LENGTH_FIELDS.isdisjoint(cast(dict[str, object], row))


def read_trace(path: Path) -> list[TraceEntry]:
    """Read a Mooncake trace: JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    Raises:
        InvalidParameter: the file cannot be read, holds no request, or has a line of another form.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InvalidParameter("trace", str(path), f"cannot be read ({error.strerror})", _REMEDY) from error
    except UnicodeDecodeError as error:
        limit = f"must be a Mooncake trace; it is no UTF-8 text ({error.reason} at byte {error.start})"
        raise InvalidParameter("trace", str(path), limit, _REMEDY) from error
    entries: list[TraceEntry] = []
    for number_of_line, line in enumerate(lines, 1):
        if line.strip():
            try:
                entries.append(_entry(line, entries[-1].timestamp_s if entries else 0.0))
            except (TypeError, ValueError, RecursionError) as error:
                limit = f"must be a Mooncake trace; line {number_of_line}: {str(error).rstrip('.')}"
                raise InvalidParameter("trace", str(path), limit, _REMEDY) from error
    if not entries:
        raise InvalidParameter("trace", str(path), "must be a Mooncake trace; it contains no request", _REMEDY)
    return entries


def _entry(line: str, earliest_s: float) -> TraceEntry:
    given: object = json.loads(line)
    if not isinstance(given, dict):
        raise TypeError("it is not a JSON object")
    row = cast(dict[str, Any], given)
    missing = [name for name in ("timestamp", "input_length", "output_length", "hash_ids") if name not in row]
    if missing:
        raise ValueError(f"it lacks {' and '.join(missing)}")
    check_number("timestamp", row["timestamp"], 0.0, 1e15, "milliseconds, at least 0")
    check_int("input_length", row["input_length"], 1, MAX_LENGTH)
    check_int("output_length", row["output_length"], 0, MAX_LENGTH)
    entry = TraceEntry(row["timestamp"] / 1000, row["input_length"], row["output_length"], tuple(row["hash_ids"]))
    for hash_id in entry.hash_ids:
        check_int("hash_ids", hash_id, 0, MAX_HASH_ID)
    num_ids = -(-entry.input_length // TRACE_BLOCK)
    if len(entry.hash_ids) != num_ids:
        found, tokens = len(entry.hash_ids), entry.input_length
        raise ValueError(f"{found} hash ids for {tokens} tokens; one per {TRACE_BLOCK} tokens would be {num_ids}")
    if entry.timestamp_s < earliest_s:
        raise ValueError(f"timestamp={row['timestamp']} is before the previous one, {earliest_s * 1000:.0f}")
    return entry


def num_tokens_of(entry: TraceEntry, divisor: int = 1) -> tuple[int, int]:
    """Return the numbers of prompt and output tokens, divided and rounded up; at least one output token.

    >>> num_tokens_of(TraceEntry(0.0, 513, 0, (1, 2)), divisor=4)
    (129, 1)
    """
    return -(-entry.input_length // divisor), max(1, -(-entry.output_length // divisor))


def trace_requests(
    lines: Sequence[TraceEntry], *, block_size: int, divisor: int = 1, longest: int | None = None
) -> tuple[tuple[SimulatedRequest, ...], int]:
    """Return the requests of a trace, and the number of those left out.

    Args:
        lines: entries of the trace.
        block_size: tokens per KV block; must divide the tokens per hash id.
        divisor: divides all lengths, rounded up; shared prefixes stay shared.
        longest: limit for the tokens of a request; longer requests are left out.

    Raises:
        InvalidParameter: the divisor or the block size does not divide evenly.
    """
    per_id, rest = divmod(TRACE_BLOCK, divisor)
    if rest:
        raise InvalidParameter("trace_divisor", divisor, f"must divide {TRACE_BLOCK}, the tokens per hash id")
    if per_id % block_size:
        limit = f"must divide {TRACE_BLOCK} / {divisor} = {per_id}, the tokens per hash id of the trace"
        raise InvalidParameter("block_size", block_size, limit, f"Give --block-size {per_id & -per_id} or less.")
    names = _BlockHashes(per_id // block_size)
    found: list[SimulatedRequest] = []
    for index, line in enumerate(lines):
        request = _request(index, line, block_size, divisor, names)
        num_tokens = request.arrival.num_prompt_tokens + request.arrival.max_tokens
        if longest is None or num_tokens <= longest:
            found.append(request)
    return tuple(found), len(lines) - len(found)


class _BlockHashes(dict[int, tuple[bytes, ...]]):
    """Block hashes for each hash id, created once: they take most of the memory of a trace."""

    def __init__(self, blocks_per_id: int) -> None:
        super().__init__()
        self._blocks_per_id = blocks_per_id

    def __missing__(self, hash_id: int) -> tuple[bytes, ...]:
        self[hash_id] = names = tuple(struct.pack("<qi", hash_id, part) for part in range(self._blocks_per_id))
        return names


def _request(index: int, line: TraceEntry, block_size: int, divisor: int, names: _BlockHashes) -> SimulatedRequest:
    num_prompt_tokens, num_outputs = num_tokens_of(line, divisor)
    in_order = chain.from_iterable(names[hash_id] for hash_id in line.hash_ids)
    hashes = tuple(islice(in_order, num_prompt_tokens // block_size))
    arrival = Arrival(f"{index}", line.timestamp_s, num_prompt_tokens, num_outputs, block_hashes=hashes)
    return SimulatedRequest(arrival, num_outputs, FinishReason.LENGTH)
