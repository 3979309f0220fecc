"""Commands that new users type with the habits of Ollama, llama.cpp and vLLM: they work, or the error helps."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from command_line import twostroke
from gguf_files import fixture
from twostroke.cli.main import app
from twostroke.cli.other_programs import parser_words

SMALL = ("--threads", "1", "--kv-cache-memory", "16MiB")
CLASS_NAMES = re.compile(
    r"\b(NoneType|dict|tuple|frozenset|CoercionError|[A-Z][a-z]\w*(Error|Exception|Config|Parameter|NotFound|Checkpoint)"
    r"|PosixPath|urlopen|Errno"
    r"|DoesNotFit|InvalidPrompt|UnsupportedModel|ClientError)\b|<class|Traceback|into (int|float|bool|str)\b"
)


def refused(*arguments: str, stdin: str = "") -> str:
    """Run a command that cannot be done; return the one line that says why."""
    done = twostroke(*arguments, stdin=stdin)
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("twostroke: ")
    assert not CLASS_NAMES.search(line), line
    assert len(line) < 600, line
    return line.removeprefix("twostroke: ")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["run", "llama3.2"], "`twostroke chat MODEL` talks to a model"),
        (["run", "llama3.2", "why is the sky blue?"], "`twostroke generate MODEL PROMPT`"),
        (["pull", "llama3.2"], "is fetched when it is first used"),
        (["list"], "`hf cache ls`"),
        (["ls"], "`hf cache ls`"),
        (["ps"], "`twostroke serve MODEL`"),
        (["rm", "x"], "others are where you put them"),
        (["show", "x"], "`twostroke plan MODEL`"),
        (["create", "mine", "-f", "Modelfile"], "--system"),
        (["llama-server", "-m", "x.gguf"], "`twostroke serve MODEL`"),
        (["complete", "--url", "x"], "`twostroke generate MODEL PROMPT`"),
        (["install", "llama3.2"], "is fetched when it is first used"),
        (["search", "qwen"], "`twostroke models` lists"),
        (["login"], "`hf auth login`"),
        (["update"], "`pip install --upgrade twostroke`"),
        (["launch", "x", "--port", "1"], "`twostroke serve MODEL`"),
        (["launch_server", "--model-path", "x"], "`twostroke serve MODEL`"),
        (["up"], "`twostroke serve MODEL`"),
        (["load", "x"], "until it is stopped with Ctrl-C"),
        (["web"], "shows a page to try it"),
        (["embed", "x", "text"], "POST /v1/embeddings"),
        (["tokenize", "a text"], "POST /tokenize"),
        (["ask", "why?"], "`twostroke generate MODEL PROMPT`"),
        (["info", "x"], "`twostroke plan MODEL`"),
        (["eval", "x"], "`twostroke bench quality`"),
        (["benchmark"], "`twostroke bench` lists"),
        (["./model.gguf"], "put a command before the model: twostroke chat ./model.gguf"),
        (["Qwen/Qwen3-0.6B"], "put a command before the model"),
        (["genrate", "x"], 'Did you mean "generate"?'),
    ],
    ids=" ".join,
)
def test_commands_of_others(command: list[str], words: str) -> None:
    assert words in refused(*command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", "x.gguf", "-p", "hello"], "-m. In twostroke it is --model"),
        (["x", "-p", "hello"], "twostroke generate MODEL PROMPT"),
        (["x", "-n", "20"], "-n. In twostroke it is --max-tokens"),
        (["x", "--n-predict", "20"], "--n-predict. In twostroke it is --max-tokens"),
        (["x", "--num-predict=20"], "it is --max-tokens"),
        (["x", "-c", "4096"], "-c. In twostroke it is --max-model-len"),
        (["x", "--ctx-size", "4096"], "it is --max-model-len"),
        (["x", "--temp", "0"], "--temp. In twostroke it is --temperature"),
        (["x", "-ngl", "99"], "-ngl. In twostroke it is --device cuda"),
        (["x", "-hf", "owner/name"], "the hub id itself"),
        (["x", "--repeat-penalty", "1.1"], "it is --repetition-penalty"),
        (["x", "-np", "4"], "it is --max-num-seqs"),
        (["x", "-f", "prompt.txt"], "it is --prompt-file"),
        (["x", "--trust-remote-code"], "no code of a model is ever run"),
        (["x", "--swap-space", "4"], "it is --kv-offloading-size"),
        (["x", "--max-new-tokens", "4"], "it is --max-tokens"),
        (["--model-path", "x"], "--model-path. In twostroke it is --model"),
        (["x", "--tp", "2"], "it is --tensor-parallel-size"),
        (["x", "--tp-size=2"], "--tp-size. In twostroke it is --tensor-parallel-size"),
        (["x", "--mem-fraction-static", "0.8"], "it is --gpu-memory-utilization"),
        (["x", "--max-running-requests", "8"], "it is --max-num-seqs"),
        (["x", "--max-total-tokens", "8"], "it is --max-model-len"),
        (["x", "--chunked-prefill-size", "8"], "it is --max-num-batched-tokens"),
        (["x", "--quantize", "awq"], "it is --quantization"),
        (["x", "--max-token", "4"], "Did you mean --max-tokens?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_of_others(arguments: list[str], words: str) -> None:
    assert words in refused("generate", *arguments)


LONG = "x" * 300
CHINESE = "请用三句话介绍一下北京的历史文化和美食" * 9


@pytest.mark.parametrize(
    "command",
    [
        ("generate", LONG, "hi"),
        ("generate", "./" + LONG, "hi"),
        ("generate", LONG + ".gguf", "hi"),
        ("generate", CHINESE, "hi"),
        ("generate", "x/" * 3000, "hi"),
        ("chat", LONG),
        ("serve", LONG, "--port", "0"),
        ("serve", "embedded", "--tokenizer", LONG, "--port", "0"),
        ("plan", LONG),
        ("calibrate", LONG),
        ("quantize", LONG, "--quantization", "int8", "--out", "out"),
        ("run-batch", "requests.jsonl", "-o", "out.jsonl", "--model", LONG),
    ],
    ids=lambda command: " ".join(command)[:30],
)
def test_a_name_that_no_file_can_have_is_no_model(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = '{"custom_id":"1","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}\n'
    Path("requests.jsonl").write_text(request)
    assert "cannot be looked up (File name too long)" in refused(*command)


def test_the_home_of_nobody_is_no_model() -> None:
    assert "cannot be looked up" in refused("generate", "~nobody-has-this-name/model", "hi")


def test_a_prompt_without_spaces_may_be_long() -> None:
    """Chinese has none, and a file's name may have 255 bytes."""
    assert "temperature=nan" in refused("generate", CHINESE, "--temperature", "nan")
    assert "Unknown command" in refused(LONG)


