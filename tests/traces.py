"""Traces of the shape of the published ones, made up: lengths, arrivals and who shares what with whom."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random

from twostroke.simulation.trace import TRACE_BLOCK, TraceEntry


def conversations(num_requests: int, seed: int = 0) -> list[TraceEntry]:
    """Chats: all begin with the same block, each turn with all turns before it; a chat is left at any time."""
    random, ids = Random(seed), count(1)
    chats: list[list[int]] = []
    entries: list[TraceEntry] = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += random.expovariate(2.0)
        if not chats or random.random() < 0.6:
            chats.append([0])
        chat = chats[max(0, len(chats) - 1 - int(random.expovariate(0.2)))]
        chat += [next(ids) for _ in range(random.randint(1, 9))]
        entries.append(_entry(random, now_s, chat, random.randint(1, 900)))
        chat[-1:] = [next(ids)] if random.random() < 0.7 else chat[-1:]  # the block that was not full yet
    return entries


def long_documents(num_requests: int, seed: int = 0) -> list[TraceEntry]:
    """Questions about long documents, asked again and again, with short answers, in bursts."""
    random, ids = Random(seed), count()
    documents = [[next(ids) for _ in range(random.randint(10, 70))] for _ in range(max(1, num_requests // 12))]
    entries: list[TraceEntry] = []
    now_s = 0.0
    for _ in range(num_requests):
        now_s += random.choice((0.0, 0.0, 3.0))
        document = documents[min(len(documents) - 1, int(random.expovariate(0.15)))]
        entries.append(_entry(random, now_s, [*document, next(ids)], random.randint(1, 200)))
    return entries


def write_trace(path: Path, entries: Sequence[TraceEntry]) -> Path:
    """Write a trace in the form of the published ones."""
    rows = (
        {
            "timestamp": round(entry.timestamp_s * 1000),
            "input_length": entry.input_length,
            "output_length": entry.output_length,
            "hash_ids": entry.hash_ids,
        }
        for entry in entries
    )
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def _entry(random: Random, now_s: float, hash_ids: list[int], num_outputs: int) -> TraceEntry:
    input_length = len(hash_ids) * TRACE_BLOCK - random.randrange(TRACE_BLOCK)
    return TraceEntry(round(now_s, 3), input_length, num_outputs, tuple(hash_ids))
