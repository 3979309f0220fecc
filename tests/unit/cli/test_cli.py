"""The command as people run it: a process, its streams and its exit code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclopts import App

from command_line import twostroke
from timed_engine import history
from traces import conversations, write_trace
from twostroke.cli.flags import EngineFlagsWithoutModel, LoadFromFlagsWithoutModel, check_model_names
from twostroke.cli.generate import generate
from twostroke.cli.main import app
from twostroke.client.output_processor import CompletionStream
from twostroke.config.cache import CacheConfig
from twostroke.engine.event_sinks import JsonlEventLog
from twostroke.errors import InvalidParameter
from twostroke.measure.workload import workload_of_lengths

SMALL = ["--threads", "1", "--kv-cache-memory", str(1 << 24)]


def test_generate_streams_and_ends_with_figures() -> None:
    done = twostroke("generate", "import os\n", "--max-tokens", "5", "--ignore-eos", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("import os\n")
    assert "bytes per token" in done.stderr
    assert "TTFT" in done.stderr
    assert "output 5 tokens (length)" in done.stderr


def test_generate_for_machines(random_models: dict[str, Path]) -> None:
    folder = str(random_models["qwen3"])
    sampling = ["--temperature", "0.9", "--seed", "4", "--n", "2", "--logprobs", "1", "--max-tokens", "6"]
    done = twostroke(
        "generate", folder, "--prompt-file", "/dev/stdin", "--json", "--quiet", *sampling, *SMALL, stdin="hello"
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["prompt"] == "hello"
    assert [len(o["token_ids"]) <= 6 for o in answer["outputs"]] == [True, True]
    assert answer["outputs"][0]["seed"] == 4
    assert answer["metrics"]["ttft_s"] > 0
    assert "times" not in answer


def test_calibrate_for_machines(tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    few = ["--sizes", "1,2", "--most-drafts", "2", "--context-tokens", "16", "--output-tokens", "8", "--prompts", "1"]
    few += ["--max-num-batched-tokens", "32", "--max-num-seqs", "4"]
    done = twostroke(
        "calibrate", "embedded", "--methods", "ngram", *few, "--repeats", "3", "--output", str(output), "--json",
        "--threads", "1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == json.loads(output.read_text(encoding="utf-8"))
    assert [timing["size"] for timing in found["step_s"]] == [1, 2]
    assert [drafter["method"] for drafter in found["drafters"]] == ["ngram"]
    contradiction = twostroke("calibrate", "embedded", "--model", "other", "--output", str(output))
    assert contradiction.returncode == 1
    assert "contradicts MODEL, which is 'embedded'" in contradiction.stderr


def test_generate_in_a_form() -> None:
    wanted = '{"json": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "maxItems": 3}}'
    done = twostroke("generate", "x = ", "--structured-outputs", wanted, "--json", "--quiet", *SMALL)
    assert done.returncode == 0, done.stderr
    (sequence,) = json.loads(done.stdout)["outputs"]
    assert sequence["finish_reason"] == "stop"
    assert set(json.loads(sequence["text"])) <= {"a", "b"}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("[0-9]+", "must be JSON"),
        ('["a"]', "an object with one of its fields"),
        ('{"regex": "a", "choice": ["a"]}', "exactly one of"),
        ('{"regexp": "a"}', "did you mean"),
        ('{"regex": "(?=a)"}', "look-around"),
    ],
)
def test_a_form_that_is_none(wanted: str, words: str) -> None:
    done = twostroke("generate", "x = ", "--structured-outputs", wanted, "--quiet", *SMALL)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_a_prompt_file_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "prompt").write_bytes(b"import os\r\nimport sys\r\r\n")
    done = twostroke("generate", "--prompt-file", str(tmp_path / "prompt"), "--json", "--max-tokens", "1", *SMALL)
    assert json.loads(done.stdout)["prompt"] == "import os\r\nimport sys\r\r\n"


def test_chat_remembers_the_conversation() -> None:
    done = twostroke("chat", "--max-tokens", "8", "--seed", "1", *SMALL, stdin="add two numbers\nand now three\n\n")
    assert done.returncode == 0, done.stderr
    figures = [line for line in done.stderr.splitlines() if line.startswith("prompt ")]
    assert len(figures) == 2
    assert "(0 cached)" in figures[0]


CHAT = ["chat", "--max-tokens", "3", "--max-model-len", "64", *SMALL]
TOO_LONG = "word " * 100
HALF_A_CHARACTER = "\udcff"  # a byte that is no UTF-8, as the pipe below writes it


def test_chat_for_machines() -> None:
    done = twostroke(*CHAT, "--json", "--n", "2", stdin="one\ntwo\n/new\none\n")
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(len(answer["outputs"]), answer["error"]) for answer in answers] == [(2, None)] * 3
    assert answers[0]["outputs"][0]["text"] in answers[1]["prompt"]
    assert answers[2]["prompt"] == answers[0]["prompt"] != answers[1]["prompt"]


@pytest.mark.parametrize("refused", [TOO_LONG, HALF_A_CHARACTER], ids=["too long", "no text"])
def test_a_refused_message_is_no_turn_and_shows_in_the_exit_code(refused: str) -> None:
    strict = ["env", "PYTHONIOENCODING=utf-8:strict"]  # as it is in most locales, but not in that of many tests
    command = [*strict, sys.executable, "-m", "twostroke", *CHAT, "--json", "--quiet"]
    given = f"{refused}\none\n".encode(errors="surrogateescape")
    done = subprocess.run(command, input=given, capture_output=True, timeout=120, check=False)
    assert done.returncode == 1
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert list(first) == ["error"]
    assert first["error"] in done.stderr.decode()
    assert second["error"] is None
    assert "word" not in second["prompt"]


def test_all_messages_refused() -> None:
    done = twostroke(*CHAT, "--quiet", stdin=f"{TOO_LONG}\n{TOO_LONG}\n")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.strip().splitlines()) == 2


def test_who_sees_the_refusal_needs_no_exit_code() -> None:
    terminal, its_end = os.openpty()
    with os.fdopen(terminal, "wb", buffering=0) as keyboard, os.fdopen(its_end, "rb") as stdin:
        keyboard.write(f"{TOO_LONG}\n\n".encode())
        command = [sys.executable, "-m", "twostroke", *CHAT]
        done = subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "the prompt has" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate"], "PROMPT"),
        (["generate", "a", "b", "c"], "PROMPT"),
        (["generate", "--prompt-file", "/no/such/file"], "prompt_file"),
        (["generate", "/no/such/folder", "x"], "no folder"),
        (["generate", "--model", "/no/such/folder", "x"], "no folder"),
        (["generate", "--model", "embedded", "./other", "x"], "--model='embedded'"),
        (["generate", "./other", "x", "--model", "./one"], "'./other'"),
        (["chat", "./other", "--model", "embedded"], "--model='embedded'"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["generate", "x", "--max-model-len", "100000"], "context of 4096"),
        (["generate", "x", "--device", "cuda", "--quiet"], "CUDA"),
        (["generate", "x", "--event-log", "/proc/none/log", "--quiet"], "event_log="),
        (["bench", "summarize", "/no/such/file"], "No such file"),
        (["bench", "offline", "--name", ".."], "name='..'"),
        (["bench", "offline", "--seed", "-1"], "seed=-1"),
        (["bench", "offline", "--price-per-hour", "0"], "price_per_hour=0.0: must be a number above 0"),
        (["bench", "serve", "--price-per-hour", "-1"], "price_per_hour=-1.0: must be a number above 0"),
        (["bench", "summarize", "/no/such/file", "--price-per-hour", "nan"], "price_per_hour=nan"),
        (["bench", "offline", "--trace", "/no/such/file", "--request-rate", "2"], "beside a trace"),
        (["bench", "reproduce", "r2", "--seed", "1"], "of the repository, run: python -m benchmarks reproduce"),
        (["bench", "compare", "--help"], "of the repository, run: python -m benchmarks compare"),
    ],
    ids=str,
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(arguments: list[str], words: str) -> None:
    done = twostroke(*arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_prompt_that_looks_like_a_flag_is_told_where_to_go() -> None:
    done = twostroke("generate", "- one thing\n- ", "--max-tokens", "1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "generate [FLAGS] -- PROMPT" in done.stderr
    assert "-- PROMPT" not in twostroke("chat", "--no-such-flag").stderr
    done = twostroke("generate", "--max-tokens", "1", *SMALL, "--", "- one thing\n- ")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("- one thing\n- ")


SHORT = ["generate", "x", "--max-tokens", "1", *SMALL]


@pytest.mark.parametrize("arguments", [SHORT, [*SHORT, "--json"], ["generate", "--help"]], ids=["text", "json", "help"])
def test_output_that_cannot_be_written(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "twostroke", *arguments]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("twostroke: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    reader, writer = os.pipe()
    os.close(reader)  # as `head` leaves it
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 141
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_closed_streams_are_no_accident() -> None:
    command = [sys.executable, "-m", "twostroke", *SHORT]
    for closed in ("<&- >&-", "<&- >&- 2>&-"):
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr


def test_a_character_without_a_code_is_spelt_out() -> None:
    command = ["env", "PYTHONIOENCODING=ascii", sys.executable, "-m", "twostroke", "generate", "é", "--max-tokens", "1"]
    done = subprocess.run([*command, *SMALL], capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(rb"\xe9")


def test_help_loads_nothing_heavy() -> None:
    code = "import atexit, sys\nfrom twostroke.cli.main import main\n"
    code += "atexit.register(lambda: print('torch' in sys.modules))\n"
    code += "sys.argv = ['twostroke', 'generate', '--help-all']\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip().endswith("False"), done.stdout[-300:] + done.stderr[-300:]
    assert "--temperature" in done.stdout
    assert "--block-size" in done.stdout
    assert "--logit-bias ID:BIAS,..." in done.stdout


def test_a_stream_copies_no_more_than_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def copy(_: CompletionStream) -> None:
        raise AssertionError("everything so far was copied")

    monkeypatch.setattr(CompletionStream, "so_far", copy)
    load = LoadFromFlagsWithoutModel(threads=1)
    engine = EngineFlagsWithoutModel(load=load, cache=CacheConfig(kv_cache_memory=1 << 24))
    generate("import os\n", engine_flags=engine, quiet=True)
    assert len(capsys.readouterr().out) > len("import os\n")


SLOWER = "using torch's own operators, which are slower"
WITHOUT_NATIVE = """
import sys
sys.modules["twostroke.kernels.native._native"] = None  # as where it was not built
from twostroke.cli.main import main
main()
"""


def without_native(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_NATIVE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


ONE_TOKEN = ("generate", "import os", "--max-tokens", "1", *SMALL)


def test_one_line_says_that_the_native_kernels_are_missing() -> None:
    done = without_native(*ONE_TOKEN)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "not built" in line] == [
        "the native kernels were not built (no C++20 compiler when the package was installed); " + SLOWER
    ]
    done = without_native(*ONE_TOKEN, "--json", "--quiet")
    assert json.loads(done.stdout)["prompt"] == "import os"
    assert done.stderr.count(SLOWER) == 1


def test_who_asked_for_the_reference_is_told_nothing() -> None:
    done = without_native(*ONE_TOKEN, "--kernels", "reference")
    assert done.returncode == 0, done.stderr
    assert SLOWER not in done.stderr


def test_one_line_says_that_the_native_kernels_lack_a_type() -> None:
    done = twostroke(*ONE_TOKEN, "--dtype", "float16")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(SLOWER) == 1
    assert SLOWER not in twostroke(*ONE_TOKEN, "--dtype", "float16", "--kernels", "reference").stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a run in simulated time, so that its back-test holds on every machine."""
    log = tmp_path_factory.mktemp("recorded") / "events.jsonl"
    with JsonlEventLog(log) as file:
        for event in history(workload_of_lengths([(8 + 4 * i, 8) for i in range(12)])):
            file.append(event)
    return log


