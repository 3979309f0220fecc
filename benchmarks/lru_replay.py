"""What a prefix cache of a given size ought to hit, one request after the other: the prediction for trace replays.

Rules, as the block pool documents them and nothing else of it:

- only full blocks can be found, and a prompt's last token is always computed: at most (prompt tokens - 1) // block_size
  blocks are hits;
- a block that is needed comes from the free ones, else the cached block given back longest ago is forgotten;
- a block can be found once its last token is computed; when the same content can be found already, the old one stays
  and the new one is free as soon as its request has ended;
- a request that ends gives its blocks back tail first, so its head is forgotten last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.measure.workload import WorkloadRequest

_ROOT = -1


@dataclass(slots=True)
class LruReplay:
    """A cache with one user at a time.

    Args:
        num_blocks: blocks there are; None never forgets.
        block_size: tokens per block.
        output_token_id: what every output consists of.
    """

    num_blocks: int | None
    block_size: int
    output_token_id: int = 1
    _names: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict[tuple[int, tuple[int, ...]], int])
    _cached: OrderedDict[int, None] = field(default_factory=OrderedDict[int, None])
    """Content that can be found; the first is forgotten first."""

    def run(self, request: WorkloadRequest) -> int:
        """Runs one request to its end.

        Returns:
            How many of the prompt's blocks were found.
        """
        size = self.block_size
        num_prompt = len(request.prompt_token_ids)
        chain = self._chain(request)
        usable = (num_prompt - 1) // size
        num_hits = 0
        while num_hits < usable and chain[num_hits] in self._cached:
            del self._cached[chain[num_hits]]  # in use: cannot be forgotten
            num_hits += 1
        held: list[int | None] = [*chain[:num_hits]]
        # the prompt's step takes its blocks at once; each further one is taken when its first token is computed
        num_computed = num_prompt
        self._take(held, num_computed)
        self._name(held, chain, num_computed)
        for _ in range(request.max_tokens - 1):  # the last token that is sampled is never computed
            num_computed += 1
            self._take(held, num_computed)
            self._name(held, chain, num_computed)
        for name in reversed(held):
            if name is not None:
                self._cached[name] = None
        return num_hits

    def _chain(self, request: WorkloadRequest) -> list[int]:
        """One name per full block, equal where all tokens up to the block's end are equal."""
        size = self.block_size
        tokens = request.prompt_token_ids + (self.output_token_id,) * (request.max_tokens - 1)
        names: list[int] = []
        parent = _ROOT
        for begin in range(0, len(tokens) - size + 1, size):
            parent = self._names.setdefault((parent, tokens[begin : begin + size]), len(self._names))
            names.append(parent)
        return names

    def _take(self, held: list[int | None], num_tokens: int) -> None:
        wanted = -(-num_tokens // self.block_size) - len(held)
        held.extend([None] * wanted)
        if self.num_blocks is not None:
            assert len(held) <= self.num_blocks, (
                f"a request of {num_tokens} tokens does not fit {self.num_blocks} blocks"
            )
            while len(held) + len(self._cached) > self.num_blocks:
                self._cached.popitem(last=False)

    def _name(self, held: list[int | None], chain: Sequence[int], num_tokens: int) -> None:
        for i in range(num_tokens // self.block_size):
            if held[i] is None and chain[i] not in self._cached:
                held[i] = chain[i]