@pytest.mark.parametrize("flag", ["-i", "--input-file"])
def test_a_batch_as_in_vllm(flag: str) -> None:
    told = refused("run-batch", flag, "in.jsonl", "-o", "out.jsonl", "--model", "embedded")
    assert "it is the file of requests itself: twostroke run-batch REQUESTS --output RESULTS" in told


def test_a_host_of_another_machine_is_told_by_its_flag() -> None:
    """An address of TEST-NET-1 (RFC 5737), which no machine has."""
    told = refused("serve", "embedded", "--host", "192.0.2.1", "--port", "0")
    assert told.endswith("Use an address of this machine as --host."), told


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "x", "--max-tokens", "ten"],
        ["generate", "x", "--max-tokens", "1.5"],
        ["generate", "x", "--max-tokens", "9" * 5000],
        ["generate", "x", "--max-tokens", ""],
        ["generate", "x", "--seed", "0x10"],
        ["generate", "x", "--top-p", "90%"],
        ["generate", "x", "--top-k", "½"],
        ["generate", "x", "--temperature", "0,7"],
        ["generate", "x", "--temperature", "nan"],
        ["generate", "x", "--kv-cache-memory", "9" * 5000],
        ["generate", "x", "--kv-cache-memory", "1GB1MB"],
        ["generate", "x", "--max-model-len", "∞"],
        ["serve", "embedded", "--port", "8000:8000"],
        ["serve", "embedded", "--host", "http://localhost"],
        ["serve", "embedded", "--ssl-certfile", "/no/such/file"],
        ["serve", "embedded", "--api-key-file", "/no/such/file"],
        ["serve", "embedded", "--decode"],
        ["serve", "embedded", "--served-model-name", ""],
        ["generate", "x", "--temperature", "warm"],
        ["generate", "x", "--dtype", "half"],
        ["generate", "x", "--max-tokens"],
        ["generate", "x", "--enable-prefix-caching=maybe"],
        ["generate", "x", "--kv-cache-memory", "1XB"],
        ["generate", "x", "--kv-cache-memory", "half"],
        ["generate", "x", "--kv-cache-memory", "-1GB"],
        ["generate", "x", "--logit-bias", "a"],
        ["generate", "x", "--structured-outputs", "[1"],
        ["generate", "x", "--structured-outputs", '{"regexp": "a"}'],
        ["generate", "x", "--speculative-config", "5"],
        ["chat", "embedded", "hello", "there"],
        ["chat", "embedded", "--no-such-flag"],
        ["chat", "embedded", "-"],
        ["serve", "embedded", "--port", "http"],
        ["serve", "embedded", "--port", "99999"],
        ["serve", "embedded", "--max-body-bytes", "1"],
        ["serve", "embedded", "--prefill-config", "[]"],
        ["serve", "embedded", "--itl-slo", "soon"],
        ["serve", "/no/such/model", "--tool-call-parser", "hermess"],
        ["run-batch", "/no/such/file", "--output", "/no/such/folder/out"],
        ["run-batch", "/no/such/file"],
        ["plan", "embedded", "--memory", "much"],
        ["plan", "owner"],
        ["plan", "embedded", "--link-bytes-per-s", "fast"],
        ["plan", "embedded", "--png", "/dev/null/x.png"],
        ["serve", "embedded", "--answer-timeout-s", "-5ms"],
        ["doctor"],
        ["doctor", "a.events", "--url", "http://127.0.0.1:1"],
        ["doctor", "--url", "http://127.0.0.1:1"],
        ["doctor", "--url", "ftp://127.0.0.1:1"],
        ["bench", "quality", "--model", "embedded", "--text", "/no/such/text"],
        ["serve", "embedded", "--chat-template", "/no/such/template"],
        ["train-medusa", "embedded", "--data", "/"],
        ["explain", "x"],
        ["explain", "x", "--event-log", "a.events", "--url", "http://127.0.0.1:1"],
        ["bench", "nothing"],
        ["quantize", "embedded"],
        ["quantize", "embedded", "out", "--quantization", "int3"],
    ],
    ids=lambda arguments: " ".join(arguments)[:80],
)
def test_no_message_names_a_class_of_python(arguments: list[str]) -> None:
    refused(*arguments)


