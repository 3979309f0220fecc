"""Templates run in a process of their own: whatever they do, the caller gets a text or a clear error."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from benchmarks.hostile.mutations import HOSTILE_EXPRESSIONS
from twostroke.api.http_errors import error_body
from twostroke.errors import EngineUnavailable, InvalidPrompt
from twostroke.tokenizer import template_process
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.messages import CallArguments
from twostroke.tokenizer.template_confinement import confined_environment
from twostroke.tokenizer.template_process import TemplateSource, template_process_id
from twostroke.tokenizer.template_wire import CPU_S, MEMORY_MIB, packed, unpacked

CHAT = [{"role": "user", "content": "Hi"}]
PATIENCE_S = 60.0


def the_process() -> int:
    pid = template_process_id()
    assert pid is not None
    return pid


def rendered(source: str) -> str:
    return ChatTemplate({"default": source}, {}).render(CHAT)


TOO_MUCH_TIME = f"takes more than {CPU_S:.2f} s of processor time"
TOO_MUCH_MEMORY = f"needs more than {MEMORY_MIB} MiB of memory"
TOO_MUCH = f"{TOO_MUCH_MEMORY}|{TOO_MUCH_TIME}"
"""Memory that is taken in many steps: a slow processor has used up its time before."""
LOOP = "{% set n = namespace(a=START) %}{% for i in range(60) %}{% set n.a = NEXT %}{% endfor %}{{ n.a | length }}"


def repeated(start: str, following: str) -> str:
    return LOOP.replace("START", start).replace("NEXT", following)


SPIN = "{% for i in range(99999) %}{% for i in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "chat", [CHAT, [{"role": "critic", "content": "Hi"}]], ids=["tools and calls", "a role of its own"]
)
def test_what_is_to_be_learned_of_a_template_takes_little_of_its_time(chat: list[dict[str, str]]) -> None:
    """A template that spins for our own conversations alone is stopped once, and answers the user's."""
    found = "{% set ours = messages | map(attribute='content') | join %}"
    source = found + "{% if 'mark' in ours %}" + SPIN + "{% endif %}{{ ours }}"
    template = ChatTemplate({"default": source}, {})
    pids: list[int] = [the_process()]
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]
    for _ in range(2):
        assert template.render([*chat, *calls, *CHAT], tools=[{"name": "f"}]) == chat[0]["content"] + "Hi"
        pids.append(the_process())
    assert len(set(pids)) == 2, "more than one process was ended"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ ((((9**64)**64)**64)**64) % 7 }}", TOO_MUCH_TIME),
        (repeated("3", "n.a * n.a"), TOO_MUCH_TIME),
        ("{{ ('9' * 4000) | int ** 64 ** 64 ** 64 }}", f"power above 64|{TOO_MUCH_TIME}"),
        (repeated("'ab'", "n.a ~ n.a"), TOO_MUCH),
        (repeated("'ab'", "n.a + n.a"), TOO_MUCH),
        (repeated("[1]", "n.a + n.a"), TOO_MUCH),
        (repeated("['ab', 'c']", "[n.a | join, n.a | join]"), TOO_MUCH),
        (repeated("'ab'", "n.a | replace('a', 'aa') | replace('b', 'bb')"), TOO_MUCH),
        (repeated("'ab'", "'%s%s' % (n.a, n.a)"), TOO_MUCH),
        (repeated("'ab'", "'{0}{0}'.format(n.a)"), TOO_MUCH),
        ("{{ ('x' * 99999) | replace('x', 'y' * 99999) | length }}", TOO_MUCH_MEMORY),
        ("{{ ('x' * 99999).replace('x', 'y' * 99999) | length }}", TOO_MUCH_MEMORY),
        ("{{ '%2000000000d' % 1 }}", TOO_MUCH_MEMORY),
        ("{{ '{:2000000000}'.format('a') }}", TOO_MUCH_MEMORY),
        ("{{ 'a'.ljust(2000000000) }}", TOO_MUCH_MEMORY),
        ("{{ 'a'.zfill(2000000000) }}", TOO_MUCH_MEMORY),
        ("{{ 'a' | center(2000000000) }}", TOO_MUCH_MEMORY),
        ("{{ ('a\\n' * 99999) | indent(99999) | length }}", TOO_MUCH),
        ("{{ ('\\t' * 99999).expandtabs(99999) | length }}", TOO_MUCH_MEMORY),
        ("{{ [1] | batch(2000000000, 0) | list | length }}", TOO_MUCH),
        ("{{ range(2000000000) | list }}", "Range too big"),
        ("{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "calls itself without end"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            f"{TOO_MUCH_TIME}|steps",
        ),
        (
            "{% macro f(x, n) %}{% if n %}{{ f(x ~ x, n - 1) }}{% endif %}{% endmacro %}{{ f('ab', 60) }}",
            TOO_MUCH,
        ),
        ("{% for a in range(99999) if a in range(99999) | list %}{% endfor %}", TOO_MUCH_TIME),
    ],
    ids=str,
)
def test_what_takes_too_much_is_an_error_and_the_next_chat_is_served(source: str, told: str) -> None:
    with pytest.raises(InvalidPrompt, match=told):
        rendered(source)
    assert rendered("{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set __twostroke_step__ = 1 %}{% for a in [1, 2] %}x{% endfor %}", "xx"),
        ("{% macro __twostroke_step__() %}{% endmacro %}{% for a in [1, 2] %}x{% endfor %}", "xx"),
        ("{% for __twostroke_step__ in [1, 2] %}x{% endfor %}", "xx"),
        ("{% set steps = 1 %}{% set environment = 2 %}{% for a in [1, 2] %}x{% endfor %}", "xx"),
        ("{{ __twostroke_step__ is defined }}{{ steps is defined }}", "FalseFalse"),
        ("{% for a in [1, 2] recursive %}{% if a == 1 %}{{ loop([3]) }}{% endif %}x{% endfor %}", "xxx"),
    ],
)
def test_no_name_in_a_template_leads_to_its_counter(source: str, text: str) -> None:
    assert rendered(source) == text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('x' * 1000000) }}", "(1000000 characters)"),
        ("{{ raise_exception(messages[0].content * 400000) }}", "(800000 characters)"),
        ("{{ raise_exception('\\x1b[31mred') }}", "conversation: \\x1b[31mred"),
        ("{{ raise_exception('a\\nb') }}", "conversation: a b"),
        ("{{ 'x'.encode('idna') }}", "it asks for a file and can read none."),
        ("{{ ('9' * 4000) | int ** 60 }}", "a number has more than 4300 digits"),
        ("{{ " + "9" * 5000 + " }}", "a number has more than 4300 digits"),
        ("{{ '%c' % 1114112 }}", "not in range"),
        ("{{ 15 | round(-2000000000) }}", TOO_MUCH_TIME),
        ("{{ lipsum(n=2000000000) }}", TOO_MUCH_TIME),
        ("{{ messages | tojson(indent=2000000000) }}", TOO_MUCH_MEMORY),
        ("{% block a %}{{ self.a() }}{% endblock %}", "calls itself without end"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "calls itself without end"),
        ("{{ not_there.x }}", "'not_there' is undefined"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "maximum recursion depth"),
        ("{% macro f(a, a) %}{% endmacro %}", "duplicate argument"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_wrong_is_told_in_a_line_that_can_be_printed(source: str, words: str) -> None:
    with pytest.raises(InvalidPrompt) as told:
        rendered(source)
    message = str(told.value)
    assert words in message
    assert len(message) < 2200
    assert message.isprintable()


@pytest.mark.parametrize("place", range(len(HOSTILE_EXPRESSIONS)))
def test_hostile_expressions_end(place: int) -> None:
    """With a text, where a machine is fast or the expression harmless, or with our error; the caller takes nothing."""
    before = peak_kib()
    with contextlib.suppress(InvalidPrompt):
        rendered(HOSTILE_EXPRESSIONS[place])
    assert peak_kib() - before < 200 * 1024


def peak_kib() -> int:
    """Return the peak memory of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_one_process_serves_many_chats_and_templates() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": "{{ tools[0].name }}"}, {})
    template.render(CHAT)
    before = template_process_id()
    for index in range(20):
        assert template.render([{"role": "user", "content": str(index)}]) == str(index)
        assert template.render(CHAT, tools=[{"name": f"f{index}"}]) == f"f{index}"
        assert rendered(f"{index}") == f"{index}"
    assert template_process_id() == before


def test_texts_come_back_as_they_were_sent() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ x }}"}, {})
    for text in ("Köln 👍 東京\0\n", "half \ud83d a character", "x" * 3_000_000, "é" * 1_000_000):
        assert template.render([{"role": "user", "content": text}], template_kwargs={"x": 0.1}) == f"{text}0.1"


@pytest.mark.parametrize("value", [10**400, -0.0, 1e-320, float("inf"), True, None, [], {"a": [1, {}]}])
def test_values_are_the_same_in_the_process(value: object) -> None:
    assert unpacked(packed({"x": value})) == {"x": value}
    assert rendered_with(value) == str(value)


def rendered_with(value: object) -> str:
    return ChatTemplate({"default": "{{ x }}"}, {}).render(CHAT, template_kwargs={"x": value})


def test_a_number_that_has_no_text_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="cannot be given to the chat template"):
        rendered_with(10**5000)


def test_arguments_keep_their_words() -> None:
    words = '{"b":1,  "a": [2.50]}'
    for call in ({"function": {"name": "f", "arguments": words}}, {"name": "f", "arguments": words}):
        chat = [*CHAT, {"role": "assistant", "tool_calls": [call]}]
        source = (
            "{% set c = messages[1].tool_calls[0] %}{% set a = (c.function or c).arguments %}"
            "{{ a | tojson }}|{{ a }}|{{ a.a }}|{{ c | tojson }}"
        )
        text = ChatTemplate({"default": source}, {}).render(chat)
        assert text.split("|")[:3] == [words, words, "[2.5]"]
        assert words in text.split("|")[3]
    arguments = CallArguments({"b": 1}, '{"b":1}')
    call = {"name": "f", "arguments": arguments}
    (found,) = unpacked(packed({"messages": [{"tool_calls": [call]}]}))["messages"][0]["tool_calls"]
    assert isinstance(found["arguments"], CallArguments)


def test_a_process_that_was_ended_from_outside_costs_nobody_an_answer() -> None:
    assert rendered("a") == "a"
    for ending in (signal.SIGKILL, signal.SIGTERM):
        os.kill(the_process(), ending)
        assert rendered("{{ messages[0].content }}") == "Hi"


def test_a_process_that_is_stopped_costs_nobody_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds whether it waited or worked, and does not take the time that a busy machine is allowed."""
    monkeypatch.setattr(template_process, "WALL_S", 1e6)
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    assert template.render(CHAT) == "Hi"
    stopped = the_process()
    os.kill(stopped, signal.SIGSTOP)
    assert template.render(CHAT) == "Hi"
    assert the_process() != stopped
    assert not is_alive(str(stopped))
    long = [{"role": "user", "content": "x" * 2**21}]
    with children(monkeypatch, STOPS_ITSELF) as started:
        assert template.render(long) == "x" * 2**21
    assert started == [STOPS_ITSELF, None]


@pytest.mark.parametrize(
    ("ending", "wall_s", "told"), [("STOP", 1e6, "stopped"), ("KILL", 1e6, "-9"), ("CONT", 0.0, "no answer for 0 s")]
)
def test_an_end_that_no_template_brings_about_is_not_told_of_it(
    monkeypatch: pytest.MonkeyPatch, ending: str, wall_s: float, told: str
) -> None:
    """The same request may be answered later; and nothing is remembered of the template."""
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    source = STOPS_ITSELF.replace("SIGSTOP", f"SIG{ending}")
    with children(monkeypatch, *[source] * 2), monkeypatch.context() as patch:
        patch.setattr(template_process, "WALL_S", wall_s)
        with pytest.raises(EngineUnavailable, match=f"process for chat templates.*{told}.*Try again") as caught:
            template.render(CHAT)
    answer = error_body(caught.value)
    assert (answer.status, "retry-after" in answer.headers) == (503, True)
    assert template.render(CHAT) == "Hi"


STOPS_ITSELF = """
import os, signal, socket, sys
connection = socket.socket(fileno=int(sys.argv[1]))
connection.recv(1)
os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


@contextlib.contextmanager
def children(monkeypatch: pytest.MonkeyPatch, *sources: str) -> Generator[list[str | None]]:
    """Let the next processes run these scripts, then the real one. Yields what was started."""
    started: list[str | None] = []
    right = template_process.child_command

    def command(module: str, descriptor: str) -> tuple[str, ...]:
        source = sources[len(started)] if len(started) < len(sources) else None
        started.append(source)
        return right(module, descriptor) if source is None else (sys.executable, "-c", source, descriptor)

    runner = template_process._Runner()  # pyright: ignore[reportPrivateUsage]
    with monkeypatch.context() as patch:
        patch.setattr(template_process, "_runner", runner)
        patch.setattr(template_process, "child_command", command)
        yield started
        runner.close()


def test_threads_share_them() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    found: dict[int, str] = {}

    def render(number: int) -> None:
        for _ in range(20):
            found[number] = template.render([{"role": "user", "content": str(number)}])

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: str(number) for number in range(8)}


FORKING = """
import os, sys
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.template_process import template_process_id

template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
print(template.render([{"role": "user", "content": "one"}]), template_process_id(), flush=True)
assert "jinja2" not in sys.modules, "nothing of a template is to run here"
child = os.fork()
if not child:
    assert not template_process_id()
    print(template.render([{"role": "user", "content": "two"}]), template_process_id(), flush=True)
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(template.render([{"role": "user", "content": "three"}]), template_process_id(), flush=True)
if sys.argv[1] == "killed":
    os.kill(os.getpid(), 9)
if sys.argv[1] == "stopped":
    os.kill(template_process_id(), 19)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("ending", ["exits", "killed", "stopped"])
def test_a_forked_process_has_its_own_and_all_end_with_those_that_started_them(ending: str) -> None:
    command = [sys.executable, "-W", "error", "-c", FORKING, ending]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [text for text, *_ in lines] == ["one", "two", "three"]
    (first,), (second,), (third,) = (pids for _, *pids in lines)
    assert first == third
    assert second != first
    for pid in (first, second):
        deadline_s = time.monotonic() + PATIENCE_S
        while is_alive(pid):
            assert time.monotonic() < deadline_s, f"{pid} lives on"
            time.sleep(0.02)


def is_alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_no_module_is_taken_from_the_folder_that_the_user_stands_in(tmp_path: Path) -> None:
    """The folder may be a model's, and no code of a model is ever run."""
    for module in ("jinja2", "msgspec", "json", "twostroke"):
        (tmp_path / f"{module}.py").write_text("open('taken', 'w').close()\nraise SystemExit(3)\n")
    program = "from twostroke.tokenizer.template_process import TemplateSource\nprint(TemplateSource('a').render({}))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("a\n", "")
    assert not (tmp_path / "taken").exists()


ESCAPED = """
import json, os, signal, socket, subprocess, sys
from twostroke.tokenizer.template_confinement import confine

folder, parent = sys.argv[1], os.getppid()
ways = {
    "read": lambda: open("/etc/hostname").read(),
    "write": lambda: open(folder + "/kept", "w").write("x"),
    "remove": lambda: os.remove(folder + "/kept"),
    "rename": lambda: os.rename(folder + "/kept", folder + "/other"),
    "make": lambda: os.mkdir(folder + "/made"),
    "link": lambda: os.symlink("/etc", folder + "/link"),
    "socket": lambda: socket.socket(socket.AF_UNIX),
    "udp": lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
    "pipe": lambda: os.pipe(),
    "program": lambda: subprocess.run(["/bin/true"]),
    "signal": lambda: os.kill(parent, 0),
}
confine()
done = []
for name, way in ways.items():
    try:
        way()
        done.append(name)
    except OSError:
        pass
print(json.dumps(done))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux's")
def test_a_template_that_leaves_the_sandbox_finds_nothing(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    command = [sys.executable, "-P", "-c", ESCAPED, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    unlimited = {"read", "write", "socket", "udp", "pipe", "program"} & set(json.loads(done.stdout))
    assert not unlimited, "any Linux limits these"
    assert kept.read_text() in ("as it was", "")
    if has_landlock():
        assert set(json.loads(done.stdout)) <= {"signal"}, "which older kernels allow"
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        assert kept.read_text() == "as it was"


def has_landlock() -> bool:
    return int(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))) > 0


def test_secrets_of_the_server_are_not_in_the_process_environment() -> None:
    given = {"HF_TOKEN": "x", "OPENAI_API_KEY": "y", "PYTHONPATH": "/a", "LC_ALL": "C", "TZ": "UTC", "PATH": "/bin"}
    assert confined_environment(given) == {"PYTHONPATH": "/a", "LC_ALL": "C", "TZ": "UTC", "PATH": "/bin"}
    rendered("a")
    environment = Path(f"/proc/{the_process()}/environ").read_bytes()
    assert {line.partition(b"=")[0] for line in environment.split(b"\0")} >= {b"PATH"}
    assert b"PYTEST_CURRENT_TEST=" not in environment, "pytest's own variable stands for all that it does not need"


BOASTING = """
import socket, sys
from twostroke.tokenizer.template_wire import ANSWER, TEXT
connection = socket.socket(fileno=int(sys.argv[1]))
connection.recv(1)
connection.sendall(ANSWER.pack(TEXT, 2**40))
connection.sendall(bytes(2**27))
connection.recv(2**20)
"""


def test_an_answer_that_is_far_too_long_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was taken over may send such an answer."""

    def boasting(module: str, descriptor: str) -> tuple[str, ...]:
        return (sys.executable, "-c", BOASTING, descriptor)

    runner = template_process._Runner()  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(template_process, "_runner", runner)
    monkeypatch.setattr(template_process, "child_command", boasting)
    monkeypatch.setattr(template_process, "WALL_S", 20.0)
    with pytest.raises(InvalidPrompt, match="ended its process"):
        TemplateSource("a")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (r"{{ '\N{BULLET}\u00e9' }}", "\u2022\u00e9"),
        ("{{ [1] | pprint }}", "[1]"),
        ("{{ 'a b' | wordwrap(1) }}", "a\nb"),
        ("{{ '<b>a</b>&amp;' | striptags }}", "a&"),
        ("{{ lipsum(1) | length > 9 }}", "True"),
        ("{{ 'a b' | urlencode }}{{ 'a' | center(3) }}{{ 'a'.encode('latin-1') }}", "a%20b a b'a'"),
    ],
)
def test_filters_that_import_when_they_are_used_still_work(source: str, text: str) -> None:
    assert rendered(source) == text


def test_a_large_prompt_leaves_nothing_behind() -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    text = "x" * 2**23
    assert template.render([{"role": "user", "content": text}]) == text
    gc.collect()
    resident = int(Path(f"/proc/{the_process()}/status").read_text().partition("VmRSS:")[2].split()[0])
    assert resident < 100 * 1024
