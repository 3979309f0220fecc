"""Batch files: what a line may be, and results that an earlier run left in any state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.api import batch_file
from twostroke.api.batch_file import BatchRequest, InvalidLine, ResultsFile, count_lines, read_requests
from twostroke.errors import InvalidParameter

URLS = frozenset({"/v1/completions"})


def line(custom_id: Any = "a", **changes: Any) -> bytes:
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}} | changes
    return json.dumps(row).encode() + b"\n"


def read(path: Path, content: bytes) -> list[BatchRequest | InvalidLine]:
    path.write_bytes(content)
    return list(read_requests(path, URLS))


def test_a_request_is_read(tmp_path: Path) -> None:
    found = read(tmp_path / "r", b"\n" + line("a") + b"  \r\n" + line("b")[:-1])
    assert found == [
        BatchRequest(2, "a", "/v1/completions", {"prompt": "x"}),
        BatchRequest(4, "b", "/v1/completions", {"prompt": "x"}),
    ]
    assert count_lines(tmp_path / "r") == 4


@pytest.mark.parametrize(
    ("content", "custom_id", "code", "message"),
    [
        (b"{not json}\n", None, "invalid_json_line", "not valid JSON"),
        (b"[" * 100_000 + b"\n", None, "invalid_json_line", "not a JSON object"),
        (b"\xff\xfe\n", None, "invalid_json_line", "not valid JSON"),
        (b"[1]\n", None, "invalid_json_line", "not a JSON object"),
        (line(None), None, "missing_required_parameter", "1 to 512 characters"),
        (line(""), None, "missing_required_parameter", "1 to 512 characters"),
        (line("i" * 513), None, "missing_required_parameter", "1 to 512 characters"),
        (line(method="GET"), "a", "invalid_request", "it is 'GET'"),
        (line(url="/v1/images"), "a", "invalid_request", "must be one of /v1/completions; it is '/v1/images'"),
        (line(url=["/v1/completions"]), "a", "invalid_request", "url must be"),
        (line(body="x"), "a", "invalid_request", "body must be an object"),
    ],
)
def test_a_line_that_is_no_request_says_why(
    tmp_path: Path, content: bytes, custom_id: str | None, code: str, message: str
) -> None:
    bad, good = read(tmp_path / "r", content + line("good"))
    assert isinstance(bad, InvalidLine)
    assert (bad.line, bad.custom_id, bad.code) == (1, custom_id, code)
    assert message in bad.message
    assert isinstance(good, BatchRequest)


def test_an_id_is_taken_once(tmp_path: Path) -> None:
    first, second = read(tmp_path / "r", line("a") + line("a"))
    assert isinstance(first, BatchRequest)
    assert second == InvalidLine(2, "a", "duplicate_custom_id", second.message)  # type: ignore[union-attr]


def test_a_line_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_file, "MAX_LINE_BYTES", 200)
    monkeypatch.setattr(batch_file, "_BLOCK_BYTES", 64)
    long = line("long", body={"prompt": "x" * 1000})
    found = read(tmp_path / "r", long + line("a") + long[:-1])
    assert [(f.line, f.code if isinstance(f, InvalidLine) else "") for f in found] == [
        (1, "line_too_long"),
        (2, ""),
        (3, "line_too_long"),
    ]


def write_some(path: Path, *custom_ids: str) -> None:
    results = ResultsFile(path)
    for i, custom_id in enumerate(custom_ids):
        results.add_response(BatchRequest(i + 1, custom_id, "", {}), 200, {"text": "\u2028 é"})
    results.add_error(InvalidLine(9, None, "invalid_json_line", "no JSON"))
    results.close()


def test_results_have_openais_form(tmp_path: Path) -> None:
    write_some(tmp_path / "o", "a")
    response, error = [json.loads(row) for row in (tmp_path / "o").read_text().split("\n")[:2]]
    name = response["id"].removeprefix("batch_req_")
    assert response == {
        "id": f"batch_req_{name}",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": f"req_{name}", "body": {"text": "\u2028 é"}},
        "error": None,
    }
    assert error["response"] is None
    assert error["error"] == {"code": "invalid_json_line", "message": "no JSON", "param": None, "line": 9}


@given(cut=st.integers(0, 400))
def test_a_file_cut_anywhere_is_gone_on_with(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "o"
    write_some(path, "a", "b")
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    results = ResultsFile(path)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for custom_id, end in zip("ab", ends, strict=False):
        # a line that lacks nothing but its end is whole
        assert results.has(BatchRequest(1, custom_id, "", {})) == (cut >= end - 1)
    results.add_response(BatchRequest(1, "c", "", {}), 200, {})
    results.close()
    rows = [json.loads(row) for row in path.read_bytes().split(b"\n")[:-1]]
    assert rows[-1]["custom_id"] == "c"
    assert len(rows) == 1 + sum(cut >= end - 1 for end in ends)


def test_bad_lines_are_told_once(tmp_path: Path) -> None:
    write_some(tmp_path / "o")
    results = ResultsFile(tmp_path / "o")
    assert results.has(InvalidLine(9, None, "", ""))
    assert not results.has(InvalidLine(8, None, "", ""))
    results.close()


def test_another_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "o"
    path.write_bytes(line("a"))
    with pytest.raises(InvalidParameter, match="not a batch result: line 1"):
        ResultsFile(path)
    assert path.read_bytes() == line("a")


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    first = ResultsFile(tmp_path / "o")
    with pytest.raises(InvalidParameter, match="another run"):
        ResultsFile(tmp_path / "o")
    first.close()
    ResultsFile(tmp_path / "o").close()


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameter, match=r"requests=.*No such file"):
        list(read_requests(tmp_path / "none", URLS))
    with pytest.raises(InvalidParameter, match=r"requests=.*No such file"):
        count_lines(tmp_path / "none")
    with pytest.raises(InvalidParameter, match=r"output=.*Is a directory"):
        ResultsFile(tmp_path)
