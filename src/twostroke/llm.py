"""LLM: the offline interface of the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self, Unpack, cast

from tqdm.auto import tqdm

from twostroke.client.chat_inputs import ChatInputs, TemplateOptions
from twostroke.client.input_processor import Prompt
from twostroke.client.output_processor import OutputKind
from twostroke.client.text_engine import TextEngine, build_text_engine, hold_interrupts
from twostroke.config.engine import EngineConfig
from twostroke.errors import InvalidParameter
from twostroke.outputs import RequestOutput
from twostroke.sampling_params import SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model that completes many prompts at once.

    >>> llm = LLM("embedded")                                            # doctest: +SKIP
    >>> llm.generate("def add(a, b):", SamplingParams(max_tokens=16))[0].outputs[0].text      # doctest: +SKIP

    Args:
        model: a Hugging Face folder, a hub id, or "embedded".
        config: the fields of EngineConfig's parts, by name: dtype, max_model_len, block_size, max_num_seqs, …

    Raises:
        UnknownParameter: a keyword is no such field.
        SetupError: the model cannot be loaded, or the sizes do not fit.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self._engine: TextEngine = build_text_engine(EngineConfig.from_keywords(model=model, **config))
        self._one_call = threading.Lock()  # calls from several threads wait for each other

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> TextEngine:
        """The underlying engine, for callers that step it themselves."""
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, batched; return when all have ended.

        Args:
            prompts: a string, {"prompt": string} or {"prompt_token_ids": [...]}, or a sequence of these.
            sampling_params: one for all, or one each; default: SamplingParams().
            priority: one per prompt (lower is served earlier; needs policy="priority").
            cache_salt: separates this call's prefix cache from that of other calls.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in their order.

        Raises:
            ClientError: a prompt or parameter cannot be run; then none of this call's prompts runs.
        """
        return self._run(_prompts(prompts), sampling_params, priority, cache_salt, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        use_tqdm: bool = False,
        **template: Unpack[TemplateOptions],
    ) -> list[RequestOutput]:
        """Answer conversations, by the model's chat template; everything else is as for `generate`.

        Args:
            messages: a conversation (a sequence of {"role", "content"}), or a sequence of these.
            sampling_params: one for all, or one each; default: SamplingParams().
            priority: one per conversation (lower is served earlier; needs policy="priority").
            cache_salt: separates this call's prefix cache from that of other calls.
            use_tqdm: show a progress bar.
            template: the fields of TemplateOptions, by name: tools, documents, add_generation_prompt,
                continue_final_message, chat_template_kwargs.
        """
        chats = [ChatInputs(conversation, **template) for conversation in _conversations(messages)]
        return self._run(chats, sampling_params, priority, cache_salt, use_tqdm)

    def close(self) -> None:
        """Release the memory of the model and the cache."""
        self._engine.close()

    def _run(
        self,
        prompts: Sequence[Prompt | ChatInputs],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        with self._one_call:
            return self._run_alone(prompts, sampling_params, priority, cache_salt, use_tqdm)

    def _run_alone(
        self,
        prompts: Sequence[Prompt | ChatInputs],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        cache_salt: str | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        self._engine.check_open()  # also without prompts
        params = _one_each("sampling_params", sampling_params, SamplingParams(), SamplingParams, len(prompts))
        ranks = _one_each("priority", priority, 0, int, len(prompts))
        request_ids: list[str] = []
        with hold_interrupts() as let_interrupts_through:
            try:
                for prompt, own, rank in zip(prompts, params, ranks, strict=True):
                    request_ids.append(
                        self._engine.submit(prompt, own, priority=rank, cache_salt=cache_salt, kind=OutputKind.FINAL)
                    )
                    let_interrupts_through()
                return self._finish(request_ids, use_tqdm, let_interrupts_through)
            except BaseException:
                # a refused prompt, or an interrupt: abort all requests of this call
                if self._engine.is_consistent:
                    for request_id in request_ids:
                        self._engine.abort(request_id)
                    while self._engine.has_work:
                        self._engine.step()
                raise

    def _finish(
        self, request_ids: list[str], use_tqdm: bool, let_interrupts_through: Callable[[], None]
    ) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), unit="prompt", disable=not use_tqdm) as progress:
            while self._engine.has_work:
                let_interrupts_through()
                for output in self._engine.step():
                    if output.finished:
                        if output.prompt_logprobs is not None:
                            output.prompt_logprobs = list(output.prompt_logprobs)
                        done[output.request_id] = output
                        progress.update()
        return [done[request_id] for request_id in request_ids]


def _prompts(given: object) -> list[Prompt]:
    """Return one prompt or several as a list; the input processor checks their content."""
    if isinstance(given, str | Mapping):
        return [cast(Prompt, given)]
    items = _several("prompts", given, "a string, a prompt object, or a sequence of these")
    for index, item in enumerate(items):
        if not isinstance(item, str | Mapping):
            raise InvalidParameter(f"prompts[{index}]", item, "must be a string or {'prompt_token_ids': [...]}")
    return items


def _conversations(given: object) -> list[Messages]:
    """Return one conversation or several as a list."""
    limit = 'a sequence of {"role": ..., "content": ...}, or a sequence of such sequences'
    items = _several("messages", given, limit)
    if not items or all(isinstance(item, Mapping) for item in items):
        return [items]
    for index, item in enumerate(items):
        if not all(isinstance(message, Mapping) for message in _several(f"messages[{index}]", item, limit)):
            raise InvalidParameter(f"messages[{index}]", item, f"must be {limit}")
    return items


def _one_each(name: str, given: object, default: object, kind: type, count: int) -> list[Any]:
    """Return one value per prompt: the default, the one given for all, or the given list."""
    if given is None:
        given = default
    if _is_a(given, kind):
        return [given] * count
    limit = f"one {kind.__name__} for all or one each"
    values = _several(name, given, limit)
    for index, value in enumerate(values):
        if not _is_a(value, kind):
            raise InvalidParameter(f"{name}[{index}]", value, f"must be a {kind.__name__}")
    if len(values) != count:
        raise InvalidParameter(name, f"{len(values)} values", f"must be {limit}; there are {count} prompts")
    return values


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _several(name: str, given: object, limit: str) -> list[Any]:
    # a string or a mapping would be split into characters or keys
    if not isinstance(given, Iterable) or isinstance(given, str | bytes | Mapping):
        raise InvalidParameter(name, cast(object, given), f"must be {limit}")
    return list(cast(Iterable[Any], given))
