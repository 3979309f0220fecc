"""The ends of hand-overs, built for an engine that is one of a pool."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.engine.clock import monotonic_clock
from twostroke.engine.handover_port import HandoverPort, LenderFacts
from twostroke.engine.journal import Journal
from twostroke.engine.kv_fetching import KVFetching
from twostroke.engine.kv_lending import KVLending
from twostroke.engine.pool_engine import KVEnds
from twostroke.errors import SetupError
from twostroke.kernels.reference.kv_codec import recode
from twostroke.kv_transfer.borrower import KVBorrower
from twostroke.kv_transfer.geometry import KVGeometry
from twostroke.kv_transfer.intake import BlockReading
from twostroke.kv_transfer.lender import KVLender, PoolToLend
from twostroke.kv_transfer.memory import KVMemory, SharedMemory
from twostroke.kv_transfer.nixl_reads import NixlAgent
from twostroke.kv_transfer.transport import Fetched
from twostroke.runner.model_runner import ModelRunner
from twostroke.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class HandoverEnds:
    """What an engine in a pool needs besides its config."""

    port: HandoverPort
    epoch: int
    """A number that no other process has."""
    is_fetched: Callable[[int, Fetched], object]
    """Called in another thread when an import has come, or will not; then PoolEngine.kv_fetched is to be called."""
    is_over: Callable[[int], object]
    """The same of blocks on loan, and PoolEngine.end_hold."""


def shared_memory_for(port: HandoverPort, num_ranks: int, num_bytes: int) -> SharedMemory | None:
    """Make memory for a KV cache that processes on this machine map; None where none of them is to.

    Other engines on this machine map what they fetch from; rank 0 maps that of all ranks, to lend and to fill it.

    Args:
        port: where the engine lends, and whether it fetches; one that does neither may have ranks on other hosts.
        num_ranks: of the engine.
        num_bytes: of each rank's cache.

    Raises:
        SetupError: the system has no such memory.
    """
    hands_over = port.lends_at is not None or port.fetches
    is_mapped_elsewhere = port.lends_at is not None and port.lends_at.is_local
    if not hands_over or (num_ranks == 1 and not is_mapped_elsewhere):
        return None
    try:
        return SharedMemory(num_ranks, num_bytes)
    except (OSError, AttributeError) as error:  # not on Linux: no such call
        alone = " and --tensor-parallel-size 1" if num_ranks > 1 else ""
        raise SetupError(
            f"no shared memory for a KV cache of {num_bytes:,} bytes ({error}). Hand KV over by TCP (--kv-transport "
            f"tcp){alone}, or serve with one process."
        ) from None


def open_ends(
    ends: HandoverEnds,
    geometry: KVGeometry,
    scheduler: Scheduler,
    journal: Journal,
    runner: ModelRunner,
    shared: SharedMemory | None,
) -> tuple[KVEnds, LenderFacts | None]:
    """The two ends of hand-overs, as far as an engine has them, and where it lends.

    Args:
        ends: what they tell, and where they are.
        geometry: of this engine.
        scheduler: of the engine.
        journal: of the engine.
        runner: what computes in its KV cache.
        shared: memory of all ranks' caches, where processes map it.

    Raises:
        SetupError: nobody can be served at its address, or NIXL is not there.
    """
    kv = runner.kv
    own = kv.bytes_of_pool()
    others = () if shared is None else shared.descriptors[1:]
    memory = KVMemory(kv.layout, own, *(memoryview(mmap.mmap(other, len(own))) for other in others))
    block_size, port = kv.layout.block_size, ends.port
    lending = fetching = where = None
    if port.lends_at is not None:
        lent = NixlAgent(memory) if port.lends_at.by_nixl else shared if port.lends_at.is_local else None
        orders = tuple(runner.head_order(group.spec, block_size) for group in kv.layout.groups)
        lender = KVLender(
            PoolToLend(memory, lent, orders),
            geometry,
            epoch=ends.epoch,
            clock=monotonic_clock,
            is_over=ends.is_over,
        )
        lending = KVLending(scheduler, lender, kv.layout, split_layers=memory.num_layers if memory.num_ranks > 1 else 0)
        kv.layer_written = lending.layer_written
        try:
            where = LenderFacts(lender.listen(port.lends_at), ends.epoch)
        except OSError as error:
            raise SetupError(f"{port.lends_at}: nobody can fetch KV there ({error}). Give another address.") from None
    if port.fetches:
        borrower = KVBorrower(
            memory,
            geometry,
            reading=BlockReading(runner.head_order, recode, runner.key_means),
            clock=monotonic_clock,
            allows_drift=port.allows_drift,
            nixl=NixlAgent(memory) if port.fetches_by_nixl else None,
        )
        fetching = KVFetching(
            scheduler, borrower, journal, layout=kv.layout, clock=monotonic_clock, is_done=ends.is_fetched
        )
    return KVEnds(lending, fetching), where
