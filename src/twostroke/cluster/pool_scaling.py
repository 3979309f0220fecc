"""PoolScaling: translates the workers' reports for the autoscaler, and its decisions into pool sizes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostroke.client.load import EngineLoad
from twostroke.config.pools import PoolConfig, ScalingConfig
from twostroke.engine.facts import EngineFacts
from twostroke.pools.autoscaler import (
    DecodeLoad,
    PrefillLoad,
    Replica,
    ScalingDecision,
    ScalingState,
    scale_decode,
    scale_prefill,
)
from twostroke.pools.member import Role
from twostroke.pools.ratio import SuggestedRatio, suggested_ratio


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """Current figures of a worker that stays."""

    worker_id: str
    role: Role
    num_live: int
    """Number of sequences that need it."""
    load: EngineLoad | None = None
    """Load of the worker; None while it starts."""
    facts: EngineFacts | None = None
    num_free_blocks: int = 0


WINDOW_S = 60.0
"""Seconds over which the load is averaged."""


class ObservedLoad:
    """Prompt and output tokens of the last minute, and the ratio of the pools that fits them.

    Workers measure the speeds that the ratio needs. When the last worker of a pool has left, its speeds are used until
    another worker has measured its own.
    """

    def __init__(self, tpot_target_s: float) -> None:
        self._tpot_target_s = tpot_target_s
        self._seen: deque[tuple[float, int, int]] = deque()
        """Time, prompt tokens and output tokens of each record."""
        self._max_num_seqs: int | None = None
        """Number of slots of a decode worker."""
        self._prefilled: dict[Role, EngineLoad] = {}
        """Load of the last worker of each pool that left after it had computed prompts."""
        self._decoded: dict[Role, EngineLoad] = {}
        """Load of the last worker of each pool that left after it had decoded."""

    def joined(self, role: Role, max_num_seqs: int) -> None:
        """Record the slots of a worker that is ready."""
        if role is not Role.PREFILL:
            self._max_num_seqs = max_num_seqs

    def left(self, role: Role, load: EngineLoad) -> None:
        """Keep the measurements of a worker that retires or has died."""
        if load.has_prefilled:
            self._prefilled[role] = load
        if load.has_decoded:
            self._decoded[role] = load

    def saw(self, now_s: float, *, num_prompt_tokens: int = 0, num_output_tokens: int = 0) -> None:
        """Count prompt tokens sent to a worker, or output tokens received."""
        self._seen.append((now_s, num_prompt_tokens, num_output_tokens))
        self._forget(now_s)

    def suggested(self, workers: Sequence[WorkerFigures], now_s: float) -> SuggestedRatio | None:
        """Return the ratio of the pools for this load and the measured speeds; None while one of them is unknown.

        Args:
            workers: of both pools.
            now_s: current time in seconds.
        """
        self._forget(now_s)
        loads = [(worker.role, worker.load) for worker in workers if worker.load is not None]
        prefilling = _measured([each for each in loads if each[1].has_prefilled], self._prefilled, Role.PREFILL)
        decoding = _measured([each for each in loads if each[1].has_decoded], self._decoded, Role.DECODE)
        if not (self._seen and prefilling and decoding and self._max_num_seqs):
            return None
        rates = [1 / load.prefill_s_per_token for load in prefilling]
        seconds = max(1.0, now_s - self._seen[0][0])
        return suggested_ratio(
            prompt_tokens_per_s=sum(prompt for _, prompt, _ in self._seen) / seconds,
            output_tokens_per_s=sum(output for _, _, output in self._seen) / seconds,
            prefill_tokens_per_s=sum(rates) / len(rates),
            step_s=sum(load.decode_step_s for load in decoding) / len(decoding),
            step_s_per_sequence=sum(load.step_s_per_sequence for load in decoding) / len(decoding),
            tpot_target_s=self._tpot_target_s,
            max_num_seqs=self._max_num_seqs,
        )

    def _forget(self, now_s: float) -> None:
        while self._seen and self._seen[0][0] < now_s - WINDOW_S:
            self._seen.popleft()


def _measured(
    loads: Sequence[tuple[Role, EngineLoad]], left: Mapping[Role, EngineLoad], role: Role
) -> list[EngineLoad]:
    """Return the loads of one pool's workers, or of the last that left it; failing both, those of all workers."""
    of_role = [load for its_role, load in loads if its_role is role]
    if of_role:
        return of_role
    return [left[role]] if role in left else [load for _, load in loads] or list(left.values())


