"""A Mooncake trace as requests of a simulation: lengths, arrivals, and which prompts begin alike.

A hash id stands for 512 prompt tokens and all before them, so it names its blocks by itself; no token is made up:

    hash ids            7                  9
    tokens     |------- 512 -------|------- 512 -------|
    blocks     | 7.0 | 7.1 | … 7.31| 9.0 | 9.1 | …            of 16 tokens
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from twostroke.config.checks import number, whole_number
from twostroke.errors import InvalidParameter
from twostroke.request import Arrival, FinishReason
from twostroke.simulation.requests import SimulatedRequest

TRACE_BLOCK = 512
"""Tokens behind one hash id."""

MAX_LENGTH = 1 << 24
"""Tokens of a prompt or an output; more is a slip of the keyboard."""


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One line of a Mooncake trace."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    """One per 512 prompt tokens, the last one of what is left; equal ids, equal text from the prompt's beginning on."""


def read_trace(path: Path) -> list[TraceEntry]:
    """Reads a Mooncake trace: JSON lines with `timestamp` in ms, `input_length`, `output_length`, `hash_ids`.

    Raises:
        InvalidParameter: there is no such file, or a line is not of this form.
    """
    try:
        return list(_entries(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InvalidParameter(
            "trace", str(path), f"cannot be read ({error.strerror})", "See benchmarks/README.md."
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidParameter(
            "trace", str(path), f"must be a Mooncake trace ({error!r})", "See benchmarks/README.md."
        ) from error


def _entries(text: str) -> Iterator[TraceEntry]:
    for line in text.splitlines():
        if line.strip():
            row = json.loads(line)
            whole_number("input_length", row["input_length"], 1, MAX_LENGTH)
            whole_number("output_length", row["output_length"], 0, MAX_LENGTH)
            number("timestamp", row["timestamp"], 0.0, 1e15, "milliseconds, at least 0")
            hash_ids = tuple(int(i) for i in row["hash_ids"])
            if len(hash_ids) != -(-row["input_length"] // TRACE_BLOCK):
                raise ValueError(f"{len(hash_ids)} hash ids for {row['input_length']} tokens")
            yield TraceEntry(row["timestamp"] / 1000, row["input_length"], row["output_length"], hash_ids)


def requests_of_trace(
    lines: Sequence[TraceEntry], *, block_size: int, divisor: int = 1, longest: int | None = None
) -> tuple[tuple[SimulatedRequest, ...], int]:
    """The requests, and how many were left out.

    Args:
        lines: of the trace.
        block_size: tokens of a KV block; divides the tokens behind a hash id.
        divisor: lengths are divided by it, and rounded up; prompts share what they shared.
        longest: tokens of a request; longer ones are left out.

    Raises:
        InvalidParameter: sizes that do not divide.
    """
    per_id, rest = divmod(TRACE_BLOCK, divisor)
    if rest or per_id % block_size:
        limit = f"must divide {TRACE_BLOCK} / {divisor}, the tokens that a hash id of the trace stands for"
        raise InvalidParameter("block_size", block_size, limit)
    found: list[SimulatedRequest] = []
    for index, line in enumerate(lines):
        request = _request(index, line, block_size, divisor, per_id // block_size)
        num_tokens = request.arrival.num_prompt_tokens + request.arrival.max_tokens
        if longest is None or num_tokens <= longest:
            found.append(request)
    return tuple(found), len(lines) - len(found)


def _request(index: int, line: TraceEntry, block_size: int, divisor: int, blocks_per_id: int) -> SimulatedRequest:
    num_prompt_tokens = -(-line.input_length // divisor)
    num_outputs = max(1, -(-line.output_length // divisor))
    num_full = num_prompt_tokens // block_size
    names = (struct.pack("<qi", hash_id, part) for hash_id in line.hash_ids for part in range(blocks_per_id))
    hashes = tuple(name for name, _ in zip(names, range(num_full), strict=False))
    arrival = Arrival(f"{index}", line.timestamp_s, num_prompt_tokens, num_outputs, block_hashes=hashes)
    return SimulatedRequest(arrival, num_outputs, FinishReason.LENGTH)
