"""Trace files: what is one, and what is said of one that has a hole."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces import conversations, long_documents, write_trace
from twostroke.errors import InvalidParameter
from twostroke.simulation.trace import TraceEntry, is_trace, read_trace, trace_requests

GOOD = '{"timestamp": 7, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'


def test_what_was_written_is_read(tmp_path: Path) -> None:
    entries = [*conversations(50), *(TraceEntry(1e6, e.input_length, 1, e.hash_ids) for e in long_documents(9))]
    path = write_trace(tmp_path / "any.name", entries)
    assert is_trace(path)
    assert read_trace(path) == entries


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it contains no request"),
        ("\n\n", "it contains no request"),
        ("nonsense\n", "line 1: "),
        ("[1]\n", "line 1: it is not a JSON object"),
        (GOOD + '{"timestamp": 8, "output_length": 3, "hash_ids": []}', "line 2: it lacks input_length"),
        (GOOD + '{"timestamp": 8}', "line 2: it lacks input_length and output_length and hash_ids"),
        (GOOD + GOOD[:40], "line 2: "),
        (
            GOOD + "\n" + GOOD.replace("[1, 2]", "[1]"),
            "line 3: 1 hash ids for 600 tokens; one per 512 tokens would be 2",
        ),
        (GOOD + GOOD.replace("7", "6.5"), "line 2: timestamp=6.5 is before the previous one, 7"),
        (GOOD.replace("7", "-7"), "line 1: timestamp=-7: must be milliseconds"),
        (GOOD.replace("7", "NaN"), "line 1: timestamp=nan"),
        (GOOD.replace("600", "true"), "line 1: input_length=true"),
        (GOOD.replace("600", "1e99"), "line 1: input_length=1e+99"),
        (GOOD.replace("3,", "-3,"), "line 1: output_length=-3"),
        (GOOD.replace("[1, 2]", '["a", 2]'), "line 1: hash_ids='a'"),
        (GOOD.replace("[1, 2]", "[1, 99999999999999999999]"), "line 1: hash_ids=99999999999999999999"),
        (GOOD.replace("[1, 2]", "7"), "line 1: "),
        ("[" * 100_000, "line 1: "),
    ],
)
def test_a_hole_is_named_by_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InvalidParameter) as refused:
        read_trace(path)
    assert "must be a Mooncake trace" in str(refused.value)
    assert said in str(refused.value)
    assert "Each line is" in str(refused.value)


def test_what_is_no_text_or_no_file(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(bytes(range(256)))
    for path, said in ((binary, "no UTF-8 text"), (tmp_path, "cannot be read"), (tmp_path / "gone", "cannot be read")):
        assert not is_trace(path)
        with pytest.raises(InvalidParameter, match=said):
            read_trace(path)


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[1]", "3", '{"v": 1, "event": "EngineStarted"}', '{"timestamp": 3}', "[" * 100_000]
)
def test_what_is_no_trace_by_its_content(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    assert not is_trace(path)


@pytest.mark.parametrize(
    ("divisor", "block_size", "said"),
    [
        (3, 16, "trace_divisor=3: must divide 512"),
        (64, 16, "block_size=16: must divide 512 / 64 = 8, .* Give --block-size 8 or less"),
        (1, 48, "block_size=48: must divide 512 / 1 = 512"),
    ],
)
def test_sizes_that_do_not_divide(divisor: int, block_size: int, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
        trace_requests((), block_size=block_size, divisor=divisor)


def test_longer_requests_are_counted() -> None:
    entries = [TraceEntry(0.0, 512 * n, 10, tuple(range(n))) for n in range(1, 9)]
    requests, num_left_out = trace_requests(entries, block_size=16, divisor=2, longest=4 * 256 + 5)
    assert ([one.arrival.num_prompt_tokens for one in requests], num_left_out) == ([256, 512, 768, 1024], 4)
    assert requests[3].arrival.block_hashes[:48] == requests[2].arrival.block_hashes
