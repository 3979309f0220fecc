"""Branches: alternative continuations of a sequence, each verified as a sequence of its own in the same pass.

    pool      | … | t t t L d1 d2 d3 |           L is the last known token, d its chain of drafts
    branch        | t t t L e1 d2    |           a copy of that block in a spare one; the blocks before are shared

A branch sees exactly the keys that its tokens would see if they followed alone, at the same places of its blocks. So
its logits have the same bits as without any branch, whatever kernel computes them. A mask over one run of slots
(kernels/tree_mask.py) would sum the same numbers at other places, and so sometimes give another token. The cost is that
tokens common to several paths are computed once for each path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from twostroke.kv_cache.layout import KVLayout
from twostroke.runner.input_batch import InputBatch, RequestRow, RequestTable
from twostroke.runner.kv_storage import KVStorage

MAX_BRANCHES = 16
"""Most branches in one step, over all requests; further ones are not verified."""


def pages_of_branch(max_tokens: int, block_size: int) -> int:
    """Return the pages per KV group that a branch of `max_tokens` tokens may touch, including the last known token's.

    >>> pages_of_branch(4, 16), pages_of_branch(4, 1)
    (2, 5)
    """
    return (block_size - 1 + max_tokens) // block_size + 1


def blocks_of_branch(max_tokens: int, layout: KVLayout) -> int:
    """Return the blocks that hold the pages of a branch, over all KV groups."""
    num_pages = pages_of_branch(max_tokens, layout.block_size)
    return sum(-(-num_pages // group.pages_per_block) for group in layout.groups)


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """One branch and its places."""

    row: RequestRow
    token_ids: tuple[int, ...]
    begin: int
    """Position of the last known token."""
    first: int
    """Index of that token in the flat batch; the branch follows."""
    first_page: int
    """Index of the first page of its own, in the sequence's block tables."""
    page_ids: tuple[tuple[int, ...], ...]
    """Ids of its own pages, by KV group."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed for it."""
        return 1 + len(self.token_ids)


class BranchBlocks:
    """Spare blocks that hold the pages of branches.

    Args:
        kv: the KV memory, with `branch_ids`.
    """

    def __init__(self, kv: KVStorage) -> None:
        self._kv = kv
        self._block_size = kv.layout.block_size

    def allocate(self, rows: Iterable[RequestRow], table: RequestTable, num_tokens: int) -> list[Branch]:
        """Give blocks to branches, as far as there are any, and copy the known part of each first page.

        Args:
            rows: rows of the step, in its order.
            table: table of the rows.
            num_tokens: tokens of the flat batch, before the branches.
        """
        branches: list[Branch] = []
        spare = iter(self._kv.branch_ids)
        for row in rows:
            for token_ids in row.branches:
                if len(branches) == MAX_BRANCHES:
                    return branches
                begin = int(table.num_tokens[row.index]) - 1
                first_page, last_page = begin // self._block_size, (begin + len(token_ids)) // self._block_size
                count = last_page + 1 - first_page
                page_ids = tuple(
                    tuple(ids.of_blocks(list(itertools.islice(spare, -(-count // ids.per_block))))[:count])
                    for ids in self._kv.page_ids
                )
                branches.append(Branch(row, token_ids, begin, num_tokens, first_page, page_ids))
                num_tokens += 1 + len(token_ids)
                if begin % self._block_size:  # otherwise the step opens the page, and zeroes it
                    for group_id, (group, ids) in enumerate(zip(table.block_tables, page_ids, strict=True)):
                        self._copy(group_id, int(group[row.index, first_page]), ids[0])
        return branches

    def commit(self, branch: Branch, num_tokens: int, table: RequestTable) -> None:
        """Copy the pages of a branch's first `num_tokens` tokens to the sequence, because these were accepted."""
        num_pages = (branch.begin + num_tokens - 1) // self._block_size + 1 - branch.first_page
        for group_id, (group, ids) in enumerate(zip(table.block_tables, branch.page_ids, strict=True)):
            for place, page_id in enumerate(ids[:num_pages]):
                self._copy(group_id, page_id, int(group[branch.row.index, branch.first_page + place]))

    def _copy(self, group_id: int, from_id: int, to_id: int) -> None:
        self._kv.page(group_id, to_id).copy_(self._kv.page(group_id, from_id))


def append_branches(inputs: InputBatch, branches: Sequence[Branch], table: RequestTable) -> InputBatch:
    """Return the inputs of the pass: the requests' tokens, then those of the branches.

    ```
    requests   L d1 d2 d3 | L d1        branches   L e1 d2 | L d1 e2        positions as if each followed alone
    ```
    """
    lens = np.array([branch.begin + branch.num_tokens for branch in branches], np.int32)
    seq_lens = np.concatenate((inputs.seq_lens, lens))
    max_pages = -(-int(seq_lens.max()) // table.block_size)
    known = [int(table.token_ids[branch.row.index, branch.begin]) for branch in branches]
    ends = inputs.query_start_loc[-1] + np.cumsum([branch.num_tokens for branch in branches], dtype=np.int32)
    tables: list[npt.NDArray[np.int32]] = []
    for place, group in enumerate(table.block_tables):
        own = group[[branch.row.index for branch in branches], :max_pages]
        for entries, branch in zip(own, branches, strict=True):
            ids = branch.page_ids[place]
            entries[branch.first_page : branch.first_page + len(ids)] = ids
        tables.append(np.concatenate((group[inputs.row_indexes, :max_pages], own)))
    return replace(
        inputs,
        input_ids=np.concatenate(
            (inputs.input_ids, *([k, *b.token_ids] for k, b in zip(known, branches, strict=True)))
        ),
        positions=np.concatenate((inputs.positions, *(b.begin + np.arange(b.num_tokens) for b in branches))),
        query_start_loc=np.concatenate((inputs.query_start_loc, ends)).astype(np.int32),
        seq_lens=seq_lens,
        block_tables=tables,
    )
