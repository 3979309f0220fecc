"""SpeculativeModelRunner: gets drafts from a proposer, and verifies them and their branches in the same pass."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from twostroke.batch import BlockTableUpdate, RequestResult, ScheduledBatch, StepResult, TokenLogprobs
from twostroke.grammar.backend import GrammarBackend
from twostroke.model.decoder import DecoderModel
from twostroke.runner.branches import Branch, BranchBlocks, append_branches
from twostroke.runner.input_batch import InputBatch, RequestRow, build_input_batch
from twostroke.runner.kv_storage import KVStorage
from twostroke.runner.launched_step import Draw, LaunchedStep
from twostroke.runner.model_runner import ModelRunner, RunnerParts
from twostroke.sampling.sampler import SampledTokens, Sampler
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import ComputedSpan, DraftRequest, FeatureObserver, Proposer, TargetStep


@dataclass(frozen=True, slots=True, eq=False)
class DraftPath:
    """Continuation of a sequence, verified from its last known token on."""

    token_ids: tuple[int, ...]
    drawn_rows: Sequence[int]
    """Rows of the tokens drawn: after the last known token, and after each draft."""
    branch: Branch | None = None
    """Branch that holds the path; None for the chain."""

    def num_accepted(self, token_ids: Sequence[int]) -> int:
        """Return how many of its drafts equal the token drawn in their place."""
        pairs = zip(self.token_ids, self.drawn_rows, strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: token_ids[pair[1]] == pair[0], pairs))


@dataclass(slots=True, eq=False)
class SpeculativeStep(LaunchedStep):
    """Step with drafts."""

    observer: FeatureObserver | None = None
    features: torch.Tensor | None = None
    """Hidden features of the layers that the watcher asked for."""
    draft_time_s: float = 0.0
    paths: dict[int, list[DraftPath]] = field(default_factory=dict[int, list[DraftPath]])
    """Paths by row of the table; the chain comes first."""
    accepted_branches: dict[int, Branch] = field(default_factory=dict[int, Branch])
    """Accepted branches by row of the table, for rows that did not follow the chain."""


class SpeculativeModelRunner(ModelRunner):
    """Runner of decided batches whose requests verify drafts.

    Args:
        proposer: proposes drafts.
        model: maths and weights.
        kv: the KV memory.
        sampler: chooses tokens.
        max_model_len: longest request, in tokens.
        grammars: makes the matchers of structured outputs.
        parts: optional parts of the runner; None for none.
    """

    def __init__(
        self,
        proposer: Proposer,
        model: DecoderModel,
        kv: KVStorage,
        sampler: Sampler,
        *,
        max_model_len: int,
        grammars: GrammarBackend,
        parts: RunnerParts | None = None,
    ) -> None:
        super().__init__(model, kv, sampler, max_model_len=max_model_len, grammars=grammars, parts=parts)
        self._proposer = proposer
        self._observer = proposer if isinstance(proposer, FeatureObserver) else None
        self._branches = BranchBlocks(kv) if kv.branch_ids else None

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Get drafts from the proposer, and launch a step that verifies them."""
        self._prepare_pass(batch)
        begin_s = time.perf_counter()
        self._propose_drafts(batch)
        draft_time_s = time.perf_counter() - begin_s
        inputs = build_input_batch(batch, self._table)
        branches = self._branches.allocate(inputs.rows, self._table, len(inputs.input_ids)) if self._branches else []
        flat = append_branches(inputs, branches, self._table) if branches else inputs
        input_ids, positions = self._to_device(flat.input_ids), self._to_device(flat.positions)
        observer = self._watcher_for(batch)
        begin_s = time.perf_counter()
        if observer is None:
            hidden = self._prepare(flat, positions)(input_ids)
            features = hidden[:, :0]
        else:
            hidden, features = self._run_observed(observer, flat, positions, input_ids)
        step = SpeculativeStep(batch, inputs, hidden, begin_s)
        step.observer, step.features, step.draft_time_s = observer, features, draft_time_s
        if len(inputs.sampling_seqs):
            step.draw = self._draw(step, branches)
        return step

    def close(self) -> None:
        """Release the proposer, too."""
        super().close()
        del self._branches, self._proposer, self._observer

    def _run_observed(
        self, observer: FeatureObserver, flat: InputBatch, positions: torch.Tensor, input_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a pass with the features that the watcher needs, and return hidden states and features."""
        attention, layers = self._attention(flat), observer.feature_layers
        if layers:
            return self._model.forward_with_features(input_ids, positions, attention, self._kv, layers)
        hidden = self._model.forward(input_ids, positions, attention, self._kv)
        return hidden, hidden[:, :0]

    def _watcher_for(self, batch: ScheduledBatch) -> FeatureObserver | None:
        """Return the watcher if it observes this step."""
        if self._observer is None or not self._observer.needs_step(batch.num_prefill_tokens > 0):
            return None
        return self._observer

    def _remove_row(self, request_id: str) -> RequestRow | None:
        row = super()._remove_row(request_id)
        if row is not None:
            self._proposer.forget(row.index, 0)
        return row

    def _update_blocks(self, row: RequestRow, updates: Sequence[BlockTableUpdate]) -> None:
        super()._update_blocks(row, updates)
        layout = self._kv.layout
        first = min(
            update.start * layout.tokens_per_block(group)
            for group, update in zip(layout.groups, updates, strict=True)
            if update.block_ids
        )
        self._proposer.forget(row.index, first)  # its data in these blocks belonged to another request

    def _propose_drafts(self, batch: ScheduledBatch) -> None:
        """Write drafts into the slots that the batch reserved for them."""
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
            for row, drafts in zip(rows, self._proposer.propose(requests), strict=True):
                self._table.put_drafts(row, drafts)

    def _draw(self, step: SpeculativeStep, branches: Sequence[Branch]) -> Draw:
        """Prepare one draw for each request that reached its last known token, and one after each of its drafts."""
        inputs = step.inputs
        rows = [inputs.rows[seq] for seq in inputs.sampling_seqs.tolist()]
        of_branches = [branch.first + 1 + i for branch in branches for i in range(len(branch.token_ids))]
        places = np.concatenate((inputs.sampled_tokens(), np.array(of_branches, np.int64)))
        states: list[SamplingState] = []
        for row in rows:
            first = len(states)
            step.paths[row.index] = [DraftPath(row.drafts, range(first, first + 1 + len(row.drafts)))]
            states.append(row.sampling)
            for draft in row.drafts:
                states.append(states[-1].after_tokens((draft,)))
        for branch in branches:
            known = step.paths[branch.row.index]
            behind = range(len(states), len(states) + len(branch.token_ids))
            known.append(DraftPath(branch.token_ids, (known[0].drawn_rows[0], *behind), branch))
            state = branch.row.sampling
            for draft in branch.token_ids:
                state = state.after_tokens((draft,))
                states.append(state)
        return Draw(self._logits(step.hidden, places), states)

    def _result_of(self, step: LaunchedStep) -> StepResult:
        result = super()._result_of(step)
        assert isinstance(step, SpeculativeStep), f"{step}"
        draft_time_s = step.draft_time_s
        if step.observer is not None and step.features is not None:
            begin_s = time.perf_counter()
            reads = self._target_reads(step, result.requests)
            step.observer.observe(TargetStep(step.hidden, step.features, reads, self._table.block_tables))
            draft_time_s += time.perf_counter() - begin_s
        return replace(result, draft_time_s=draft_time_s)

    def _target_reads(self, step: SpeculativeStep, results: Sequence[RequestResult]) -> list[ComputedSpan]:
        """Return the tokens of each request that were computed to stay: none after an error, and no rejected drafts."""
        inputs, taken = step.inputs, step.accepted_branches
        reads: list[ComputedSpan] = []
        firsts, begins = inputs.query_start_loc.tolist(), inputs.positions[inputs.query_start_loc[:-1]].tolist()
        known = self._table.num_tokens[inputs.row_indexes].tolist()
        for seq, (row, result) in enumerate(zip(inputs.rows, results, strict=True)):
            if result.error is None:
                first, num_tokens = firsts[seq], firsts[seq + 1] - firsts[seq]
                if row.index in taken:
                    first, num_tokens = taken[row.index].first, len(result.token_ids)
                else:
                    num_tokens -= len(row.drafts) - max(0, len(result.token_ids) - 1)
                reads.append(ComputedSpan(row.index, first, begins[seq], num_tokens, known[seq]))
        return reads

    def _token_results(self, step: LaunchedStep, draw: Draw, sampled: SampledTokens) -> dict[int, RequestResult]:
        """Return results by place in the batch, and append the accepted tokens to the known ones.

        ```
        fed       last  d1  d2  d3        the row's last known token and its drafts
        drawn     t1    t2  t3  t4        d1 = t1, d2 = t2, d3 ≠ t3: t1, t2 and t3 are the next tokens; all tokens
        after a
                                          rejected draft are dropped
        ```
        """
        del draw
        results: dict[int, RequestResult] = {}
        rows: dict[int, RequestRow] = {}
        assert isinstance(step, SpeculativeStep), f"{step}"
        inputs, token_ids = step.inputs, sampled.token_ids.tolist()
        for seq in inputs.sampling_seqs.tolist():
            row, request_id = inputs.rows[seq], step.batch.requests[seq].request_id
            if not self._table.has(request_id, row):  # the request has ended meanwhile
                continue
            paths = step.paths[row.index]
            path = max(paths, key=lambda path: path.num_accepted(token_ids)) if len(paths) > 1 else paths[0]
            if path.drawn_rows[0] in sampled.errors:
                results[seq] = RequestResult(request_id, (), error=sampled.errors[path.drawn_rows[0]])
                continue
            kept = self._accept(row, path, token_ids, sampled.errors)
            if path.branch is not None and self._branches is not None:
                self._branches.commit(path.branch, len(kept), self._table)
                step.accepted_branches[row.index] = path.branch
            found = [sampled.logprobs[i] for i in path.drawn_rows[: len(kept)]]
            logprobs = tuple(TokenLogprobs(*entry) for entry in found if entry is not None)
            num_drafts = max(len(path.token_ids) for path in paths)  # the most that could be accepted
            results[seq] = RequestResult(
                request_id, kept, num_drafts, logprobs=logprobs, is_complete=row.sampling.is_complete
            )
            rows[seq] = row
        self._table.append_tokens(list(rows.values()), [results[seq].token_ids for seq in rows])
        return results

    @staticmethod
    def _accept(
        row: RequestRow, path: DraftPath, token_ids: Sequence[int], errors: Mapping[int, str]
    ) -> tuple[int, ...]:
        """Return the drawn tokens that are kept along a path, and append them to the row's sampling state."""
        kept: list[int] = []
        for i, draft in zip(path.drawn_rows, (*path.token_ids, None), strict=True):
            if i in errors:  # the next step draws there first, and reports the error
                break
            kept.append(token_ids[i])
            row.sampling.append(token_ids[i])
            if token_ids[i] != draft or row.sampling.is_complete:
                break
        return tuple(kept)
