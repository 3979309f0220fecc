"""Table of live requests, and the flat arrays of a step that are made from it.

Each request has a row of token ids and of block tables. A request keeps its row while it lives, so a step is prepared
by indexing. A preempted request keeps its row, because its tokens are needed again; only its end frees the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.batch import BlockTableUpdate, ScheduledBatch
from twostroke.kv_cache.layout import KVLayout
from twostroke.sampling.state import SamplingState
from twostroke.speculation.proposer import Drafts

IntArray = npt.NDArray[np.int64]
_FIRST_ROWS = 8


@dataclass(slots=True, eq=False)
class RequestRow:
    """Data of one live request that are not kept in arrays."""

    index: int
    sampling: SamplingState
    num_prompt_tokens: int
    num_prompt_logprobs: int | None
    """Number of most likely tokens to report per prompt token; None reports nothing."""
    num_prompt_scored: int = 1
    """Prompt tokens whose log-probability was reported, so that a preemption reports none twice. The first token
    counts, because it has none."""
    wants_hidden_state: bool = False
    drafts: tuple[int, ...] = ()
    """Drafts of the next tokens that this step verifies, in the order of their positions."""
    branches: tuple[tuple[int, ...], ...] = ()
    """Alternative drafts of these tokens."""


class RequestTable:
    """Token ids and block tables of all live requests.

    Attributes:
        token_ids: int32 [num_rows, max_model_len]; prompt, then output as it is sampled.
        num_tokens: int32 [num_rows]; valid entries of each row of token_ids.
        block_tables: per KV group, int32 [num_rows, max_pages]; page ids, which are block ids where a block is a page.
        num_wanting_hidden_state: rows of requests that end with a hidden state.
        num_wanting_prompt_scores: rows of requests whose prompt tokens are scored.
    """

    def __init__(self, layout: KVLayout, max_model_len: int) -> None:
        self._rows: dict[str, RequestRow] = {}
        self._free_indexes: list[int] = list(range(_FIRST_ROWS - 1, -1, -1))
        max_pages = layout.num_pages(max_model_len)
        self.block_size = layout.block_size
        self.token_ids = np.zeros((_FIRST_ROWS, max_model_len), np.int32)
        self.num_tokens = np.zeros(_FIRST_ROWS, np.int32)
        self.block_tables = [np.zeros((_FIRST_ROWS, max_pages), np.int32) for _ in layout.groups]
        self._page_ids = tuple(map(layout.page_ids, layout.groups))
        self.num_wanting_hidden_state = self.num_wanting_prompt_scores = 0

    @staticmethod
    def bytes_for(layout: KVLayout, max_model_len: int, num_requests: int) -> int:
        """Return the most bytes a table takes for so many live requests, including the copy while it doubles."""
        num_rows = _FIRST_ROWS
        while num_rows < num_requests:
            num_rows *= 2
        per_row = max_model_len + 1 + len(layout.groups) * layout.num_pages(max_model_len)
        num_old_rows = num_rows // 2 if num_rows > _FIRST_ROWS else 0
        return (num_rows + num_old_rows) * per_row * np.dtype(np.int32).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        return self.token_ids.nbytes + self.num_tokens.nbytes + sum(table.nbytes for table in self.block_tables)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, request_id: str) -> RequestRow:
        return self._rows[request_id]

    def has(self, request_id: str, row: RequestRow) -> bool:
        """Return whether this row still belongs to the request; both the id and the row may have been reused."""
        return self._rows.get(request_id) is row

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingState,
        num_prompt_tokens: int,
        *,
        wants_hidden_state: bool = False,
    ) -> RequestRow:
        """Add a row for a request. The token ids are its prompt, then tokens generated before it came to this
        engine."""
        assert request_id not in self._rows, f"{request_id} has a row already"
        if not self._free_indexes:
            self._grow()
        index = self._free_indexes.pop()
        self.token_ids[index, : len(token_ids)] = token_ids
        self.num_tokens[index] = len(token_ids)
        row = RequestRow(index, sampling, num_prompt_tokens, sampling.rules.params.prompt_logprobs)
        row.wants_hidden_state = wants_hidden_state
        self.num_wanting_hidden_state += wants_hidden_state
        self.num_wanting_prompt_scores += row.num_prompt_logprobs is not None
        self._rows[request_id] = row
        return row

    def try_remove(self, request_id: str) -> RequestRow | None:
        """Free the request's row and return it; None if it has none."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_indexes.append(row.index)
            self.num_wanting_hidden_state -= row.wants_hidden_state
            self.num_wanting_prompt_scores -= row.num_prompt_logprobs is not None
        return row

    def update_blocks(self, row: RequestRow, updates: Sequence[BlockTableUpdate]) -> None:
        """Write the changed entries of the request's block tables."""
        for table, ids, update in zip(self.block_tables, self._page_ids, updates, strict=True):
            if update.block_ids:
                begin = update.start * ids.per_block
                pages = ids.of_blocks(update.block_ids)[: table.shape[1] - begin]
                table[row.index, begin : begin + len(pages)] = pages

    def append_tokens(self, rows: Sequence[RequestRow], token_ids: Sequence[tuple[int, ...]]) -> None:
        """Append the next tokens of each row; tokens beyond the context length are dropped, since no step feeds
        them."""
        if any(len(tokens) != 1 for tokens in token_ids):
            for row, tokens in zip(rows, token_ids, strict=True):
                begin = self.num_tokens[row.index]
                end = min(begin + len(tokens), self.token_ids.shape[1])
                self.token_ids[row.index, begin:end] = tokens[: end - begin]
                self.num_tokens[row.index] = end
            return
        indexes = np.fromiter((row.index for row in rows), np.int64, len(rows))
        ends = self.num_tokens[indexes]
        fit = ends < self.token_ids.shape[1]
        indexes, ends = indexes[fit], ends[fit]
        self.token_ids[indexes, ends] = np.fromiter((tokens[0] for tokens in token_ids), np.int32, len(rows))[fit]
        self.num_tokens[indexes] = ends + 1

    def put_drafts(self, row: RequestRow, drafts: Drafts) -> None:
        """Write a chain of drafts after the known tokens, where the step reads them."""
        begin, chain = int(self.num_tokens[row.index]), drafts.chain
        self.token_ids[row.index, begin : begin + len(chain)] = chain
        row.drafts, row.branches = drafts

    def known_tokens(self, row: RequestRow) -> npt.NDArray[np.int32]:
        """Return a view of prompt and output so far. [num_tokens]"""
        return self.token_ids[row.index, : self.num_tokens[row.index]]

    def _grow(self) -> None:
        old = len(self.num_tokens)
        self._free_indexes.extend(range(2 * old - 1, old - 1, -1))
        # copy only known tokens: rows have the maximum length, and pages that are never written take no memory
        token_ids = np.zeros((2 * old, self.token_ids.shape[1]), np.int32)
        for row, num_tokens in enumerate(self.num_tokens):
            token_ids[row, :num_tokens] = self.token_ids[row, :num_tokens]
        self.token_ids = token_ids
        self.num_tokens = np.concatenate((self.num_tokens, np.zeros_like(self.num_tokens)))
        self.block_tables = [np.concatenate((table, np.zeros_like(table))) for table in self.block_tables]


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """Flat inputs of one pass; the tokens of requests follow each other in the batch's order."""

    rows: Sequence[RequestRow]
    row_indexes: IntArray
    """[num_seqs]: each request's row in the table."""
    input_ids: IntArray
    """[num_tokens]: token ids."""
    positions: IntArray
    """[num_tokens]: absolute position within the request."""
    query_start_loc: npt.NDArray[np.int32]
    """[num_seqs + 1]: where each request's tokens start."""
    seq_lens: npt.NDArray[np.int32]
    """[num_seqs]: context length after this step."""
    sampling_seqs: IntArray
    """[num_samples]: requests of the batch that sample a token."""
    num_drafts: IntArray
    """[num_samples]: number of drafts at the end of each of these requests' tokens."""
    block_tables: Sequence[npt.NDArray[np.int32]]
    """[num_seqs, max_pages] for each KV group."""
    pooling_seqs: IntArray
    """[num_pooled]: requests that end with the hidden state of their last token."""

    def sampled_tokens(self) -> IntArray:
        """Return the places in the flat batch whose logits are sampled, by request and position. [num_samples + drafts]

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
        """Return the last token of each of these requests, in the flat batch. [len(seqs)]"""
        return self.query_start_loc[1:][seqs].astype(np.int64) - 1


def build_input_batch(batch: ScheduledBatch, table: RequestTable) -> InputBatch:
    """Look up the values of the scheduled tokens; reserved slots without a draft are left out.

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
    seq_lens = (starts + lens).astype(np.int32)
    max_pages = -(-int(seq_lens.max()) // table.block_size)
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
        seq_lens=seq_lens,
        block_tables=[group[row_indexes, :max_pages] for group in table.block_tables],
        sampling_seqs=sampling_seqs,
        num_drafts=num_drafts,
        pooling_seqs=pooling_seqs,
    )
