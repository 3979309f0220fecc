"""Operations and bytes of a step, from shapes alone.

Per query token, with P the parameters of a layer's matrices and c the keys it sees (itself included):

    operations   2 P                          each weight is multiplied once and added once; of experts, the chosen ones
                 4 x num_heads x head_dim x c   q·k and p·v, two operations per pair and dimension, in each layer
                 2 x hidden x vocab           only for rows that get logits
    bytes        all weights, once a step     for any number of tokens: batching shares this cost. Of experts, those
                                              that so many tokens are expected to hit (cost/expert_shares.py)
                 K and V that are seen        once per request and layer; num_kv_heads counts here, not num_heads
                 K and V that are written     one token's K and V for each query token and layer

Operations / bytes is the step's intensity. A step whose intensity is above the machine's ratio is compute-bound,
below it memory-bound. Prefill is usually compute-bound and decode memory-bound: the two strokes.

These are lower bounds: activations, norms, softmax and the embedding rows are left out (below 1 % for models of 1B
and more).

`StepWork` holds the few counts that a step's time depends on. They contain no bytes and no rates, so they are the
same on every machine.

    tokens        query tokens, each of which goes through every layer            (weights are read once for all)
    logits rows   query tokens that go through the LM head and are sampled
    pairs         query-key pairs of prefill chunks, summed over the layers       (compute: q k, p v)
    seen          K/V tokens read for decodes, summed over the layers             (memory: one query, all of its keys)

A sliding window reduces both sums, layer by layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from twostroke.batch import ScheduledBatch, ScheduledRequest
from twostroke.config.kv_format import KVFormat
from twostroke.config.layer_spec import LayerSpec
from twostroke.cost.expert_shares import ExpertGroup, ExpertShares, uniform_shares

MAX_DECODE_LIKE_TOKENS = 8
"""Largest number of query tokens of a request that is treated like a decode: its keys are read once (drafts, the rest
of a prompt). More query tokens compute their pairs in tiles."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The counts of one step."""

    num_tokens: int
    num_logits_rows: int
    num_pairs: int
    num_seen: int

    def __add__(self, other: StepWork) -> StepWork:
        """Return the work of a step that does both."""
        return StepWork(
            self.num_tokens + other.num_tokens,
            self.num_logits_rows + other.num_logits_rows,
            self.num_pairs + other.num_pairs,
            self.num_seen + other.num_seen,
        )


NO_WORK = StepWork(0, 0, 0, 0)


class Layers:
    """Layers of a model, grouped by attention window.

    Args:
        windows: one per layer: the tokens a query sees, itself included; None sees all.

    >>> Layers([None, None]).work([(10, 1, 1)])      # a decode that sees 11 tokens in each of two layers
    StepWork(num_tokens=1, num_logits_rows=1, num_pairs=0, num_seen=22)
    >>> Layers([4]).work([(0, 10, 0)])               # a chunk of 10: its queries see 1 2 3 4 4 4 4 4 4 4 tokens
    StepWork(num_tokens=10, num_logits_rows=0, num_pairs=34, num_seen=0)
    """

    __slots__ = ("_kinds",)

    def __init__(self, windows: Sequence[int | None]) -> None:
        kinds: Mapping[int | None, int] = {window: windows.count(window) for window in dict.fromkeys(windows)}
        self._kinds = tuple(kinds.items())

    @property
    def num_layers(self) -> int:
        """Number of layers of all kinds."""
        return sum(count for _, count in self._kinds)

    def work(self, shares: Iterable[tuple[int, int, int]]) -> StepWork:
        """Return the work of a step.

        Args:
            shares: for each request: tokens computed before, query tokens, rows of logits.
        """
        num_tokens = num_rows = num_pairs = num_seen = 0
        for start, count, rows in shares:
            num_tokens += count
            num_rows += rows
            if count <= MAX_DECODE_LIKE_TOKENS:
                num_seen += self._seen(start, count)
            else:
                num_pairs += self._pairs(start, count)
        return StepWork(num_tokens, num_rows, num_pairs, num_seen)

    def work_of(self, batch: ScheduledBatch) -> StepWork:
        """Return the work of a scheduled batch."""
        return self.work_of_shares(batch.requests)

    def work_of_shares(self, shares: Iterable[ScheduledRequest]) -> StepWork:
        """Return the work of a step or a part of one."""
        return self.work(
            (r.num_computed_tokens, r.num_scheduled_tokens, r.num_draft_tokens + 1 if r.samples_token else 0)
            for r in shares
        )

    def _seen(self, start: int, count: int) -> int:
        return sum(num_layers * num_seen(start, count, window) for window, num_layers in self._kinds)

    def _pairs(self, start: int, count: int) -> int:
        return sum(num_layers * num_pairs(start, count, window) for window, num_layers in self._kinds)