def limits_of(pools: PoolConfig) -> dict[Role, ScalingConfig]:
    """Return the limits of the pools that follow their load; a pool's initial size is its smallest."""
    sizes = {Role.PREFILL: (pools.prefill, pools.max_prefill), Role.DECODE: (pools.decode, pools.max_decode)}
    return {
        role: ScalingConfig(
            min_replicas=fewest,
            max_replicas=most,
            ttft_target_s=pools.ttft_target_s,
            tpot_target_s=pools.tpot_target_s,
        )
        for role, (fewest, most) in sizes.items()
        if most
    }


class PoolScaling:
    """Decisions about each pool's size, once per interval. Pure, apart from the state it keeps.

    Args:
        limits: sizes allowed for each pool; a pool that is left out keeps its size.
    """

    def __init__(self, limits: Mapping[Role, ScalingConfig]) -> None:
        self._limits = dict(limits)
        self._states = dict.fromkeys(limits, ScalingState())
        self._num_arrived_tokens = 0

    @property
    def is_wanted(self) -> bool:
        """Whether any pool follows its load."""
        return bool(self._limits)

    def arrived(self, num_tokens: int) -> None:
        """Count a prompt sent to a prefill worker."""
        self._num_arrived_tokens += num_tokens

    def decide(self, workers: Sequence[WorkerFigures], interval_s: float) -> dict[Role, ScalingDecision]:
        """Decide the sizes for the interval that ends now; a pool without loaded workers keeps its size."""
        decisions: dict[Role, ScalingDecision] = {}
        for role, config in self._limits.items():
            of_role = [worker for worker in workers if worker.role is role]
            state = self._states[role]
            if role is Role.PREFILL:
                decisions[role] = scale_prefill(self._prefill(of_role, interval_s), config, state)
            elif any(worker.facts is not None for worker in of_role):
                decisions[role] = scale_decode(_decode(of_role), config, state)
            if role in decisions:
                self._states[role] = decisions[role].state
        self._num_arrived_tokens = 0
        return decisions

    def _prefill(self, workers: Sequence[WorkerFigures], interval_s: float) -> PrefillLoad:
        loads = [worker.load for worker in workers if worker.load is not None]
        rates = [1 / load.prefill_s_per_token for load in loads if load.has_prefilled]
        return PrefillLoad(
            replicas=_replicas(workers),
            num_queued_prompt_tokens=sum(load.num_waiting_tokens for load in loads),
            prompt_tokens_per_s=self._num_arrived_tokens / interval_s,
            prefill_tokens_per_s=sum(rates) / len(rates) if rates else None,
        )


def _decode(workers: Sequence[WorkerFigures]) -> DecodeLoad:
    known = [(worker.load, worker.facts, worker) for worker in workers]
    ready = [(load, facts, worker) for load, facts, worker in known if load is not None and facts is not None]
    measured = [load for load, _, _ in ready if load.has_decoded]
    return DecodeLoad(
        replicas=_replicas(workers),
        num_sequences=sum(worker.num_live for worker in workers),
        num_used_blocks=sum(max(0, facts.num_blocks - worker.num_free_blocks) for _, facts, worker in ready),
        num_blocks=min(facts.num_blocks for _, facts, _ in ready),
        max_num_seqs=min(facts.max_num_seqs for _, facts, _ in ready),
        step_s=sum(load.decode_step_s for load in measured) / len(measured) if measured else None,
        step_s_per_sequence=sum(load.step_s_per_sequence for load in measured) / len(measured) if measured else 0.0,
    )


def _replicas(workers: Sequence[WorkerFigures]) -> list[Replica]:
    return [Replica(worker.worker_id, worker.num_live) for worker in workers]
