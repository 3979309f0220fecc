"""The engine's side of fetching KV: allocate blocks for a prefix, fill them, and start the request that needs it.

```
fetch(...) ──► waits for room ──► is fetched ──► complete: named, held for its request ──► the request runs
                     │                 │
                     └─────────────────┴──────► failed: the request computes its prefix itself
```

Everything runs in the engine's thread except the copying of bytes. A thread of the borrower writes them, to blocks
that nothing else touches until that thread reports the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from twostroke.engine.clock import Clock
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import FetchKV, KVFetched
from twostroke.events import Event, KVHoldEnded, KVImportBegan, KVImportEnded
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.prefix_cache import BlockHasher, hash_by_tokens
from twostroke.kv_transfer.transport import BorrowerSide, Fetched, KVSource
from twostroke.scheduler.scheduler import Scheduler


class ImportLog(Protocol):
    """The part of the journal that hand-overs write to."""

    process: str

    def emit(self, event: Event) -> None:
        """Write one event."""
        ...


@dataclass(slots=True, eq=False)
class _Import:
    request_id: str
    block_hashes: tuple[bytes, ...]
    digest: bytes
    """The lender's hash of the last block; it differs from ours where its blocks have another size."""
    source: KVSource
    begin_s: float
    cancel: Callable[[], None] | None = None
    """Cancels the fetch; None while the import has no blocks."""
    is_over: bool = False
    """Whether the import is complete and waits for its request."""
    is_cancelled: bool = False
    request: GenerationRequest | None = None
    """The request that waits for the import."""


class KVFetching:
    """The imports of one engine.

    Args:
        scheduler: the engine's.
        borrower: fetches the bytes.
        journal: the engine's; records the outcome of each import.
        layout: of the engine's KV.
        clock: in seconds.
        post: called in another thread with a message for each import that ended; the message is for `fetched`, in the
            engine's thread.
        names: hashes the blocks that are fetched.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        borrower: BorrowerSide,
        journal: ImportLog,
        *,
        layout: KVLayout,
        clock: Clock,
        post: Callable[[KVFetched], object],
        names: BlockHasher = hash_by_tokens,
    ) -> None:
        self._scheduler = scheduler
        self._borrower = borrower
        self._journal = journal
        self._layout, self._block_size = layout, layout.block_size
        self._clock = clock
        self._post = post
        self._names = names
        self._imports: dict[int, _Import] = {}
        self._waiting_for_room: list[int] = []

    def begin(self, message: FetchKV) -> None:
        """Queue the import of a prompt's full blocks; it starts when there is room. The request follows later.

        Where the lender's blocks have another size, only tokens in full blocks of both sizes are fetched.
        """
        import_id, request_id, source = message.import_id, message.request_id, message.source
        assert import_id not in self._imports, f"import {import_id} is not new"
        their_size = source.block_size or self._block_size
        whole = math.lcm(self._layout.prefix_tokens, source.prefix_tokens or their_size)
        token_ids = message.token_ids[: len(message.token_ids) // whole * whole]
        hashes = self._names(request_id, token_ids, self._block_size, message.cache_salt)
        if hashes:  # without a full block there is nothing to fetch
            is_alike = their_size == self._block_size
            theirs = hashes if is_alike else self._names(request_id, token_ids, their_size, message.cache_salt)
            self._imports[import_id] = _Import(request_id, hashes, theirs[-1], source, self._clock())
            self._waiting_for_room.append(import_id)

    def start_imports(self, *, is_idle: bool) -> list[GenerationRequest]:
        """Start the waiting imports that now have room.

        Args:
            is_idle: whether nothing runs that could make room.

        Returns:
            Requests that need not wait any longer.
        """
        freed: list[GenerationRequest] = []
        while self._waiting_for_room:
            import_id = self._waiting_for_room[0]
            this = self._imports[import_id]
            num_tokens = len(this.block_hashes) * self._block_size
            into = self._scheduler.handover.begin_import(import_id, this.block_hashes, num_tokens)
            if into is None:
                if is_idle and not any(other.cancel for other in self._imports.values()):
                    freed += self.fetched(import_id, Fetched("there is no room for it beside what the pool must keep"))
                    continue
                break
            self._waiting_for_room.pop(0)
            what = import_id, this.request_id, this.block_hashes, num_tokens, into.rows
            self._journal.emit(KVImportBegan(self._clock(), self._journal.process, *what))

            def is_done(fetched: Fetched, import_id: int = import_id) -> None:
                self._post(KVFetched(import_id, fetched))

            this.cancel = self._borrower.fetch(this.source, into.in_pages(self._layout), this.digest, is_done)
        return freed

    def waits_for_import(self, request: GenerationRequest) -> bool:
        """Return whether a request has to wait for its import; `fetched` returns it later."""
        this = None if request.import_id is None else self._imports.get(request.import_id)
        if this is None:
            return False
        if this.is_over:
            del self._imports[request.import_id or 0]  # the scheduler ends it when the request runs
            return False
        this.request = request
        return True

    def fetched(self, import_id: int, result: Fetched) -> list[GenerationRequest]:
        """Record the outcome of an import; return the request that waited for it, if any."""
        this = self._imports.get(import_id)
        if this is None:
            return []
        if this.cancel is None:
            self._waiting_for_room.remove(import_id)
        problem = result.problem or ("it was given up: no request waits for it" if this.is_cancelled else "")
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
        """Cancel an import whose request will not come."""
        this = self._imports.get(import_id)
        if this is None:
            return
        this.is_cancelled, this.request = True, None
        if this.is_over:
            del self._imports[import_id]
            self._end_hold(import_id)
        elif this.cancel is None:
            self.fetched(import_id, Fetched("it was given up: no request waits for it"))
        else:
            this.cancel()

    def abort(self, request_id: str) -> bool:
        """End a request that waits for its import; return False if none has this id."""
        for import_id, this in self._imports.items():
            if this.request is not None and this.request.request_id == request_id:
                self.drop(import_id)
                return True
        return False

    @property
    def num_waiting(self) -> int:
        """Number of imports in progress or waiting for their request."""
        return len(self._imports)

    def _end_hold(self, import_id: int) -> None:
        self._scheduler.handover.end_hold(import_id)
        self._journal.emit(KVHoldEnded(self._clock(), self._journal.process, import_id))

    def close(self) -> None:
        """Cancel all imports."""
        for this in self._imports.values():
            if this.cancel is not None:
                this.cancel()
        self._borrower.close()
