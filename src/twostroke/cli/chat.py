"""`twostroke chat [MODEL]`: a conversation in the terminal; the prefix cache keeps each turn cheap."""

from __future__ import annotations

import dataclasses
import sys

from twostroke.cli.flags import CacheFlags, ChatSampling, ChatSamplingFlags, LoadFlags, QuietFlag, SchedulerFlags
from twostroke.cli.generate import run_and_print, summary
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import ClientError


def chat(
    model: str | None = None,
    /,
    *,
    system: str | None = None,
    load: LoadFlags = LoadConfig(),
    cache: CacheFlags = CacheConfig(),
    scheduler: SchedulerFlags = SchedulerConfig(),
    sampling: ChatSamplingFlags = ChatSampling(),
    quiet: QuietFlag = False,
) -> None:
    """Talk to a model; an empty line or end of input ends it, /new forgets the conversation.

    Parameters
    ----------
    model
        Model folder or hub id; without it the embedded code model answers (a demonstration, not an assistant).
    system
        A system message to begin with.
    quiet
        No start-up lines, no figures.
    """
    if model is not None:
        load = dataclasses.replace(load, model=model)
    from twostroke.engine.assembly import build_text_engine  # loads torch

    engine = build_text_engine(EngineConfig(load=load, cache=cache, scheduler=scheduler))
    if not quiet:
        for line in engine.startup_lines:
            sys.stderr.write(line + "\n")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    while line := _read_line():
        if line == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        try:
            engine.submit_chat(messages, sampling)
        except ClientError as error:
            messages.pop()
            sys.stderr.write(f"{error}\n")
            continue
        output = run_and_print(engine)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        if output.error is not None:
            sys.stderr.write(f"{output.error}\n")
        elif not quiet and output.metrics is not None:
            sys.stderr.write(summary(output, output.metrics) + "\n")
    engine.close()


def _read_line() -> str:
    """The next line, stripped; empty at the end of input."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()