def test_replay_decides_again_and_asks_what_if(recorded: Path) -> None:
    done = twostroke("replay", str(recorded), "--set", "max_num_batched_tokens=32", "--set", "max-num-seqs=2")
    assert done.returncode == 0, done.stderr
    assert "steps come out the same, block by block" in done.stdout
    assert "what if A: max_num_batched_tokens=32 max_num_seqs=2" in done.stdout
    told = json.loads(twostroke("replay", str(recorded), "--set", "max_num_seqs=1", "--json").stdout)
    assert told["decides_alike"] is True
    assert told["what_if"][0]["settings"] == {"max_num_seqs": 1}
    assert told["what_if"][0]["num_steps"] > told["measured"]["num_steps"]
    assert told["back_test"]["error"]["num_steps"] == 0


def test_replay_draws_a_picture(recorded: Path, tmp_path: Path) -> None:
    png = tmp_path / "replay.png"
    twostroke("replay", str(recorded), "--set", "max_num_seqs=2", "--png", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_replay_knows_a_trace_by_its_content(tmp_path: Path) -> None:
    path = write_trace(tmp_path / "events.log", conversations(40))
    sizes = ["--trace-divisor", "64", "--block-size", "8", "--device-name", "l4"]
    done = twostroke("replay", str(path), "--model", "embedded", *sizes, "--set", "request_rate_factor=4")
    assert done.returncode == 0, done.stderr
    assert "events.log: 40 requests" in done.stdout
    told = json.loads(twostroke("replay", str(path), *sizes, "--num-kv-blocks", "200", "--json").stdout)
    assert (told["num_requests"], told["num_kv_blocks"], told["machine"]) == (40, 200, "L4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{log}", "--model", "embedded"], "it is an event log"),
        (["{log}", "--num-kv-blocks", "9"], "must be a Mooncake trace"),
        (["{trace}", "--device-name", "H1000"], "Known: T4, A10"),
        (["{trace}", "--device-name", "L4", "--trace-divisor", "64"], "block_size=16: must divide 512 / 64 = 8"),
        (["{trace}", "--device-name", "L4", "--trace-divisor", "7"], "trace_divisor=7: must divide 512"),
        (["{trace}", "--device-name", "L4", "--trace-divisor", "0"], "trace_divisor=0"),
        (["{trace}", "--device-name", "L4", "--model", "{trace}.gone"], "{trace}.gone"),
        (["{cut}", "--device-name", "L4"], "line 3: "),
        (["{empty}", "--device-name", "L4"], "it contains no request"),
        (["{empty}"], "path='"),
        (["{binary}", "--device-name", "L4"], "no UTF-8 text"),
        (["{binary}"], "it is not UTF-8"),
        (["{folder}", "--device-name", "L4"], "cannot be read"),
        (["{folder}"], "cannot be read"),
    ],
)
def test_replay_refuses_what_is_no_trace(recorded: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    trace, cut, empty, binary = (tmp_path / name for name in ("trace", "cut", "empty", "binary"))
    write_trace(trace, conversations(3))
    cut.write_text(trace.read_text()[:-20])
    empty.write_text("")
    binary.write_bytes(bytes(range(256)) * 9)
    files = {"log": recorded, "trace": trace, "cut": cut, "empty": empty, "binary": binary, "folder": tmp_path}
    done = twostroke("replay", *(a.format(**files) for a in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert message.format(**files) in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_reads_a_log(recorded: Path) -> None:
    done = twostroke("doctor", str(recorded))
    assert done.returncode == 0, done.stderr
    assert "bound by" in done.stdout
    told = json.loads(twostroke("doctor", str(recorded), "--json").stdout)
    assert told["signals"]["num_requests"] == 12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["replay", "{log}", "--set", "threads=3"], "names a setting that cannot be simulated"),
        (["replay", "{log}", "--set", "max_num_seqs=none"], "max_num_seqs"),
        (["replay", "{log}.gone"], "cannot be read"),
        (["replay", "{holes}"], "it lacks step"),
        (["doctor"], "no run is given: use twostroke doctor FILE"),
        (["doctor", "{log}", "--url", "http://127.0.0.1:1"], "are two runs"),
    ],
)
def test_replay_and_doctor_refuse(recorded: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    lines = recorded.read_text().splitlines(keepends=True)
    holes = tmp_path / "holes.jsonl"
    scheduled = [i for i, line in enumerate(lines) if '"StepScheduled"' in line]
    holes.write_text("".join(line for i, line in enumerate(lines) if i != scheduled[3]))
    done = twostroke(*(a.format(log=recorded, holes=holes) for a in arguments))
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_explain_a_request_of_an_event_log(tmp_path: Path) -> None:
    log, trace = tmp_path / "events.jsonl", tmp_path / "trace.json"
    done = twostroke("generate", "x", "--max-tokens", "4", "--ignore-eos", "--quiet", "--event-log", str(log), *SMALL)
    assert done.returncode == 0, done.stderr
    table = twostroke("explain", "request-0", "--event-log", str(log), "--trace", str(trace))
    assert table.returncode == 0, table.stderr
    assert table.stdout.startswith("request-0: ended: length, ")
    assert "decode" in table.stdout
    assert json.loads(trace.read_text())["traceEvents"]
    told = twostroke("explain", "request-0", "--event-log", str(log), "--json")
    (lane,) = json.loads(told.stdout)["lanes"]
    assert sum(segment["duration_ms"] for segment in lane["segments"]) == pytest.approx(lane["e2e_ms"])
    assert lane["num_output_tokens"] == 4
    refused = twostroke("explain", "nobody", "--event-log", str(log))
    assert refused.returncode == 1
    assert "request_id='nobody': is in none of these events" in refused.stderr
    refused = twostroke("explain", "request-0", "--event-log", str(log), "--trace", str(tmp_path))
    assert (refused.returncode, "trace=" in refused.stderr) == (1, True)


def commands(parent: App) -> Iterator[App]:
    for name in parent:
        if not name.startswith("-"):
            yield parent[name]
            yield from commands(parent[name])


def test_one_flag_leaves_the_defaults_of_the_others() -> None:
    """The parser makes a config anew from the given flags: a default that differs from its class's own is forgotten."""

    def groups_of(default: object) -> Iterator[object]:
        """Yield a group of flags and the groups within it."""
        if dataclasses.is_dataclass(default):
            yield default
            for field in dataclasses.fields(default):
                yield from groups_of(getattr(default, field.name))

    groups = 0
    for command in commands(app):
        if command.default_command is None:
            continue
        for parameter in inspect.signature(command.default_command).parameters.values():
            for group in groups_of(parameter.default):
                assert group == type(group)(), f"{command.name} {parameter.name}"
                groups += 1
    assert groups > 20
    _, given, _ = app.parse_args(["serve", "--max-num-seqs", "3"], exit_on_error=False)
    assert given.arguments["engine"].scheduler.policy == "fair"


def test_several_names_of_the_model_behind_one_flag() -> None:
    def names(*words: str) -> object:
        _, given, _ = app.parse_args(["serve", *words], exit_on_error=False)
        return given.arguments["server"].served_model_name, given.arguments.get("model")

    assert names("M", "--served-model-name", "a", "b", "--port", "0") == (("a", "b"), "M")
    assert names("M", "--served-model-name", "a", "--served-model-name", "b") == (("a", "b"), "M")
    assert names("M", "--served-model-name=a") == (("a",), "M")
    assert names("--served-model-name", "a", "b", "c", "--model", "M") == (("a", "b", "c"), None)
    batch = ["run-batch", "in.jsonl", "--served-model-name", "a", "b", "-o", "out.jsonl"]
    _, given, _ = app.parse_args(batch, exit_on_error=False)
    assert given.arguments["answers"].served_model_name == ("a", "b")


def test_a_model_that_is_taken_for_a_name_is_not_left_out(tmp_path: Path) -> None:
    for model in ("org/model", "model.gguf", str(tmp_path)):
        with pytest.raises(InvalidParameter, match="Name the model first"):
            check_model_names(("name", model))
    check_model_names(("org/one",))
    check_model_names(("one", "two"))
