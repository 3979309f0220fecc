"""Mutated files of models, templates, logs, calibrations and batches: each gives one of our errors, or is accepted.

typed      only our own errors, and no process that dies
time       of each file, from its first byte to the error, or to an engine that has loaded it
memory     taken by reading it, and all memory of the process that a template ran in

Each kind of file has a valid one, a way to mutate it, and a reader. Another process reads mutated files one after
the other: `python -m benchmarks.reproduce.hostile_files KIND FIRST NUMBER`. Each line of its output is a Case as JSON.
From these lines its parent knows which file killed the process or made it hang.
"""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from tqdm.auto import tqdm

from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.counting_engine import counting_engine
from benchmarks.hostile.mutations import mutated_bytes, mutated_json, mutated_template
from benchmarks.hostile.sound_files import CHATML, write_folder, write_gguf
from benchmarks.serving.local_server import MB
from twostroke.api.batch_file import count_lines, read_requests
from twostroke.api.calls import CALLS
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.cost.calibration import Calibration, DrafterFigures, Timing, choices_of
from twostroke.cost.step_cost import MachineLimits
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.event_sinks import consistent_events, merged_events
from twostroke.errors import TwostrokeError
from twostroke.explain.trace import trace_of
from twostroke.measure.workload import workload_of_lengths
from twostroke.planner.doctor import diagnose
from twostroke.planner.replay import replay_log
from twostroke.process_memory import peak_resident_bytes, reset_peak, resident_bytes
from twostroke.startup.assembly import build_engine
from twostroke.tokenizer.chat_template import ChatTemplate
from twostroke.tokenizer.template_process import template_process_id

_MACHINE = MachineLimits(1e11, 1e10)
BATCH, EVENTS, CALIBRATION, TEMPLATE = "requests.jsonl", "events.jsonl", "calibration.json", "chat_template.jinja"
"""Names of files: a batch's requests, and the kinds of these names."""
_GGUF = "small.gguf"
_WEIGHTS = ("model-1.safetensors", "model-2.safetensors")
_HEAD_BYTES = 3000
"""Bytes at the head of the valid GGUF file; its header is a little longer."""
_CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Weather in Köln?"},
    {
        "role": "assistant",
        "content": "<think>a call</think>",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1, 2.5]}'}}],
    },
    {"role": "tool", "content": "12 °C"},
]
_TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


@dataclass(frozen=True, slots=True)
class FileKind:
    """One kind of file.

    Attributes:
        name: of the kind.
        files: one of these is changed.
        write: writes a valid one, or several, into a folder.
        mutated: changes the content of a file.
        read: reads it as in production.
    """

    name: str
    files: tuple[str, ...]
    write: Callable[[Path], object]
    mutated: Callable[[bytes, Random], bytes]
    read: Callable[[Path], object]


def outcome_of(read: Callable[[Path], object], path: Path) -> str:
    """Return the outcome of reading a file: "accepted", the name of our error, or "!" and the name of another one."""
    try:
        read(path)
    except TwostrokeError as error:
        return type(error).__name__
    except Exception as error:
        return "!" + traceback.format_exception_only(error)[-1].strip()
    return "accepted"


