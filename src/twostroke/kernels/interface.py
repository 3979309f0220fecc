"""Operators that a model is made of, which each backend implements.

Layers call the operators they were given and never name a backend. A backend is one value of `Operators`. The plan of a
step's attention is private to the backend.
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
    """Linear map y = x W^T + b; each row's bits are independent of the other rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + b. [num_rows, K] -> [num_rows, N]."""
        ...

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the result of `__call__`, rounded to its type, as float32 [num_rows, N]; used for logits."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual [num_rows, N] + x W^T + b, in one pass where that is cheaper."""
        ...

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows of W, for an embedding tied to it: ids int64 [n] -> [n, K]."""
        ...


GatedLinear = Callable[[Tensor], Tensor]
"""Gated product activation(x G^T) * (x U^T): [num_rows, K] -> [num_rows, N], from one weight with G above U."""


Argmax = Callable[[Tensor], Tensor]
"""Column of each row's largest logit, the first of equal ones; a NaN counts as largest. [R, V] -> int64 [R]"""


GumbelArgmax = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Argmax of (logits - peak) / temperature + noise in each row, where peak is the row's largest logit.

logits float32 [R, V], temperatures float32 [R, 1], keys of the noise int64 [R] -> int64 [R]. The result is -1 where two
scores are so close that two libraries' logarithms may rank them differently. The sampler then decides, so no token
depends on the backend.
"""


FilteredArgmax = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""GumbelArgmax over the tokens that pass min_p, top_k and top_p in each row (sampling/filters.py).

After the arguments of GumbelArgmax: floors float32 [R], log(min_p) or -inf; top_k int64 [R], the size of the vocabulary
where it is off; top_p float64 [R]. The result is also -1 where it is too close to say which tokens pass.
"""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """Constants of one KV group: its heads and the layout of its storage."""

    num_heads: int
    """Number of query heads."""
    kv: KVSpec
    """KV shape of each of its layers."""
    block_size: int
    """Tokens per id of a block table."""
    id_bytes: int
    """Bytes between the places of consecutive ids. A page may be longer, and then starts at every n-th id."""
    kv_format: KVFormat

    @property
    def num_kv_heads(self) -> int:
        """KV heads of each layer."""
        return self.kv.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Dimensions of a head in each layer."""
        return self.kv.head_dim

    @property
    def window(self) -> int | None:
        """Tokens a query sees, itself included; None for all."""
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


class QKNormRope(NamedTuple):
    """Operations on q and k before attention: RMSNorm of each head, rotary embedding, then k minus its mean."""

    cos: Tensor
    """[num_tokens, 1, head_dim], both halves equal."""
    signed_sin: Tensor
    """[num_tokens, 1, head_dim]: -sin for the first half, sin for the second."""
    norm_weight: Tensor | None
    """[num_heads + num_kv_heads, head_dim], in the type of q and k or in float32; None for no norm."""
    eps: float
    """Epsilon of the norm."""
    key_mean: Tensor | None = None
    """[num_kv_heads, head_dim], in the type of k; None subtracts nothing from keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Steps of one layer from q · k to the softmax."""

    scale: float
    """Factor on q · k."""
    cap: float | None = None
    """Soft cap: scores become cap * tanh(score / cap); None for no cap."""
    sinks: Tensor | None = None
    """float32 [num_heads]: score of a key without value that every query sees (gpt-oss, arXiv:2508.10925), or None."""
    slopes: Tensor | None = None
    """float32 [num_heads]: reduction of a score for each token between its query and its key (ALiBi, Press et al. 2022,
    arXiv:2108.12409). None for no reduction. Draft trees have no slopes, because their tokens' positions differ from
    those of their slots."""


class AttentionOperator(Protocol):
    """Attention over the paged KV of a model's layers of one shape.

    K and V are encoded when they are written (config/kv_format.py) and always read as stored, also within the step that
    writes them. So results do not depend on how a prompt is cut into chunks.
    """

    @property
    def applies_qk_norm_rope(self) -> bool:
        """Whether the operator applies a QKNormRope; otherwise the caller has applied norm and rotation to q and k."""
        ...

    def kv_order(self, kv_format: KVFormat) -> str:
        """Return the name of the byte order inside a KV head of a block. Only operators with the same name may read
        these bytes."""
        ...

    def head_order(self, kv_format: KVFormat, head_dim: int, block_size: int) -> HeadOrder:
        """Return that order in as much detail as moving tokens between blocks of different sizes needs."""
        ...

    def read_heads(self, heads: Tensor, kv_format: KVFormat, head_dim: int, *, values: bool) -> Tensor:
        """Return stored numbers, one head's K (or V) each: uint8 [n, block_size * slot bytes] to float32 [n,
        block_size, head_dim]. This is for code that compares or shows them; attention does not use it."""
        ...

    def plan(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        tree_masks: TreeMasks | None = None,
    ) -> Any:
        """Return what one step of one KV group needs, computed once for all its layers (see
        AttentionMetadata.build)."""
        ...

    def __call__(
        self,
        qkv: Tensor,
        storage: Tensor,
        plan: Any,
        layer_in_block: int,
        scoring: Scoring,
        qk_norm_rope: QKNormRope | None = None,
    ) -> Tensor:
        """Write the step's K and V into the storage, then attend over the stored values.

        Args:
            qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_dim]; q, then k, then v. May be changed. Or q alone,
                [num_tokens, num_heads, head_dim], for a layer that reads the K and V that another layer has written in
                this step.
            storage: uint8 [ids, layers, 2, num_kv_heads, block_size * slot bytes]; a layer of an id is contiguous, and
                ids are `id_bytes` apart. The backend chooses the order within the last dimension (`kv_order`).
            plan: the plan of this step for the layer's KV group.
            layer_in_block: index of the layer within a block.
            scoring: settings of the layer.
            qk_norm_rope: applied to q and k first; None if that was done already. Only for operators that take it
                (`applies_qk_norm_rope`).

        Returns:
            [num_tokens, num_heads * head_dim] in qkv's type.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class AttentionOperators:
    """Attention of one model: an operator for each shape of K and V that its layers have."""

    by_shape: Mapping[tuple[int, int], AttentionOperator]
    """Operators by KV heads and head_dim."""

    @classmethod
    def of(
        cls, operators: Operators, num_heads: int, kv: Iterable[KVSpec], dtype: torch.dtype, device: torch.device
    ) -> AttentionOperators:
        """Make the operators.

        Args:
            operators: the backend.
            num_heads: query heads of every layer on this rank.
            kv: KV shapes of the layers on this rank.
            dtype: type to compute in.
            device: where they run.
        """
        shapes = dict.fromkeys((spec.num_kv_heads, spec.head_dim) for spec in kv)
        return cls({shape: operators.attention(num_heads, *shape, dtype, device) for shape in shapes})

    def __getitem__(self, kv: KVSpec) -> AttentionOperator:
        """Return the operator of a layer."""
        return self.by_shape[kv.num_kv_heads, kv.head_dim]

    def kv_order(self, kv_format: KVFormat) -> str:
        """Name the byte orders inside a KV head of a page (see AttentionOperator)."""
        return " and ".join(dict.fromkeys(operator.kv_order(kv_format) for operator in self.by_shape.values()))


