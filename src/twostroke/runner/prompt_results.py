"""Results other than tokens: log-probabilities of a prompt's tokens, and the hidden state of its last token."""

from __future__ import annotations

import numpy as np
import torch

from twostroke.batch import RequestResult, ScheduledBatch, TokenLogprobs
from twostroke.kernels.memory import send
from twostroke.model.decoder import DecoderModel
from twostroke.runner.input_batch import InputBatch, RequestTable
from twostroke.sampling.logprobs import num_slice_rows, token_logprobs

PromptScores = tuple[int, tuple[TokenLogprobs, ...]]
"""First predicted position, and one entry per predicted token."""


def hidden_states(hidden: torch.Tensor, inputs: InputBatch, batch: ScheduledBatch) -> dict[int, RequestResult]:
    """Return the results of requests that end with the hidden state of their last token, by place in the batch."""
    last = hidden[send(inputs.last_tokens(inputs.pooling_seqs), hidden.device)].float().cpu().numpy()
    results: dict[int, RequestResult] = {}
    for seq, state in zip(inputs.pooling_seqs.tolist(), last, strict=True):
        request_id = batch.requests[seq].request_id
        if np.isfinite(state).all():
            results[seq] = RequestResult(request_id, (), hidden_state=state.tobytes())
        else:
            results[seq] = RequestResult(request_id, (), error="the model's hidden state is not finite")
    return results


class PromptScorer:
    """Scorer of prompt tokens by the hidden states of a step.

    Args:
        model: computes their logits.
        vocab_size: number of logits.
    """

    def __init__(self, model: DecoderModel, vocab_size: int) -> None:
        self._model = model
        self._vocab_size = vocab_size

    def scores(self, hidden: torch.Tensor, inputs: InputBatch, table: RequestTable) -> dict[int, PromptScores]:
        """Score the prompt tokens that this chunk predicts, for requests that asked for it.

        ```
        chunk computes positions     c  c+1  …  e-1
        and so predicts the tokens   c+1  …     e       of which those inside the prompt count
        ```

        Returns:
            The scores by place in the batch.
        """
        found: dict[int, PromptScores] = {}
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
            tokens = send(table.token_ids[row.index, begin:end].astype(np.int64), hidden.device)
            found[seq] = begin, self._score(rows, tokens, row.num_prompt_logprobs)
            row.num_prompt_scored = end
        return found

    def _score(self, hidden: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> tuple[TokenLogprobs, ...]:
        """Score tokens in slices, since the logits of a long chunk over a large vocabulary would not fit at once."""
        scored: list[TokenLogprobs] = []
        step = num_slice_rows(self._vocab_size)
        for begin in range(0, len(token_ids), step):
            logits = self._model.compute_logits(hidden[begin : begin + step])
            scored += (TokenLogprobs(*p) for p in token_logprobs(logits, token_ids[begin : begin + step], num_top))
        return tuple(scored)
