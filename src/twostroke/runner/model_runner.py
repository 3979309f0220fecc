"""From the decision to the tokens: prepare, forward, sample. Nothing here knows a particular model or policy."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from twostroke.batch import BlockTableUpdate, NewRequest, RequestResult, ScheduledBatch, StepResult, TokenLogprobs
from twostroke.config.layer_spec import KVSpec
from twostroke.grammar.backend import GrammarBackend
from twostroke.kernels.head_order import HeadOrder
from twostroke.kernels.sending import send
from twostroke.kv_check import KVCheck, KVDifference
from twostroke.layers.attention_metadata import AttentionMetadata
from twostroke.model.decoder import DecoderModel
from twostroke.runner.branches import Branch, BranchBlocks, FlatBatch, flat_batch
from twostroke.runner.decode_graphs import DecodeGraphs
from twostroke.runner.host_copy import HostCopy
from twostroke.runner.input_batch import InputBatch, build_input_batch
from twostroke.runner.key_means import key_means_of_groups
from twostroke.runner.kv_moves import KVMover
from twostroke.runner.kv_recompute import KVRecomputer
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.launched_step import Draw, LaunchedStep, Path
from twostroke.runner.model_thread import ModelThread
from twostroke.runner.request_table import RequestRow, RequestTable
from twostroke.sampling.logprobs import num_slice_rows, token_logprobs
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import SampledTokens, Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import DraftRequest, Proposer, TargetRead, TargetStep, Watcher

_PromptScores = tuple[int, tuple[TokenLogprobs, ...]]
"""The first position that was predicted, and one entry per predicted token."""


@dataclass(frozen=True, slots=True, eq=False)
class _Drawn:
    """What a step drew."""

    sampled: SampledTokens
    token_ids: list[int]
    paths: dict[int, list[Path]]
    """By row of the table; the chain first."""
    taken: dict[int, Branch] = field(default_factory=dict[int, Branch])
    """By row of the table, the branch that it went along, where it was not the chain."""

    def num_standing(self, path: Path) -> int:
        """Of its tokens, those that were drawn where they stand."""
        pairs = zip(path.token_ids, path.drawn, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: self.token_ids[pair[1]] == pair[0], pairs))


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
        runs_ahead: whether a step is launched before the tokens of the one before it are known here: the device hands
            them on to itself.
        graphs: passes that are recorded and replayed; None where none are.
        mover: carries KV blocks to host memory and back; None where none go there.
        cpus: where the thread that computes runs; none: it is not pinned.
    """

    def __init__(  # noqa: PLR0913 (its parts, by their names)
        self,
        model: DecoderModel,
        kv: KVStorage,
        sampler: Sampler,
        *,
        max_model_len: int,
        device: torch.device,
        grammars: GrammarBackend,
        proposer: Proposer | None = None,
        runs_ahead: bool = False,
        graphs: DecodeGraphs | None = None,
        mover: KVMover | None = None,
        cpus: Collection[int] = (),
    ) -> None:
        assert not (runs_ahead and proposer), "drafts are guessed from tokens that are known"
        self._proposer = proposer
        self._runs_ahead = runs_ahead
        self._graphs = graphs
        self._mover = mover
        self._thread = ModelThread(cpus)
        self._last: LaunchedStep | None = None
        """The last step launched."""
        self._ready_s = 0.0
        self._watcher = proposer if isinstance(proposer, Watcher) else None
        self._model = model
        self._kv = kv
        self._sampler = sampler
        self._device = device
        self._grammars = grammars
        self._table = RequestTable(kv.layout, max_model_len)
        self._announced: dict[str, NewRequest] = {}
        self._attention_layout = kv.attention_layout(model.num_heads)
        self._recomputer = KVRecomputer(model, kv, device) if kv.scratch_ids else None
        self._branches = BranchBlocks(kv) if kv.branch_ids else None

    @property
    def kv(self) -> KVStorage:
        """The KV memory that it computes in."""
        return self._kv

    @property
    def kv_order(self) -> str:
        """Names the order of the bytes inside that memory's heads (`AttentionOperator.kv_order`)."""
        return self._model.attention.kv_order(self._kv.layout.kv_format)

    def head_order(self, kv: KVSpec, block_size: int) -> HeadOrder:
        """That order in layers of one kind, in pages of any size."""
        return self._model.attention[kv].head_order(self._kv.layout.kv_format, kv.head_dim, block_size)

    @property
    def key_means(self) -> list[NDArray[np.float32]]:
        """Means of keys that quantized KV leaves out, per KV group [layers, num_kv_heads of all ranks, head_dim]."""
        return key_means_of_groups(self._model, self._kv.layout)

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

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Computes one step: `launch` and `finish`."""
        return self.finish(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Gives the device a step, behind those that it has been given.

        Returns without waiting for it where the runner runs ahead, and then the step before it is over.
        """
        self._thread.pin()
        if self._mover is not None:
            self._mover.begin(batch.kv_moves)
        before = self._last
        if before is not None and (before.draw is None or before.draw.token_ids is None):
            self._end(before)  # nothing on the device could be handed on
        self._follow(batch)
        begin_s = time.perf_counter()
        if self._proposer is not None:
            self._guess(self._proposer, batch)
        draft_time_s = time.perf_counter() - begin_s
        inputs = build_input_batch(batch, self._table)
        branches = self._branches.place(inputs.rows, self._table, len(inputs.input_ids)) if self._branches else []
        flat = flat_batch(inputs, branches, self._table, self._kv.layout.block_size)
        input_ids, positions = self._to_device(flat.input_ids), self._to_device(flat.positions)
        handed_on = self._places_handed_on(inputs, before)
        if handed_on is not None and before is not None and before.draw is not None:
            input_ids = _with_handed_on(input_ids, before.draw, self._to_device(handed_on))

        watcher = self._watcher_of(batch)
        begin_s = time.perf_counter()
        forward = self._prepare(flat, positions, watcher)
        hidden, features = forward(input_ids)
        if before is not None:
            self._end(before)
            if handed_on is not None and before.drew_otherwise:  # all is written to the same places again
                known = build_input_batch(batch, self._table)
                hidden, features = forward(self._to_device(known.input_ids))
        step = LaunchedStep(batch, inputs, branches, watcher, hidden, features, begin_s, draft_time_s)
        step.draw = self._draw(step)
        if step.draw is not None and step.draw.token_ids is not None:
            step.places = {inputs.rows[seq].index: place for place, seq in enumerate(inputs.sampling_seqs.tolist())}
        self._last = step
        return step

    @torch.inference_mode()
    def finish(self, step: LaunchedStep) -> StepResult:
        """Waits for a step, the oldest that has not ended.

        Returns:
            One result per scheduled request, in the batch's order. A request whose logits are not finite gets an
            error; the others are as they would be without it.

        Raises:
            Exception: whatever an operator raised.
        """
        self._end(step)
        if isinstance(step.outcome, Exception):
            raise step.outcome
        assert step.outcome is not None
        return step.outcome

    def _follow(self, batch: ScheduledBatch) -> None:
        """Takes over what the batch says of its requests: who has ended, who is new, whose blocks have changed."""
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

    def _places_handed_on(self, inputs: InputBatch, before: LaunchedStep | None) -> np.ndarray | None:
        """Where among the tokens drawn by the step before each token of this step is; -1: it is known here.

        int64 [num_tokens]; None where all are known.
        """
        if before is None or before.outcome is not None:
            return None
        lens = np.diff(inputs.query_start_loc)
        is_unknown = inputs.positions >= np.repeat(self._table.num_tokens[inputs.row_indexes], lens)
        if not is_unknown.any():
            return None
        # a row whose step failed has none: what is computed for it is nobody's
        places = np.array([before.places.get(row.index, 0) for row in inputs.rows], np.int64)
        return np.where(is_unknown, np.repeat(places, lens), -1)

    def _end(self, step: LaunchedStep) -> None:
        """Waits for a step and keeps how it went, once."""
        if step.outcome is not None:
            return
        if self._last is step:
            self._last = None
        try:
            step.outcome = self._result_of(step)
        except Exception as error:  # it is the step's, whoever waits for it
            step.outcome = error

    def _result_of(self, step: LaunchedStep) -> StepResult:
        batch, inputs = step.batch, step.inputs
        drawn = self._drawn(step)
        ready_s = time.perf_counter()
        operator_time_s = ready_s - max(step.begin_s, self._ready_s)
        self._ready_s = ready_s

        prompt_logprobs = self._prompt_logprobs(step.hidden, inputs)
        pooled = self._pooled(step.hidden, inputs, batch)
        found = self._sampled_results(batch, inputs, drawn) if drawn is not None else {}
        results = self._results(batch, found | pooled, prompt_logprobs)
        draft_time_s = step.draft_time_s
        if step.watcher is not None:
            begin_s = time.perf_counter()
            reads = self._reads(inputs, results, {} if drawn is None else drawn.taken)
            step.watcher.observe(TargetStep(step.hidden, step.features, reads, self._table.block_tables))
            draft_time_s += time.perf_counter() - begin_s
        return StepResult(batch.step, results, operator_time_s, draft_time_s)

    def _watcher_of(self, batch: ScheduledBatch) -> Watcher | None:
        """Who wants to see the step."""
        if self._watcher is None or not self._watcher.watches(batch.num_prefill_tokens > 0):
            return None
        return self._watcher

    def check_kv(self, check: KVCheck, token_ids: Sequence[int]) -> tuple[KVDifference, ...]:
        """Computes a cached block again; see KVRecomputer. The KV memory was made with scratch blocks for it."""
        assert self._recomputer is not None, "no scratch blocks: kv_check_rate is 0"
        if self._mover is not None:
            self._mover.wait_for_prefetches()
        return self._recomputer.differences(check, token_ids)

    def close(self) -> None:
        """Lets go of model, KV memory and thread."""
        self._thread.release()
        del self._model, self._kv, self._recomputer, self._branches, self._proposer, self._watcher, self._last
        del self._graphs, self._mover

    def _update_blocks(self, row: RequestRow, updates: Sequence[BlockTableUpdate]) -> None:
        self._table.update_blocks(row, updates)
        if self._proposer is not None:  # what it keeps in these blocks was somebody else's
            layout = self._kv.layout
            first = min(
                update.start * layout.tokens_per_block(group)
                for group, update in zip(layout.groups, updates, strict=True)
                if update.block_ids
            )
            self._proposer.forget(row.index, first)

    def _guess(self, proposer: Proposer, batch: ScheduledBatch) -> None:
        """Puts drafts where places were made for them."""
        rows: list[RequestRow] = []
        requests: list[DraftRequest] = []
        for scheduled in batch.requests:
            row = self._table[scheduled.request_id]
            row.drafts, row.branches = (), ()
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

    def _prepare(
        self, flat: FlatBatch, positions: torch.Tensor, watcher: Watcher | None
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """The pass of a step: from token ids to hidden states and the features that somebody watches."""
        if self._graphs is not None and watcher is None:
            replay = self._graphs.prepare(flat, positions)
            if replay is not None:
                return lambda input_ids: _without_features(replay(input_ids))
        attention = AttentionMetadata.build(
            query_start_loc=flat.query_start_loc,
            seq_lens=flat.seq_lens,
            block_tables=flat.block_tables,
            layout=self._attention_layout,
            operators=self._model.attention,
        )
        model, kv, layers = self._model, self._kv, () if watcher is None else watcher.feature_layers
        if not layers:
            return lambda input_ids: _without_features(model.forward(input_ids, positions, attention, kv))
        return lambda input_ids: model.forward_with_features(input_ids, positions, attention, kv, layers)

    def _reads(
        self, inputs: InputBatch, results: Sequence[RequestResult], taken: dict[int, Branch]
    ) -> list[TargetRead]:
        """What was read for good: a request in error read nothing, and drafts that fell were not read."""
        reads: list[TargetRead] = []
        firsts, begins = inputs.query_start_loc.tolist(), inputs.positions[inputs.query_start_loc[:-1]].tolist()
        known = self._table.num_tokens[inputs.row_indexes].tolist()
        for seq, (row, result) in enumerate(zip(inputs.rows, results, strict=True)):
            if result.error is None:
                first, num_tokens = firsts[seq], firsts[seq + 1] - firsts[seq]
                if row.index in taken:
                    first, num_tokens = taken[row.index].first, len(result.token_ids)
                else:
                    num_tokens -= len(row.drafts) - max(0, len(result.token_ids) - 1)
                reads.append(TargetRead(row.index, first, begins[seq], num_tokens, known[seq]))
        return reads

    def _draw(self, step: LaunchedStep) -> Draw | None:
        """One token for each request that reached its last known one, and one behind each of its drafts.

        Where the runner runs ahead they are enqueued, and otherwise drawn when the step ends.
        """
        inputs = step.inputs
        if not len(inputs.sampling_seqs):
            return None
        rows = [inputs.rows[seq] for seq in inputs.sampling_seqs.tolist()]
        of_branches = [branch.first + 1 + i for branch in step.branches for i in range(len(branch.token_ids))]
        places = np.concatenate((inputs.sampled_tokens(), np.array(of_branches, np.int64)))
        states: list[SamplingState] = []
        paths: dict[int, list[Path]] = {}
        for row in rows:
            first = len(states)
            paths[row.index] = [Path(row.drafts, range(first, first + 1 + len(row.drafts)))]
            states.append(row.sampling)
            for draft in row.drafts:
                states.append(states[-1].ahead((draft,)))
        for branch in step.branches:
            known = paths[branch.row.index]
            behind = range(len(states), len(states) + len(branch.token_ids))
            known.append(Path(branch.token_ids, (known[0].drawn[0], *behind), branch))
            state = branch.row.sampling
            for draft in branch.token_ids:
                state = state.ahead((draft,))
                states.append(state)
        logits = self._model.compute_logits(step.hidden[self._to_device(places)])
        token_ids = self._sampler.draw_early(logits, states) if self._runs_ahead else None
        return Draw(logits, states, paths, token_ids, None if token_ids is None else HostCopy(token_ids))

    def _drawn(self, step: LaunchedStep) -> _Drawn | None:
        """Waits for what it draws; what could not be enqueued is drawn now."""
        draw = step.draw
        if draw is None:
            return None
        early = None if draw.copy is None else draw.copy.wait()
        if draw.token_ids is not None and early is not None and bool((early >= 0).all()):
            sampled = self._sampler.score(draw.logits, draw.token_ids, draw.states)
            return _Drawn(sampled, early.tolist(), draw.paths)
        step.drew_otherwise = early is not None
        sampled = self._sampler.sample(draw.logits, draw.states)
        return _Drawn(sampled, sampled.token_ids.tolist(), draw.paths)

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

    @staticmethod
    def _results(
        batch: ScheduledBatch, results: dict[int, RequestResult], prompt_logprobs: dict[int, _PromptScores]
    ) -> tuple[RequestResult, ...]:
        """One per request, those of `results` among them."""
        for seq, (start, scored) in prompt_logprobs.items():
            result = results.get(seq) or RequestResult(batch.requests[seq].request_id, ())
            results[seq] = result._replace(prompt_logprobs=scored, prompt_logprobs_start=start)
        return tuple(results.get(seq) or RequestResult(r.request_id, ()) for seq, r in enumerate(batch.requests))

    def _sampled_results(self, batch: ScheduledBatch, inputs: InputBatch, drawn: _Drawn) -> dict[int, RequestResult]:
        """By place in the batch; the tokens are taken behind those that are known.

        ```
        fed       last  d1  d2  d3        the row's last known token and its drafts
        drawn     t1    t2  t3  t4        d1 = t1, d2 = t2, d3 ≠ t3: t1, t2 and t3 are the next tokens; behind a draft
                                          that did not stand nothing is
        ```
        """
        results: dict[int, RequestResult] = {}
        rows: dict[int, RequestRow] = {}
        sampled = drawn.sampled
        for seq in inputs.sampling_seqs.tolist():
            row, request_id = inputs.rows[seq], batch.requests[seq].request_id
            if not self._table.has(request_id, row):  # it has ended meanwhile
                continue
            paths = drawn.paths[row.index]
            path = max(paths, key=drawn.num_standing) if len(paths) > 1 else paths[0]
            if path.drawn[0] in sampled.errors:
                results[seq] = RequestResult(request_id, (), error=sampled.errors[path.drawn[0]])
                continue
            kept = self._stand(row, path, drawn)
            if path.branch is not None and self._branches is not None:
                self._branches.keep(path.branch, len(kept), self._table)
                drawn.taken[row.index] = path.branch
            found = [sampled.logprobs[i] for i in path.drawn[: len(kept)]]
            logprobs = tuple(TokenLogprobs(*entry) for entry in found if entry is not None)
            num_drafts = max(len(path.token_ids) for path in paths)  # so many could have stood
            results[seq] = RequestResult(
                request_id, kept, num_drafts, logprobs=logprobs, is_complete=row.sampling.is_complete
            )
            rows[seq] = row
        self._table.append_tokens(list(rows.values()), [results[seq].token_ids for seq in rows])
        return results

    @staticmethod
    def _stand(row: RequestRow, path: Path, drawn: _Drawn) -> tuple[int, ...]:
        """Of the tokens drawn along a path those that follow; the row's sampling state goes on behind them."""
        kept: list[int] = []
        for i, draft in zip(path.drawn, (*path.token_ids, None), strict=True):
            if i in drawn.sampled.errors:  # found again by the next step, where it stands first
                break
            kept.append(drawn.token_ids[i])
            row.sampling.append(drawn.token_ids[i])
            if drawn.token_ids[i] != draft or row.sampling.is_complete:
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
            tokens = self._to_device(self._table.token_ids[row.index, begin:end].astype(np.int64))
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
        return send(array, self._device)


def _without_features(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hidden, hidden[:, :0]


def _with_handed_on(input_ids: torch.Tensor, draw: Draw, places: torch.Tensor) -> torch.Tensor:
    """With the tokens that the step before drew, where the places are not -1."""
    assert draw.token_ids is not None
    drawn = draw.token_ids.index_select(0, places.clamp(min=0)).clamp_(min=0)
    return torch.where(places < 0, input_ids, drawn)
