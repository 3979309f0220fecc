"""Request schemas of Ollama's API: POST /api/chat, /api/generate, /api/embed, /api/embeddings and /api/show."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from twostroke.api.protocol.fields import (
    MAX_OBJECTS,
    MAX_PROMPTS,
    MAX_TOOLS,
    AtMost,
    PositiveCount,
    Texts,
    WireObject,
    acts,
    bookkeeping,
    refused,
)

_AT_START = "A setting of the server's start."
_IMAGES = refused("text is the only input", [])


class OllamaOptions(WireObject):
    """Sampling options. Those that Ollama reloads a model for belong to the server's start here."""

    temperature: Annotated[float, Field(ge=0, le=100)] | None = acts("0 is greedy sampling; default: the server's.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = acts("Nucleus sampling.")
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = acts("Keep the k most likely tokens; 0 keeps all.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = acts(
        "Keep tokens at least this likely relative to the most likely one."
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = acts("The same seed gives the same tokens.")
    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = acts(
        "Maximum tokens to generate; -1 or -2: the rest of the context."
    )
    stop: str | Texts | None = acts("Texts that end the generation.")
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = acts(
        "Subtracted once from tokens already in the output."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = acts(
        "Subtracted per occurrence from tokens already in the output."
    )
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = acts(
        "Above 1 discourages tokens of prompt and output."
    )
    num_ctx: PositiveCount | None = acts("Refused if larger than the server's context, which is used as it is.")
    repeat_last_n: int | None = refused("penalties look at the whole prompt and output", -1)
    typical_p: float | None = refused("there is no typical sampling", 1, 1.0)
    tfs_z: float | None = refused("there is no tail-free sampling", 1, 1.0)
    mirostat: int | None = refused("there is no mirostat sampling", 0)
    mirostat_eta: float | None = bookkeeping("Of mirostat, which is refused.")
    mirostat_tau: float | None = bookkeeping("Of mirostat, which is refused.")
    penalize_newline: bool | None = refused("penalties are for all tokens", True)
    num_keep: int | None = bookkeeping("A prompt is never shifted; one that is too long is refused.")
    num_batch: int | None = bookkeeping(_AT_START)
    num_gpu: int | None = bookkeeping(_AT_START)
    main_gpu: int | None = bookkeeping(_AT_START)
    num_thread: int | None = bookkeeping(_AT_START)
    numa: bool | None = bookkeeping(_AT_START)
    low_vram: bool | None = bookkeeping(_AT_START)
    f16_kv: bool | None = bookkeeping(_AT_START)
    use_mmap: bool | None = bookkeeping(_AT_START)
    use_mlock: bool | None = bookkeeping(_AT_START)
    vocab_only: bool | None = refused("the server has loaded the whole model", False)
    logits_all: bool | None = bookkeeping(_AT_START)
    embedding_only: bool | None = bookkeeping(_AT_START)


class OllamaRequest(WireObject):
    """Fields of all requests."""

    model: str = Field(description="The served model's name; `:latest` behind it is left out.")
    keep_alive: float | str | None = bookkeeping("The served model stays loaded.")


class OllamaAnswerRequest(OllamaRequest):
    """Fields of requests for text."""

    options: OllamaOptions | None = acts("Sampling options.")
    stream: bool | None = acts("Send the answer in pieces, one JSON object a line; default true.")
    format: Literal["", "json"] | dict[str, Any] | None = acts("json, or a JSON schema that the answer must match.")
    think: bool | Literal["low", "medium", "high", "max"] | None = acts(
        "Whether the model reasons first (enable_thinking of its template), or how much (reasoning_effort)."
    )
    logprobs: bool | None = refused("use /v1/chat/completions", False)
    top_logprobs: int | None = refused("use /v1/chat/completions", 0)
    truncate: bool | None = bookkeeping("A prompt that is too long is refused.")
    shift: bool | None = bookkeeping("A prompt that is too long is refused.")


class OllamaFunctionCall(WireObject):
    """Function and arguments of a call."""

    name: str
    arguments: dict[str, Any] | None = None
    index: int | None = bookkeeping("Calls are in the order of the list.")


class OllamaCall(WireObject):
    """A call that the model made in an earlier turn."""

    id: str | None = acts("Id that a result may refer to.")
    function: OllamaFunctionCall


class OllamaMessage(WireObject):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | None = None
    thinking: str | None = acts("Reasoning of an earlier turn.")
    tool_calls: Annotated[list[OllamaCall], AtMost(MAX_TOOLS)] | None = acts("Calls of an earlier turn.")
    tool_name: str | None = acts("Name of the tool whose result this is.")
    tool_call_id: str | None = acts("Id of the call whose result this is.")
    images: Annotated[list[str], AtMost(MAX_OBJECTS)] | None = _IMAGES


class OllamaFunction(WireObject):
    """A function that the model may call."""

    name: str = Field(min_length=1, max_length=256)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(WireObject):
    """A tool; functions are the only kind."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class OllamaChatRequest(OllamaAnswerRequest):
    """Request of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], AtMost(MAX_OBJECTS)] | None = acts(
        "The conversation; without one, the answer only says that the model is loaded."
    )
    tools: Annotated[list[OllamaTool], AtMost(MAX_TOOLS)] | None = acts("Functions that the model may call.")


class OllamaGenerateRequest(OllamaAnswerRequest):
    """Request of POST /api/generate."""

    prompt: str | None = acts("The prompt; without one, the answer only says that the model is loaded.")
    system: str | None = acts("System prompt before it.")
    raw: bool | None = acts("Continue the prompt as it is, without the model's chat template.")
    suffix: str | None = refused("filling in the middle needs a model trained for it", "")
    template: str | None = refused("templates come with the model or with --chat-template, never with a request", "")
    context: Annotated[list[int], AtMost(MAX_OBJECTS)] | None = refused("send the conversation to /api/chat", [])
    images: Annotated[list[str], AtMost(MAX_OBJECTS)] | None = _IMAGES


class OllamaEmbedRequest(OllamaRequest):
    """Request of POST /api/embed."""

    input: str | Annotated[list[str], AtMost(MAX_PROMPTS)] = Field(description="A text or a list of texts.")
    options: dict[str, Any] | None = bookkeeping("An embedding is not sampled.")
    dimensions: PositiveCount | None = acts("Keep only the first dimensions, scaled to length 1.")
    truncate: bool | None = acts("Keep the first tokens of a text that is too long; default true.")


class OllamaEmbeddingsRequest(OllamaRequest):
    """Request of POST /api/embeddings, which /api/embed replaces."""

    options: dict[str, Any] | None = bookkeeping("An embedding is not sampled.")
    prompt: str = Field(description="A text.")


class OllamaShowRequest(WireObject):
    """Request of POST /api/show."""

    model: str | None = acts("The served model's name.")
    name: str | None = acts("The older name of `model`.")
    verbose: bool | None = bookkeeping("There is only one form of the answer.")
