"""`twostroke chat [MODEL]`: a conversation in the terminal; the prefix cache keeps each turn cheap."""

from __future__ import annotations

import sys

from twostroke.cli.flags import (
    CacheFlags,
    ChatSampling,
    ChatSamplingFlags,
    LoadBesideModel,
    LoadBesideModelFlags,
    ModelFlag,
    QuietFlag,
    SchedulerFlags,
    with_model,
)
from twostroke.cli.generate import run_and_print, summary
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import ClientError


def chat(  # noqa: PLR0913 (each is a flag or a group of flags)
    model: str | None = None,
    /,
    *,
    system: str | None = None,
    model_flag: ModelFlag = None,
    load: LoadBesideModelFlags = LoadBesideModel(),
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
    model_flag
        The same as MODEL.
    system
        A system message to begin with.
    quiet
        No start-up lines, no figures.
    """
    chosen = with_model(load, by_place=model, by_flag=model_flag)
    from twostroke.engine.assembly import build_text_engine  # loads torch

    engine = build_text_engine(EngineConfig(load=chosen, cache=cache, scheduler=scheduler))
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