@pytest.mark.parametrize(
    "model",
    [
        "Qwen/Qwen3-0.6B",
        "./Qwen3-0.6B",
        "/models/x",
        "x.gguf",
        "x.safetensors",
        "llama3.2:1b",
        "embedded",
        "Qwen3-0.6B",
        "https://huggingface.co/Qwen/Qwen3-0.6B",
        "hf.co/bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
        "Qwen/Qwen3-0.6B:free",
        "models/qwen/small/",
        "mistral",
    ],
)
def test_a_model_without_a_prompt_is_not_completed_by_another(model: str) -> None:
    line = refused("generate", model)
    assert f"there is no PROMPT after the model {model!r}" in line
    assert "with - as PROMPT to read it from stdin" in line
    assert f"twostroke generate embedded {model}" in line, "and how it is completed if it was meant so"


def test_prompts_that_are_missing(tmp_path: Path, random_models: dict[str, Path]) -> None:
    assert "after the model" in refused("generate", str(random_models["llama"]))
    assert "after the model" in refused("generate", str(fixture("llama-q4_0")))
    file = tmp_path / "prompt.txt"
    file.write_text("x = 1")
    assert f"twostroke generate --prompt-file {file}" in refused("generate", str(file))
    assert "the PROMPT is empty" in refused("generate", "")
    assert "the PROMPT is empty" in refused("generate", "-")
    assert "the PROMPT is empty" in refused("generate", "embedded", "-", stdin="")
    assert "too many words ('embedded' 'tell' 'me')" in refused("generate", "embedded", "tell", "me")
    assert "is not UTF-8 text (byte 1)" in refused("generate", "--prompt-file", str(binary(tmp_path)))


