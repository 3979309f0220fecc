"""Prompts of the last minutes, for those whose they are: kept only where the server was told to (--live-text)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.client.input_processor import PromptInput
from twostroke.explain.names import name_of, request_of

MAX_UNITS = 4 * 2**20
"""Most characters and token ids of all that are kept; the oldest leave first."""


@dataclass(slots=True)
class KeptPrompt:
    """Of one request of the engine."""

    name: str
    tenant: str
    kept_at_s: float
    content: str | tuple[int, ...]
    """The text, after the chat template where there was one; token ids where those were sent."""
    request: str = ""
    """Its name and number, by which it differs from others of the name; empty until the engine has given it one."""


class PromptTexts:
    """In the order in which they came.

    Args:
        minutes: how long each is kept.
        now_s: a clock.
    """

    def __init__(self, minutes: float, now_s: Callable[[], float]) -> None:
        self._seconds = 60 * minutes
        self._now_s = now_s
        self._kept: deque[KeptPrompt] = deque()
        self._unnumbered: dict[str, KeptPrompt] = {}
        self._num_units = 0

    def keep(self, name: str, tenant: str, prompt: PromptInput) -> None:
        """One that was queued, before any event of it; one that is too long is not kept."""
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
        """The engine has numbered the request; of names in use there is one at a time."""
        kept = self._unnumbered.pop(name_of(sequence_id), None)
        if kept is not None:
            kept.request = request_of(sequence_id)

    def of(self, request_id: str, tenant: str) -> KeptPrompt | None:
        """What a request asked, for its own tenant and, as "", the administrator; None: not to be had.

        Args:
            request_id: its name, the last of that name is meant then; or `name#number`.
            tenant: who asks.
        """
        self._forget()
        own = (kept for kept in reversed(self._kept) if tenant in ("", kept.tenant))
        return next((kept for kept in own if request_id in (kept.name, kept.request)), None)

    def _forget(self) -> None:
        """All that is too old, and the oldest of what is too much."""
        oldest_s = self._now_s() - self._seconds
        while self._kept and (self._kept[0].kept_at_s < oldest_s or self._num_units > MAX_UNITS):
            left = self._kept.popleft()
            self._num_units -= len(left.content)
            if self._unnumbered.get(left.name) is left:
                del self._unnumbered[left.name]
