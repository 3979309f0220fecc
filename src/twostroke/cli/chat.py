"""`twostroke chat [MODEL]`: a conversation in the terminal; the prefix cache keeps each turn cheap."""

from __future__ import annotations

import io
import json
import sys
from typing import TYPE_CHECKING

from twostroke.cli.flags import (
    CacheFlags,
    ChatSampling,
    ChatSamplingFlags,
    JsonFlag,
    LoadBesideModel,
    LoadBesideModelFlags,
    ModelFlag,
    QuietFlag,
    SchedulerFlags,
    SpeculationFlag,
    with_model,
)
from twostroke.cli.generate import print_json, run_and_print, summary
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import ClientError, EngineError, TwostrokeError

if TYPE_CHECKING:
    from twostroke.engine.text_engine import TextEngine


def chat(  # noqa: PLR0913 (each is a flag or a group of flags)
    model: str | None = None,
    /,
    *,
    system: str | None = None,
    model_flag: ModelFlag = None,
    load: LoadBesideModelFlags = LoadBesideModel(),
    cache: CacheFlags = CacheConfig(),
    scheduler: SchedulerFlags = SchedulerConfig(),
    speculative_config: SpeculationFlag = None,
    sampling: ChatSamplingFlags = ChatSampling(),
    json_output: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Talk to a model; an empty line or end of input ends it, /new forgets the conversation.

    A message that is refused or fails is no part of the conversation, which goes on. Unless the messages come from a
    terminal, the exit code is 1 then.

    Parameters
    ----------
    model
        Model folder or hub id; without it the embedded code model answers (a demonstration, not an assistant).
    model_flag
        The same as MODEL.
    system
        A system message to begin with.
    json_output
        Print nothing but one JSON object a message: what `generate --json` prints, or {"error": ...} for a refused one.
    quiet
        No start-up lines, no figures.
    """
    chosen = with_model(load, by_place=model, by_flag=model_flag)
    from twostroke.engine.assembly import build_text_engine  # loads torch

    engine = build_text_engine(
        EngineConfig(load=chosen, cache=cache, scheduler=scheduler, speculative_config=speculative_config)
    )
    if not quiet:
        for line in engine.startup_lines:
            sys.stderr.write(line + "\n")
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    num_failed = 0
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # a line that is no text is refused, like any other
    while line := _read_line():
        if line == "/new":
            messages = list(opening)
            continue
        question = {"role": "user", "content": line}
        try:
            answer = _ask(engine, [*messages, question], sampling, json_output=json_output, quiet=quiet)
        except TwostrokeError as error:
            sys.stderr.write(f"{error}\n")
            num_failed += 1
        else:
            messages += [question, {"role": "assistant", "content": answer}]
    engine.close()
    if num_failed and not sys.stdin.isatty():
        sys.exit(1)  # a person has seen it; a pipe has only this


def _ask(
    engine: TextEngine, messages: list[dict[str, str]], sampling: ChatSampling, *, json_output: bool, quiet: bool
) -> str:
    """The answer to a conversation, printed as it comes; raises what was refused or failed."""
    from twostroke.engine.output_processor import OutputKind  # loaded by now

    try:
        engine.submit_chat(messages, sampling, kind=OutputKind.DELTA)
    except ClientError as error:
        if json_output:  # whoever sent the message waits for a line
            print(json.dumps({"error": str(error)}), flush=True)
        raise
    output = run_and_print(engine, silent=json_output)
    if json_output:
        print_json(output)
    elif not quiet and output.metrics is not None:
        sys.stderr.write(summary(output, output.metrics) + "\n")
    if output.error is not None:
        raise EngineError(output.error)
    return output.outputs[0].text


def _read_line() -> str:
    """The next line, stripped; empty at the end of input."""
    if sys.stdin.isatty():
        sys.stderr.write("> ")
        sys.stderr.flush()
    return sys.stdin.readline().strip()
