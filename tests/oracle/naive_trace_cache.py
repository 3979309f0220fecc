"""What a prefix cache did in a run of a trace, told from the run's decisions alone: who had how many tokens computed in
which step, who was admitted, who gave way. Dictionaries and lists, one block after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.batch import Commit, ScheduledBatch, Stroke
from twostroke.simulation.trace import TRACE_BLOCK, TraceEntry

Content = tuple[object, ...]
"""What stands in a full block, with everything before it."""


@dataclass
class NaiveTraceCache:
    """Blocks are empty, used by a request, or on the shelf: unused, but findable."""

    entries: Sequence[TraceEntry]
    num_blocks: int
    block_size: int
    divisor: int
    used: dict[Content, int] = field(default_factory=dict)
    """What can be found and is used, and by how many."""
    shelf: list[Content] = field(default_factory=list)
    """Unused findable blocks, in the order in which they were freed."""
    tables: dict[str, list[Content | None]] = field(default_factory=dict)
    """None: a block that no other request can find."""
    hits: list[tuple[str, int]] = field(default_factory=list)
    """Request and tokens, admission by admission."""
    evictions: Counter[str] = field(default_factory=Counter)
    """By the request that took the block."""

    def decided(self, batch: ScheduledBatch) -> None:
        """Allocate blocks to the batch's requests in its order; requests were preempted when blocks ran out."""
        batch_priority = [preemption.request_id for preemption in batch.preemptions]
        admitted = {one.request_id: one.num_tokens for one in batch.admitted}
        for share in batch.requests:
            if share.stroke is Stroke.PREFILL:  # prompts preempt no request: decoding requests were admitted before
                while batch_priority:
                    self.give_back(batch_priority.pop(0))
            name = share.request_id
            if name in admitted:
                self.tables[name] = list(self.look_up(name, admitted[name]))
                self.hits.append((name, len(self.tables[name]) * self.block_size))
                assert share.num_computed_tokens == self.hits[-1][1], f"{name} begins elsewhere"
            end = share.num_computed_tokens + share.num_scheduled_tokens
            missing = -(-end // self.block_size) - len(self.tables[name])
            while self.num_empty + len(self.shelf) < missing:
                self.give_back(batch_priority.pop(0))
            for _ in range(missing):
                if self.num_empty == 0:
                    self.shelf.pop(0)
                    self.evictions[name] += 1
                self.tables[name].append(None)
        while batch_priority:
            self.give_back(batch_priority.pop(0))

    def committed(self, batch: ScheduledBatch, commits: Sequence[Commit]) -> None:
        """Record committed tokens: full blocks become findable unless equal ones are; ended requests free theirs."""
        for share, commit in zip(batch.requests, commits, strict=True):
            table = self.tables[share.request_id]
            end = share.num_computed_tokens + share.num_scheduled_tokens
            for i in range(share.num_computed_tokens // self.block_size, end // self.block_size):
                content = self.content(share.request_id, i)
                if table[i] is None and content not in self.used and content not in self.shelf:
                    table[i] = content
                    self.used[content] = 1
            if commit.finish_reason is not None:
                self.give_back(share.request_id)

    @property
    def num_empty(self) -> int:
        """Blocks that are unused and cannot be found."""
        private = sum(one is None for table in self.tables.values() for one in table)
        return self.num_blocks - private - len(self.used) - len(self.shelf)

    def look_up(self, name: str, num_tokens: int) -> list[Content]:
        """Search block after block, without the last token's block, which has to be computed."""
        found: list[Content] = []
        while (len(found) + 1) * self.block_size < num_tokens:
            content = self.content(name, len(found))
            if content in self.shelf:
                self.shelf.remove(content)
                self.used[content] = 0
            if content not in self.used:
                break
            self.used[content] += 1
            found.append(content)
        return found

    def give_back(self, name: str) -> None:
        """Free a request's blocks, the last of the prompt first, so that its beginning is evicted last."""
        for content in reversed(self.tables.pop(name)):
            if content is not None:
                self.used[content] -= 1
                if self.used[content] == 0:
                    del self.used[content]
                    self.shelf.append(content)

    def content(self, name: str, block: int) -> Content:
        """A block of the prompt is named by its hash id; a block with output is unique."""
        entry = self.entries[int(name)]
        begin, end = block * self.block_size * self.divisor, (block + 1) * self.block_size
        if end > -(-entry.input_length // self.divisor):
            return (name, block)
        return (entry.hash_ids[begin // TRACE_BLOCK], begin % TRACE_BLOCK)
