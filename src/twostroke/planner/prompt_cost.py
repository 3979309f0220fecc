"""The cost of one request: its prompt's tokens as the server counts them, KV bytes, times and price."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from twostroke.client.chat_inputs import ChatInputs
from twostroke.client.input_processor import InputProcessor
from twostroke.errors import InvalidParameter
from twostroke.planner.floors import Predictor
from twostroke.planner.machine import PlannedMachine
from twostroke.planner.memory import MemoryPlan
from twostroke.planner.options import PlanOptions
from twostroke.sampling_params import SamplingParams
from twostroke.startup.prepared import Prepared


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCost:
    """Cost of one request that has the machine to itself."""

    num_prompt_tokens: int
    """Prompt tokens as in `usage.prompt_tokens` of the same request."""
    is_chat: bool
    """Whether the prompt was rendered by the chat template."""
    max_tokens: int
    """Output tokens: the requested number, cut to what the longest request allows."""
    asked_max_tokens: int
    kv_bytes: int
    """Bytes of the prompt's K and V, in all layers and on all ranks."""
    kv_block_bytes: int
    """Bytes of the blocks that the prompt and its output take, on all ranks."""
    ttft_floor_s: float
    ttft_predicted_s: float | None
    total_s: float
    """Seconds until the last token: predicted, or a floor."""
    is_predicted: bool
    """Whether calibrated steps predict the times; otherwise times and price are floors, below the real values."""
    is_estimate: bool
    """Whether other processes ran while the machine was measured: its floors may then exceed the real values."""
    price: float | None
    """Price of the machine for that time, in the money of the given price; None: no price is known."""

    @property
    def basis(self) -> str:
        """Statement of how far times and price can be trusted."""
        if self.is_predicted:
            return "calibrated"
        return "estimate" if self.is_estimate else "floor"


def cost_of_prompt(
    options: PlanOptions, prepared: Prepared, memory: MemoryPlan, predictor: Predictor, machine: PlannedMachine
) -> PromptCost:
    """Count a prompt as the engine would, and return its cost.

    Args:
        options: the prompt, whether it is a chat message, and the most output tokens.
        prepared: the model, with its tokenizer.
        memory: its memory plan.
        predictor: floors and predictions of its times.
        machine: the machine, with its price and rates.

    Raises:
        InvalidPrompt: empty, too long for the plan, or a chat without a chat template.
        InvalidParameter: a file that cannot be read.
    """
    assert options.prompt is not None
    text, params = read_prompt(options.prompt), SamplingParams(max_tokens=options.max_tokens)
    inputs = InputProcessor(
        prepared.tokenizer,
        max_model_len=memory.max_model_len,
        vocab_size=prepared.config.vocab_size,
        eos_token_ids=prepared.eos_token_ids,
        grammars=prepared.grammars,
    )
    if options.chat:
        found = inputs.process_chat(ChatInputs([{"role": "user", "content": text}]), params)
    else:
        found = inputs.process(text, params)
    num_tokens, max_tokens = len(found.prompt_token_ids), found.max_tokens
    ttft = predictor.ttft(num_tokens, memory.max_tokens_per_step)
    # step time grows linearly with context, so the middle step gives the mean
    middle = predictor.tpot(1, num_tokens + max_tokens // 2)
    first_s = ttft.floor_s if ttft.predicted_s is None else ttft.predicted_s
    step_s = middle.tpot_floor_s if middle.tpot_predicted_s is None else middle.tpot_predicted_s
    total_s = first_s + (max_tokens - 1) * step_s
    return PromptCost(
        num_prompt_tokens=num_tokens,
        is_chat=options.chat,
        max_tokens=max_tokens,
        asked_max_tokens=options.max_tokens,
        kv_bytes=num_tokens * memory.kv_bytes_per_token * memory.num_ranks,
        kv_block_bytes=memory.blocks_for(num_tokens + max_tokens) * memory.kv_bytes_per_block * memory.num_ranks,
        ttft_floor_s=ttft.floor_s,
        ttft_predicted_s=ttft.predicted_s,
        total_s=total_s,
        is_predicted=ttft.predicted_s is not None,
        is_estimate=machine.limits.is_estimate,
        price=None if machine.price_per_hour is None else machine.price_per_hour * total_s / 3600,
    )


def read_prompt(given: str) -> str:
    """Return a prompt as given, or the text of the file that @ names; @@ stands for one @.

    Raises:
        InvalidParameter: there is no such file, or it holds no text.

    >>> read_prompt("What is 2 + 2?"), read_prompt("@@home")
    ('What is 2 + 2?', '@home')
    """
    if not given.startswith("@"):
        return given
    if given.startswith("@@"):
        return given[1:]
    remedy = "Give the path of a text file, or @@ for a prompt that begins with @."
    try:
        return Path(given[1:]).expanduser().read_text(encoding="utf-8")
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ names the home of an unknown user
        why = error.strerror if isinstance(error, OSError) else str(error).rstrip(".")
        raise InvalidParameter("prompt", given, f"cannot be read ({why})", remedy) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter("prompt", given, f"is no text in UTF-8 (byte {error.start})", remedy) from error
