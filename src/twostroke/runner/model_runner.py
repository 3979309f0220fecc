"""Execution of a decided batch: prepare, forward, sample. Independent of particular models and policies.

ModelRunner is the plain loop. Runners that do more are chosen at the start: SpeculativeModelRunner (runner/drafting.py)
verifies drafts, AsyncModelRunner (runner/async_runner.py) launches a step before the previous one has ended. The
engine uses them as an Executor, below, in this process or as one of several ranks (runner/tensor_parallel.py).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from twostroke.batch import BlockTableUpdate, NewRequest, RequestResult, ScheduledBatch, StepResult, TokenLogprobs
from twostroke.config.layer_spec import KVSpec
from twostroke.grammar.backend import GrammarBackend
from twostroke.kernels.head_order import HeadOrder
from twostroke.kernels.memory import send
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.layers.attention import AttentionMetadata
from twostroke.log import get_logger
from twostroke.model.decoder import DecoderModel
from twostroke.plain_words import reason_of
from twostroke.runner.decode_graphs import DecodeGraphs
from twostroke.runner.input_batch import InputBatch, RequestRow, RequestTable, build_input_batch
from twostroke.runner.key_means import key_means_of_groups
from twostroke.runner.kv_moves import KVMover
from twostroke.runner.kv_recompute import KVRecomputer
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.launched_step import Draw, LaunchedStep
from twostroke.runner.prompt_results import PromptScorer, PromptScores, hidden_states
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import SampledTokens, Sampler
from twostroke.sampling.state import SamplingState

log = get_logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class RunnerParts:
    """Optional parts of a runner."""

    graphs: DecodeGraphs | None = None
    """Passes that are recorded and replayed."""
    mover: KVMover | None = None
    """Copies of KV blocks to host memory and back."""
    cpus: Collection[int] = ()
    """CPUs of the computing thread; empty if it is not pinned."""


class ThreadPinning:
    """Pinning of the thread that computes steps, undone at the end: the offline API computes in its caller's thread."""

    def __init__(self, cpus: Collection[int]) -> None:
        """Take the CPUs; empty pins nothing."""
        self._cpus = frozenset(cpus)
        self._pinned: int | None = None
        self._before: tuple[int, set[int]] | None = None
        """Native id of the thread, and its CPU affinity before it was pinned."""

    def pin(self) -> None:
        """Pin the calling thread, unless it is pinned."""
        if not self._cpus or self._pinned == threading.get_ident():
            return
        self.release()
        self._before = threading.get_native_id(), os.sched_getaffinity(0)
        os.sched_setaffinity(0, self._cpus)
        self._pinned = threading.get_ident()

    def release(self) -> None:
        """Restore the thread's affinity."""
        if self._before is not None:
            thread, cpus = self._before
            with contextlib.suppress(OSError):  # the thread has ended, or its CPUs were taken away
                os.sched_setaffinity(thread, cpus)
        self._pinned = self._before = None


