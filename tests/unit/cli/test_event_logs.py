"""Every command that reads an event log or a dump refuses one of another version, and a file of another kind."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pool_log import D, P, PoolLog
from timed_engine import history
from traces import conversations, write_trace
from twostroke.api.view import read_recording
from twostroke.cli import bench, explain
from twostroke.cli.doctor import doctor
from twostroke.cli.explain import explain as explain_request
from twostroke.cli.plan import plan
from twostroke.cli.replay import TraceEngineFlags, replay
from twostroke.cli.view import view
from twostroke.config.cache import CacheConfig
from twostroke.errors import InvalidParameter, UnreadableEvent
from twostroke.event_codec import EVENT_LOG_VERSION, from_json, to_json
from twostroke.measure.from_log import count_prompt_tokens
from twostroke.measure.serve.load import Origin
from twostroke.measure.workload import workload_of_lengths
from twostroke.planner.options import PlanOptions

DOORS: dict[str, Callable[[Path], object]] = {
    "doctor": lambda path: doctor(path),
    "replay": lambda path: replay(path),
    "explain": lambda path: explain_request("1-0", event_log=(path,)),
    "view": lambda path: view(path, port=0),
    "plan --measured": lambda path: plan("embedded", options=PlanOptions(measured=path)),
    "bench summarize": lambda path: bench.summarize(path),
}


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return [to_json(event) for event in history(workload_of_lengths([(8, 4)] * 3))]


def with_version(lines: list[str], version: object) -> str:
    return "".join(json.dumps(json.loads(line) | {"v": version}) + "\n" for line in lines)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("version", [EVENT_LOG_VERSION - 1, EVENT_LOG_VERSION + 1])
def test_a_log_of_another_version_is_refused_by_version(
    door: str, version: int, lines: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(with_version(lines, version))
    with pytest.raises(UnreadableEvent) as refused:
        DOORS[door](path)
    assert f"event log version {version}; this release reads version {EVENT_LOG_VERSION}" in str(refused.value)
    assert "line 1" in str(refused.value)
    assert "Read it with the release that wrote it." in str(refused.value)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "torn",
    [b"half", b"[1]\n", b"null\n", b'{"v":', b"\xff\xfe\n", b'{"v": 1}x\n'],
    ids=["a line in the middle", "a list", "null", "its last line", "no text", "more behind"],
)
def test_a_torn_log_says_what_to_do(door: str, torn: bytes, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = "".join(line + "\n" for line in lines).encode()
    path.write_bytes(whole[:300] + b"\n" + whole if torn == b"half" else torn + b"\n" + whole)
    with pytest.raises(
        UnreadableEvent, match="Give the whole file as --event-log wrote it; fetch a truncated dump"
    ) as refused:
        DOORS[door](path)
    assert "object has no attribute" not in str(refused.value)


def test_a_dump_that_was_cut_off_says_what_to_do(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dump = "".join(line + "\n" for line in lines)
    monkeypatch.setattr(explain.Server, "get", lambda _self, _path: dump[:-10])
    with pytest.raises(UnreadableEvent, match=r"http://there: no event: .* fetch a truncated dump again\."):
        doctor(url="http://there")


@pytest.mark.parametrize("version", [EVENT_LOG_VERSION - 1, EVENT_LOG_VERSION + 1])
def test_the_live_pages_recording_refuses_another_version(version: int, lines: list[str], tmp_path: Path) -> None:
    """This also holds if only a later file has another version."""
    mine, other = tmp_path / "mine.jsonl", tmp_path / "other.jsonl"
    mine.write_text(with_version(lines, EVENT_LOG_VERSION))
    other.write_text(with_version(lines, version))
    with pytest.raises(UnreadableEvent, match=f"other.jsonl, line 1: event log version {version};"):
        read_recording((mine, other))
    assert list(read_recording((mine,)).events())


def test_a_server_of_another_version_is_refused_by_version(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    dump = with_version(lines, EVENT_LOG_VERSION + 1)
    monkeypatch.setattr(explain.Server, "get", lambda _self, _path: dump)
    with pytest.raises(UnreadableEvent, match=f"http://there: event log version {EVENT_LOG_VERSION + 1};"):
        doctor(url="http://there")


@pytest.mark.parametrize("door", [door for door in DOORS if door != "replay"])
def test_a_trace_is_no_event_log(door: str, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "trace.jsonl", conversations(3))
    with pytest.raises(InvalidParameter, match="is a Mooncake trace, not an event log") as refused:
        DOORS[door](path)
    assert f"twostroke replay {path} --model MODEL" in str(refused.value)


NAMES = {"doctor": "event_log", "plan --measured": "measured", "bench summarize": "event_log"}


@pytest.mark.parametrize("door", NAMES)
def test_a_log_without_events_or_steps_is_refused_by_name(
    door: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a longer path is shortened in a message
    path = Path("events.jsonl")
    for kept, words in (([], "holds no event"), (lines[:1], "holds no finished step")):
        path.write_text("".join(f"{line}\n" for line in kept))
        with pytest.raises(InvalidParameter) as refused:
            DOORS[door](path)
        assert str(refused.value).startswith(f"{NAMES[door]}='{path}': {words}. Give the file that --event-log wrote")


def test_the_cost_of_prompts_and_output_alike(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert count_prompt_tokens(map(from_json, lines)) == 3 * 8
    bench.summarize(path, price_per_hour=3600.0)
    words = re.findall(r"[\d,.]+(?= (?:in total|per million))", capsys.readouterr().out)
    total, of_output, alike = (float(word.replace(",", "")) for word in words)
    assert of_output == pytest.approx(total / 12 * 1e6, rel=1e-3)
    assert alike == pytest.approx(total / (12 + 24) * 1e6, rel=1e-3)


@pytest.mark.parametrize("version", [EVENT_LOG_VERSION, EVENT_LOG_VERSION - 1])
def test_an_event_log_is_no_trace(version: int, lines: list[str], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(with_version(lines, version))
    with pytest.raises(InvalidParameter, match=r"it is an event log.*--set KEY=VALUE"):
        replay(path, model="embedded")
    with pytest.raises(InvalidParameter, match="it is an event log"):
        replay(path, engine=TraceEngineFlags(cache=CacheConfig(num_kv_blocks=9)))


def without(lines: list[str], kind: str) -> list[str]:
    return [line for line in lines if json.loads(line)["event"] != kind]


BROKEN: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "no start": (lambda lines: lines[1:], "it lacks the start of the engine before"),
    "only its end": (lambda lines: lines[-12:], "it lacks the start of the engine before"),
    "reversed": (lambda lines: lines[::-1], "it lacks the start of the engine before"),
    "no arrivals": (lambda lines: without(lines, "RequestArrived"), "it lacks the arrival of request "),
    "no decisions": (lambda lines: without(lines, "StepScheduled"), "it lacks step 0 before"),
    "before the clock began": (
        lambda lines: [json.dumps(json.loads(line) | {"time_s": -2.5}) for line in lines],
        "must hold times from 0 s on, where an engine's clock begins; the earliest is -2.500 s",
    ),
    "at one time": (
        lambda lines: [json.dumps(json.loads(line) | {"time_s": 2.5}) for line in lines],
        "must hold steps that took time; all of them are at 2.500 s",
    ),
    "results first": (
        lambda lines: [
            json.dumps(json.loads(line) | ({"time_s": 0.0} if '"StepCommitted"' in line else {})) for line in lines
        ],
        "must hold results after their decisions; that of step 1 is at 0.000 s",
    ),
}


@pytest.mark.parametrize("door", NAMES)
@pytest.mark.parametrize("broken", BROKEN)
def test_a_log_that_lacks_something_is_refused_by_file(
    door: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a longer path is shortened in a message
    path = Path("events.jsonl")
    change, words = BROKEN[broken]
    lines = [to_json(event) for event in history(workload_of_lengths([(8, 4)] * 3))]
    path.write_text("".join(f"{line}\n" for line in change(lines)))
    with pytest.raises(InvalidParameter) as refused:
        DOORS[door](path)
    assert str(refused.value).startswith(f"{NAMES[door]}='events.jsonl': must hold ")
    assert words in str(refused.value)
    assert str(refused.value).endswith("Give a file that --event-log wrote, as it was written.")


def test_an_idle_server_is_called_idle(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explain.Server, "get", lambda _self, _path: f"{lines[0]}\n")
    doctor(url="http://there")
    assert "bound by nothing\n  the engine is idle: no step ended" in capsys.readouterr().out


def test_a_servers_dump_that_lacks_something_is_refused_by_address(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain.Server, "get", lambda _self, _path: "".join(f"{line}\n" for line in lines[1:]))
    with pytest.raises(InvalidParameter, match="url='http://there': must hold every event from the engine's start"):
        doctor(url="http://there")


def test_the_doctor_reads_the_logs_of_two_processes_as_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = PoolLog()
    for i in range(12):
        log.handed_over(f"r#{i}.0", 1.25 * i)
    paths = [tmp_path / f"pool.{process}.events" for process in (D, P)]
    for path, process in zip(paths, (D, P), strict=True):
        lines = [to_json(event) for event in log.events if event.process == process]
        path.write_text("".join(f"{line}\n" for line in lines))
    doctor(*paths)
    printed = capsys.readouterr().out
    assert printed.startswith("12 requests, 36 tokens, 36 steps in 16.5 s, of which steps ran in ")
    assert " in the busiest of 2 processes\n" in printed


def test_the_doctor_says_which_of_several_runs_it_reads(
    lines: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines + lines))
    doctor(path)
    printed = capsys.readouterr().out
    assert printed.startswith("3 requests, 12 tokens, ")
    assert "the log has 2 runs; this is the last one" in printed


@contextmanager
def answering(answer: bytes) -> Generator[str]:
    """Run something that answers every connection with these bytes; yield its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


