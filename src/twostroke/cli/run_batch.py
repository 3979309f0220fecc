"""`twostroke run-batch REQUESTS -o RESULTS`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.flags import (
    CacheFlags,
    LoadByFlags,
    LoadFlags,
    ModelNames,
    PresetFlag,
    QuietFlag,
    SchedulerFlags,
    SpeculationFlag,
)
from twostroke.cli.interrupts import imports_are_done
from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.server import ServerConfig

PATIENT = 2**31 - 1
"""More than any batch holds: nobody else waits for it, so nothing of it is refused."""


def run_batch(  # noqa: PLR0913 (each is a flag or a group of flags)
    requests: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    served_model_name: ModelNames = (),
    tool_call_parser: str | None = None,
    reasoning_parser: str | None = None,
    strict: bool = False,
    default_max_tokens: int | None = None,
    max_concurrency: int | None = None,
    load: LoadFlags = LoadByFlags(),
    cache: CacheFlags = CacheConfig(),
    scheduler: SchedulerFlags = SchedulerConfig(),
    preset: PresetFlag = None,
    speculative_config: SpeculationFlag = None,
    quiet: QuietFlag = False,
) -> None:
    """Answer a file of requests, as the server would; run it again to go on where it ended.

    Parameters
    ----------
    requests
        Lines of custom_id, method, url and body; urls are /v1/completions and /v1/chat/completions.
    output
        Results, a line each, in the order in which they came. Requests that have one there are not asked again.
    served_model_name
        Names that requests may call the model by, all words up to the next flag; default: as --model is given.
    tool_call_parser
        How the model writes tool calls; without it a chat with tools is refused.
    reasoning_parser
        How the model marks its reasoning; without it the reasoning is part of the answer.
    strict
        Refuse requests with fields that nobody here knows.
    default_max_tokens
        Output tokens of a chat whose request sets no limit; default: what the context leaves.
    max_concurrency
        Requests held at a time; default: twice --max-num-seqs.
    quiet
        No start-up lines, no progress, no counts.
    """
    import uvloop  # what takes long to import is for this command only

    from twostroke.api.run_batch import answer_file

    config = EngineConfig(load=load, cache=cache, scheduler=scheduler, speculative_config=speculative_config)
    answers = ServerConfig(
        max_queued_requests=PATIENT,
        max_queued_tokens=PATIENT,
        max_queue_wait_s=86400,  # a file waits as long as it takes
        served_model_name=served_model_name,
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        strict=strict,
        default_max_tokens=default_max_tokens,
    )
    run = answer_file(config, answers, requests, output, max_concurrency=max_concurrency, progress=not quiet)
    imports_are_done()
    count = uvloop.run(run)
    if not quiet:
        sys.stderr.write(f"{output}: {count}\n")