def mutated_copy(kind: FileKind, sound: Path, folder: Path, seed: int) -> Path:
    """Write a mutated copy of valid files.

    Args:
        kind: of the files.
        sound: folder of the valid ones.
        folder: of the copy; existing content is removed.
        seed: source of the changes.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    random = Random(f"{kind.name} {seed}")
    path = folder / (kind.files[0] if len(kind.files) == 1 else random.choice(kind.files))
    path.write_bytes(kind.mutated(path.read_bytes(), random))
    return folder


def _open_model(path: Path) -> None:
    """Load a model completely, including its template, without serving it."""
    config = EngineConfig.from_keywords(
        model=str(path), threads=1, num_kv_blocks=8, block_size=16, max_model_len=64, max_num_seqs=2
    )
    built = build_engine(config, machine=_MACHINE)
    built.engine.close()


def _mutated_json(content: bytes, random: Random) -> bytes:
    return mutated_json(json.loads(content), random).encode("utf-8", "surrogateescape")


def _mutated_weights(content: bytes, random: Random) -> bytes:
    size = int.from_bytes(content[:8], "little")
    if random.random() < 0.5:
        head = _mutated_json(content[8 : 8 + size], random)
        return len(head).to_bytes(8, "little") + head + content[8 + size :]
    return mutated_bytes(content, random, first=8 + size)


def _mutated_gguf(content: bytes, random: Random) -> bytes:
    # most of the head is the vocabulary; the keys before it and the tensors after it are few bytes
    return mutated_bytes(content, random, first=random.choice((300, 900, _HEAD_BYTES, 12_000, None)))


def _mutated_lines(content: bytes, random: Random) -> bytes:
    lines = content.decode().splitlines()
    for _ in range(random.randint(1, 3)):
        place = random.randrange(len(lines))
        match random.randrange(5):
            case 0:
                lines.insert(random.randrange(len(lines)), lines[place])
            case 1 if len(lines) > 1:
                del lines[place]
            case _:
                try:
                    lines[place] = mutated_json(json.loads(lines[place]), random)
                except (ValueError, RecursionError):  # it was mutated before
                    lines[place] = lines[place][: len(lines[place]) // 2]
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")


def _write_event_log(folder: Path) -> None:
    built = counting_engine(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        CacheConfig(block_size=16, num_kv_blocks=12),
        max_model_len=128,
        event_log=folder / EVENTS,
    )
    with closing(built.engine):
        built.run(workload_of_lengths([(40, 6), (20, 12), (70, 3), (40, 30)], vocab_size=500))


def _read_event_log(folder: Path) -> None:
    paths = [folder / EVENTS]
    events = list(merged_events(paths))
    with consistent_events(paths):
        json.dumps(trace_of(events))
    with consistent_events(paths):
        diagnose(events)
    with consistent_events(paths):
        replay_log(events, ())


def _write_calibration(folder: Path) -> None:
    timings = (Timing(1, 0.01), Timing(2, 0.015), Timing(8, 0.03))
    drafters = (
        DrafterFigures(method="ngram", acceptance=0.5, share=0.25, draft_s=(Timing(1, 1e-5), Timing(4, 2e-5))),
        DrafterFigures(method="early_exit", exit_layer=1, acceptance=0.7, share=1.0, draft_s=(Timing(1, 1e-3),)),
    )
    Calibration(
        model="embedded",
        load={"model": "embedded", "threads": 1},
        machine={"processor": "x", "cores": 2},
        context_tokens=100,
        most_drafts=8,
        step_s=timings,
        limits=_MACHINE,
        scheduler={"max_num_seqs": 8},
        cache={"block_size": 16},
        drafters=drafters,
    ).write(folder / CALIBRATION)


def _read_calibration(folder: Path) -> None:
    found = Calibration.read(folder / CALIBRATION)
    choices_of(found)
    found.verify_s(3)


def _write_batch(folder: Path) -> None:
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stop": ["b"]}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": "a", "max_tokens": 3}),
        ("/v1/completions", {"prompt": [1, 2], "logit_bias": {"5": 1}}),
        ("/v1/chat/completions", chat),
        ("/v1/responses", {"input": [{"role": "user", "content": "a"}], "metadata": {"b": "c"}}),
        ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "float"}),
    ]
    lines = [
        json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body})
        for i, (url, body) in enumerate(asked * 2)
    ]
    (folder / BATCH).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _read_batch(folder: Path) -> None:
    path = folder / BATCH
    count_lines(path)
    for line in read_requests(path, frozenset(CALLS)):
        str(line).encode("utf-8", "surrogatepass")


def _mutated_template(content: bytes, random: Random) -> bytes:
    return mutated_template(content.decode(), random).encode("utf-8", "surrogatepass")


def _read_template(folder: Path) -> None:
    source = (folder / TEMPLATE).read_bytes().decode("utf-8", "surrogatepass")
    template = ChatTemplate({"default": source}, {"eos_token": "<|end|>"})
    template.render(_CONVERSATION, tools=_TOOLS)


_JSON_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "model.safetensors.index.json",
)
KINDS = {
    kind.name: kind
    for kind in (
        FileKind(
            "gguf", (_GGUF,), lambda to: write_gguf(to / _GGUF), _mutated_gguf, lambda at: _open_model(at / _GGUF)
        ),
        FileKind("safetensors", _WEIGHTS, write_folder, _mutated_weights, _open_model),
        *(FileKind(name, (name,), write_folder, _mutated_json, _open_model) for name in _JSON_FILES),
        FileKind(
            "template",
            (TEMPLATE,),
            lambda to: (to / TEMPLATE).write_text(CHATML, "utf-8"),
            _mutated_template,
            _read_template,
        ),
        FileKind("event log", (EVENTS,), _write_event_log, _mutated_lines, _read_event_log),
        FileKind("calibration", (CALIBRATION,), _write_calibration, _mutated_json, _read_calibration),
        FileKind("batch file", (BATCH,), _write_batch, _mutated_lines, _read_batch),
    )
}
"""All kinds, by name."""


TIMEOUT_S = 30.0
"""Seconds after which a file counts as one that never ends."""


class Case(msgspec.Struct, frozen=True):
    """The outcome of one mutated file."""

    kind: str
    seed: int
    outcome: str
    """Outcome of reading it, from outcome_of."""
    seconds: float = 0.0
    num_bytes: int = 0
    """Peak memory of reading it: growth of the process, plus all of a template's process."""


