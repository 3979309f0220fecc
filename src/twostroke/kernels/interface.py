"""The operators a model is made of: what each backend implements.

Layers call what they were given here and never a backend by name. A backend is one value of `Operators`; its plan of
a step's attention is its own business and opaque to the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from twostroke.config.kv_format import KV_FORMATS, KVFormat, slot_bytes
from twostroke.config.layer_spec import Activation, KVSpec
from twostroke.config.load import QuantizationOnLoad
from twostroke.kernels.expert_operators import ExpertLinears, GatedExperts, Route
from twostroke.kernels.feed_forward_parts import ExpertParts, MLPParts
from twostroke.kernels.head_order import HeadOrder
from twostroke.kernels.quantized_weight import QuantizedFormat, QuantizedWeight
from twostroke.kernels.stacked_weight import StackedWeight
from twostroke.kernels.streamed_weight import Matrix
from twostroke.kernels.tree_mask import TreeMasks

Weight = Matrix | StackedWeight


class Linear(Protocol):
    """y = x W^T + b; each row's bits are independent of the other rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """[num_rows, K] -> [num_rows, N]."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """The numbers of `__call__`, rounded to its type, as float32 [num_rows, N]: for logits."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """residual [num_rows, N] + x W^T + b, in one pass where that is cheaper."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of W, for an embedding that is tied to it: ids int64 [n] -> [n, K]."""
        ...


GatedLinear = Callable[[Tensor], Tensor]
"""activation(x G^T) * (x U^T): [num_rows, K] -> [num_rows, N], for the rows of G above those of U in one weight."""


Argmax = Callable[[Tensor], Tensor]
"""The column of the largest logit of each row, the first of equal ones; a NaN counts as largest. [R, V] -> int64 [R]"""


GumbelArgmax = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The winner of (logits - peak) / temperature + noise in each row, whose peak is its largest logit.

