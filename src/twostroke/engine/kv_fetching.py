"""The engine's side of fetching KV: a prefix takes its blocks, is filled, and is there for its request, or is not.

```
fetch(...) ──► waits for room ──► is fetched ──► complete: named, held for its request ──► the request runs
                     │                 │
                     └─────────────────┴──────► failed: the request computes its prefix as if nobody had tried
```

All of it in the engine's thread but for the bytes, which a thread of the borrower's writes to blocks that nobody else
may touch before it has said that it is done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twostroke.engine.clock import Clock
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_port import FetchKV, KVFetched
from twostroke.events import Event, KVHoldEnded, KVImportBegan, KVImportEnded
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import BlockNames, names_by_tokens
from twostroke.kv_transfer.transport import Fetched, FetchingSide, KVSource
from twostroke.scheduler.scheduler import Scheduler


class ImportLog(Protocol):
    """Takes the events of a process."""

    process: str

    def emit(self, event: Event) -> None:
        """Write one event."""
        ...


@dataclass(slots=True, eq=False)
class _Import:
    request_id: str
    block_hashes: tuple[bytes, ...]
    digest: bytes
    """The lender's name of the last block, which is another where its blocks have another size."""
    source: KVSource
    begin_s: float
    give_up: Callable[[], None] | None = None
    """None while it has no blocks."""
    is_over: bool = False
    """It is complete, and waits for its request."""
    is_dropped: bool = False
    request: GenerationRequest | None = None
    """Waits for it."""


class KVFetching:
    """The imports of one engine.

    Args:
        scheduler: of the engine.
        borrower: fetches.
        journal: of the engine; hears what becomes of each import.
        layout: of the engine's KV.
        clock: in seconds.
        post: is given the message of each import whose bytes have come, or will not, in another thread; it is for
            `fetched`, in the engine's own.
        names: names the blocks that are fetched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        borrower: FetchingSide,
        journal: ImportLog,
        *,
        layout: KVLayout,
        clock: Clock,
        post: Callable[[KVFetched], object],
        names: BlockNames = names_by_tokens,
    ) -> None:
        self._scheduler = scheduler
        self._borrower = borrower
        self._journal = journal
        self._layout, self._block_size = layout, layout.block_size
        self._clock = clock
        self._post = post
        self._names = names
        self._imports: dict[int, _Import] = {}
        self._without_room: list[int] = []

    def begin(self, message: FetchKV) -> None:
        """Is to fetch the full blocks of a prompt, as soon as there is room; its request comes later.

        Where the lender's blocks have another size, what is in full blocks of both.
        """
        import_id, request_id, source = message.import_id, message.request_id, message.source
        assert import_id not in self._imports, f"import {import_id} is not new"
        their_size = source.block_size or self._block_size
        whole = math.lcm(self._layout.prefix_tokens, source.prefix_tokens or their_size)
        token_ids = message.token_ids[: len(message.token_ids) // whole * whole]
        hashes = self._names(request_id, token_ids, self._block_size, message.cache_salt)
        if hashes:  # else there is no full block, nothing to fetch and nothing to wait for
            is_alike = their_size == self._block_size
            theirs = hashes if is_alike else self._names(request_id, token_ids, their_size, message.cache_salt)
            self._imports[import_id] = _Import(request_id, hashes, theirs[-1], source, self._clock())
            self._without_room.append(import_id)

    def try_again(self, *, is_idle: bool) -> list[GenerationRequest]:
        """Looks whether there is room now for those that had none.

        Args:
            is_idle: nothing runs that would make room.

        Returns:
            Requests that are not to wait any longer.
        """
        freed: list[GenerationRequest] = []
        while self._without_room:
            import_id = self._without_room[0]
            this = self._imports[import_id]
            num_tokens = len(this.block_hashes) * self._block_size
            into = self._scheduler.handover.begin_import(import_id, this.block_hashes, num_tokens)
            if into is None:
                if is_idle and not any(other.give_up for other in self._imports.values()):
                    freed += self.fetched(import_id, Fetched("there is no room for it beside what the pool must keep"))
                    continue
                break
            self._without_room.pop(0)
            what = import_id, this.request_id, this.block_hashes, num_tokens, into.rows
            self._journal.emit(KVImportBegan(self._clock(), self._journal.process, *what))

            def is_done(fetched: Fetched, import_id: int = import_id) -> None:
                self._post(KVFetched(import_id, fetched))

            this.give_up = self._borrower.fetch(this.source, into.in_pages(self._layout), this.digest, is_done)
        return freed

    def holds_back(self, request: GenerationRequest) -> bool:
        """Whether a request has to wait for its import; it is kept until `fetched` gives it back."""
        this = None if request.import_id is None else self._imports.get(request.import_id)
        if this is None:
            return False
        if this.is_over:
            del self._imports[request.import_id or 0]  # the scheduler ends it when the request runs
            return False
        this.request = request
        return True

    def fetched(self, import_id: int, result: Fetched) -> list[GenerationRequest]:
        """The bytes have come, or will not; the requests that waited for them."""
        this = self._imports.get(import_id)
        if this is None:
            return []
        if this.give_up is None:
            self._without_room.remove(import_id)
        problem = result.problem or ("nobody waits for it any more" if this.is_dropped else "")
        if not problem:
            self._scheduler.handover.complete_import(import_id, this.block_hashes)
        traffic = result.num_bytes, this.begin_s, result.first_byte_s, result.busy_s, result.drift, result.last_byte_s
        ended = KVImportEnded(self._clock(), self._journal.process, import_id, this.request_id, problem, *traffic)
        self._journal.emit(ended)
        if problem:
            self._end_hold(import_id)
            del self._imports[import_id]
        elif this.request is not None:
            del self._imports[import_id]
        this.is_over = True
        return [] if this.request is None else [this.request]

    def drop(self, import_id: int) -> None:
        """No request will come for it."""
        this = self._imports.get(import_id)
        if this is None:
            return
        this.is_dropped, this.request = True, None
        if this.is_over:
            del self._imports[import_id]
            self._end_hold(import_id)
        elif this.give_up is None:
            self.fetched(import_id, Fetched("nobody waits for it any more"))
        else:
            this.give_up()

    def abort(self, request_id: str) -> bool:
        """Ends a request that waits; False: none of this name does."""
        for import_id, this in self._imports.items():
            if this.request is not None and this.request.request_id == request_id:
                self.drop(import_id)
                return True
        return False

    @property
    def num_waiting(self) -> int:
        """Imports that are not over, or wait for their request."""
        return len(self._imports)

    def _end_hold(self, import_id: int) -> None:
        self._scheduler.handover.end_hold(import_id)
        self._journal.emit(KVHoldEnded(self._clock(), self._journal.process, import_id))

    def close(self) -> None:
        """What is on its way is given up."""
        for this in self._imports.values():
            if this.give_up is not None:
                this.give_up()
        self._borrower.close()