def cases(kind: str, first: int, number: int) -> Iterator[Case]:
    """Read `number` mutated files in another process, which is restarted when a file kills it."""
    seed, end = first, first + number
    while seed < end:
        command = (sys.executable, "-m", "benchmarks.reproduce.hostile_files", kind, str(seed), str(end - seed))
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
            assert process.stdout is not None
            while True:
                watch = threading.Timer(TIMEOUT_S, process.kill)
                watch.start()
                line = process.stdout.readline()
                watch.cancel()
                if not line:
                    break
                yield msgspec.json.decode(line, type=Case)
                seed += 1
        if seed < end:
            yield Case(kind, seed, f"!ended the process ({process.returncode})")
            seed += 1


def main(kind_name: str, first: int, number: int) -> None:
    """Read the files in this process."""
    logging.disable()
    kind = KINDS[kind_name]
    with tempfile.TemporaryDirectory() as folder:
        sound, copy = Path(folder, "sound"), Path(folder, "copy")
        sound.mkdir()
        kind.write(sound)
        kind.read(sound)  # what the first read loads must not count for other files
        for seed in range(first, first + number):
            mutated_copy(kind, sound, copy, seed)
            sys.stdout.write(msgspec.json.encode(_case(kind_name, seed, copy)).decode() + "\n")
            sys.stdout.flush()


def _case(kind_name: str, seed: int, copy: Path) -> Case:
    reset_peak()
    before, began_s = resident_bytes(), monotonic_clock()
    children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    outcome = outcome_of(KINDS[kind_name].read, copy)
    seconds = monotonic_clock() - began_s
    took = peak_resident_bytes() - before
    if pid := template_process_id():
        with contextlib.suppress(OSError, AssertionError):  # it has ended
            took += peak_resident_bytes(pid)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if ended > children:  # only a new maximum is known: this child took more than any before
        took = max(took, ended * 1024)
    return Case(kind_name, seed, outcome[:200], seconds, took)


MAX_S = 2.0
MAX_MB = 500.0
_NUMBERS = {"template": 2500, "gguf": 2000, "safetensors": 1000, "config.json": 1000, "tokenizer.json": 1000}
"""Files of the largest kinds; the other kinds share the rest of 10,000 equally."""
_TOTAL = 10_000
_SMALL_SHARE = 50
"""Divisor of the numbers in a quick run."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Read all mutated files."""
    others = (_TOTAL - sum(_NUMBERS.values())) // (len(KINDS) - len(_NUMBERS)) + 1
    numbers = {kind: _NUMBERS.get(kind, others) // (1 if options.full else _SMALL_SHARE) for kind in KINDS}
    read = chain.from_iterable(cases(kind, options.seed * _TOTAL, number) for kind, number in numbers.items())
    found = list(tqdm(read, total=sum(numbers.values()), desc="files", disable=None, leave=False))
    wrong = [case for case in found if case.outcome.startswith("!")]
    slowest = max(found, key=lambda case: case.seconds)
    largest = max(found, key=lambda case: case.num_bytes)
    claims = (
        Claim.equal("files read", sum(numbers.values()), len(found)),
        Claim.equal("that ended in another error than ours, or never", 0, len(wrong)),
        Claim.at_most("seconds, the slowest", MAX_S, slowest.seconds).judged(options.full),
        Claim.at_most("MB, the largest", MAX_MB, largest.num_bytes / MB).judged(options.full),
        Claim.reported("templates that were stopped", sum("stopped" in case.outcome for case in found)),
    )
    return Reproduction(
        claims=claims,
        workload={"files": numbers, "seed": options.seed},
        details={
            "kinds": {kind: _of_kind([case for case in found if case.kind == kind]) for kind in KINDS},
            "wrong": [f"{case.kind} {case.seed}: {case.outcome}" for case in wrong],
            "slowest": f"{slowest.kind} {slowest.seed}",
            "largest": f"{largest.kind} {largest.seed}",
        },
    )


def _of_kind(found: list[Case]) -> dict[str, object]:
    return {
        "outcomes": dict(Counter(case.outcome for case in found)),
        "most_seconds": round(max(case.seconds for case in found), 3),
        "most_mb": round(max(case.num_bytes for case in found) / MB, 1),
        "seconds": round(sum(case.seconds for case in found), 1),
    }


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