logits float32 [R, V], temperatures float32 [R, 1], keys of the noise int64 [R] -> int64 [R]. -1 where two
scores are closer than two libraries' logarithms may be: the sampler then decides, so no token depends on the backend.
"""


FilteredArgmax = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""The same among the tokens that min_p, top_k and top_p leave of each row (sampling/filters.py).

Behind the arguments of GumbelArgmax: floors float32 [R], log(min_p) or -inf; top_k int64 [R], the size of the
vocabulary where it is off; top_p float64 [R]. -1 where which tokens are left is too close, too.
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The constants of one KV group: its heads and how its storage is cut up."""

    num_heads: int
    """Query heads."""
    kv: KVSpec
    """Of each of its layers."""
    block_size: int
    """Tokens for which one id of a block table stands."""
    id_bytes: int
    """Bytes from the place of one id to that of the next; a page may be longer, and then is behind every n-th id."""
    kv_format: KVFormat

    @property
    def num_kv_heads(self) -> int:
        """Of each layer."""
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Of each layer."""
        return self.kv.head_dim

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None sees all."""
        return self.kv.window

    @property
    def heads_per_kv_head(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def slot_bytes(self) -> int:
        """Bytes of K, or of V, of one token in one head."""
        return slot_bytes(self.kv_format, self.head_dim)

    @property
    def head_bytes(self) -> int:
        """Bytes of K, or of V, of one head in a page."""
        return self.block_size * self.slot_bytes

    @property
    def layer_bytes(self) -> int:
        """Bytes of K and V of one layer in a page."""
        return 2 * self.num_kv_heads * self.head_bytes


class HeadTurn(NamedTuple):
    """Operations on q and k before attention: a norm over each head, rotation, then k less its mean."""

    cos: Tensor
    """[num_tokens, 1, head_dim], both halves alike."""
    signed_sin: Tensor
    """[num_tokens, 1, head_dim]: -sin for the first half, sin for the second."""
    norm_weight: Tensor | None
    """[num_heads + num_kv_heads, head_dim], in the type of q and k or in float32"""
    eps: float
    """Of the norm."""
    key_mean: Tensor | None = None
    """[num_kv_heads, head_dim], in the type of k; None: keys are stored whole."""


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """What one layer makes of q · k before the softmax."""

    scale: float
    """Factor on q · k."""
    cap: float | None = None
    """Scores are cap * tanh(score / cap); None: as they are."""
    sinks: Tensor | None = None
    """float32 [num_heads]: the score of a key without a value, which every query sees; None: there is none
    (gpt-oss, arXiv:2508.10925)."""
    slopes: Tensor | None = None
    """float32 [num_heads]: what a score loses for each token between its query and its key (ALiBi, Press et al. 2022,
    arXiv:2108.12409). None: nothing. Draft trees, whose tokens are not at the place of their key, have none."""


class AttentionOperator(Protocol):
    """Attention over the paged KV of a model's layers of one shape.

    K and V are encoded when they are written (config/kv_format.py) and always read as they are stored, within the step
    that writes them too; so it makes no difference how a prompt is cut into chunks.
    """

    @property
    def turns_heads(self) -> bool:
        """Whether it takes a HeadTurn; else q and k come turned."""
        ...

    def kv_order(self, kv_format: KVFormat) -> str:
        """Names the order of the bytes inside a KV head of a block: only who has the same name may read them."""
        ...

    def head_order(self, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
        """That order, as far as tokens are moved from blocks of one size to those of another."""
        ...

    def read_heads(self, heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
        """The numbers that are stored: one head's K (or V) each, uint8 [n, block_size * slot bytes], to float32
        [n, block_size, head_dim]. For whoever compares or shows them; attention reads them by itself."""
        ...

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None = None,
    ) -> Any:
        """What one step of one KV group needs, worked out once for all of its layers; see AttentionMetadata.build."""
        ...

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: Any,
        layer_in_block: int,
        scoring: Scoring,
        turn: HeadTurn | None = None,
    ) -> Tensor:
        """Writes the step's K and V into the storage, then attends over what is stored.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; q, then k, then v. May be changed. Or q alone,
                [num_tokens, num_heads, head_dim], of a layer that reads what another one has written in this step.
            storage: uint8 [ids, layers, 2, num_kv_heads, block_size * slot bytes]; a layer of an id is contiguous,
                and ids are `id_bytes` apart. The order inside the last is the backend's own (`kv_order`).
            plan: of this step and the layer's KV group.
            layer_in_block: which of a block's layers this is.
            scoring: of the layer.
            turn: of q and k, before anything else; None: they are turned. Only for who `turns_heads`.

        Returns:
            [num_tokens, num_heads * head_dim] in qkv's type.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOperators:
    """The attention of one model: an operator for each shape of K and V that its layers have."""

    by_shape: Mapping[tuple[int, int], AttentionOperator]
    """By KV heads and head_dim."""

    @classmethod
    def of(
        cls, operators: Operators, num_heads: int, kv: Iterable[KVSpec], dtype: torch.dtype, device: torch.device
    ) -> AttentionOperators:
        """Make them.

        Args:
            operators: of the back end.
            num_heads: query heads of every layer, of this rank.
            kv: of the layers, of this rank.
            dtype: that they compute in.
            device: where.
        """
        shapes = dict.fromkeys((spec.num_kv_heads, spec.head_dim) for spec in kv)
        return cls({shape: operators.attention(num_heads, *shape, dtype, device) for shape in shapes})

    def __getitem__(self, kv: KVSpec) -> AttentionOperator:
        """Return that of a layer."""
        return self.by_shape[kv.num_kv_heads, kv.head_dim]

    def kv_order(self, kv_format: KVFormat) -> str:
        """Name the orders of the bytes inside a KV head of a page; see AttentionOperator."""
        return " and ".join(dict.fromkeys(operator.kv_order(kv_format) for operator in self.by_shape.values()))


class StepOnHost(Protocol):
    """A step worked out, whose arrays are still on the host."""

    @property
    def num_part_rows(self) -> int:
        """Rows of partial results that it needs beside its tokens' own; 0: none."""
        ...


@dataclass(frozen=True, slots=True)
class FixedSize:
    """What a plan whose tensors stay where they are has room for."""

    num_tokens: int
    """As many as its pass has; those of a step may be fewer."""
    num_seqs: int
    """Sequences; those of a step may be fewer."""
    max_blocks: int
    """Of a sequence."""
    num_part_rows: int


class FixedPlan(Protocol):
    """A plan whose tensors stay where they are, for a pass that is recorded once and replayed for many steps."""

    @property
    def plan(self) -> Any:
        """What the operator is called with. Until the first `fill`, and behind a step's tokens, it has tokens that are
        nobody's: nothing is written for them, and their results mean nothing."""
        ...

    def fill(self, step: Any) -> None:
        """Puts a step in, enqueued behind whoever still reads the last one. It fits the size."""
        ...


@runtime_checkable
class RecordableAttention(AttentionOperator, Protocol):
    """An operator that does the same for every step of one size, so that a pass can be recorded and replayed."""

    def plan_on_host(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        *,
        splits: bool,
    ) -> StepOnHost:
        """Plan a step as `plan` does, without draft trees, and leave it on the host.

        Args:
            shape: the group.
            query_start_loc: see `plan`, as the next two.
            seq_lens: likewise.
            block_table: likewise.
            splits: whether contexts may be split among programs.
        """
        ...

    def fixed_plan(self, shape: GroupShape, size: FixedSize) -> FixedPlan:
        """An empty one."""
        ...


class NormWeight(NamedTuple):
    """An RMS norm."""

    weight: Tensor
    """[n], or of heads [num_heads + num_kv_heads, head_dim]"""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """A layer y = x + out_norm(output(attention(norm(x)))), y + out_norm(feed_forward(norm(y))); None is no norm."""

    attention_norm: NormWeight | None
    attention_out_norm: NormWeight | None
    mlp_norm: NormWeight | None
    mlp_out_norm: NormWeight | None
    head_norm: NormWeight | None
    """Over each head of q and k, before they are rotated."""
    scoring: Scoring
    head_dim: int
    qkv: Linear
    output: Linear
    feed_forward: MLPParts | ExpertParts


class WholeLayer(Protocol):
    """The layer of some LayerParts in one call: the same bits, and less time between its operators."""

    def __call__(
        self,
        x: Tensor,
        rotation: tuple[Tensor, Tensor] | None,
        storage: Tensor,
        plan: Any,
        layer_in_block: int,
        key_mean: Tensor | None = None,
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: [num_tokens, hidden_size], contiguous; may be changed, and be what is returned.
            rotation: of q and k, see HeadTurn; None: they are not rotated.
            storage: as the layer's AttentionOperator takes it, and so are the next two.
            plan: see there.
            layer_in_block: see there.
            key_mean: see HeadTurn; None: keys are stored whole.

        Returns:
            [num_tokens, hidden_size].
        """
        ...


class PackedSizes(Protocol):
    """Bytes that packing makes of weights, known before there are any."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        """Of a weight [N, K], without its bias.

        Args:
            shape: N and K; of a gated one, the rows of both factors together.
            quantized: None: it is of floats.
            dtype: of floats, and of the activations.
            gated: whether it goes to `pack_gated`.
        """
        ...

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        """Of the bias of so many rows."""
        ...


def no_whole_layer(_: LayerParts) -> None:
    """Call the parts of every layer one by one."""


@dataclass(frozen=True, slots=True)
class Operators:
    """One backend; kernels/reference documents shapes and numerics of each, and every backend is tested against it."""

    name: str
    set_num_threads: Callable[[int], None]
    """How many threads compute, for the whole process; those of its own go where the caller may."""
    pack_linear: Callable[[Weight, Tensor | None], Linear]
    pack_gated: Callable[[Weight, Tensor | None, Activation], GatedLinear]
    route: Route
    pack_gated_experts: Callable[[Sequence[Weight], Tensor | None, Activation], GatedExperts]
    """Of the weights [2 N, K] of all experts, G above U, and biases [num_experts, 2 N]."""
    pack_expert_linears: Callable[[Sequence[Weight], Tensor | None], ExpertLinears]
    """Of the weights [N, K] of all experts, and biases [num_experts, N]."""
    packed_sizes: PackedSizes
    keeps_quantized: bool
    """Whether a quantized weight stays one when it is packed; else it takes the room of the numbers it stands for."""
    quantize_per_channel: Callable[[Tensor], QuantizedWeight]
    """Floats [N, K] to 8 bits; every backend gives the bits of kernels/quantized_weight.py, in both."""
    quantize_in_groups: Callable[[Tensor, int], QuantizedWeight]
    """Floats [N, K] and a group size to 4 bits."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_: Callable[[Tensor, Tensor, float], None]
    """The same in place."""
    rotate_heads_: Callable[[Tensor, Tensor, Tensor], None]
    attention: Callable[[int, int, int, torch.dtype, torch.device], AttentionOperator]
    """For num_heads, num_kv_heads, head_dim, the type it computes in, and the device."""
    whole_layer: Callable[[LayerParts], WholeLayer | None] = no_whole_layer
    """Binds the parts of a layer that it made itself; None: they are called one by one."""
    pin_threads: Callable[[Sequence[int]], None] | None = None
    """A thread for each CPU, pinned to it; the first is the caller's of the kernels, who pins itself. None: threads go
    where who calls them may."""
    argmax: Argmax | None = None
    """Finds the largest logits; None leaves that to the sampler's own tensor code."""
    gumbel_argmax: GumbelArgmax | None = None
    """Draws from whole vocabularies; None leaves that to the sampler's own tensor code."""
    filtered_argmax: FilteredArgmax | None = None
    """Draws from what filters leave of them; None leaves that to it, too."""
    is_batch_invariant: bool = True
    """Whether a row's bits do not depend on the other rows."""
    quantizations: tuple[QuantizationOnLoad, ...] = get_args(QuantizationOnLoad)
    """That its products take."""
    kv_formats: tuple[KVFormat, ...] = KV_FORMATS
    """That its attention reads and writes."""
    narrow_attention: torch.dtype | None = None
    """The type of attention's products where activations are float32 and K and V are narrower; None: float32."""

    def attention_dtype(self, dtype: torch.dtype, kv_format: KVFormat) -> torch.dtype:
        """Return the type that attention multiplies in, for activations of a type and a format of K and V."""
        if self.narrow_attention is None or dtype is not torch.float32 or kv_format == "f32":
            return dtype
        return self.narrow_attention
