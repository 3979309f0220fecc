"""RoutedPlacer: translates the workers' reports for the router, and its routes for the dispatcher."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from twostroke.client.load import EngineLoad
from twostroke.config.pools import KVTransport, RoutingConfig
from twostroke.engine.facts import EngineFacts
from twostroke.engine.generation import GenerationRequest
from twostroke.engine.handover_messages import LenderAddress
from twostroke.events import Event, KVImportEnded, PrefixCacheReset, RequestRouted, StepScheduled
from twostroke.kv_cache.prefix_cache import BlockHasher, hash_by_tokens
from twostroke.pools.member import Member, Role, Transport
from twostroke.pools.route import RouteRequest
from twostroke.pools.router import REPORTS_EVERY_S, Router


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """A worker that accepts requests."""

    worker_id: str
    role: Role
    lender: LenderAddress | None
    """Address of its KV, if it is a prefill worker."""
    block_size: int
    numerics: Mapping[str, str] = field(default_factory=dict[str, str])
    """Numerics of the worker; if they differ, the last bits of results may differ."""
    prefix_tokens: int = 0
    """Granularity in tokens at which prefixes can be handed over, see KVLayout; 0: block_size."""
    num_ranks: int = 1
    """Ranks that share the model's layers."""

    @property
    def whole_tokens(self) -> int:
        """Granularity in tokens at which blocks of all KV groups end."""
        return self.prefix_tokens or self.block_size


@dataclass(frozen=True, slots=True)
class Place:
    """Workers that run an attempt."""

    decode: str
    prefill: str | None = None
    """Worker that computes the prompt; None: the decode worker does. A prefill worker may decode while no decode worker
    is ready."""
    reason: str = ""
    """Reason in words."""


class Placer(Protocol):
    """A pure function that chooses workers."""

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place | None:
        """Return the workers for a request; None if no worker can take it now.

        Args:
            request: the request as it arrived.
            token_ids: all known tokens, which have to be computed before the next one is sampled.
            members: workers that accept requests.
            num_live: returns the number of sequences that need a member, by its id.
        """
        ...


@dataclass(slots=True, eq=False)
class _WorkerState:
    idle: Member
    """State in which the worker joined."""
    prefix_tokens: int
    num_free_blocks: int
    reported_s: float = float("-inf")


