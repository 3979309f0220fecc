"""From the decision to flat arrays: which token ids and positions go through the model, and which rows get sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.batch import ScheduledBatch
from twostroke.runner.request_table import RequestRow, RequestTable

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """Flat inputs of one pass; requests lie one after the other in the batch's order."""

    rows: Sequence[RequestRow]
    row_indexes: IntArray
    """[num_seqs]: each request's row in the table."""
    input_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]: absolute, within the request."""
    query_start_loc: npt.NDArray[np.int32]
    """[num_seqs + 1]: where each request's tokens begin."""
    seq_lens: npt.NDArray[np.int32]
    """[num_seqs]: context length after this step."""
    sampling_seqs: IntArray
    """[num_samples]: which requests of the batch sample a token."""
    num_drafts: IntArray
    """[num_samples]: how many drafts, at the end of its tokens, each of these verifies."""
    pooling_seqs: IntArray
    """[num_pooled]: which end with the hidden state of their last token."""

    def sampled_tokens(self) -> IntArray:
        """[num_samples + drafts]: the tokens behind which one is drawn, in the flat batch, by request and position.

        ```
        request   ..known.. last draft draft
        drawn                  ^     ^     ^
        ```
        """
        last = self.last_tokens(self.sampling_seqs)
        if not self.num_drafts.any():
            return last
        counts = self.num_drafts + 1
        ends = np.cumsum(counts)
        return np.repeat(last - ends + 1, counts) + np.arange(ends[-1])

    def last_tokens(self, seqs: IntArray) -> IntArray:
        """[len(seqs)]: the last token of each of these requests, in the flat batch."""
        return self.query_start_loc[1:][seqs].astype(np.int64) - 1


def build_input_batch(batch: ScheduledBatch, table: RequestTable) -> InputBatch:
    """Looks up the values of the scheduled tokens; places of drafts that nobody guessed are left out.

    ```
    requests         A: computed 0, scheduled 3     B: computed 7, scheduled 1
    positions        0 1 2                          7
    query_start_loc  0                              3                           4
    seq_lens         3                              8
    ```
    """
    requests = batch.requests
    rows = [table[r.request_id] for r in requests]
    row_indexes = np.fromiter((row.index for row in rows), np.int64, len(rows))
    starts = np.fromiter((r.num_computed_tokens for r in requests), np.int64, len(rows))
    lens = np.fromiter((r.num_scheduled_tokens for r in requests), np.int64, len(rows))
    guessed = np.array([len(row.drafts) for row in rows])
    lens += guessed - np.array([r.num_draft_tokens for r in requests])
    query_start_loc = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lens, out=query_start_loc[1:])
    # position = the request's start + offset within the request
    offsets = np.arange(query_start_loc[-1]) - np.repeat(query_start_loc[:-1], lens)
    positions = np.repeat(starts, lens) + offsets
    sampling_seqs = np.flatnonzero([r.samples_token for r in requests])
    num_drafts = guessed[sampling_seqs]
    pooling_seqs = sampling_seqs[:0]
    if table.num_wanting_hidden_state:
        pools = np.array([rows[seq].wants_hidden_state for seq in sampling_seqs.tolist()], bool)
        sampling_seqs, pooling_seqs, num_drafts = sampling_seqs[~pools], sampling_seqs[pools], num_drafts[~pools]
    return InputBatch(
        rows=rows,
        row_indexes=row_indexes,
        input_ids=table.token_ids[np.repeat(row_indexes, lens), positions].astype(np.int64),
        positions=positions,
        query_start_loc=query_start_loc,
        seq_lens=(starts + lens).astype(np.int32),
        sampling_seqs=sampling_seqs,
        num_drafts=num_drafts,
        pooling_seqs=pooling_seqs,
    )
