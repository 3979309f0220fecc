# Addresses refer to contiguous memory that outlives the call. Types have the codes of csrc/kernels/table.hpp.

from collections.abc import Sequence

MAX_HEAD_DIM: int
ROOM_KEPT: int

def levels() -> list[str]: ...
def set_num_threads(count: int, cpus: Sequence[int]) -> None:
    """Compute on `count` threads, each pinned to one of the CPUs; without CPUs they inherit the caller's affinity."""
    ...

def num_threads() -> int: ...
def packed_bytes(n: int, k: int, gated: bool, type: int) -> int: ...
def row_of_channel(channel: int, n: int, gated: bool) -> int: ...
def pack_linear(weight: int, packed: int, n: int, k: int, gated: bool, type: int) -> None: ...
def unpack_rows(packed: int, ids: int, out: int, count: int, k: int, type: int) -> None: ...
def ggml_types() -> list[str]: ...
def unpack_blocks(
    type: str, blocks: int, num_blocks: int, codes: int, scales: int, mins: int, super_scales: int, super_mins: int
) -> None: ...

class WeightFormat:
    """Format of a quantized weight (csrc/kernels/table.hpp)."""

    def __init__(self, bits: int, group: int, has_min: bool, has_super_blocks: bool, table: int) -> None: ...

def packed_quantized_bytes(n: int, k: int, gated: bool, format: WeightFormat) -> int: ...
def pack_quantized(
    codes: int,
    scales: int,
    mins: int,
    super_scales: int,
    super_mins: int,
    packed: int,
    n: int,
    k: int,
    gated: bool,
    format: WeightFormat,
) -> None: ...
def pack_stored(
    type: str, files: int, offsets: int, packed: int, n: int, k: int, gated: bool, format: WeightFormat
) -> bool:
    """Pack rows from files: files int32 and offsets int64, one per row; `packed` is zeroed (csrc/stored_rows.hpp)."""
    ...

def checksum(bytes: int, num_bytes: int) -> int: ...
def read_stream(bytes: int, num_bytes: int) -> int: ...
def unpack_quantized_rows(packed: int, ids: int, out: int, count: int, k: int, format: WeightFormat) -> None: ...
def kernels(level: str) -> Kernels: ...

class Kernels:
    @property
    def level(self) -> str: ...
    def quantize_weight(
        self, weight: int, codes: int, scales: int, n: int, k: int, group: int, steps: Sequence[float], type: int
    ) -> None: ...
    def rms_norm(
        self,
        x: int,
        x_stride: int,
        weight: int,
        y: int,
        y_stride: int,
        rows: int,
        parts: int,
        n: int,
        eps: float,
        type: int,
        weight_type: int,
    ) -> None: ...
    def rotate(
        self, x: int, token_stride: int, tokens: int, heads: int, head_dim: int, cos: int, sin: int, type: int
    ) -> None: ...
    def step_attention(
        self,
        query_start: int,
        seq_lens: int,
        block_table: int,
        tree: int,
        tree_start: int,
        num_seqs: int,
        max_blocks: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        window: int,
        type: int,
        kv_format: int,
    ) -> StepAttention: ...
    def argmax(self, values: int, stride: int, rows: int, columns: int, winners: int) -> None: ...
    def gumbel_argmax(
        self,
        logits: int,
        stride: int,
        rows: int,
        vocab_size: int,
        temperatures: int,
        keys: int,
        winners: int,
    ) -> None: ...
    def filtered_argmax(
        self,
        logits: int,
        stride: int,
        rows: int,
        vocab_size: int,
        temperatures: int,
        keys: int,
        floors: int,
        top_k: int,
        top_p: int,
        winners: int,
    ) -> None: ...

class PackedLinear:
    """Packed weight and its bias (csrc/layer.hpp). The last three arguments are for quantized weights."""

    def __init__(
        self,
        kernels: Kernels,
        w: int,
        bias: int,
        n: int,
        k: int,
        gate: int,
        type: int,
        format: WeightFormat = ...,
        order: int = ...,
        quantizes_inputs: bool = ...,
    ) -> None: ...
    def multiply(self, x: int, ldx: int, residual: int, y: int, ldy: int, m: int, wide_y: bool) -> None:
        """Run without the GIL."""
        ...

