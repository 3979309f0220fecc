"""The engine's side of lending KV: tells the lender after each step which blocks of a prompt are ready.

arrives         grant(number of blocks)
step decided    the blocks of its cached prefix are ready; those that the step fills are begun
layer written   one more layer of the begun blocks is ready      (in the middle of the step)
ends            on loan: complete, or the lease is dead
preempted       the lease is dead; blocks that the request lends later are not fetched
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.batch import ScheduledBatch
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.leases import LenderSide
from twostroke.request import Arrival
from twostroke.scheduler.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Loan:
    lease_id: int
    num_blocks: int
    """Number of pages of each KV group."""
    digest: bytes
    """Hash of the last page."""
    is_dead: bool = False
    """Whether the loan will not be fetched, although its request may continue."""


class KVLending:
    """The loans of an engine's requests.

    Args:
        scheduler: the engine's.
        lender: serves the borrowers.
        layout: of the engine's KV.
        split_layers: number of layers of a model that several ranks compute; 0: one rank has all of it. When this rank
            has written a layer, other ranks may still be writing it. All ranks gather between two layers, so the layer
            is complete when the next one is written.
    """

    def __init__(self, scheduler: Scheduler, lender: LenderSide, layout: KVLayout, *, split_layers: int = 0) -> None:
        self._scheduler = scheduler
        self._lender = lender
        self._block_size, self._prefix_tokens = layout.block_size, layout.prefix_tokens
        self._page_ids = tuple(map(layout.page_ids, layout.groups))
        self._split_layers = split_layers
        self._loans: dict[str, _Loan] = {}
        self._in_step: list[int] = []
        """Leases whose blocks the current step fills."""

    def arrived(self, arrival: Arrival) -> None:
        """Grant a lease for a request that arrived. It covers the prompt's blocks that are full for both engines."""
        if arrival.lend_as is None:
            return
        whole = math.lcm(self._prefix_tokens, arrival.lend_block_size or 1)
        num_blocks = arrival.num_prompt_tokens // whole * whole // self._block_size
        hashes = arrival.block_hashes[:num_blocks]
        self._lender.grant(arrival.lend_as, num_blocks)
        self._loans[arrival.request_id] = _Loan(arrival.lend_as, num_blocks, hashes[-1] if hashes else b"")
        if not hashes or arrival.max_tokens != 1:  # with more tokens it would lend unexpected blocks
            self._invalidate(arrival.request_id, "the request has no full block, or makes more than one token here")

    def decided(self, batch: ScheduledBatch) -> None:
        """Report the blocks that are ready before a step, and those that the step fills."""
        self._in_step.clear()
        if not self._loans:
            return
        for request_id in batch.preempted_request_ids:
            self._invalidate(request_id, "its request was preempted")
        cached = {admitted.request_id: admitted.num_cached_tokens for admitted in batch.admitted}
        for share in batch.requests:
            loan = self._loans.get(share.request_id)
            if loan is not None and not loan.is_dead:
                tables = zip(self._page_ids, self._scheduler.block_tables(share.request_id), strict=True)
                rows = [ids.of_blocks(row) for ids, row in tables]
                num_cached = cached.get(share.request_id, 0) // self._block_size
                self._lender.begin_part(loan.lease_id, rows, num_cached, is_computed=True)
                end = (share.num_computed_tokens + share.num_scheduled_tokens) // self._block_size
                self._lender.begin_part(loan.lease_id, rows, end, is_computed=False)
                self._in_step.append(loan.lease_id)

    def layer_written(self, layer_id: int) -> None:
        """Report that the current step has written the K and V of a layer; the only call of the runner about layers."""
        num_there = layer_id if self._split_layers else layer_id + 1
        if self._in_step and num_there:
            self._lender.layer_ready(self._in_step, num_there)

    def computed(self) -> None:
        """Report the last layer after a step: by now all ranks have written it."""
        if self._in_step and self._split_layers:
            self._lender.layer_ready(self._in_step, self._split_layers)

    def ended(self, request_id: str) -> int | None:
        """Settle the loan of a request that has ended, for any reason; call it after the scheduler ended the request.

        Returns:
            The hold to end now, because its blocks will not be fetched; None if there is none.
        """
        loan = self._loans.get(request_id)
        if loan is None:
            return None
        is_on_loan = self._scheduler.handover.is_on_loan(loan.lease_id)
        if not is_on_loan:
            self._invalidate(request_id, "its request was ended, or there was no room to keep its blocks")
        elif not loan.is_dead:
            self._lender.complete(loan.lease_id, loan.digest)
        del self._loans[request_id]
        return loan.lease_id if is_on_loan and loan.is_dead else None

    def _invalidate(self, request_id: str, failure: str) -> None:
        loan = self._loans.get(request_id)
        if loan is not None:
            loan.is_dead = True
            self._lender.invalidate(loan.lease_id, failure)

    def close(self) -> None:
        """Stop serving borrowers."""
        self._lender.close()
