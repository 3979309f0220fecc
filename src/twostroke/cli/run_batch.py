"""`twostroke run-batch REQUESTS -o RESULTS`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.flags import DraftingEngineFlags, ModelNames, PresetFlag, QuietFlag
from twostroke.cli.interrupts import restore_interrupt_handler
from twostroke.config.server import ServerConfig

UNLIMITED_QUEUE = 2**31 - 1
"""Queue limit of a batch file. It exceeds any batch, so no request is refused: no other client waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags:
    """Settings for answering the requests of a file."""

    served_model_name: ModelNames = ()
    """Names that requests may call the model by, all words up to the next flag; default: as --model is given."""
    tool_call_parser: str | None = None
    """Format of the model's tool calls; without it a chat with tools is refused."""
    reasoning_parser: str | None = None
    """Format of the model's reasoning; without it the reasoning is part of the answer."""
    strict: bool = False
    """Refuse requests with unknown fields."""
    default_max_tokens: int | None = None
    """Output tokens of a chat whose request sets no limit; default: the rest of the context."""
    max_concurrency: int | None = None
    """Most requests at a time; default: twice --max-num-seqs."""

    def server(self) -> ServerConfig:
        """Return the settings of the server that would answer these requests."""
        return ServerConfig(
            max_queued_requests=UNLIMITED_QUEUE,
            max_queued_tokens=UNLIMITED_QUEUE,
            max_queue_wait_s=86400,  # a batch file may wait a day
            served_model_name=self.served_model_name,
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            strict=self.strict,
            default_max_tokens=self.default_max_tokens,
        )


def run_batch(
    requests: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=("--output", "-o"))],
    answers: Annotated[AnswerFlags, Parameter(name="*")] = AnswerFlags(),
    engine: Annotated[DraftingEngineFlags, Parameter(name="*")] = DraftingEngineFlags(),
    preset: PresetFlag = None,
    quiet: QuietFlag = False,
) -> None:
    """Answer a file of requests as the server would; run the command again to continue an unfinished file.

    Parameters
    ----------
    requests
        Lines of custom_id, method, url and body; urls are /v1/completions and /v1/chat/completions.
    output
        Results, one line per request, in the order of completion. Requests with a result there are skipped.
    quiet
        Print no start-up lines, no progress and no counts.
    """
    import uvloop  # slow imports, needed by this command only

    from twostroke.api.run_batch import answer_file

    config, server = engine.config(engine.load), answers.server()
    run = answer_file(config, server, requests, output, max_concurrency=answers.max_concurrency, progress=not quiet)
    restore_interrupt_handler()
    count = uvloop.run(run)
    if not quiet:
        sys.stderr.write(f"{output}: {count}\n")