class ModelRunner:
    """Runner of decided batches on the device of the KV memory.

    Args:
        model: maths and weights.
        kv: the KV memory.
        sampler: chooses tokens.
        max_model_len: longest request, in tokens.
        grammars: makes the matchers of structured outputs.
        parts: optional parts; None for none.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: KVStorage,
        sampler: Sampler,
        *,
        max_model_len: int,
        grammars: GrammarBackend,
        parts: RunnerParts | None = None,
    ) -> None:
        parts = parts or RunnerParts()
        self._graphs, self._mover = parts.graphs, parts.mover
        self._thread = ThreadPinning(parts.cpus) if parts.cpus else None
        self._ready_s = 0.0
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._device = kv.tensor.device
        self._grammars = grammars
        self._table = RequestTable(kv.layout, max_model_len)
        self._pending_requests: dict[str, NewRequest] = {}
        self._attention_layout = kv.attention_layout(model.num_heads)
        self._recomputer = KVRecomputer(model, kv, self._device) if kv.scratch_ids else None
        self._scorer = PromptScorer(model, sampler.vocab_size)

    @property
    def kv(self) -> KVStorage:
        """KV memory that it computes in."""
        return self._kv

    @property
    def kv_order(self) -> str:
        """Name of the byte order inside that memory's heads (`AttentionOperator.kv_order`)."""
        return self._model.attention.kv_order(self._kv.layout.kv_format)

    def head_order(self, kv: KVSpec, block_size: int) -> HeadOrder:
        """Return that order for layers of one kind, in pages of any size."""
        return self._model.attention[kv].head_order(self._kv.layout.kv_format, kv.head_dim, block_size)

    @property
    def key_means(self) -> list[NDArray[np.float32]]:
        """Means of keys that quantized KV subtracts, per KV group [layers, num_kv_heads of all ranks, head_dim]."""
        return key_means_of_groups(self._model, self._kv.layout)

    def add_request(self, request: NewRequest) -> None:
        """Announce a request; it gets its row with the first batch that contains it.

        It gets none before, because that batch may be the one that ends an earlier request of the same id.
        """
        self._pending_requests[request.request_id] = request

    def _add_row(self, request: NewRequest) -> None:
        rules = self._sampler.rules(request.params, request.bad_words_token_ids)
        stream = NoiseStream(request.seed, request.sample_index)
        matcher = None if request.grammar is None else self._grammars.matcher(request.grammar)
        state = SamplingState(rules, stream, request.prompt_token_ids, request.output_token_ids, matcher)
        token_ids = request.prompt_token_ids + request.output_token_ids
        self._table.add(
            request.request_id,
            token_ids,
            state,
            len(request.prompt_token_ids),
            wants_hidden_state=request.wants_hidden_state,
        )

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Compute one step: `launch` and `finish`."""
        return self.finish(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Launch a step, after those launched before."""
        self._prepare_pass(batch)
        inputs = build_input_batch(batch, self._table)
        begin_s = time.perf_counter()
        forward = self._prepare(inputs, self._to_device(inputs.positions))
        hidden = forward(self._to_device(inputs.input_ids))
        step = LaunchedStep(batch, inputs, hidden, begin_s)
        if len(inputs.sampling_seqs):
            states = [inputs.rows[seq].sampling for seq in inputs.sampling_seqs.tolist()]
            step.draw = Draw(self._logits(hidden, inputs.last_tokens(inputs.sampling_seqs)), states)
        return step

    @torch.inference_mode()
    def finish(self, step: LaunchedStep) -> StepResult:
        """Wait for the oldest unfinished step.

        Returns:
            One result per scheduled request, in the batch's order. A request whose logits are not finite gets an error,
            and the other requests are unaffected.

        Raises:
            Exception: any exception of an operator.
        """
        return self._result_of(step)

    def _prepare_pass(self, batch: ScheduledBatch) -> None:
        """Prepare a pass: pin the thread, start KV moves, update the rows of requests."""
        if self._thread is not None:
            self._thread.pin()
        if self._mover is not None:
            self._mover.begin(batch.kv_moves)
        self._apply_batch_changes(batch)

    def _apply_batch_changes(self, batch: ScheduledBatch) -> None:
        """Apply the batch's changes of requests: ended requests, new requests, changed block tables."""
        for request_id in batch.finished_request_ids:
            self._remove_row(request_id)
        while self._pending_requests:
            self._add_row(self._pending_requests.pop(next(iter(self._pending_requests))))
        for scheduled in batch.requests:
            for update in scheduled.block_tables:
                if update.block_ids:  # most steps open no block
                    self._update_blocks(self._table[scheduled.request_id], scheduled.block_tables)
                    break

    def _remove_row(self, request_id: str) -> RequestRow | None:
        """Forget a request. It has no row if the step that was to give it one failed."""
        row = self._table.try_remove(request_id)
        if row is None:
            self._pending_requests.pop(request_id, None)
        return row

    def _update_blocks(self, row: RequestRow, updates: Sequence[BlockTableUpdate]) -> None:
        self._table.update_blocks(row, updates)

    def _prepare(self, flat: InputBatch, positions: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the pass of a step as a function from token ids to hidden states."""
        if self._graphs is not None:
            replay = self._graphs.prepare(flat, positions)
            if replay is not None:
                return replay
        model, kv, attention = self._model, self._kv, self._attention(flat)

        def forward(input_ids: torch.Tensor) -> torch.Tensor:
            return model.forward(input_ids, positions, attention, kv)

        return forward

    def _attention(self, flat: InputBatch) -> AttentionMetadata:
        """Plan the attention of a step."""
        return AttentionMetadata.build(
            query_start_loc=flat.query_start_loc,
            seq_lens=flat.seq_lens,
            block_tables=flat.block_tables,
            layout=self._attention_layout,
            operators=self._model.attention,
        )

    def _logits(self, hidden: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of the tokens at these places of the flat batch. float32 [len(places), V]"""
        return self._model.compute_logits(hidden[self._to_device(places)])

    def _result_of(self, step: LaunchedStep) -> StepResult:
        batch, inputs, draw = step.batch, step.inputs, step.draw
        sampled = None if draw is None else self._sampled(step, draw)
        ready_s = time.perf_counter()
        operator_time_s = ready_s - max(step.begin_s, self._ready_s)
        self._ready_s = ready_s

        scores: dict[int, PromptScores] = {}
        if self._table.num_wanting_prompt_scores:
            scores = self._scorer.scores(step.hidden, inputs, self._table)
        found = {} if draw is None or sampled is None else self._token_results(step, draw, sampled)
        if len(inputs.pooling_seqs):
            found |= hidden_states(step.hidden, inputs, batch)
        return StepResult(batch.step, self._results(batch, found, scores), operator_time_s)

    def _sampled(self, step: LaunchedStep, draw: Draw) -> SampledTokens:
        """Return the tokens that a step draws, once they are known."""
        del step
        return self._sampler.sample(draw.logits, draw.states)

    @staticmethod
    def _results(
        batch: ScheduledBatch, results: dict[int, RequestResult], scores: dict[int, PromptScores]
    ) -> tuple[RequestResult, ...]:
        """Return one result per request, including those of `results`."""
        for seq, (start, scored) in scores.items():
            result = results.get(seq) or RequestResult(batch.requests[seq].request_id, ())
            results[seq] = result._replace(prompt_logprobs=scored, prompt_logprobs_start=start)
        return tuple(results.get(seq) or RequestResult(r.request_id, ()) for seq, r in enumerate(batch.requests))

    def _token_results(self, step: LaunchedStep, draw: Draw, sampled: SampledTokens) -> dict[int, RequestResult]:
        """Return the results of requests that got a token, by place in the batch."""
        del draw
        inputs, token_ids = step.inputs, sampled.token_ids.tolist()
        results: dict[int, RequestResult] = {}
        rows: list[RequestRow] = []
        tokens: list[tuple[int, ...]] = []
        for place, seq in enumerate(inputs.sampling_seqs.tolist()):
            row, request_id = inputs.rows[seq], step.batch.requests[seq].request_id
            if not self._table.has(request_id, row):  # the request has ended meanwhile
                continue
            if place in sampled.errors:
                results[seq] = RequestResult(request_id, (), error=sampled.errors[place])
                continue
            row.sampling.append(token_ids[place])
            rows.append(row)
            tokens.append((token_ids[place],))
            scored = sampled.logprobs[place]
            logprobs = () if scored is None else (TokenLogprobs(*scored),)
            is_complete = row.sampling.is_complete
            results[seq] = RequestResult(request_id, tokens[-1], logprobs=logprobs, is_complete=is_complete)
        self._table.append_tokens(rows, tokens)
        return results

    def expert_counts(self) -> NDArray[np.int64]:
        """Return the tokens of each expert since the start, of all layers in a row; empty if they are not counted."""
        counts = self._model.expert_counts
        return torch.cat(counts).numpy() if counts else np.zeros(0, np.int64)

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...]:
        """Recompute a cached block (see KVRecomputer). The KV memory must have scratch blocks."""
        assert self._recomputer is not None, "no scratch blocks: kv_check_rate is 0"
        if self._mover is not None:
            self._mover.wait_for_prefetches()
        return self._recomputer.differences(check, token_ids)

    def close(self) -> None:
        """Release model, KV memory and thread."""
        if self._thread is not None:
            self._thread.release()
        del self._model, self._kv, self._recomputer, self._scorer, self._graphs, self._mover

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return send(array, self._device)


