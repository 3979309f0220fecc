"""Submission: a request as one object, from the API to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import OutputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked prompt, and how it is to be served."""

    prompt: PromptInput
    """The result of InputProcessor, with the sampling parameters."""
    arrival_time_s: float
    """When the caller asked, on the engine's clock: preparing the prompt counts as waiting."""
    request_id: str | None = None
    """A name of the caller's; must not be in use, which ends with the output that is `finished`. None: one is made."""
    priority: int = 0
    """Lower is served earlier; only with policy "priority"."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with those of the same salt."""
    tenant: str = ""
    """Whose request it is, for a fair queue."""
    background: bool = False
    """It takes what the others leave; needs chunked prefill, continuous and mixed batches."""
    start_by_s: float | None = None
    """A request that still waits then, on the engine's clock, is aborted: its stream raises Overloaded."""
    kind: OutputKind = OutputKind.CUMULATIVE
    """Whether outputs hold everything so far, what is new, or come once at the end."""