class HostStepPlan(Protocol):
    """Planned step whose arrays are still on the host."""

    @property
    def num_part_rows(self) -> int:
        """Rows of partial results needed in addition to one for each token; 0 for none."""
        ...


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Capacity of a plan whose tensors stay in place."""

    num_tokens: int
    """Tokens of the recorded pass; a step may have fewer."""
    num_seqs: int
    """Sequences; a step may have fewer."""
    max_blocks: int
    """Blocks of a sequence."""
    num_part_rows: int


class FixedPlan(Protocol):
    """Plan whose tensors stay in place, for a pass that is recorded once and replayed for many steps."""

    @property
    def plan(self) -> Any:
        """Plan to call the operator with. Until the first `fill`, and after the tokens of a step, it holds padding
        tokens: nothing is written for them, and their results mean nothing."""
        ...

    def fill(self, step: Any) -> None:
        """Copy a step into the plan, enqueued after all reads of the previous one. The step must fit the size."""
        ...


@runtime_checkable
class RecordableAttention(AttentionOperator, Protocol):
    """Operator that does the same work for every step of one size, so that a pass can be recorded and replayed."""

    def plan_on_host(
        self,
        shape: GroupShape,
        query_start_loc: npt.NDArray[np.int32],
        seq_lens: npt.NDArray[np.int32],
        block_table: npt.NDArray[np.int32],
        *,
        splits: bool,
    ) -> HostStepPlan:
        """Plan a step as `plan` does, without draft trees, and leave it on the host.

        Args:
            shape: the group.
            query_start_loc: see `plan`.
            seq_lens: see `plan`.
            block_table: see `plan`.
            splits: whether contexts may be split among programs.
        """
        ...

    def fixed_plan(self, shape: GroupShape, size: FixedSize) -> FixedPlan:
        """Return an empty plan of this size."""
        ...


class NormWeight(NamedTuple):
    """Weight and epsilon of an RMS norm."""

    weight: Tensor
    """[n], or for heads [num_heads + num_kv_heads, head_dim]."""
    eps: float


@dataclass(frozen=True, slots=True, eq=False)
class LayerParts:
    """Parts of a layer y = x + out_norm(output(attention(norm(x)))), y + out_norm(feed_forward(norm(y)))."""

    attention_norm: NormWeight | None
    attention_out_norm: NormWeight | None
    mlp_norm: NormWeight | None
    mlp_out_norm: NormWeight | None
    head_norm: NormWeight | None
    """Norm of each head of q and k before the rotary embedding."""
    scoring: Scoring
    head_dim: int
    qkv: Linear
    output: Linear
    feed_forward: MLPParts | ExpertParts


class FusedLayer(Protocol):
    """Layer of given LayerParts in one call: the same bits, and less time between its operators."""

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
            x: [num_tokens, hidden_size], contiguous; may be changed and returned.
            rotation: cos and signed_sin of a QKNormRope; None for no rotary embedding.
            storage: as for the layer's AttentionOperator.
            plan: as for the layer's AttentionOperator.
            layer_in_block: as for the layer's AttentionOperator.
            key_mean: see QKNormRope; None subtracts nothing from keys.

        Returns:
            [num_tokens, hidden_size].
        """
        ...


