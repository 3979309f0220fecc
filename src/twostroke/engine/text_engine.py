"""Text in, text out, on top of the engine: what LLM, AsyncEngine and the command line share."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from twostroke.batch import NewRequest
from twostroke.engine.clock import Clock
from twostroke.engine.engine import Engine
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.input_processor import InputProcessor, Prompt, PromptInput
from twostroke.engine.output_processor import OutputKind, OutputProcessor
from twostroke.errors import InvalidParameter
from twostroke.outputs import RequestOutput
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams


class TextEngine:
    """Prompts in, RequestOutputs out, a step at a time. Not for several threads at once.

    Args:
        engine: runs sequences of token ids.
        inputs: checks and encodes.
        outputs: decodes and puts together.
        clock: the engine's.
        uses_priority: whether the scheduler looks at priorities at all.
        startup_lines: what was loaded and how memory was divided, for people.
    """

    def __init__(
        self,
        engine: Engine,
        inputs: InputProcessor,
        outputs: OutputProcessor,
        *,
        clock: Clock,
        uses_priority: bool,
        startup_lines: Sequence[str] = (),
    ) -> None:
        self._engine = engine
        self._inputs = inputs
        self._outputs = outputs
        self._clock = clock
        self._uses_priority = uses_priority
        self.startup_lines = tuple(startup_lines)
        self._names = (f"request-{number}" for number in itertools.count())
        self._ended: list[RequestOutput] = []

    @property
    def engine(self) -> Engine:
        """The loop beneath."""
        return self._engine

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return self._engine.has_work or bool(self._ended)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
    ) -> str:
        """Queues a prompt.

        Args:
            prompt: text, or {"prompt_token_ids": [...]}.
            params: how to sample and when to stop.
            request_id: a name of the caller's; must not be in use. Default: one is made.
            priority: lower is served earlier; only with policy "priority".
            cache_salt: requests share cached prefixes only with those of the same salt.
            kind: whether outputs hold everything so far, what is new, or come once at the end.

        Returns:
            The request's id, which its outputs carry.

        Raises:
            ClientError: the prompt or a parameter cannot be run; nothing was queued.
        """
        arrival_time_s = self._clock()
        return self._queue(self._inputs.process(prompt, params), arrival_time_s, request_id, priority, cache_salt, kind)

    def submit_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kind: OutputKind = OutputKind.CUMULATIVE,
        **template: Any,
    ) -> str:
        """Queues a conversation, rendered by the model's chat template.

        `template` holds what InputProcessor.process_chat takes: tools, add_generation_prompt, continue_final_message,
        chat_template_kwargs. The rest is as for `submit`.
        """
        arrival_time_s = self._clock()
        prompt = self._inputs.process_chat(messages, params, **template)
        return self._queue(prompt, arrival_time_s, request_id, priority, cache_salt, kind)

    def abort(self, request_id: str) -> bool:
        """Ends a request now; its last output, finish_reason "abort", comes with the next step.

        Returns:
            False when it had ended before, or never was.
        """
        sequence_ids = self._outputs.live_sequence_ids(request_id)
        for sequence_id in sequence_ids:
            self._engine.finish(sequence_id, FinishReason.ABORT)
        output = self._outputs.abort(request_id, self._clock())
        if output is not None:
            self._ended.append(output)
        return bool(sequence_ids)

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the outputs of requests that it, or an abort before it, has changed."""
        ended, self._ended = self._ended, []
        processed = self._outputs.process(self._engine.step())
        for accepted in processed.accepted:
            if accepted.finish_reason is not None:
                # a stop string is only seen here; for what the engine ended itself this does nothing
                self._engine.finish(accepted.request_id, accepted.finish_reason)
        return [*ended, *processed.outputs]

    def close(self) -> None:
        """Gives back memory; nothing may be called afterwards."""
        self._engine.close()

    def _queue(
        self,
        prompt: PromptInput,
        arrival_time_s: float,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
        kind: OutputKind,
    ) -> str:
        if priority and not self._uses_priority:
            raise InvalidParameter("priority", priority, "needs the policy 'priority'; this engine runs 'fcfs'")
        if request_id is None:
            request_id = next(self._names)
        elif self._outputs.is_live(request_id):
            raise InvalidParameter("request_id", request_id, "is in use by a request that has not ended")
        seed = secrets.randbits(63) if prompt.params.seed is None else prompt.params.seed
        sequence_ids = self._outputs.add(
            request_id, prompt, seeds=[seed] * prompt.params.n, arrival_time_s=arrival_time_s, kind=kind
        )
        for index, sequence_id in enumerate(sequence_ids):
            params = prompt.params
            if index:  # one sequence reports the prompt's log-probabilities; the others may use the prefix cache
                params = dataclasses.replace(params, prompt_logprobs=None)
            new_request = NewRequest(
                sequence_id,
                prompt.prompt_token_ids,
                params,
                seed=seed,
                sample_index=index,
                eos_token_ids=tuple(sorted(prompt.eos_token_ids)),
                bad_words_token_ids=prompt.bad_words_token_ids,
            )
            self._engine.add_request(
                GenerationRequest(new_request, arrival_time_s, prompt.max_tokens, priority, cache_salt)
            )
        return request_id
