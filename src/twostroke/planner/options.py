"""What `twostroke plan` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostroke.config.checks import number, switch, text, whole_number, whole_numbers
from twostroke.config.sizes import read_sizes
from twostroke.cost.price import check_price_per_hour
from twostroke.errors import InvalidParameter
from twostroke.measure.figure import check_png
from twostroke.planner.devices import find_device

DEFAULT_PROMPTS = "128,512,2048,8192"
DEFAULT_MAX_TOKENS = 16
"""Output tokens of a request that does not set max_tokens."""
DEFAULT_OTHERS = "L4,A100-80,H100-SXM"

MAX_BYTES = 1 << 50
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The machine, the load, and what else is to be compared."""

    memory: int | None = None
    """Bytes of memory to plan with, such as 24GB; default: the named device's, or what is free on this machine now."""
    device_name: str | None = None
    """Plan for a GPU whose figures are published, such as H100-SXM, instead of this machine. With tensor_parallel_size
    each rank has one."""
    price_per_hour: float | None = None
    """Price of an hour, in any money; adds costs to the output. Without --search it pays for all ranks' devices; with
    --search it pays for one GPU of the named kind, or for this whole machine, whose cores share it."""
    prompt: str | None = None
    """Text of one prompt, or @FILE: print its tokens as the server counts them, KV bytes, time to first token,
    price."""
    chat: bool = False
    """Render the prompt with the chat template, as one message of a user."""
    max_tokens: int = DEFAULT_MAX_TOKENS
    """Output tokens of that prompt."""
    requests: int | None = None
    """Concurrent users: print whether so many of the longest requests fit (see --max-model-len)."""
    batch: int = 1
    """Requests of a step that verifies drafts, at most max_num_seqs: what binds it with 0 to 8 drafts each."""
    prompt_lengths: str = DEFAULT_PROMPTS
    """Prompt tokens that the time to the first token is asked for, with commas between; those that no request may have
    are left out."""
    context: int | None = None
    """Tokens that each decoding request has; default: 1024, or half of the longest request where that is less."""
    link_bytes_per_s: float | None = None
    """Of the link between two pools, prefill and decode: whether transfers would hide behind prefills."""
    compare: str = DEFAULT_OTHERS
    """Devices to compare with, with commas between; 'none' for none."""
    measured: Path | None = None
    """After a run: the file that its --event-log wrote; what was planned is printed beside it, with the error."""
    png: Path | None = None
    """File to draw the frontier of throughput and latency into, as PNG; its name ends in .png."""

    def __post_init__(self) -> None:
        """Checks what needs no model."""
        read_sizes(self, "memory")
        if self.memory is not None:
            whole_number("memory", self.memory, 1, MAX_BYTES)
        if self.context is not None:
            whole_number("context", self.context, 1, MAX_TOKENS)
        for name in ("requests", "batch", "max_tokens"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1, MAX_TOKENS)
        if self.prompt is not None:
            text("prompt", self.prompt)
        switch("chat", self.chat)
        check_png(self.png)
        self._check_prompt()
        check_price_per_hour(self.price_per_hour)
        if self.link_bytes_per_s is not None:
            number("link_bytes_per_s", self.link_bytes_per_s, 0, 1e15, "more than 0", low_open=True)
        _ = self.prompts
        for name in self.others:
            find_device(name, "compare")
        if self.device_name is not None:
            find_device(self.device_name)

    def _check_prompt(self) -> None:
        if self.prompt is not None:
            return
        if self.chat:
            raise InvalidParameter("chat", True, "changes nothing without a prompt", "Give --prompt.")
        if self.max_tokens != DEFAULT_MAX_TOKENS:
            raise InvalidParameter("max_tokens", self.max_tokens, "changes nothing without a prompt", "Give --prompt.")

    @property
    def prompts(self) -> tuple[int, ...]:
        """The lengths that are asked for."""
        return whole_numbers("prompt_lengths", self.prompt_lengths, 1, MAX_TOKENS)

    @property
    def others(self) -> tuple[str, ...]:
        """The devices to compare with."""
        if self.compare == "none":
            return ()
        return tuple(dict.fromkeys(part.strip() for part in self.compare.split(",") if part.strip()))