class PackedSizes(Protocol):
    """Sizes of packed weights, known before the weights are read."""

    def weight(
        self, shape: tuple[int, int], quantized: QuantizedFormat | None, dtype: torch.dtype, *, gated: bool
    ) -> int:
        """Return the bytes of a weight [N, K] without its bias.

        Args:
            shape: N and K; for a gated weight, N counts the rows of both factors.
            quantized: format of the codes; None for floats.
            dtype: type of floats and of the activations.
            gated: whether it goes to `pack_gated`.
        """
        ...

    def bias(self, num_rows: int, dtype: torch.dtype, *, gated: bool) -> int:
        """Return the bytes of a bias of `num_rows` rows."""
        ...


def no_fused_layer(_: LayerParts) -> None:
    """Return None, so that the parts of every layer are called one by one."""


@dataclass(frozen=True, slots=True)
class Operators:
    """One backend; kernels/reference documents shapes and numerics, and every backend is tested against it."""

    name: str
    set_num_threads: Callable[[int], None]
    """Set the number of threads that compute, for the whole process. New threads get the CPU affinity of the caller."""
    pack_linear: Callable[[Weight, Tensor | None], Linear]
    pack_gated: Callable[[Weight, Tensor | None, Activation], GatedLinear]
    route: Route
    pack_gated_experts: Callable[[Sequence[Weight], Tensor | None, Activation], GatedExperts]
    """Pack the weights [2 N, K] of all experts, G above U, and biases [num_experts, 2 N]."""
    pack_expert_linears: Callable[[Sequence[Weight], Tensor | None], ExpertLinears]
    """Pack the weights [N, K] of all experts, and biases [num_experts, N]."""
    packed_sizes: PackedSizes
    keeps_quantized: bool
    """Whether packing keeps a weight quantized; otherwise it takes the room of the dequantized numbers."""
    quantize_per_channel: Callable[[Tensor], QuantizedWeight]
    """Floats [N, K] to 8 bits; every backend gives the bits of kernels/quantized_weight.py, here and for 4 bits."""
    quantize_in_groups: Callable[[Tensor, int], QuantizedWeight]
    """Floats [N, K] and a group size to 4 bits."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rms_norm_: Callable[[Tensor, Tensor, float], None]
    """rms_norm in place."""
    rotate_heads_: Callable[[Tensor, Tensor, Tensor], None]
    attention: Callable[[int, int, int, torch.dtype, torch.device], AttentionOperator]
    """Operator for num_heads, num_kv_heads, head_dim, the type it computes in, and the device."""
    fused_layer: Callable[[LayerParts], FusedLayer | None] = no_fused_layer
    """Join the parts of a layer, made by this backend, into one call; None if they have to be called one by one."""
    pin_threads: Callable[[Sequence[int]], None] | None = None
    """Start and pin a thread per CPU, except the first, to which the caller pins itself; None if not possible."""
    read_stream: Callable[[Tensor], object] | None = None
    """Read a contiguous tensor on all threads as fast as kernels read weights; None leaves that to torch."""
    argmax: Argmax | None = None
    gumbel_argmax: GumbelArgmax | None = None
    filtered_argmax: FilteredArgmax | None = None
    """Argmax of logits, draws from whole and from filtered vocabularies; None leaves it to the sampler's code."""
    is_batch_invariant: bool = True
    """Whether a row's bits are independent of the other rows."""
    quantizations: tuple[QuantizationOnLoad, ...] = get_args(QuantizationOnLoad)
    """Quantizations that its products take."""
    kv_formats: tuple[KVFormat, ...] = KV_FORMATS
    """KV formats that its attention reads and writes."""
    reduced_attention_dtype: torch.dtype | None = None
    """Type of attention's products where activations are float32 and K and V are narrower; None for float32."""

    def attention_dtype(self, dtype: torch.dtype, kv_format: KVFormat) -> torch.dtype:
        """Return the type of attention's products, for a type of activations and a format of K and V."""
        if self.reduced_attention_dtype is None or dtype is not torch.float32 or kv_format == "f32":
            return dtype
        return self.reduced_attention_dtype
