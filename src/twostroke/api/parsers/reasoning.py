"""Reasoning before the answer, and how families mark it."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.api.parsers.output import Output
from twostroke.api.parsers.source import Reading, Source, Stops


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """Reasoning is what the generation begins with, up to the first closing tag, or to the end if none comes.

    A tool call within it is a thought, and tags after it are text.
    """

    opens: tuple[str, ...]
    closes: tuple[str, ...]
    starts_open: bool = False
    """Whether the generation begins within it even if neither the prompt nor the model has opened it."""

    def is_open_after(self, prompt: str, said: str = "") -> bool:
        """Whether the generation begins within the reasoning, which many templates open, or close at once.

        Args:
            prompt: the rendered chat, or the end of it.
            said: what the turn says already that is continued; an answer, unless its last tag opens the reasoning.
        """
        said = said.strip()
        end = prompt.rstrip().removesuffix(said).rstrip()
        opened, closed = (max(map(said.rfind, tags)) for tags in (self.opens, self.closes))
        if opened != closed:
            return opened > closed
        if end.endswith(self.opens):
            return True
        return self.starts_open and not said and not end.endswith(self.closes)

    @property
    def markup(self) -> tuple[str, ...]:
        """What may be single tokens of the model."""
        return self.opens + self.closes


THINK = ReasoningFamily(("<think>",), ("</think>",))

REASONING_FAMILIES: dict[str, ReasoningFamily] = {
    "deepseek_r1": ReasoningFamily(("<think>",), ("</think>",), starts_open=True),
    "deepseek_v3": THINK,
    "glm45": THINK,
    "granite": ReasoningFamily(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
    "mistral": ReasoningFamily(("[THINK]",), ("[/THINK]",)),
    "qwen3": THINK,
    "seed_oss": ReasoningFamily(("<seed:think>",), ("</seed:think>",)),
}
"""By vLLM's names."""


def read_reasoning(source: Source, output: Output, family: ReasoningFamily, *, is_open: bool) -> Reading[bool]:
    """The reasoning with its tags, if there is any; whether there was."""
    start = source.position
    yield from source.space()
    has_tag = bool((yield from source.literal(*family.opens)))
    if not has_tag:
        source.position = start
    if not (has_tag or is_open):
        return False
    closing = yield from source.copy_until(Stops(*family.closes), output.reasoning)
    source.position += len(closing)
    if closing:
        output.end_reasoning()
    return True
