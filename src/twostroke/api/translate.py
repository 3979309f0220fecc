"""From what clients send to what the engine takes: the one file that speaks both vocabularies of sampling."""

from __future__ import annotations

from typing import Any

from twostroke.api.protocol.chat import ChatRequest
from twostroke.api.protocol.sampling import CompletionRequest, SamplingFields
from twostroke.errors import InvalidParameter
from twostroke.sampling_params import MAX_SEED, SamplingParams, StructuredOutputs

SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "bad_words",
    "allowed_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)
"""Fields that mean what the parameter of the same name means; one that is left out, or null, has its default."""


def completion_params(request: CompletionRequest, form: StructuredOutputs | None) -> SamplingParams:
    """The sampling of a completion whose output has to have that form.

    Raises:
        InvalidParameter: fields that contradict each other, or a value that cannot be used.
    """
    given = _shared(request, form)
    if request.max_tokens is not None:
        given["max_tokens"] = request.max_tokens or _one_step(request)
    if request.logprobs is not None:
        given["logprobs"] = request.logprobs
        if request.echo:
            given["prompt_logprobs"] = max(request.logprobs, request.prompt_logprobs or 0)
    if request.best_of is not None:
        _check_best_of(request, request.best_of)
        given["n"] = request.best_of
        given.setdefault("logprobs", 0)  # they are ranked by it
    return SamplingParams(**given)


def chat_params(request: ChatRequest, form: StructuredOutputs | None) -> SamplingParams:
    """The sampling of a chat whose output has to have that form; raises what `completion_params` raises."""
    given = _shared(request, form)
    given["max_tokens"] = request.max_completion_tokens or request.max_tokens
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidParameter("top_logprobs", request.top_logprobs, "needs logprobs", "Set logprobs to true.")
    if request.logprobs:
        given["logprobs"] = request.top_logprobs or 0
    return SamplingParams(**given)


def check_stream_options(request: SamplingFields) -> None:
    """Refuses options of a stream that is none."""
    if request.stream_options is not None and not request.stream:
        raise InvalidParameter("stream_options", "{...}", "is for streams", "Leave it out, or set stream to true.")


def _shared(request: SamplingFields, form: StructuredOutputs | None) -> dict[str, Any]:
    given = {name: value for name in SAME_NAMES if (value := getattr(request, name)) is not None}
    if form is not None:
        given["structured_outputs"] = form
    if request.seed is not None:
        given["seed"] = request.seed & MAX_SEED  # clients may send negative ones; each is some seed
    return given


def _one_step(request: CompletionRequest) -> int:
    """Return 1 for max_tokens 0: a step has to run for the log-probabilities of the prompt."""
    if not request.echo:
        raise InvalidParameter("max_tokens", 0, "must be at least 1 unless echo is set")
    if request.min_tokens:
        raise InvalidParameter("min_tokens", request.min_tokens, "at most max_tokens, which is 0")
    return 1


def _check_best_of(request: CompletionRequest, best_of: int) -> None:
    n = request.n or 1
    if best_of < n:
        raise InvalidParameter("best_of", best_of, f"must be at least n, which is {n}")
    if request.stream and best_of != n:
        raise InvalidParameter("best_of", best_of, "cannot be chosen from before all are there; this is a stream")