ASKING: dict[str, Callable[[str], None]] = {
    "doctor": lambda url: doctor(url=url),
    "explain": lambda url: explain_request("x", url=url),
    "explain --json": lambda url: explain_request("x", url=url, json_output=True),
    "explain --trace": lambda url: explain_request("x", url=url, trace=Path("never-written.json")),
}


@pytest.mark.parametrize("door", ASKING)
@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:abc", "http://127.0.0.1:80/a b", "http://a b", "http://[::1", "http://a..b", "http://"]
)
def test_what_is_no_address_is_refused(door: str, url: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        ASKING[door](url)
    assert str(refused.value).startswith(f"url='{url}': ")
    assert str(refused.value).endswith("Give the address that `twostroke serve` printed.")


@pytest.mark.parametrize("door", ASKING)
@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "returns an incomplete or invalid HTTP response (SSH-2.0-OpenSSH_9.6)"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nabc", "returns an incomplete or invalid HTTP response ("),
        (b"HTTP/1.1 500 No\r\ncontent-length: 99\r\n\r\nabc", "the server answers 500: "),
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\n\r\n<html>", "returns a web page; no `twostroke"),
    ],
    ids=["no HTTP", "cut off", "cut off error", "a web page"],
)
def test_a_server_of_another_kind_is_refused(door: str, answer: bytes, told: str) -> None:
    with answering(answer) as url, pytest.raises(InvalidParameter) as refused:
        ASKING[door](url)
    assert str(refused.value).startswith(f"url='{url}': {told}")


@pytest.mark.parametrize("door", ["explain --json", "explain --trace"])
def test_an_answer_that_is_no_json_is_refused(door: str) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello"
    with answering(answer) as url, pytest.raises(InvalidParameter, match="returns a body that is not JSON; no"):
        ASKING[door](url)


@pytest.mark.parametrize("key", ["a\nb", "schlüssel"])
def test_a_key_that_is_no_header_is_refused_by_its_name_and_not_shown(key: str) -> None:
    with pytest.raises(InvalidParameter, match="must be printable ASCII") as refused:
        doctor(url="http://127.0.0.1:9", api_key=key)
    assert refused.value.name == "api_key"
    assert key not in str(refused.value)


def test_the_load_generator_refuses_an_address_that_no_socket_takes() -> None:
    for url in ("http://a..b", f"http://{'x' * 70}.de", "http://127.0.0.1/€", "http://a b"):
        with pytest.raises(InvalidParameter, match=r"^url="):
            Origin.parse(url)
    assert Origin.parse("http://[::1]:80/v1").host == "::1"


@pytest.mark.parametrize("door", [*NAMES, "replay"])
def test_a_file_that_cannot_be_read_is_refused_by_the_commands_own_parameter(door: str, tmp_path: Path) -> None:
    for path in (Path("missing"), tmp_path):
        with pytest.raises(InvalidParameter, match="cannot be read") as refused:
            DOORS[door](path)
        assert str(refused.value).startswith(f"{NAMES.get(door, 'path')}=")
