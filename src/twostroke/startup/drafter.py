"""What a start knows of a drafter: its needs before a weight is read, and how it is built beside the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from twostroke.model.decoder import DecoderModel
from twostroke.runner.kv_storage import KVStorage
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.proposer import Proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """The target in memory."""

    model: DecoderModel
    kv: KVStorage
    sampler: Sampler
    max_model_len: int
    max_tokens: int
    """Known tokens of a step, which drafting layers may read at once."""
    max_num_seqs: int
    """Requests of a step."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the engine needs to know about the drafter. The defaults describe no drafter."""

    max_drafts: int | None = None
    """Most tokens in a row that it can guess; None: any number."""
    num_weight_bytes: int = 0
    """Bytes of its own weights."""
    kv_bytes_per_block: int = 0
    """Bytes it keeps beside each KV block of the target."""
    num_branch_blocks: int = 0
    """KV blocks of the target that its branches are verified in."""
    bytes_per_token: int = 0
    """Most bytes that it remembers of each token of the largest step."""
    bytes_per_request: int = 0
    """Most bytes that it remembers of each request of that step."""


class Drafter(Protocol):
    """A drafter that was found and checked, and not yet built."""

    @property
    def facts(self) -> DrafterFacts:
        """Return its needs and limits."""
        ...

    @property
    def words(self) -> str:
        """Return its description for the lines at the start."""
        ...

    def build(self, target: LoadedTarget) -> Proposer:
        """Read its weights and return what drafts."""
        ...


@dataclass(frozen=True, slots=True)
class GivenDrafter:
    """A proposer that is there already: a benchmark's, or a test's."""

    proposer: Proposer
    words: str
    facts: DrafterFacts = DrafterFacts()

    def build(self, target: LoadedTarget) -> Proposer:
        del target
        return self.proposer
