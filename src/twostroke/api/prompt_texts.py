"""Prompts of the last minutes, for those whose they are: kept only where the server was told to (--live-text)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.engine.input_processor import PromptInput

MAX_UNITS = 4 * 2**20
"""Most characters and token ids of all that are kept; the oldest leave first."""


@dataclass(frozen=True, slots=True)
class KeptPrompt:
    """Of one request of the engine."""

    tenant: str
    kept_at_s: float
    content: str | tuple[int, ...]
    """The text, after the chat template where there was one; token ids where those were sent."""


class PromptTexts:
    """By the name of the engine's request.

    Args:
        minutes: how long each is kept.
        now_s: a clock.
    """

    def __init__(self, minutes: float, now_s: Callable[[], float]) -> None:
        self._seconds = 60 * minutes
        self._now_s = now_s
        self._kept: OrderedDict[str, KeptPrompt] = OrderedDict()
        self._num_units = 0

    def keep(self, request_id: str, tenant: str, prompt: PromptInput) -> None:
        """One that was queued; of two by one name the later is meant, one that is too long is not kept."""
        content = prompt.prompt_token_ids if prompt.prompt_text is None else prompt.prompt_text
        self._drop(request_id)
        if len(content) > MAX_UNITS:
            return
        self._kept[request_id] = KeptPrompt(tenant, self._now_s(), content)
        self._num_units += len(content)
        self._forget()

    def of(self, request_id: str, tenant: str) -> KeptPrompt | None:
        """What the request asked, for its own tenant and, as "", the administrator; None: not to be had."""
        self._forget()
        found = self._kept.get(request_id)
        return found if found is not None and tenant in ("", found.tenant) else None

    def _forget(self) -> None:
        """All that is too old, and the oldest of what is too much."""
        oldest_s = self._now_s() - self._seconds
        while self._kept:
            name, first = next(iter(self._kept.items()))
            if first.kept_at_s >= oldest_s and self._num_units <= MAX_UNITS:
                return
            self._drop(name)

    def _drop(self, request_id: str) -> None:
        dropped = self._kept.pop(request_id, None)
        if dropped is not None:
            self._num_units -= len(dropped.content)
