"""Honest little machines that stand in for the slow parts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from twostroke.batch import Commit, KVLoad, KVMoves, ScheduledBatch, ScheduledRequest, StepTimer
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.config.speculation import SpeculativeConfig
from twostroke.cost.step_cost import Layers
from twostroke.cost.step_model import StepTimeModel
from twostroke.event_codec import plain
from twostroke.events import (
    EngineStarted,
    EventLog,
    EventRing,
    KVBlockChecked,
    RequestArrived,
    RequestFinishedByCaller,
    StepCommitted,
    StepScheduled,
)
from twostroke.kv_cache.layout import KVLayout
from twostroke.kv_cache.manager import KVCacheManager
from twostroke.kv_cache.prefix_cache import hash_blocks
from twostroke.kv_check import NO_SUSPECTS, KVCheck, Verdict
from twostroke.request import Arrival, FinishReason, Key
from twostroke.scheduler.baselines import variant_of
from twostroke.scheduler.policy import make_policy
from twostroke.scheduler.scheduler import Scheduler


@dataclass
class FakeGeneration:
    """A request's tokens as the device has them, and what K and V of each token depend on."""

    token_ids: list[int]
    max_tokens: int
    salt: str = ""
    num_prompt_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    num_committed: int = 0
    """Tokens whose values the engine has seen."""
    contents: list[int] = field(default_factory=list)
    """Per token: a digest of all tokens up to it, which is what its K and V depend on."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_committed = len(self.token_ids)

    def content(self, position: int) -> int:
        """Return the digest at one position."""
        while len(self.contents) <= position:
            before = self.contents[-1] if self.contents else hash(self.salt)
            self.contents.append(hash((before, self.token_ids[len(self.contents)])))
        return self.contents[position]


class FakeExecutor:
    """A device whose KV memory holds digests.

    It writes where the block tables say, and checks that every query finds, in every KV group, exactly the K and V of
    its own request's tokens. A wrong block, a block with two owners or a rejected draft that was kept shows at once.
    """

    def __init__(self, layout: KVLayout, rng: random.Random) -> None:
        self.layout = layout
        self.most_tokens = max(map(layout.tokens_per_block, layout.groups))
        self.rng = rng
        self.generations: dict[str, FakeGeneration] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        self.num_token_passes = 0
        self.checks_reads = True
        self.host: dict[int, list[tuple[int, int] | None]] = {}
        self.late: tuple[KVLoad, ...] = ()
        """Prefetches that take as long as they may."""

    def execute(self, batch: ScheduledBatch) -> dict[str, list[int]]:
        """Return new token ids of each request."""
        self._move(batch.kv_moves or KVMoves(), batch.step)
        for request_id in batch.finished_request_ids:
            # a request that was admitted and preempted in one step, and then ended, was never seen here
            if self.tables.pop(request_id, None) is None:
                assert not any(s.request_id == request_id for s in batch.requests), f"{request_id} ended, and runs"
        written: dict[tuple[int, int], str] = {}
        results = {scheduled.request_id: self._sample(scheduled) for scheduled in batch.requests}
        for scheduled in batch.requests:
            self._update_tables(scheduled)
            self._write(scheduled, written)
        for scheduled in batch.requests if self.checks_reads else ():
            self._read(scheduled)
        self.num_token_passes += batch.num_tokens
        return results

    def _move(self, moves: KVMoves, step: int) -> None:
        """Prefetches are done at the first or at the last moment, in turn; until then there is nothing in their blocks,
        and what a pass writes there is lost."""
        self._wait_for_prefetches()
        for store in moves.stores:
            self.host[store.slot] = [self.memory.get((store.block_id, i)) for i in range(self.most_tokens)]
        self._load(moves.loads)
        for load in moves.prefetches:
            for offset in range(self.most_tokens):
                self.memory.pop((load.block_id, offset), None)
        self.late = moves.prefetches if step % 2 else ()
        self._load(() if step % 2 else moves.prefetches)

    def _wait_for_prefetches(self) -> None:
        self._load(self.late)
        self.late = ()

    def _load(self, loads: Iterable[KVLoad]) -> None:
        for load in loads:
            num_tokens = self.layout.tokens_per_block(self.layout.groups[load.group_id])
            for offset, content in enumerate(self.host[load.slot][:num_tokens]):
                assert content is not None, f"{load} finds nothing at {offset}"
                assert content[0] == load.group_id, f"{load} finds {content}"
                self.memory[load.block_id, offset] = content

    def check(self, check: KVCheck) -> None:
        """Check that the page holds its request's tokens, and that its context was not evicted meanwhile."""
        self._wait_for_prefetches()
        generation, block_size = self.generations[check.request_id], self.layout.block_size
        begin = check.entry * block_size
        for group_id, group in enumerate(self.layout.groups):
            size = self.layout.tokens_per_block(group)
            first = 0 if group.window is None else max(0, begin - group.window + 1)
            assert len(check.context[group_id]) == -(-begin // size)
            for position in range(first, begin + block_size):
                entry, offset = divmod(position, size)
                block_id = check.context[group_id][entry] if position < begin else check.block_ids[group_id]
                if block_id is not None:
                    assert self.memory[block_id, offset] == (group_id, generation.content(position)), f"{check}"

    def _update_tables(self, scheduled: ScheduledRequest) -> None:
        num_groups = len(self.layout.groups)
        assert len(scheduled.block_tables) == num_groups
        rows = self.tables.setdefault(scheduled.request_id, [[] for _ in range(num_groups)])
        for row, update in zip(rows, scheduled.block_tables, strict=True):
            if update.block_ids:
                assert update.start <= len(row), f"{scheduled}: a gap in the block table"
                row[update.start :] = update.block_ids

    def _slot(self, request_id: str, group_id: int, position: int) -> tuple[int, int]:
        entry, offset = divmod(position, self.layout.tokens_per_block(self.layout.groups[group_id]))
        return self.tables[request_id][group_id][entry], offset

    def _write(self, scheduled: ScheduledRequest, written: dict[tuple[int, int], str]) -> None:
        """Write digests; those of drafts that will be rejected match nothing."""
        generation = self.generations[scheduled.request_id]
        num_valid = len(generation.token_ids) - scheduled.samples_token
        for position in scheduled.token_range:
            content = generation.content(position) if position < num_valid else -1
            for group_id in range(len(self.layout.groups)):
                slot = self._slot(scheduled.request_id, group_id, position)
                assert slot not in written, f"{slot} is written by {scheduled.request_id} and {written[slot]}"
                written[slot] = scheduled.request_id
                self.memory[slot] = (group_id, content)

    def _read(self, scheduled: ScheduledRequest) -> None:
        generation = self.generations[scheduled.request_id]
        for group_id, group in enumerate(self.layout.groups):
            first = 0 if group.window is None else max(0, scheduled.num_computed_tokens - group.window + 1)
            for position in range(first, min(scheduled.token_range.stop, len(generation.token_ids) - 1)):
                found = self.memory.get(self._slot(scheduled.request_id, group_id, position))
                assert found == (group_id, generation.content(position)), (
                    f"{scheduled.request_id} finds another request's K and V at {position} in group {group_id}"
                )

    def _sample(self, scheduled: ScheduledRequest) -> list[int]:
        """Draw how many drafts are right, and append the tokens; before writing, since K and V of right drafts stay."""
        generation = self.generations[scheduled.request_id]
        num_known = scheduled.token_range.stop - scheduled.num_draft_tokens
        assert scheduled.samples_token == (num_known == len(generation.token_ids)), f"{scheduled}: {generation}"
        if not scheduled.samples_token:
            return []
        num_new = 1 + self.rng.randint(0, scheduled.num_draft_tokens)
        for _ in range(num_new):
            generation.token_ids.append(generation.content(len(generation.token_ids) - 1) % 5)
        return generation.token_ids[-num_new:]


class FakeEngine:
    """The real scheduler, a fake executor, and the loop between them.

    Args:
        latency: steps that are decided before the scheduler hears of a result; 0 waits for each.
        max_drafts: drafts that each decode verifies; "auto" as the gate decides by the times of the steps.
        stop_chance: chance that a token ends its request.
        log: takes the events of the run.
        step_time_s: how long a step takes, on the engine's own clock.
        corruption_chance: chance that a check of a cached block says that it has gone bad, while there is room.
        check_time_s: how long a check takes.
        step_times: that the scheduler believes in.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        *,
        max_model_len: int,
        scheduler_config: SchedulerConfig | None = None,
        cache_config: CacheConfig | None = None,
        latency: int = 0,
        max_drafts: int | Literal["auto"] = 0,
        stop_chance: float = 0.0,
        seed: int = 0,
        log: EventLog | None = None,
        step_time_s: Callable[[ScheduledBatch], float] = lambda batch: 1.0,
        corruption_chance: float = 0.0,
        check_time_s: float = 0.0,
        step_times: StepTimeModel | None = None,
    ) -> None:
        cache_config = cache_config or CacheConfig(block_size=layout.block_size)
        scheduler_config = scheduler_config or SchedulerConfig()
        self.layout = layout
        self.kv = KVCacheManager(layout, num_blocks, cache_config, max_model_len)
        drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=max_drafts) if max_drafts else None
        self.scheduler = Scheduler(
            scheduler_config,
            self.kv,
            max_model_len=max_model_len,
            speculation=drafts,
            step_times=step_times,
            layers=Layers([group.window for group in layout.groups for _ in group.layer_ids]),
        )
        self.log = log if log is not None else EventRing(1)
        self.settings = scheduler_config
        self.policy = make_policy(scheduler_config)
        self.keys: dict[str, Key] = {}
        self.tenants: dict[str, str] = {}
        self.background: set[str] = set()
        self.last_results: dict[str, list[int]] = {}
        configs = plain(scheduler_config), plain(cache_config), plain(layout)
        speculation = None if drafts is None else plain(drafts)
        begin = EngineStarted(0.0, "fake", *configs, num_blocks, max_model_len, "fake", speculation=speculation)
        self.log.append(replace(begin, step_times=step_times))
        self.rng = random.Random(seed)
        self.executor = FakeExecutor(layout, self.rng)
        self.latency = latency
        self.stop_chance = stop_chance
        self.step_time_s = step_time_s
        self.corruption_chance = corruption_chance
        self.check_time_s = check_time_s
        rule = variant_of(scheduler_config, self.kv.keeps_computed_kv).chunk_rule
        self.num_needed = self.kv.num_blocks_to_compute(max_model_len, rule.max_tokens_per_step(max_model_len))
        self.num_checks = 0
        self.started_over: list[str] = []
        """In the last step."""
        self.now_s = 0.0
        self.in_flight: deque[tuple[ScheduledBatch, dict[str, list[int]], dict[str, FakeGeneration]]] = deque()
        self.timer = StepTimer()
        self.live: dict[str, FakeGeneration] = {}
        self.ended: dict[str, tuple[FinishReason, list[int]]] = {}
        self.batches: list[ScheduledBatch] = []

    def submit(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        max_tokens: int,
        *,
        priority: int = 0,
        salt: str = "",
        tenant: str = "",
        background: bool = False,
        arrival_time_s: float | None = None,
    ) -> Arrival:
        """Submit a request as the engine would."""
        generation = FakeGeneration(list(prompt_token_ids), max_tokens, salt)
        hashes = hash_blocks(prompt_token_ids, self.layout.block_size, salt)
        generation.block_hashes = list(hashes)
        arrival = Arrival(
            request_id,
            self.now_s if arrival_time_s is None else arrival_time_s,
            len(prompt_token_ids),
            max_tokens,
            priority,
            hashes,
            tenant=tenant,
            background=background,
        )
        self.live[request_id] = self.executor.generations[request_id] = generation
        self.keys[request_id] = self.policy(arrival, len(self.keys))
        self.tenants[request_id] = tenant
        if background:
            self.background.add(request_id)
        self.log.append(RequestArrived(self.now_s, "fake", request_id, arrival))
        self.scheduler.add_request(arrival)
        return arrival

    def abort(self, request_id: str) -> None:
        """Abort a request."""
        generation = self.live.pop(request_id)
        self.ended[request_id] = (FinishReason.ABORT, generation.token_ids)
        self.log.append(RequestFinishedByCaller(self.now_s, "fake", request_id, FinishReason.ABORT))
        self.scheduler.finish(request_id, FinishReason.ABORT)

    def step(self) -> ScheduledBatch:
        """Decide one step, compute it, and commit those that are due."""
        decided_s = self.now_s
        batch = self.scheduler.schedule(decided_s)
        self.log.append(StepScheduled(decided_s, "fake", batch))
        self.batches.append(batch)
        ran = {scheduled.request_id: self.live[scheduled.request_id] for scheduled in batch.requests}
        self.started_over = []
        for check in batch.kv_checks:
            self._check(check)
        self.now_s += self.step_time_s(batch)
        if not batch.is_empty:
            self.last_results = self.executor.execute(batch)
            self.timer.decided(batch.step, decided_s)
            self.in_flight.append((batch, self.last_results, ran))
        for request_id in self.started_over:
            old = self.live[request_id]
            fresh = FakeGeneration(old.token_ids[: old.num_prompt_tokens], old.max_tokens, old.salt)
            fresh.block_hashes = old.block_hashes[: old.num_prompt_tokens // self.layout.block_size]
            self.live[request_id] = self.executor.generations[request_id] = fresh
        while len(self.in_flight) > (self.latency if not batch.is_empty else 0):
            self._update()
        return batch

    def _check(self, check: KVCheck) -> None:
        """Return verdicts that call some sound blocks corrupt: those of some groups or of all, at random."""
        self.executor.check(check)
        if check.request_id not in self.live or check.request_id in self.started_over:
            return
        self.num_checks += 1
        begin_s, self.now_s = self.now_s, self.now_s + self.check_time_s
        quarantined: tuple[int | None, ...] = ()
        suspects = NO_SUSPECTS
        has_room = self.kv.num_usable_blocks - len(self.layout.groups) >= self.num_needed
        if has_room and self.rng.random() < self.corruption_chance:
            quarantined = tuple(self.rng.choice([b, b, None]) for b in check.block_ids)
            if not any(block_id is not None for block_id in quarantined):
                quarantined = check.block_ids
            suspects = self.scheduler.quarantine(check.request_id, check.entry, quarantined)
            self.started_over += suspects.started_over
            for request_id in suspects.ended:
                self.ended[request_id] = (FinishReason.ERROR, self.live.pop(request_id).token_ids)
        verdict = Verdict.CORRUPTION if quarantined else Verdict.EXACT
        found = {"quarantined": quarantined, "suspects": suspects}
        self.log.append(
            KVBlockChecked(self.now_s, "fake", begin_s, check.request_id, check.entry, verdict, **found)  # type: ignore[arg-type]
        )

    def run(self, max_steps: int = 100_000) -> int:
        """Run steps until no request is left; return how many computed something."""
        num_steps = 0
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                while self.in_flight:
                    self._update()
                return num_steps
            num_steps += not self.step().is_empty
        raise AssertionError(f"{max_steps} steps and no end: {self.live.keys()}")

    def _update(self) -> None:
        batch, results, ran = self.in_flight.popleft()
        # results of a request that started over meanwhile are dropped
        mine = [s for s in batch.requests if self.live.get(s.request_id, ran[s.request_id]) is ran[s.request_id]]
        commits = tuple(self._commit(s, results[s.request_id]) for s in mine)
        self.log.append(StepCommitted(self.now_s, "fake", batch.step, commits))
        self.scheduler.update(batch.step, commits, self.timer.ended(batch.step, self.now_s))

    def _commit(self, scheduled: ScheduledRequest, token_ids: list[int]) -> Commit:
        request_id = scheduled.request_id
        generation = self.live.get(request_id)
        if generation is None:
            return Commit(request_id, len(token_ids))
        num_accepted, reason = len(token_ids), None
        for i in range(len(token_ids)):
            num_outputs = generation.num_committed + i + 1 - generation.num_prompt_tokens
            assert num_outputs <= generation.max_tokens, f"{request_id} generates more than {generation.max_tokens}"
            if self.rng.random() < self.stop_chance:
                num_accepted, reason = i + 1, FinishReason.STOP
                break
            if num_outputs == generation.max_tokens:
                num_accepted, reason = i + 1, FinishReason.LENGTH
                break
        generation.num_committed += num_accepted
        committed = generation.token_ids[: generation.num_committed]
        num_hashed = len(generation.block_hashes)
        hashes = hash_blocks(committed, self.layout.block_size, generation.salt)[num_hashed:]
        generation.block_hashes.extend(hashes)
        if reason is not None:
            del self.live[request_id]
            self.ended[request_id] = (reason, committed)
        return Commit(request_id, num_accepted, hashes, reason, scheduled.num_draft_tokens)