class RoutedPlacer:
    """A placer that asks the Router.

    Args:
        config: of the router.
        names: hashes the blocks of prompts.
    """

    def __init__(self, config: RoutingConfig, names: BlockHasher = hash_by_tokens) -> None:
        self.router = Router(config)
        self._names = names
        self._workers: dict[str, _WorkerState] = {}
        self._handovers: dict[str, tuple[str, str]] = {}
        """Prefill and decode worker of each hand-over in progress, by the request's id at the workers."""

    def joined(self, member: ReadyWorker, facts: EngineFacts, transport: KVTransport) -> None:
        """Add a worker that accepts requests."""
        numerics = " ".join(f"{name}={value}" for name, value in sorted(member.numerics.items()))
        kind = Transport.SHARED_MEMORY if transport == "shm" else Transport.TCP
        computes = f"{numerics} kernels={facts.kernels} threads={facts.num_threads} ranks={member.num_ranks}"
        idle = Member(
            member_id=member.worker_id,
            role=member.role,
            max_num_seqs=facts.max_num_seqs,
            num_free_blocks=facts.num_blocks,
            num_blocks=facts.num_blocks,
            block_size=facts.block_size,
            kv_bytes_per_token=facts.kv_bytes_per_token,
            num_layers=facts.num_layers,
            kind=computes,
            transport=kind,
            numerics=numerics,
        )
        self.joined_idle(idle, facts.prefix_tokens)

    def joined_idle(self, idle: Member, prefix_tokens: int) -> None:
        """Add a worker that has no requests yet.

        Args:
            idle: its current state.
            prefix_tokens: granularity in tokens at which prefixes can be handed over.
        """
        self._workers[idle.member_id] = _WorkerState(idle, prefix_tokens, idle.num_free_blocks)
        self._put(idle.member_id, EngineLoad(idle.max_num_seqs))

    def num_free_blocks(self, worker_id: str) -> int:
        """Return the number of free blocks that a worker last reported."""
        worker = self._workers.get(worker_id)
        return 0 if worker is None else worker.num_free_blocks

    @property
    def num_handovers(self) -> int:
        """Number of hand-overs whose end was not reported yet."""
        return len(self._handovers)

    def left(self, worker_id: str) -> None:
        """Remove a worker that accepts no more requests."""
        if self._workers.pop(worker_id, None) is not None:
            self.router.remove(worker_id)
            self._handovers = {name: ends for name, ends in self._handovers.items() if worker_id not in ends}

    def on_event(self, worker_id: str, event: Event) -> None:
        """Process an event of a worker's engine."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        match event:
            case StepScheduled():
                worker.num_free_blocks = event.batch.num_free_blocks
            case PrefixCacheReset():
                self.router.reset(worker_id)
            case KVImportEnded():
                self._measured(worker_id, event)
            case _:
                pass

    def routed(self, event: RequestRouted) -> None:
        """Record a hand-over in progress; its outcome gives the speed of the link."""
        if event.prefill is not None:
            self._handovers[event.request_id] = event.prefill, event.decode

    def reported(self, worker_id: str, load: Callable[[], EngineLoad], now_s: float) -> None:
        """Update a worker's load, unless that was done recently."""
        worker = self._workers.get(worker_id)
        if worker is not None and now_s - worker.reported_s >= REPORTS_EVERY_S:
            worker.reported_s = now_s
            self._put(worker_id, load())

    def silent(self, worker_id: str, load: EngineLoad, silent_s: float) -> None:
        """Record that a worker has work and has reported no step for so many seconds: it may hang."""
        if worker_id in self._workers:
            self._put(worker_id, load, silent_s)

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place | None:
        """Return the workers for a request, chosen among those that have joined."""
        del members, num_live
        if not self._workers:
            return None
        # the largest block size of all: full blocks of that size are also full in smaller ones
        block_size = max(worker.idle.block_size for worker in self._workers.values())
        whole = math.lcm(*(worker.prefix_tokens for worker in self._workers.values()))
        new = request.new_request
        asked = RouteRequest(
            num_prompt_tokens=len(token_ids),
            num_output_tokens=request.max_tokens - (len(token_ids) - len(new.prompt_token_ids)),
            block_hashes=self._names(request.request_id, token_ids, block_size, request.cache_salt),
            block_size=block_size,
            whole_tokens=whole,
            may_be_handed_over=new.params.prompt_logprobs is None and not new.wants_hidden_state,
        )
        route = self.router.route(asked)
        if route.decode_id is None:
            return None
        self.router.placed(asked, route)
        return Place(route.decode_id, route.prefill_id, route.words)

    def _put(self, worker_id: str, load: EngineLoad, silent_s: float = 0.0) -> None:
        worker = self._workers[worker_id]
        rate = 1 / load.prefill_s_per_token if load.prefill_s_per_token > 0 else None
        self.router.put(
            replace(
                worker.idle,
                num_queued_prompt_tokens=load.num_waiting_tokens + load.num_running_tokens,
                silent_s=silent_s,
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_free_blocks=min(worker.num_free_blocks, worker.idle.num_blocks),
                prefill_tokens_per_s=rate,
                step_s=load.step_s,
            )
        )

    def _measured(self, worker_id: str, event: KVImportEnded) -> None:
        """Record the rate of a successful hand-over, over the time in which bytes arrived."""
        prefill, decode = self._handovers.pop(event.request_id, ("", ""))
        is_theirs = decode == worker_id and prefill in self._workers
        if is_theirs and not event.problem and event.num_bytes and event.busy_s > 0:
            self.router.link_measured(prefill, decode, event.num_bytes / event.busy_s)


class LeastBusy:
    """The simplest placer: takes the workers with the fewest sequences, and hands over every prompt of a block or
    more."""

    def place(
        self,
        request: GenerationRequest,
        token_ids: Sequence[int],
        members: Sequence[ReadyWorker],
        num_live: Callable[[str], int],
    ) -> Place | None:
        order = sorted(members, key=lambda member: (num_live(member.worker_id), member.worker_id))
        decode = next((member for member in order if member.role is Role.DECODE), None)
        prefill = next((member for member in order if member.role is Role.PREFILL), None)
        if decode is None:
            return None if prefill is None else Place(prefill.worker_id, reason="no decode worker is ready")
        new = request.new_request
        if prefill is None:
            return Place(decode.worker_id, reason="no prefill worker is ready")
        if len(token_ids) < math.lcm(decode.whole_tokens, prefill.whole_tokens):
            return Place(decode.worker_id, reason="not one full block")
        if new.params.prompt_logprobs is not None or new.wants_hidden_state:
            return Place(decode.worker_id, reason="the request needs scores or a hidden state of its prompt")
        return Place(decode.worker_id, prefill.worker_id, "a prefill worker is ready")
