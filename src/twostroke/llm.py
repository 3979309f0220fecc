"""LLM: the offline face of the engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, cast

from tqdm.auto import tqdm

from twostroke.config.engine import EngineConfig
from twostroke.engine.assembly import build_text_engine
from twostroke.engine.input_processor import Prompt
from twostroke.engine.output_processor import OutputKind
from twostroke.engine.text_engine import TextEngine
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
        UnknownParameter: a keyword that is no such field.
        SetupError: the model or the sizes cannot be had.
    """

    def __init__(self, model: str = "embedded", **config: Any) -> None:
        self._engine: TextEngine = build_text_engine(EngineConfig.from_keywords(model=model, **config))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def engine(self) -> TextEngine:
        """The engine beneath, for those who want to step it themselves."""
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
        """Completes prompts, batched; returns when all have ended.

        Args:
            prompts: a text, {"prompt": text} or {"prompt_token_ids": [...]}, or a sequence of these.
            sampling_params: one for all, or one each; default: SamplingParams().
            priority: one per prompt (lower is served earlier; needs policy="priority").
            cache_salt: separates this call's prefix cache from others'.
            use_tqdm: show a progress bar.

        Returns:
            One output per prompt, in their order.

        Raises:
            ClientError: a prompt or parameter cannot be run; none of this call's prompts runs then.
        """
        items: list[Prompt] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)

        def submit(index: int, params: SamplingParams, rank: int) -> str:
            return self._engine.submit(
                items[index], params, priority=rank, cache_salt=cache_salt, kind=OutputKind.FINAL
            )

        return self._run(submit, len(items), sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation (a sequence of {"role", "content"}) or several, by the model's chat template."""
        is_one = not messages or isinstance(messages[0], Mapping)
        conversations = cast("list[Messages]", [messages] if is_one else list(messages))

        def submit(index: int, params: SamplingParams, rank: int) -> str:
            return self._engine.submit_chat(
                conversations[index],
                params,
                priority=rank,
                kind=OutputKind.FINAL,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        return self._run(submit, len(conversations), sampling_params, None, use_tqdm)

    def close(self) -> None:
        """Gives back the model's and the cache's memory."""
        self._engine.close()

    def _run(
        self,
        submit: Callable[[int, SamplingParams, int], str],
        count: int,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = _one_each("sampling_params", sampling_params or SamplingParams(), SamplingParams, count)
        ranks = _one_each("priority", 0 if priority is None else priority, int, count)
        request_ids: list[str] = []
        try:
            request_ids.extend(submit(index, params[index], ranks[index]) for index in range(count))
            return self._finish(request_ids, use_tqdm)
        except BaseException:
            # a refused prompt, or an interrupt: nothing of this call goes on in the background
            for request_id in request_ids:
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()
            raise

    def _finish(self, request_ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with tqdm(total=len(request_ids), unit="prompt", disable=not use_tqdm) as progress:
            while self._engine.has_work:
                for output in self._engine.step():
                    if output.finished:
                        done[output.request_id] = output
                        progress.update()
        return [done[request_id] for request_id in request_ids]


def _one_each(name: str, given: Any, kind: type, count: int) -> list[Any]:
    values = [given] * count if isinstance(given, kind) else list(given)
    if len(values) != count:
        raise InvalidParameter(
            name, f"{len(values)} values", f"must be one for all or one each; there are {count} prompts"
        )
    return values