def binary(folder: Path) -> Path:
    path = folder / "binary"
    path.write_bytes(b"a\xff")
    return path


@pytest.mark.parametrize(
    "words",
    [
        ["-"],
        ["embedded", "-"],
        ["-", "--model", "embedded"],
        ["--prompt-file", "-"],
        ["embedded", "--prompt-file", "-"],
    ],
    ids=" ".join,
)
def test_the_prompt_comes_from_stdin(words: Sequence[str]) -> None:
    done = twostroke("generate", *words, "--json", "--max-tokens", "1", *SMALL, stdin="import os\n# é\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == "import os\n# é\n"


def test_a_dash_behind_the_end_of_flags_is_a_prompt() -> None:
    done = twostroke("generate", "--json", "--max-tokens", "1", *SMALL, "--", "-", stdin="not this")
    assert json.loads(done.stdout)["prompt"] == "-"


def test_whoever_names_no_model_is_told_which_one_answers() -> None:
    done = twostroke("generate", "x = 1", "--max-tokens", "1", *SMALL)
    assert "note     no model was named; the embedded model" in done.stderr
    assert "no model was named" not in twostroke("generate", "embedded", "x = 1", "--max-tokens", "1", *SMALL).stderr


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_note_about_the_settings_is_said_once(command: str) -> None:
    words = ["x = 1"] if command == "generate" else []
    done = twostroke(command, "embedded", *words, "--max-tokens", "1", "--kv-cache-dtype", "int4", *SMALL, stdin="a\n")
    assert done.stderr.count("kv_cache_dtype=int4: one scale") == 1
    assert "kv cache int4" in done.stderr


@pytest.mark.parametrize("size", ["16MiB", "16M", "16777216", "16384KiB", "16_777_216"])
def test_sizes_are_read_as_people_write_them(size: str) -> None:
    done = twostroke("plan", "embedded", "--memory", "1GB", "--kv-cache-memory", size, "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["memory_bytes"] == 10**9
    assert 0 <= 16 * 2**20 - plan["kv_bytes"] < plan["kv_bytes_per_block"]


@pytest.mark.parametrize("command", [["plan"], ["bench", "offline"], ["serve"]], ids=" ".join)
def test_what_is_no_size_is_told_what_is(command: list[str]) -> None:
    assert "kv_cache_memory='1XB': must be a number of bytes" in refused(*command, "--kv-cache-memory", "1XB")


def test_rates_and_times_are_read_as_people_write_them() -> None:
    given = ["--link-bytes-per-s", "10GB/s", "--search", "--request-rate", "1", "--ttft-target-s", "200ms"]
    _, bound, _ = app.parse_args(["plan", *given, "--tpot-target-s", "0.05"], exit_on_error=False, print_error=False)
    search = bound.arguments["search"]
    assert (search.ttft_target_s, search.tpot_target_s) == (0.2, 0.05)
    assert bound.arguments["options"].link_bytes_per_s == 1e10


def test_a_device_that_there_is_not_is_told_by_its_flag() -> None:
    assert "compare='nosuch': is no device" in refused("plan", "--compare", "nosuch")


def test_a_plan_shows_every_byte_in_80_columns() -> None:
    done = twostroke("plan", "embedded", "--memory", "24GB")
    assert done.returncode == 0, done.stderr
    assert "…" not in done.stdout
    assert re.search(r"^KV cache +2,415,919,104 +32,768 blocks of 16 tokens", done.stdout, re.MULTILINE)
    assert "\nKV cache: twice what 64 requests of 4,096 tokens can use" in done.stdout


@pytest.mark.parametrize("command", [["plan", "embedded"], ["replay", "run.events"]])
@pytest.mark.parametrize("name", ["x.foo", "plan.svg", "plan", "plan.png.jpg"])
def test_a_picture_is_a_png_and_named_so(
    command: list[str], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = twostroke(*command, "--png", name)
    assert done.returncode == 1
    assert f"png='{name}': must end in .png: only PNG files can be written. Name it " in done.stderr
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("flag", "value", "kind"),
    [
        ("--kv-cache-memory", "-1GB", "a number of bytes"),
        ("--max-model-len", "-1k", "a whole number"),
        ("--max-tokens", "-1.5", "a whole number"),
    ],
)
def test_a_number_below_0_is_a_value_and_no_flag(flag: str, value: str, kind: str) -> None:
    name = flag.removeprefix("--").replace("-", "_")
    assert f"{name}='{value}': must be {kind}" in refused("generate", "embedded", "x", flag, value)


@pytest.mark.parametrize("flags", [("--max-num-seqs", "64"), ("--max-num-seqs=64",)], ids=" ".join)
def test_a_flag_beside_a_preset_wins_where_it_says_the_default(flags: Sequence[str]) -> None:
    _, bound, _ = app.parse_args(["serve", *flags, "--preset", "batch"], exit_on_error=False, print_error=False)
    chosen = bound.arguments["engine"].scheduler
    assert (chosen.max_num_seqs, chosen.max_num_batched_tokens) == (64, 2048), "64 is the default, and was asked for"


def test_help_says_all_that_a_preset_sets() -> None:
    _, bound, _ = app.parse_args(["serve", "--preset", "interactive"], exit_on_error=False, print_error=False)
    chosen = bound.arguments["engine"].scheduler
    assert (chosen.itl_slo_s, chosen.ttft_slo_s) == (0.1, 0.3)
    for command in ("serve", "run-batch"):
        told = " ".join(twostroke(command, "--help").stdout.replace("│", " ").split())
        assert "interactive: --itl-slo 100ms --ttft-slo 300ms." in told


def test_a_context_is_read_in_thousands() -> None:
    given = json.loads(twostroke("plan", "embedded", "--max-model-len", "1k", "--json").stdout)
    assert given["max_model_len"] == 1000


def test_start_line_plan_and_log_have_the_same_kv_memory(tmp_path: Path) -> None:
    sizes = ("--threads", "1", "--max-num-seqs", "3", "--max-model-len", "100")
    log = tmp_path / "events.jsonl"
    done = twostroke("generate", "embedded", "x", "--max-tokens", "1", *sizes, "--event-log", str(log))
    assert done.returncode == 0, done.stderr
    words = "twice what 3 requests of 100 tokens can use; the second half holds cached prefixes"
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("kv cache")]
    assert "42 blocks of 16 tokens" in line
    assert line.endswith(f"({words})")
    plan = json.loads(twostroke("plan", "embedded", *sizes, "--json").stdout)
    assert (plan["num_blocks"], plan["kv_limit"]) == (42, words)
    assert json.loads(log.read_text().splitlines()[0])["num_blocks"] == 42
    compared = twostroke("plan", "embedded", *sizes, "--measured", str(log), "--json")
    assert json.loads(compared.stdout)["measured"]["sizes"]["num_blocks"] == {"planned": 42, "measured": 42, "error": 0}


def test_the_model_files_that_one_has_at_hand(random_models: dict[str, Path], tmp_path: Path) -> None:
    folder = random_models["llama"]
    line = refused("generate", str(folder / "model.safetensors"), "x")
    assert line == f"{folder / 'model.safetensors'} is one file of a model. Give its folder: {folder}."
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(fixture("llama-q4_0").read_bytes())
    line = refused("generate", str(tmp_path), "x")
    assert line == f"{tmp_path} holds 2 GGUF files; give one of them: {tmp_path / 'a.gguf'}, {tmp_path / 'b.gguf'}."
    (tmp_path / "b.gguf").unlink()
    done = twostroke("generate", str(tmp_path), "x", "--max-tokens", "1", "--json", *SMALL)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("flag", ["--tool-call-parser", "--reasoning-parser"])
@pytest.mark.parametrize("command", [["serve"], ["run-batch", "requests", "--output", "results"]], ids=" ".join)
def test_a_parser_that_there_is_not_is_refused_before_the_model_is_looked_for(command: list[str], flag: str) -> None:
    model = ["/no/such/model"] if command == ["serve"] else ["--model", "/no/such/model"]
    line = refused(*command[:1], *command[1:], *model, flag, "nobodys")
    assert f"{flag.removeprefix('--').replace('-', '_')}='nobodys': must be one of deepseek" in line


CHAT = ("chat", "--max-tokens", "3", "--max-model-len", "64", *SMALL)


def answers(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """Return what a chat printed with --json, an object for each message."""
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("end", ["/bye", "/exit", "/quit", "/q", ""])
def test_a_chat_ends_when_it_is_told_to(end: str) -> None:
    done = twostroke(*CHAT, "--quiet", stdin=f"{end}\nnobody hears this\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_chat_says_what_can_be_typed_and_how_long_answers_are() -> None:
    done = twostroke(*CHAT, stdin="/help\n/?\n/bye\n")
    assert done.returncode == 0
    assert "answers  at most 3 tokens each (--max-tokens); /help lists" in done.stderr
    assert done.stderr.count("/set NAME VALUE") == 2
    assert done.stdout == ""


def test_the_limit_of_answers_can_be_set() -> None:
    said = "one\n/set max_tokens 2\none\n/set parameter num_predict 1\none\n/set temperature 0\n"
    done = twostroke(*CHAT, "--ignore-eos", "--json", stdin=said)
    assert done.returncode == 0, done.stderr
    assert [len(answer["outputs"][0]["token_ids"]) for answer in answers(done)] == [3, 2, 1]
    assert "answers  at most 2 tokens each" in done.stderr
    cut = twostroke(*CHAT, "--ignore-eos", stdin="one\n").stderr
    assert "cut off: at most 3 tokens each (--max-tokens); /set max_tokens 1000 allows more" in cut


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/save mine", "there is no command /save; /help lists"),
        ("/set", "/set takes a name and a value"),
        ("/set system you are a pirate", "/set takes a name and a value"),
        ("/set verbosity 3", "/set cannot change 'verbosity'; it can change"),
        ("/set max_tokens many", "max_tokens='many': must be a number, true, false or null"),
        ("/set max_tokens 0", "max_tokens=0: must be"),
        ("/set bad_words x", "/set cannot change 'bad_words'"),
        (f"/set seed {'[' * 100_000}", "must be a number, true, false or null"),
        ("/set temperature -1", "temperature=-1"),
    ],
)
def test_a_command_that_cannot_be_done_is_no_message(line: str, words: str) -> None:
    done = twostroke(*CHAT, "--quiet", "--json", stdin=f"{line}\none\n")
    refusal, answer = answers(done)
    assert (done.returncode, list(refusal)) == (1, ["error"])
    assert words in refusal["error"]
    assert line not in answer["prompt"]
    assert not CLASS_NAMES.search(done.stderr)


@pytest.mark.parametrize("message", ["/etc/hosts is what?", " /bye", "// a comment", "bye", "a /help"])
def test_a_message_that_only_looks_like_a_command_is_one(message: str) -> None:
    (answer,) = answers(twostroke(*CHAT, "--quiet", "--json", stdin=f"{message}\n"))
    assert message.strip() in answer["prompt"]


def test_a_conversation_is_forgotten_as_in_other_programs() -> None:
    done = twostroke(*CHAT, "--quiet", "--json", stdin="one\n/clear\ntwo\n")
    _, second = answers(done)
    assert "one" not in second["prompt"]


def test_help_and_version_by_any_name() -> None:
    assert twostroke("version").stdout == twostroke("--version").stdout != ""
    assert twostroke("help", "chat").stdout == twostroke("chat", "--help").stdout != ""
    assert "run-batch" in twostroke("help").stdout
    assert twostroke("bench", "offline", "help").stdout == twostroke("bench", "offline", "--help").stdout != ""


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan", "doctor", "bench", "models", "run-batch"])
def test_help_behind_a_command_is_its_help_and_not_a_model(command: str, tmp_path: Path) -> None:
    assert parser_words([command, "help"]) == [command, "--help"]
    (tmp_path / "help").write_text("a file of this name")
    with contextlib.chdir(tmp_path):
        assert parser_words([command, "help"]) == [command, "help"]
    rest = ["offline", "--model", "help"] if command == "bench" else ["embedded", "help"]
    assert parser_words([command, *rest]) == [command, *rest], "another word is before it: a prompt, for example"


CTRL_C = "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""Heard, although a shell may run the tests in the background, where it is ignored."""
MAIN = "from twostroke.cli.main import main\nmain()\n"
INTERRUPTED_IMPORT = """
class Interrupt:
    def find_spec(self, name, *more):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


def program(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", source, *arguments]


def ended(source: str, *arguments: str) -> tuple[int, str, str]:
    """Run a program to its end; return its exit code, its output and its errors."""
    done = subprocess.run(program(source, *arguments), capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("module", ["cyclopts", "twostroke.cli.generate", "torch", "twostroke.client.output_processor"])
def test_ctrl_c_during_imports_is_silent(module: str) -> None:
    source = CTRL_C + INTERRUPTED_IMPORT.format(module=module) + MAIN
    assert ended(source, "generate", "x", "--max-tokens", "1") == (130, "", "")


INTERRUPTED = "import twostroke.cli.generate as command\n"
INTERRUPTED += "command.model_and_prompt = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT) or ('', '')\n"


def test_ctrl_c_elsewhere_is_silent_too() -> None:
    assert ended(CTRL_C + INTERRUPTED + MAIN, "generate", "x") == (130, "", "")


def test_whoever_ignores_ctrl_c_goes_on_ignoring_it() -> None:
    ignored = "import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n" + INTERRUPTED + MAIN
    code, _, errors = ended(ignored, "generate", "/no/such/model", "x")
    assert code == 1
    assert "model=''" in errors or "there is no folder" in errors


def test_ctrl_c_at_a_terminal_stops_the_answer_and_not_the_chat() -> None:
    terminal, its_end = os.openpty()
    arguments = ["chat", "--ignore-eos", "--max-tokens", "4000", "--threads", "1", "--kv-cache-memory", "64MiB"]
    command = program(CTRL_C + MAIN, *arguments)
    with os.fdopen(terminal, "wb", buffering=0) as keyboard, os.fdopen(its_end, "rb") as stdin:
        chat = subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert chat.stdout is not None
        keyboard.write(b"a long story\n")
        chat.stdout.read(1)  # the answer has begun
        chat.send_signal(signal.SIGINT)
        keyboard.write(b"/set max_tokens 2\nand now a short one\n/bye\n")
        _, said = chat.communicate(timeout=120)
    assert chat.returncode == 0, said
    assert "stopped; the question is not part of the conversation" in said
    assert re.findall(r"output (\d+) tokens", said) == ["2"]
    assert "Traceback" not in said
