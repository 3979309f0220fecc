"""The first stage of a start: settings resolved against a model's files, before any weight is read.

Also a drafter's interface to the start: its needs before weights are read, and how it is built beside the target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from twostroke.config.engine import EngineConfig
from twostroke.config.kv_format import KVFormat
from twostroke.config.load import DEFAULT_GROUP_SIZE
from twostroke.config.model import ModelConfig
from twostroke.cost.step_cost import ModelShape
from twostroke.grammar.backend import GrammarBackend
from twostroke.kernels.interface import Operators
from twostroke.kv_cache.layout import KVLayout
from twostroke.layers.row_split import SINGLE_RANK, RankSplit
from twostroke.model.decoder import DecoderModel
from twostroke.model.registry import num_parameters
from twostroke.model.weight_size import expert_bytes, weight_bytes
from twostroke.model.weight_source import WeightSource
from twostroke.runner.key_means import key_means_bytes
from twostroke.runner.kv_storage import KVStorage
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.proposer import Proposer
from twostroke.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """The target model in memory."""

    model: DecoderModel
    kv: KVStorage
    sampler: Sampler
    max_model_len: int
    max_tokens: int
    """Known tokens of a step, which drafting layers may read at once."""
    max_num_seqs: int
    """Most requests of a step."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """Needs and limits of a drafter. The defaults describe no drafter."""

    max_drafts: int | None = None
    """Most tokens in a row that it can draft; None: any number."""
    num_weight_bytes: int = 0
    """Bytes of its own weights."""
    kv_bytes_per_block: int = 0
    """Bytes it keeps for each KV block of the target."""
    num_branch_blocks: int = 0
    """KV blocks of the target in which its branches are verified."""
    bytes_per_token: int = 0
    """Most bytes that it keeps for each token of the largest step."""
    bytes_per_request: int = 0
    """Most bytes that it keeps for each request of that step."""


class Drafter(Protocol):
    """A drafter that was found and checked, and not yet built."""

    @property
    def facts(self) -> DrafterFacts:
        """Needs and limits of the drafter."""
        ...

    @property
    def words(self) -> str:
        """Description for the lines at the start."""
        ...

    def build(self, target: LoadedTarget) -> Proposer:
        """Read its weights and return the proposer."""
        ...


@dataclass(frozen=True, slots=True)
class ProvidedDrafter:
    """A proposer that exists already, from a benchmark or a test."""

    proposer: Proposer
    words: str
    facts: DrafterFacts = DrafterFacts()

    def build(self, target: LoadedTarget) -> Proposer:
        del target
        return self.proposer


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A model that can be loaded, with its settings and the values derived from both."""

    settings: EngineConfig
    path: Path
    config: ModelConfig
    weights: WeightSource
    dtype: torch.dtype
    kv_format: KVFormat
    device: torch.device
    operators: Operators
    num_threads: int
    cpus: tuple[int, ...]
    """CPUs that the threads are pinned to; empty: they are not pinned."""
    tokenizer: Tokenizer
    tokenizer_path: Path
    eos_token_ids: frozenset[int]
    grammars: GrammarBackend
    layout: KVLayout
    drafter: Drafter | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute the model together."""
        return self.settings.load.tensor_parallel_size

    @property
    def split(self) -> RankSplit:
        """Distribution of the weights over the ranks."""
        return RankSplit(self.num_ranks, self.settings.load.enable_expert_parallel)

    @property
    def dtype_name(self) -> str:
        """Name of the type of activations, as in the settings."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def attention_dtype(self) -> torch.dtype:
        """Type in which attention multiplies."""
        return self.operators.attention_dtype(self.dtype, self.kv_format)

    @property
    def drafter_facts(self) -> DrafterFacts:
        """Facts of the drafter; defaults without one."""
        return DrafterFacts() if self.drafter is None else self.drafter.facts

    @property
    def longest_request(self) -> int:
        """Tokens of the longest request in the settings; whether KV memory holds it is decided later."""
        return self.settings.load.max_model_len or self.config.max_context

    @property
    def max_tokens_per_step(self) -> int:
        """Most tokens that one step can add to one request."""
        scheduler = self.settings.scheduler
        return scheduler.max_num_batched_tokens if scheduler.enable_chunked_prefill else self.config.max_context

    @property
    def step_tokens(self) -> int:
        """Tokens of the largest step; no step has more than all its requests together."""
        scheduler, longest = self.settings.scheduler, self.longest_request
        most = scheduler.max_num_batched_tokens
        if not scheduler.enable_chunked_prefill:
            most = max(most, longest + scheduler.max_num_seqs)
        if self.settings.cache.kv_check_rate:  # a pass over one block is a step too
            most = max(most, self.settings.cache.block_size)
        return min(most, longest * scheduler.max_num_seqs)

    @property
    def drafter_step_bytes(self) -> int:
        """Bytes that drafts take in the largest step: the state that is kept, and the blocks of branches."""
        drafts = self.drafter_facts
        kept = drafts.bytes_per_token * self.step_tokens
        kept += drafts.bytes_per_request * self.settings.scheduler.max_num_seqs
        return kept + drafts.num_branch_blocks * self.layout.bytes_per_block

    @property
    def shape(self) -> ModelShape:
        """Figures from which operations and bytes are counted, for all ranks together."""
        num_bytes, num_weights = self.weight_bytes(), num_parameters(self.config)
        shape = ModelShape(
            hidden_size=self.config.hidden_size,
            vocab_size=self.config.vocab_size,
            layers=self.config.layers,
            bytes_per_weight=num_bytes / num_weights,
            kv_format=self.layout.kv_format,
        )
        if not shape.experts:
            return shape
        load, of_experts = self.settings.load, sum(alike.num_weights for alike in shape.experts)
        group_size = load.group_size or DEFAULT_GROUP_SIZE
        in_experts = expert_bytes(self.weights, self.config, self.dtype, self.operators, load.quantization, group_size)
        return replace(
            shape,
            bytes_per_weight=(num_bytes - in_experts) / (num_weights - of_experts),
            bytes_per_expert_weight=in_experts / of_experts,
        )

    @property
    def int8_operators(self) -> Operators | None:
        """Operators that multiply this model's weights in 8 bits; None if products use floats."""
        load = self.settings.load
        is_quantized = load.quantization is not None or self.weights.quantization is not None
        multiplies_codes = self.device.type == "cpu" and self.operators.keeps_quantized
        if not is_quantized or not multiplies_codes or load.activation_quantization == "none":
            return None
        return self.operators

    @property
    def read_stream(self) -> Callable[[Tensor], object] | None:
        """The backend's own reading of memory; None on several ranks, each of which has threads of its own."""
        return self.operators.read_stream if self.num_ranks == 1 else None

    @property
    def step_bytes(self) -> float:
        """Bytes of weights that the smallest step reads."""
        return self.shape.layer_bytes_read(1) + self.shape.head_bytes

    @property
    def rank_weight_bytes(self) -> int:
        """Weight bytes of the rank that has most, without drafters."""
        return self.weight_bytes(self.split)

    def weight_bytes(self, split: RankSplit = SINGLE_RANK) -> int:
        """Return the weight bytes of the rank that has most, including means of keys with quantized KV."""
        load = self.settings.load
        means = key_means_bytes(self.config, self.kv_format, self.dtype.itemsize)
        return means + weight_bytes(
            self.weights,
            self.config,
            self.dtype,
            self.operators,
            load.quantization,
            load.group_size or DEFAULT_GROUP_SIZE,
            split,
        )
