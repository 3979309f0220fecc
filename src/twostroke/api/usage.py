"""What a request cost, in tokens."""

from __future__ import annotations

from typing import Any

from twostroke.outputs import NumericDrift, RequestOutput, merged_drift


class UsageCount:
    """Counts the tokens of one answer while its outputs come, as deltas or whole."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[int, int]] = {}
        self._num_output_tokens = 0
        self.num_reasoning_tokens = 0
        """Of the output; whoever parses it counts them."""
        self._numeric_drift: NumericDrift = {}

    def add(self, prompt: int, output: RequestOutput) -> None:
        """Takes an output of the prompt-th prompt; each token must be in one output only."""
        if output.finished or prompt not in self._prompts:
            self._prompts[prompt] = (len(output.prompt_token_ids), output.num_cached_tokens)
        if output.numeric_drift:
            self._numeric_drift = merged_drift(self._numeric_drift, output.numeric_drift)
        for part in output.outputs:
            self._num_output_tokens += len(part.token_ids)

    def as_json(self) -> dict[str, Any]:
        """Return OpenAI's object; with `numeric_drift` where workers of different numerics made the answer."""
        num_prompt_tokens = sum(num_tokens for num_tokens, _ in self._prompts.values())
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(cached for _, cached in self._prompts.values())},
            "completion_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            **({"numeric_drift": self._numeric_drift} if self._numeric_drift else {}),
        }
