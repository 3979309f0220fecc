"""Request fields shared by several APIs, OpenAI's and vLLM's, and the requests for completions and embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.api.protocol.fields import (
    MAX_CHOICES,
    SERVICE_TIER,
    AtMost,
    Biases,
    Count,
    PositiveCount,
    Prompts,
    ServiceTier,
    SomeTokenIds,
    Texts,
    WireObject,
    acts,
    bookkeeping,
    refused,
)
from twostroke.client.input_processor import TruncationSide


class StreamOptions(WireObject):
    """Options for usage in a stream."""

    include_usage: bool | None = acts("Send the usage in one more chunk at the end.")
    continuous_usage_stats: bool | None = acts("With include_usage: every chunk has the usage so far.")
    include_obfuscation: bool | None = bookkeeping("Padding against eavesdroppers; never sent.")

    @property
    def has_usage_in_chunks(self) -> bool:
        """Whether every chunk has the usage so far."""
        return bool(self.include_usage and self.continuous_usage_stats)


class StructuredOutputsField(WireObject):
    """Constraint on the output; exactly one field must be set."""

    json_: dict[str, Any] | str | None = acts("A JSON schema.", alias="json")
    regex: str | None = acts("A regular expression.")
    choice: Annotated[list[str], AtMost(MAX_CHOICES)] | None = acts("One of these strings.")
    grammar: str | None = acts("A grammar, Lark or GBNF.")
    json_object: bool | None = acts("Any JSON object.")


class ServedFields(WireObject):
    """Fields for the model, and for scheduling and caching the request."""

    model: str | None = acts("The served model's name; optional, because there is only one.")
    service_tier: ServiceTier | None = acts(SERVICE_TIER)
    priority: Annotated[int, Field(ge=-(2**31), le=2**31)] | None = acts(
        "Lower is served earlier; needs --policy priority."
    )
    cache_salt: str | None = acts(
        "Share cached prefixes only with requests of this salt.", min_length=1, max_length=1024
    )


class ChoiceFields(ServedFields):
    """Sampling fields of all APIs."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = acts("0 is greedy sampling; default 1.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = acts("Nucleus sampling; default 1.")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = acts("Keep the k most likely tokens; 0 or -1 keeps all.")
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = acts("The same seed gives the same tokens.")
    ignore_eos: bool | None = acts("Continue after the model's end-of-text tokens.")
    stream: bool | None = acts("Send the answer in pieces as server-sent events.")


class SamplingFields(ChoiceFields):
    """Sampling and stopping fields of OpenAI's older APIs."""

    min_p: Annotated[float, Field(ge=0, le=1)] | None = acts(
        "Keep tokens at least this likely relative to the most likely one."
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = acts("Choices per prompt; default 1.")
    stop: str | Texts | None = acts("Texts that end the generation.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = acts(
        "Subtracted once from tokens already in the output."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = acts(
        "Subtracted per occurrence from tokens already in the output."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = acts(
        "Above 1 discourages tokens of prompt and output."
    )
    logit_bias: Biases | None = acts("Map from token ids to numbers that are added to their logits.")
    min_tokens: Count | None = acts("Minimum tokens before the generation may end.")
    stop_token_ids: SomeTokenIds | None = acts("Token ids that end the generation.")
    bad_words: Texts | None = acts("Words that may not be generated.")
    allowed_token_ids: SomeTokenIds | None = acts("The only token ids that may be generated.")
    include_stop_str_in_output: bool | None = acts("Keep the stop string in the output.")
    skip_special_tokens: bool | None = acts("Leave special tokens out of the text; default true.")
    prompt_logprobs: Count | None = acts(
        "Return log-probabilities of the prompt's tokens and of this many of the most likely."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = acts(
        "Keep only this many tokens of the prompt, by default the last; -1: as many as the context holds."
    )
    truncation_side: TruncationSide | None = acts(
        "With truncate_prompt_tokens: left (default) keeps the last tokens, right the first."
    )
    add_special_tokens: bool | None = acts(
        "Add the tokenizer's special tokens to the prompt; default true for texts, false for chats."
    )
    return_token_ids: bool | None = acts("Return token ids of prompt and output beside the text.")
    return_tokens_as_token_ids: bool | None = acts("Write the tokens of log-probabilities as token_id:42.")
    request_id: str | None = acts("A name chosen by the client; part of the answer's id.", min_length=1, max_length=256)
    structured_outputs: StructuredOutputsField | None = acts(
        "Constrain the output. With tools, JSON still allows tool calls; other forms do not."
    )
    stream_options: StreamOptions | None = acts("Only with stream.")
    use_beam_search: Any = refused("there is no beam search; best_of and n sample several", False)
    length_penalty: Any = refused("it is for beam search, which is not supported", 1.0)
    guided_json: Any = refused("replaced by structured_outputs")
    guided_regex: Any = refused("replaced by structured_outputs")
    guided_choice: Any = refused("replaced by structured_outputs")
    guided_grammar: Any = refused("replaced by structured_outputs")
    user: str | None = bookkeeping("The end user's name.")


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ConversationFields(ChoiceFields):
    """Fields shared by the Messages and Responses APIs."""

    chat_template_kwargs: dict[str, Any] | None = acts("Further variables for the chat template.")

    def as_chat_fields(self) -> dict[str, Any]:
        """Return the fields that a chat request has under the same names."""
        return {name: value for name in ConversationFields.model_fields if (value := getattr(self, name)) is not None}


class CompletionRequest(SamplingFields):
    """OpenAI's completion request with vLLM's extensions."""

    prompt: Prompts = Field(description="A text, token ids, or a list of either.")
    max_tokens: Count | None = acts("Maximum tokens to generate, default 16; 0 only with echo.")
    echo: bool | None = acts("Put the prompt before the text.")
    logprobs: Count | None = acts("Return log-probabilities of each token and of this many of the most likely.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = acts(
        "Generate this many choices and return the n most likely; not in streams."
    )
    suffix: str | None = refused("filling in the middle needs a model trained for it", "")


class EmbeddingRequest(ServedFields):
    """OpenAI's request for embeddings, with vLLM's extensions."""

    input: Prompts = Field(description="A text, token ids, or a list of either.")
    dimensions: PositiveCount | None = acts(
        "Keep only the first dimensions, scaled to length 1; default: all of the hidden state."
    )
    encoding_format: Literal["float", "base64"] | None = acts(
        "Numbers, or base64 of little-endian float32; default float."
    )
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = acts(
        "Keep only this many tokens of each input, by default the last; -1: as many as the context holds."
    )
    truncation_side: TruncationSide | None = acts(
        "With truncate_prompt_tokens: left (default) keeps the last tokens, right the first."
    )
    add_special_tokens: bool | None = acts("Add the tokenizer's special tokens to texts; default true.")
    user: str | None = bookkeeping("The end user's name.")
