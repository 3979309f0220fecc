"""Submission: one object for a request on its way from the API to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.client.input_processor import PromptInput
from twostroke.client.output_processor import OutputKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A checked prompt with its settings for serving."""

    prompt: PromptInput
    """Result of InputProcessor, with the sampling parameters."""
    arrival_time_s: float
    """Time of the call on the engine's clock; preparing the prompt counts as waiting."""
    request_id: str | None = None
    """Name chosen by the caller, not in use; it is free again after the output that is `finished`. None: one is
    generated."""
    priority: int = 0
    """Priority; lower is served earlier; only with policy "priority"."""
    cache_salt: str | None = None
    """Salt of the prefix cache: requests share cached prefixes only with requests of the same salt."""
    tenant: str = ""
    """Tenant of the request, for a fair queue."""
    background: bool = False
    """Whether it runs as background work, in the room that other requests leave; needs chunked prefill, continuous and
    mixed batches."""
    start_by_s: float | None = None
    """Time on the engine's clock at which a request that still waits is aborted; its stream raises Overloaded."""
    kind: OutputKind = OutputKind.CUMULATIVE
    """Form of the outputs: everything so far, what is new, or once at the end."""