# ------------------------------------------------------------------ the executor


class Executor(Protocol):
    """Interface of one or more workers to the engine.

    Batches are executed in the order of `submit`; `collect` returns their results in the same order.
    """

    @property
    def max_in_flight(self) -> int:
        """Batches that may be submitted before the first result is collected; with 1, deciding and computing
        alternate."""
        ...

    def add_request(self, request: NewRequest) -> None:
        """Announce a request before it is first scheduled."""
        ...

    def submit(self, batch: ScheduledBatch) -> None:
        """Start a batch."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest submitted batch."""
        ...

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Recompute a cached block, after all batches submitted so far and outside of them.

        Args:
            check: the block.
            token_ids: tokens of the block.

        Returns:
            The differences of the stored block, empty if there are none; None if it could not be computed.
        """
        ...

    def close(self) -> None:
        """Release memory and workers; nothing may be called afterwards."""
        ...


class InProcessExecutor:
    """Executor in the caller's thread.

    Args:
        runner: runner of the model.
        max_in_flight: see Executor; more than 1 for a runner that launches steps early.
    """

    def __init__(self, runner: ModelRunner, max_in_flight: int = 1) -> None:
        self._runner = runner
        self._max_in_flight = max_in_flight
        self._steps: deque[LaunchedStep | StepResult] = deque()

    @property
    def max_in_flight(self) -> int:
        return self._max_in_flight

    def add_request(self, request: NewRequest) -> None:
        self._runner.add_request(request)

    def submit(self, batch: ScheduledBatch) -> None:
        """Launch a step, and finish it unless several may be in flight. A step that raises ends its requests with an
        error."""
        try:
            self._steps.append(self._runner.launch(batch))
        except Exception as error:
            # an operator's exception must not end requests that were not in this step
            self._steps.append(_failed(batch, error))
            return
        if self._max_in_flight == 1:  # so that an interrupt of the caller finds no unfinished step
            self._steps.append(self._finished(self._steps.pop()))

    def collect(self) -> StepResult:
        return self._finished(self._steps.popleft())

    def _finished(self, step: LaunchedStep | StepResult) -> StepResult:
        if isinstance(step, StepResult):
            return step
        try:
            return self._runner.finish(step)
        except Exception as error:
            return _failed(step.batch, error)

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...] | None:
        """Recompute a cached block. A failed check is only logged, since it belongs to no request."""
        try:
            return self._runner.check_kv(check, token_ids)
        except Exception:
            log.exception("block %d of the prefix of %s could not be checked", check.entry, check.request_id)
            return None

    def close(self) -> None:
        self._runner.close()


def _failed(batch: ScheduledBatch, error: Exception) -> StepResult:
    """Return an error for each request of a step, and log the exception."""
    log.error("step %d failed", batch.step, exc_info=error)
    reason = f"step {batch.step} failed: {reason_of(error)}"
    return StepResult(batch.step, tuple(RequestResult(r.request_id, (), error=reason) for r in batch.requests))
