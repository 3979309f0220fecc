"""The engine's side of lending KV: tells the lender, step by step, which blocks of a prompt are there.

arrives         grant(number of blocks)
step decided    its cached prefix is there; the blocks that the step fills are begun
layer written   of these, one more layer is there                (in the middle of the step)
ends            on loan: complete, or the lease is dead
preempted       the lease is dead; what the request leaves on loan later is for nobody
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.batch import ScheduledBatch
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_transfer.leases import LendingSide
from twostroke.request import Arrival
from twostroke.scheduler.scheduler import Scheduler


@dataclass(slots=True, eq=False)
class _Loan:
    lease_id: int
    num_blocks: int
    """Pages of each KV group."""
    digest: bytes
    """Name of the last page."""
    is_dead: bool = False
    """Nobody will fetch it, though its request may go on."""


class KVLending:
    """Follows the requests of an engine that lend their blocks.

    Args:
        scheduler: of the engine.
        lender: serves the others.
        layout: of the engine's KV.
        split_layers: layers of a model that several ranks compute; 0: one rank has all of it. What this rank has
            written the others may be about to write; between two layers all ranks gather, so then it is there.
    """

    def __init__(self, scheduler: Scheduler, lender: LendingSide, layout: KVLayout, *, split_layers: int = 0) -> None:
        self._scheduler = scheduler
        self._lender = lender
        self._block_size, self._prefix_tokens = layout.block_size, layout.prefix_tokens
        self._page_ids = tuple(map(layout.page_ids, layout.groups))
        self._split_layers = split_layers
        self._loans: dict[str, _Loan] = {}
        self._in_step: list[int] = []
        """Leases whose blocks the step that runs fills."""

    def arrived(self, arrival: Arrival) -> None:
        """A request has; it lends what of it came in full blocks of both sides, if any."""
        if arrival.lend_as is None:
            return
        whole = math.lcm(self._prefix_tokens, arrival.lend_block_size or 1)
        num_blocks = arrival.num_prompt_tokens // whole * whole // self._block_size
        hashes = arrival.block_hashes[:num_blocks]
        self._lender.grant(arrival.lend_as, num_blocks)
        self._loans[arrival.request_id] = _Loan(arrival.lend_as, num_blocks, hashes[-1] if hashes else b"")
        if not hashes or arrival.max_tokens != 1:  # with more tokens it would lend blocks that nobody expects
            self._kill(arrival.request_id, "the request has no full block, or makes more than one token here")

    def decided(self, batch: ScheduledBatch) -> None:
        """A step is about to be computed."""
        self._in_step.clear()
        if not self._loans:
            return
        for request_id in batch.preempted_request_ids:
            self._kill(request_id, "its request had to give way to others")
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
        """The step that runs has written the K and V of a layer; all that it is to be told of layers."""
        num_there = layer_id if self._split_layers else layer_id + 1
        if self._in_step and num_there:
            self._lender.layer_ready(self._in_step, num_there)

    def computed(self) -> None:
        """The step is over, on all ranks: they have gathered what came behind the last layer."""
        if self._in_step and self._split_layers:
            self._lender.layer_ready(self._in_step, self._split_layers)

    def ended(self, request_id: str) -> int | None:
        """Settle the loan of a request that has ended, in whatever way; the scheduler knows already.

        Returns:
            The hold that is to end now, since nobody will fetch its blocks; None: there is none.
        """
        loan = self._loans.get(request_id)
        if loan is None:
            return None
        is_on_loan = self._scheduler.handover.is_on_loan(loan.lease_id)
        if not is_on_loan:
            self._kill(request_id, "its request was ended, or there was no room to keep its blocks")
        elif not loan.is_dead:
            self._lender.complete(loan.lease_id, loan.digest)
        del self._loans[request_id]
        return loan.lease_id if is_on_loan and loan.is_dead else None

    def _kill(self, request_id: str, trouble: str) -> None:
        loan = self._loans.get(request_id)
        if loan is not None:
            loan.is_dead = True
            self._lender.kill(loan.lease_id, trouble)

    def close(self) -> None:
        """Nobody is served any more."""
        self._lender.close()