def num_seen(start: int, count: int, window: int | None) -> int:
    """Return the keys of one layer that any query from position `start` on sees, each counted once."""
    first = 0 if window is None else max(0, start - window + 1)
    return start + count - first


def num_pairs(start: int, count: int, window: int | None) -> int:
    """Return the query-key pairs of one layer: those of all positions before the end, less those before the start.

    ```
    full     q sees   1 2 3 4 5 6    n (n + 1) / 2          window 3     1 2 3 3 3 3
    ```
    """

    def up_to(position: int) -> int:
        if window is None or position <= window:
            return position * (position + 1) // 2
        return window * (window + 1) // 2 + (position - window) * window

    return up_to(start + count) - up_to(start)


_ROUNDING = 1 + 1e-9
"""Tolerance for rounding: times are differences of clocks, so a floor within this factor of a step is not above it."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Combined costs of all layers of one kind."""

    window: int | None
    """Tokens that a query sees, itself included; None: all."""
    operations_per_pair: int
    """Operations of q·k and p·v for one query and one key."""
    kv_bytes_per_token: int
    writes_kv: bool
    """Whether these layers have K and V of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder that its costs depend on."""

    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    bytes_per_weight: float
    """Bytes per weight, scales of quantized weights included, hence not always a whole number."""
    bytes_per_expert_weight: float | None = None
    """Bytes per expert weight, as experts are often in another format; None: as the other weights."""
    kv_format: KVFormat
    expert_shares: tuple[ExpertShares, ...] = ()
    """Measured shares, for each of `experts`; empty: not measured, so that expectations about experts are upper
    bounds."""
    kinds: tuple[LayerGroup, ...] = field(init=False, repr=False, compare=False)
    """Layers by kind, in order of first appearance. Computed once, because every step uses them."""
    num_layer_parameters: int = field(init=False, repr=False, compare=False)
    """Weights in the matrices of all layers that every token goes through."""
    experts: tuple[ExpertGroup, ...] = field(init=False, repr=False, compare=False)
    """The experts of all layers; empty where there are none."""
    num_head_parameters: int = field(init=False, repr=False, compare=False)
    """Weights of the LM head."""

    def __post_init__(self) -> None:
        """Count the layers and their weights."""
        counts = Counter(self.layers)
        kinds = tuple(
            LayerGroup(
                layer.kv.window,
                4 * num * layer.q_size,
                num * layer.kv.bytes_per_token(self.kv_format),
                layer.kv_source is None,
            )
            for layer, num in counts.items()
        )
        object.__setattr__(self, "kinds", kinds)
        object.__setattr__(self, "experts", tuple(self._expert_groups()))
        num_parameters = sum(num * self._num_parameters(layer) for layer, num in counts.items())
        object.__setattr__(self, "num_layer_parameters", num_parameters)
        object.__setattr__(self, "num_head_parameters", self.hidden_size * self.vocab_size)

    def _expert_groups(self) -> Iterator[ExpertGroup]:
        """Yield the experts of layers alike, with the shares of tokens that choose each."""
        kinds = Counter(layer.experts for layer in self.layers if layer.experts is not None)
        shares = self.expert_shares or (uniform_shares(spec, num) for spec, num in kinds.items())
        for (spec, num), of_kind in zip(kinds.items(), shares, strict=True):
            yield ExpertGroup(spec, num, 3 * self.hidden_size * spec.intermediate_size, of_kind)

    def _num_parameters(self, layer: LayerSpec) -> int:
        """Return the number of weights in the matrices of a layer that every token goes through.

        These are q, k, v, o, up, down, a gate if it has one, those of what each token brings to it, a router and a
        shared expert.
        """
        of_mlp = (3 if layer.has_gate else 2) * layer.intermediate_size
        if layer.experts is not None:
            of_mlp += layer.experts.num_experts + layer.experts.has_shared_gate + 3 * layer.experts.shared_size
        return self.hidden_size * (2 * layer.q_size + layer.projected_kv_size + of_mlp + 3 * layer.token_input_size)

    @property
    def num_parameters_per_token(self) -> int:
        """Weights of all layers that a token is multiplied with."""
        return self.num_layer_parameters + sum(alike.spec.num_chosen * alike.num_parameters for alike in self.experts)

    def distinct_experts(self, num_tokens: int) -> float:
        """Return the expected number of experts of a layer that the tokens hit, as a mean over layers with experts.

        0.0 without such layers. An upper bound unless the tokens of each expert were measured.
        """
        num_layers = sum(alike.num_layers for alike in self.experts)
        hit = sum(alike.expected_hits(num_tokens) for alike in self.experts)
        return hit / num_layers if num_layers else 0.0

    def layer_bytes_read(self, num_tokens: int) -> float:
        """Return the expected bytes of weights that a step of `num_tokens` tokens reads, in all layers."""
        of_experts = sum(alike.expected_hits(num_tokens) * alike.parameters_each for alike in self.experts)
        each = self.bytes_per_weight if self.bytes_per_expert_weight is None else self.bytes_per_expert_weight
        return self.num_layer_parameters * self.bytes_per_weight + of_experts * each

    @property
    def head_bytes(self) -> float:
        """Return the bytes of the LM head."""
        return self.num_head_parameters * self.bytes_per_weight

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Per layer, the tokens that a query sees, itself included; None: all."""
        return tuple(layer.kv.window for layer in self.layers)


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Best rates of the machine."""

    flops_per_s: float
    bytes_per_s: float
    is_estimate: bool = False
    """Whether other work disturbed the measurement, as processor times and rates that disagree show: the machine may
    then do better."""

    @property
    def balance(self) -> float:
        """Operations per byte at which arithmetic and memory take equally long."""
        return self.flops_per_s / self.bytes_per_s

    def best_of(self, other: MachineLimits) -> MachineLimits:
        """Return the better rates of two measurements; an estimate only if both are."""
        return MachineLimits(
            max(self.flops_per_s, other.flops_per_s),
            max(self.bytes_per_s, other.bytes_per_s),
            self.is_estimate and other.is_estimate,
        )

    def raised_by(self, cost: StepCost, seconds: float) -> MachineLimits:
        """Return rates at which the floor of an observed step is at most its time.

        Args:
            cost: work of the step; its own rates do not matter.
            seconds: time of the step, from its start to its result.

        >>> seen = StepCost(100.0, 40.0, 0.0, 0.0, 2.5, "memory", 4.0)
        >>> limits = MachineLimits(flops_per_s=100.0, bytes_per_s=10.0)
        >>> limits.raised_by(seen, 2.0).bytes_per_s, limits.raised_by(seen, 8.0).bytes_per_s
        (20.0, 10.0)
        """
        if seconds <= 0.0 or self.floor_s(cost) <= seconds * _ROUNDING:
            return self
        return replace(
            self,
            flops_per_s=max(self.flops_per_s, cost.operations / seconds),
            bytes_per_s=max(self.bytes_per_s, cost.num_bytes / seconds),
        )

    def floor_s(self, cost: StepCost) -> float:
        """Return the least seconds of a step: the longer of its arithmetic and its memory traffic."""
        return max(cost.operations / self.flops_per_s, cost.num_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Operations and bytes of a step, and which of the two it waits for."""

    operations: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float
    intensity: float
    """Operations per byte."""
    bound: Literal["compute", "memory"]
    seconds: float
    """Shortest time on the given machine: the longer of arithmetic and memory."""

    @property
    def num_bytes(self) -> float:
        """Bytes read and written."""
        return self.weight_bytes + self.kv_read_bytes + self.kv_written_bytes


class Share(NamedTuple):
    """One request's part in a step."""

    num_computed_tokens: int
    num_scheduled_tokens: int
    num_logits_rows: int
    """Query tokens that get logits: 0 in a chunk that does not sample, else 1 + drafts."""


def shares_of(batch: ScheduledBatch) -> tuple[Share, ...]:
    """Return each request's share of a scheduled batch."""
    return tuple(
        Share(r.num_computed_tokens, r.num_scheduled_tokens, r.num_draft_tokens + 1 if r.samples_token else 0)
        for r in batch.requests
    )


def step_cost(shape: ModelShape, shares: Iterable[Share], machine: MachineLimits) -> StepCost:
    """Return the total operations and bytes of the shares of a step.

    >>> from twostroke.config.layer_spec import KVSpec
    >>> from twostroke.config.rope import RopeConfig
    >>> layer = LayerSpec(num_heads=2, kv=KVSpec(num_kv_heads=1, head_dim=2), rope=RopeConfig(1e4), intermediate_size=8)
    >>> shape = ModelShape(hidden_size=4, vocab_size=10, layers=(layer,), bytes_per_weight=2, kv_format="bf16")
    >>> cost = step_cost(shape, [Share(7, 1, 1)], MachineLimits(flops_per_s=100.0, bytes_per_s=100.0))
    >>> cost.operations              # 2 x (48 + 96) + 4 x 2 x 2 x 8 + 2 x 40
    496.0
    >>> cost.weight_bytes, cost.kv_read_bytes, cost.kv_written_bytes
    (368.0, 64.0, 8.0)
    """
    shares = tuple(shares)
    num_tokens = sum(share.num_scheduled_tokens for share in shares)
    num_logits_rows = sum(share.num_logits_rows for share in shares)
    score_operations = num_kv_read = num_kv_written = 0
    for kind in shape.kinds:
        spans = [(share.num_computed_tokens, share.num_scheduled_tokens, kind.window) for share in shares]
        score_operations += kind.operations_per_pair * sum(num_pairs(*span) for span in spans)
        num_kv_read += kind.kv_bytes_per_token * sum(num_seen(*span) for span in spans)
        num_kv_written += kind.kv_bytes_per_token * num_tokens if kind.writes_kv else 0

    multiplied = shape.num_parameters_per_token * num_tokens + shape.num_head_parameters * num_logits_rows
    operations = 2.0 * multiplied + score_operations
    weight_bytes = float(shape.layer_bytes_read(num_tokens)) if num_tokens else 0.0
    if num_logits_rows:
        weight_bytes += shape.head_bytes
    kv_read_bytes, kv_written_bytes = float(num_kv_read), float(num_kv_written)
    num_bytes = weight_bytes + kv_read_bytes + kv_written_bytes
    intensity = operations / num_bytes if num_bytes else 0.0
    return StepCost(
        operations,
        weight_bytes,
        kv_read_bytes,
        kv_written_bytes,
        intensity,
        "compute" if intensity >= machine.balance else "memory",
        max(operations / machine.flops_per_s, num_bytes / machine.bytes_per_s),
    )


def raised_by_steps(limits: MachineLimits, steps: Iterable[tuple[StepCost, float]]) -> MachineLimits:
    """Return rates at which no observed step is faster than its floor.

    Args:
        limits: as measured or published.
        steps: work of each step, and its seconds.
    """
    for cost, seconds in steps:
        limits = limits.raised_by(cost, seconds)
    return limits