class RouterRules:
    """Rules of a router's choice (csrc/experts.hpp)."""

    def __init__(
        self,
        num_experts: int,
        num_chosen: int,
        is_sigmoid: bool,
        is_renormalized: bool,
        scale: float,
        num_groups: int,
        num_chosen_groups: int,
    ) -> None: ...
    def route(
        self,
        logits: int,
        correction: int,
        expert_scales: int,
        m: int,
        tokens: int,
        starts: int,
        places: int,
        weights: int,
        counts: int,
    ) -> None:
        """Run without the GIL."""
        ...

class PackedExperts:
    """Packed weights of experts (csrc/experts.hpp), which must outlive it."""

    def __init__(self, experts: Sequence[PackedLinear]) -> None: ...
    @property
    def num_multiplied(self) -> int:
        """Experts whose weights were multiplied so far, counted in each call."""
        ...

    def multiply(self, x: int, ldx: int, tokens: int, starts: int, y: int, m: int, num_pairs: int) -> None:
        """Run without the GIL."""
        ...

    def multiply_and_add(
        self, x: int, ldx: int, starts: int, places: int, weights: int, y: int, m: int, num_chosen: int
    ) -> None:
        """Run without the GIL."""
        ...

    def add(self, products: int, places: int, weights: int, y: int, m: int, num_chosen: int) -> None:
        """Run without the GIL."""
        ...

class Norm:
    """Weight and epsilon of a norm (csrc/layer.hpp)."""

    def __init__(self, weight: int, eps: float, weight_type: int) -> None: ...

class FeedForward:
    """Feed-forward half of a layer (csrc/layer.hpp). Its arguments must outlive it."""

class GatedMlp(FeedForward):
    """Gated MLP (csrc/layer.hpp)."""

    def __init__(self, inner: PackedLinear, down: PackedLinear) -> None: ...

class Experts(FeedForward):
    """Router, experts and shared expert (csrc/experts.hpp)."""

    def __init__(
        self,
        router: PackedLinear,
        rules: RouterRules,
        correction: int,
        expert_scales: int,
        counts: int,
        gated: PackedExperts,
        down: PackedExperts,
        shared_inner: PackedLinear | None,
        shared_down: PackedLinear | None,
    ) -> None: ...

class DecoderLayer:
    """Decoder layer in one call (csrc/layer.hpp). Its arguments must outlive it."""

    def __init__(
        self,
        kernels: Kernels,
        norms: Sequence[Norm],
        qkv: Sequence[PackedLinear],
        output: PackedLinear,
        feed_forward: FeedForward,
        scale: float,
        cap: float,
        sinks: int,
        slopes: int,
        hidden_size: int,
        q_size: int,
        type: int,
    ) -> None:
        """Take norms in the order: attention input and output, MLP input and output, heads."""
        ...

    @property
    def room_bytes(self) -> int:
        """Bytes of intermediate results for each row."""
        ...

    def run(
        self,
        step: StepAttention,
        x: int,
        room: int,
        m: int,
        storage: int,
        block_bytes: int,
        cos: int,
        sin: int,
        key_mean: int,
    ) -> None:
        """Change x in place; release the GIL. `room` may be 0 where at most ROOM_KEPT bytes are needed."""
        ...

class StepAttention:
    """Attention of one step (csrc/attention.hpp)."""

    def attention(
        self,
        qkv: int,
        token_heads: int,
        storage: int,
        block_bytes: int,
        out: int,
        scale: float,
        cap: float,
        sinks: int,
        slopes: int,
        cos: int,
        sin: int,
        norm_weight: int,
        eps: float,
        weight_type: int,
        key_mean: int,
    ) -> int:
        """Attend, and return the number of tasks; release the GIL."""
        ...

class SharedGather:
    """Gather in memory shared by ranks (csrc/shared_gather.hpp)."""

    @staticmethod
    def memory_bytes(size: int, slot_bytes: int) -> int: ...
    def __init__(self, memory: int, rank: int, size: int, slot_bytes: int) -> None: ...
    def start(self, local: int, out: int, widths: Sequence[int], num_rows: int) -> None: ...
    def advance(self, patience_us: int) -> int:
        """Advance the gather; release the GIL. Raise RuntimeError if a rank has sent another number of bytes."""
        ...
