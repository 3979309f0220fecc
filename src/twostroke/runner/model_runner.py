"""From the decision to the tokens: prepare, forward, sample. Nothing here knows a particular model or policy."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from twostroke.batch import BlockTableUpdate, NewRequest, RequestResult, ScheduledBatch, StepResult, TokenLogprobs
from twostroke.grammar.backend import GrammarBackend
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.model.decoder import DecoderModel
from twostroke.runner.input_batch import InputBatch, build_input_batch
from twostroke.runner.kv_recompute import KVRecomputer
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.request_table import RequestRow, RequestTable
from twostroke.sampling.logprobs import num_slice_rows, token_logprobs
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import SampledTokens, Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import DraftRequest, Proposer, TargetRead, TargetStep, Watcher

_PromptScores = tuple[int, tuple[TokenLogprobs, ...]]
"""The first position that was predicted, and one entry per predicted token."""


class ModelRunner:
    """Executes decided batches on one device.

    Args:
        model: maths and weights.
        kv: the KV memory.
        sampler: chooses tokens.
        max_model_len: longest request, in tokens.
        device: where the tensors of a step are made.
        grammars: makes the matchers of structured outputs.
        proposer: guesses drafts; None where nobody does.
    """

    def __init__(
        self,
        model: DecoderModel,
        kv: KVStorage,
        sampler: Sampler,
        *,
        max_model_len: int,
        device: torch.device,
        grammars: GrammarBackend,
        proposer: Proposer | None = None,
    ) -> None:
        self._proposer = proposer
        self._watcher = proposer if isinstance(proposer, Watcher) else None
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._device = device
        self._grammars = grammars
        self._table = RequestTable(kv.layout, max_model_len)
        self._announced: dict[str, NewRequest] = {}
        self._attention_layout = kv.attention_layout(model.config.num_heads)
        self._recomputer = KVRecomputer(model, kv, device) if kv.scratch_ids else None

    def add_request(self, request: NewRequest) -> None:
        """Announces a request; it gets its row with the first batch that it is part of.

        Not before: that batch may be the one that says that an earlier request of the same id has ended.
        """
        self._announced[request.request_id] = request

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

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Computes one step.

        Returns:
            One result per scheduled request, in the batch's order. A request whose logits are not finite gets an
            error; the others are as they would be without it.
        """
        for request_id in batch.finished_request_ids:
            # without a row when the step that was to give it one failed
            row = self._table.try_remove(request_id)
            if row is None:
                self._announced.pop(request_id, None)
            elif self._proposer is not None:
                self._proposer.forget(row.index, 0)
        while self._announced:
            self._add_row(self._announced.pop(next(iter(self._announced))))
        for scheduled in batch.requests:
            for update in scheduled.block_tables:
                if update.block_ids:  # most steps open no block
                    self._update_blocks(self._table[scheduled.request_id], scheduled.block_tables)
                    break
        begin_s = time.perf_counter()
        if self._proposer is not None:
            self._guess(self._proposer, batch)
        draft_time_s = time.perf_counter() - begin_s
        inputs = build_input_batch(batch, self._table)
        attention = self._attention_metadata(inputs)
        input_ids, positions = self._to_device(inputs.input_ids), self._to_device(inputs.positions)

        begin_s = time.perf_counter()
        hidden, features = self._forward(input_ids, positions, attention)
        sampled, token_ids = self._sample(hidden, inputs)
        operator_time_s = time.perf_counter() - begin_s

        prompt_logprobs = self._prompt_logprobs(hidden, inputs)
        pooled = self._pooled(hidden, inputs, batch)
        results = self._results(batch, inputs, sampled, token_ids, prompt_logprobs, pooled)
        if self._watcher is not None:
            begin_s = time.perf_counter()
            reads = self._reads(inputs, results)
            self._watcher.observe(TargetStep(hidden, features, reads, self._table.block_tables))
            draft_time_s += time.perf_counter() - begin_s
        return StepResult(batch.step, results, operator_time_s, draft_time_s)

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...]:
        """Computes a cached block again; see KVRecomputer. The KV memory was made with scratch blocks for it."""
        assert self._recomputer is not None, "no scratch blocks: kv_check_rate is 0"
        return self._recomputer.differences(check, token_ids)

    def close(self) -> None:
        """Lets go of model and KV memory."""
        del self._model, self._kv, self._recomputer, self._proposer, self._watcher

    def _update_blocks(self, row: RequestRow, updates: Sequence[BlockTableUpdate]) -> None:
        self._table.update_blocks(row, updates)
        if self._proposer is not None:  # what it keeps in these blocks was somebody else's
            first = min(update.start for update in updates if update.block_ids)
            self._proposer.forget(row.index, first * self._kv.layout.block_size)

    def _guess(self, proposer: Proposer, batch: ScheduledBatch) -> None:
        """Puts drafts where places were made for them."""
        rows: list[RequestRow] = []
        requests: list[DraftRequest] = []
        for scheduled in batch.requests:
            row = self._table[scheduled.request_id]
            row.drafts = ()
            if scheduled.num_draft_tokens:
                rows.append(row)
                requests.append(
                    DraftRequest(
                        row.index,
                        self._table.known_tokens(row),
                        scheduled.num_draft_tokens,
                        row.sampling,
                        [table[row.index] for table in self._table.block_tables],
                    )
                )
        if requests:
            for row, drafts in zip(rows, proposer.propose(requests), strict=True):
                self._table.put_drafts(row, drafts)

    def _forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, and the features that somebody watches."""
        if self._watcher is None or not self._watcher.feature_layers:
            hidden = self._model.forward(input_ids, positions, attention, self._kv)
            return hidden, hidden[:, :0]
        layers = self._watcher.feature_layers
        return self._model.forward_with_features(input_ids, positions, attention, self._kv, layers)

    def _reads(self, inputs: InputBatch, results: Sequence[RequestResult]) -> list[TargetRead]:
        """What was read for good: a request in error read nothing, and drafts that fell were not read."""
        reads: list[TargetRead] = []
        firsts, begins = inputs.query_start_loc.tolist(), inputs.positions[inputs.query_start_loc[:-1]].tolist()
        known = self._table.num_tokens[inputs.row_indexes].tolist()
        for seq, (row, result) in enumerate(zip(inputs.rows, results, strict=True)):
            if result.error is None:
                num_fallen = len(row.drafts) - max(0, len(result.token_ids) - 1)
                num_tokens = firsts[seq + 1] - firsts[seq] - num_fallen
                reads.append(TargetRead(row.index, firsts[seq], begins[seq], num_tokens, known[seq]))
        return reads

    def _attention_metadata(self, inputs: InputBatch) -> AttentionMetadata:
        max_blocks = -(-int(inputs.seq_lens.max()) // self._kv.layout.block_size)
        return AttentionMetadata.build(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            block_tables=[table[inputs.row_indexes, :max_blocks] for table in self._table.block_tables],
            layout=self._attention_layout,
            operator=self._model.attention,
        )

    def _sample(self, hidden: torch.Tensor, inputs: InputBatch) -> tuple[SampledTokens | None, list[int]]:
        """One token for each request that reached its last known one, and one behind each of its drafts."""
        if not len(inputs.sampling_seqs):
            return None, []
        logits = self._model.compute_logits(hidden[self._to_device(inputs.sampled_tokens())])
        states: list[SamplingState] = []
        for seq in inputs.sampling_seqs.tolist():
            row = inputs.rows[seq]
            states.append(row.sampling)
            for draft in row.drafts:
                states.append(states[-1].ahead((draft,)))
        sampled = self._sampler.sample(logits, states)
        return sampled, sampled.token_ids.tolist()

    def _pooled(self, hidden: torch.Tensor, inputs: InputBatch, batch: ScheduledBatch) -> dict[int, RequestResult]:
        """The results of requests that end with the hidden state of their last token, by place in the batch."""
        if not len(inputs.pooling_seqs):
            return {}
        last = hidden[self._to_device(inputs.last_tokens(inputs.pooling_seqs))].float().cpu().numpy()
        results: dict[int, RequestResult] = {}
        for seq, state in zip(inputs.pooling_seqs.tolist(), last, strict=True):
            request_id = batch.requests[seq].request_id
            if np.isfinite(state).all():
                results[seq] = RequestResult(request_id, (), hidden_state=state.tobytes())
            else:
                results[seq] = RequestResult(request_id, (), error="the model's hidden state is not finite")
        return results

    def _results(
        self,
        batch: ScheduledBatch,
        inputs: InputBatch,
        sampled: SampledTokens | None,
        token_ids: list[int],
        prompt_logprobs: dict[int, _PromptScores],
        results: dict[int, RequestResult],
    ) -> tuple[RequestResult, ...]:
        """One per request, those of `results` among them."""
        if sampled is not None:
            results |= self._sampled_results(batch, inputs, sampled, token_ids)
        for seq, (start, scored) in prompt_logprobs.items():
            result = results.get(seq) or RequestResult(batch.requests[seq].request_id, ())
            results[seq] = result._replace(prompt_logprobs=scored, prompt_logprobs_start=start)
        return tuple(results.get(seq) or RequestResult(r.request_id, ()) for seq, r in enumerate(batch.requests))

    def _sampled_results(
        self, batch: ScheduledBatch, inputs: InputBatch, sampled: SampledTokens, token_ids: list[int]
    ) -> dict[int, RequestResult]:
        """By place in the batch; the tokens are taken behind those that are known.

        ```
        fed       last  d1  d2  d3        the row's last known token and its drafts
        drawn     t1    t2  t3  t4        d1 = t1, d2 = t2, d3 ≠ t3: t1, t2 and t3 are the next tokens; behind a draft
                                          that did not stand nothing is
        ```
        """
        results: dict[int, RequestResult] = {}
        rows: dict[int, RequestRow] = {}
        first = 0
        for seq, num_drafts in zip(inputs.sampling_seqs.tolist(), inputs.num_drafts.tolist(), strict=True):
            row, request_id = inputs.rows[seq], batch.requests[seq].request_id
            drawn = range(first, first + 1 + num_drafts)
            first = drawn.stop
            if drawn.start in sampled.errors:
                results[seq] = RequestResult(request_id, (), error=sampled.errors[drawn.start])
                continue
            kept = self._stand(row, drawn, sampled, token_ids)
            found = [sampled.logprobs[i] for i in drawn[: len(kept)]]
            logprobs = tuple(TokenLogprobs(*entry) for entry in found if entry is not None)
            results[seq] = RequestResult(
                request_id, kept, num_drafts, logprobs=logprobs, is_complete=row.sampling.is_complete
            )
            rows[seq] = row
        self._table.append_tokens(list(rows.values()), [results[seq].token_ids for seq in rows])
        return results

    def _stand(self, row: RequestRow, drawn: range, sampled: SampledTokens, token_ids: list[int]) -> tuple[int, ...]:
        """Of the tokens drawn for a row those that follow; its sampling state goes on behind them."""
        kept: list[int] = []
        for i, draft in zip(drawn, (*row.drafts, None), strict=True):
            if i in sampled.errors:  # found again by the next step, where it stands first
                break
            kept.append(token_ids[i])
            row.sampling.append(token_ids[i])
            if token_ids[i] != draft or row.sampling.is_complete:
                break
        return tuple(kept)

    def _prompt_logprobs(
        self, hidden: torch.Tensor, inputs: InputBatch
    ) -> dict[int, tuple[int, tuple[TokenLogprobs, ...]]]:
        """For requests that asked: how likely the model found the prompt tokens that this chunk predicts.

        ```
        chunk computes positions     c  c+1  …  e-1
        and so predicts the tokens   c+1  …     e       of which those inside the prompt count
        ```

        Returns:
            The scores by place in the batch.
        """
        found: dict[int, _PromptScores] = {}
        for seq, row in enumerate(inputs.rows):
            if row.num_prompt_logprobs is None or row.num_prompt_scored >= row.num_prompt_tokens:
                continue
            begin_loc, end_loc = int(inputs.query_start_loc[seq]), int(inputs.query_start_loc[seq + 1])
            first_predicted = int(inputs.positions[begin_loc]) + 1
            begin = max(first_predicted, row.num_prompt_scored)
            end = min(int(inputs.positions[end_loc - 1]) + 2, row.num_prompt_tokens)
            if begin >= end:
                continue
            first_row = begin_loc + begin - first_predicted
            rows = hidden[first_row : first_row + end - begin]
            tokens = torch.from_numpy(self._table.token_ids[row.index, begin:end].astype(np.int64)).to(self._device)
            found[seq] = begin, self._score(rows, tokens, row.num_prompt_logprobs)
            row.num_prompt_scored = end
        return found

    def _score(self, hidden: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[TokenLogprobs, ...]:
        """Logits in slices: those of a long chunk over a large vocabulary would not fit at once."""
        scored: list[TokenLogprobs] = []
        step = num_slice_rows(self._sampler.vocab_size)
        for begin in range(0, len(token_ids), step):
            logits = self._model.compute_logits(hidden[begin : begin + step])
            scored += (TokenLogprobs(*p) for p in token_logprobs(logits, token_ids[begin : begin + step], num_top))
        return tuple(scored)

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
