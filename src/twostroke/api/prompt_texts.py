"""Prompts of the last minutes, readable by their own tenant; kept only with --live-text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.client.input_processor import PromptInput
from twostroke.explain.names import name_of, request_of

MAX_UNITS = 4 * 2**20
"""Maximum characters and token ids over all kept prompts; the oldest are dropped first."""


@dataclass(slots=True)
class KeptPrompt:
    """Prompt of one engine request."""

    name: str
    tenant: str
    kept_at_s: float
    content: str | tuple[int, ...]
    """Text after the chat template, or token ids if those were sent."""
    request: str = ""
    """The engine's `name#number`, unique among requests of one name; empty until the engine has assigned it."""


class PromptTexts:
    """Store of prompts, in order of arrival.

    Args:
        minutes: minutes that each prompt is kept.
        now_s: clock.
    """

    def __init__(self, minutes: float, now_s: Callable[[], float]) -> None:
        self._seconds = 60 * minutes
        self._now_s = now_s
        self._kept: deque[KeptPrompt] = deque()
        self._unnumbered: dict[str, KeptPrompt] = {}
        self._num_units = 0

    def keep(self, name: str, tenant: str, prompt: PromptInput) -> None:
        """Add a queued prompt, before any event of it; a prompt that is too long is not kept."""
        content = prompt.prompt_token_ids if prompt.prompt_text is None else prompt.prompt_text
        self._unnumbered.pop(name, None)
        if len(content) > MAX_UNITS:
            return
        kept = KeptPrompt(name, tenant, self._now_s(), content)
        self._kept.append(kept)
        self._unnumbered[name] = kept
        self._num_units += len(content)
        self._forget()

    def has_arrived(self, sequence_id: str) -> None:
        """Record the number that the engine gave the request; only one request of a name is active at a time."""
        kept = self._unnumbered.pop(name_of(sequence_id), None)
        if kept is not None:
            kept.request = request_of(sequence_id)

    def of(self, request_id: str, tenant: str) -> KeptPrompt | None:
        """Return a request's prompt for its own tenant or, with "", for the administrator; None if it is not available.

        Args:
            request_id: name, for the latest request of that name, or `name#number`.
            tenant: tenant that asks.
        """
        self._forget()
        own = (kept for kept in reversed(self._kept) if tenant in ("", kept.tenant))
        return next((kept for kept in own if request_id in (kept.name, kept.request)), None)

    def _forget(self) -> None:
        """Drop prompts that are too old, and the oldest while the total is too large."""
        oldest_s = self._now_s() - self._seconds
        while self._kept and (self._kept[0].kept_at_s < oldest_s or self._num_units > MAX_UNITS):
            left = self._kept.popleft()
            self._num_units -= len(left.content)
            if self._unnumbered.get(left.name) is left:
                del self._unnumbered[left.name]
