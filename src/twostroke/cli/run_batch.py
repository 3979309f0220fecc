"""`twostroke run-batch REQUESTS -o RESULTS`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from twostroke.cli.flags import DraftingEngineFlags, ModelNames, PresetFlag, QuietFlag
from twostroke.cli.interrupts import imports_are_done
from twostroke.config.server import ServerConfig

PATIENT = 2**31 - 1
"""More than any batch holds: nobody else waits for it, so nothing of it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFlags:
    """How the requests are answered."""

    served_model_name: ModelNames = ()
    """Names that requests may call the model by, all words up to the next flag; default: as --model is given."""
    tool_call_parser: str | None = None
    """How the model writes tool calls; without it a chat with tools is refused."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning; without it the reasoning is part of the answer."""
    strict: bool = False
    """Refuse requests with fields that nobody here knows."""
    default_max_tokens: int | None = None
    """Output tokens of a chat whose request sets no limit; default: what the context leaves."""
    max_concurrency: int | None = None
    """Requests held at a time; default: twice --max-num-seqs."""

    def server(self) -> ServerConfig:
        """Return the settings of the server whose place the file takes."""
        return ServerConfig(
            max_queued_requests=PATIENT,
            max_queued_tokens=PATIENT,
            max_queue_wait_s=86400,  # a file waits as long as it takes
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
    """Answer a file of requests, as the server would; run it again to go on where it ended.

    Parameters
    ----------
    requests
        Lines of custom_id, method, url and body; urls are /v1/completions and /v1/chat/completions.
    output
        Results, a line each, in the order in which they came. Requests that have one there are not asked again.
    quiet
        No start-up lines, no progress, no counts.
    """
    import uvloop  # what takes long to import is for this command only

    from twostroke.api.run_batch import answer_file

    config, server = engine.config(engine.load), answers.server()
    run = answer_file(config, server, requests, output, max_concurrency=answers.max_concurrency, progress=not quiet)
    imports_are_done()
    count = uvloop.run(run)
    if not quiet:
        sys.stderr.write(f"{output}: {count}\n")
