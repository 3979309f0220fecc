"""A prefix cache so slow and plain that it can be believed: whole prefixes as names, lists searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

Prefix = tuple[int, ...]
"""All tokens from the prompt's beginning to the end of a block: what the block's content depends on."""


@dataclass
class NaivePrefixCache:
    """`num_blocks` boxes. A box holds a prefix that can be found, or None. One request at a time."""

    num_blocks: int
    block_size: int
    empty: int = field(init=False)
    """Boxes that are unused and hold no prefix."""
    shelf: list[Prefix] = field(default_factory=list)
    """Unused boxes that hold a prefix, in the order in which they were freed."""

    def __post_init__(self) -> None:
        self.empty = self.num_blocks

    def run(self, prompt: list[int], output: list[int]) -> int:
        """Run one request from admission to end; return the number of blocks that it found."""
        using: list[Prefix | None] = []
        # look up: never the block with the prompt's last token, for that token has to be computed
        while True:
            end = (len(using) + 1) * self.block_size
            if end > len(prompt) - 1 or tuple(prompt[:end]) not in self.shelf:
                break
            self.shelf.remove(tuple(prompt[:end]))
            using.append(tuple(prompt[:end]))
        hits = len(using)
        # first step: the whole prompt. Every further step: the token sampled in the step before.
        everything = prompt + output
        for computed in range(len(prompt), len(prompt) + len(output)):
            while len(using) * self.block_size < computed:
                if self.empty:
                    self.empty -= 1
                else:
                    self.shelf.pop(0)
                using.append(None)
            for i in range(len(using)):
                end = (i + 1) * self.block_size
                prefix = tuple(everything[:end])
                if end <= computed and prefix not in self.shelf:
                    using[i] = prefix
        while using:
            last = using.pop()
            if last is None:
                self.empty += 1
            else:
                self.shelf.append(last)
        assert self.empty + len(self.shelf) == self.num_blocks
        return hits
