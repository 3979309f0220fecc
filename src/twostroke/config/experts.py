"""Experts of sparse layers and their router, as a config.json describes them; no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twostroke.config.fields import is_number, one_value, read_bool, read_count, read_count_or_0, read_list
from twostroke.errors import CorruptCheckpoint, shown

MAX_EXPERTS = 4096
"""Most experts of a layer. Published models have up to 512."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in configs. Some have several."""
_NUM_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", "top_k_experts")
"""Names of the number of experts that compute a token."""
RouterScores = Literal["softmax", "sigmoid"]
"""Scoring function of experts: a softmax over all logits, or a sigmoid of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsSpec:
    """The experts of one layer and the rule that routes tokens to them (Shazeer et al. 2017, arXiv:1701.06538)."""

    num_experts: int
    num_chosen: int
    """Experts that compute each token."""
    intermediate_size: int
    """Rows of an expert's gate and of its up projection."""
    scores: RouterScores = "softmax"
    is_renormalized: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    scale: float = 1.0
    """Factor on these weights."""
    has_correction_bias: bool = False
    """Whether a bias is added to the scores for the selection of experts, not for their weights (DeepSeek-V3,
    arXiv:2412.19437)."""
    num_groups: int = 1
    """Groups of neighbouring experts. A group is rated by the sum of its two largest scores; experts come from the
    best."""
    num_chosen_groups: int = 1
    shared_size: int = 0
    """Rows of the gate of the shared expert, which computes every token; 0: no shared expert."""
    has_shared_gate: bool = False
    """Whether the shared expert's output is multiplied by a sigmoid gate."""
    norms_router_input: bool = False
    """Whether the router reads its input through its own RMS norm, times hidden_size ** -0.5."""
    has_expert_scales: bool = False
    """Whether each expert has a factor on its weights, applied after they are renormalized."""
    has_biases: bool = False
    """Whether the router and every linear layer of an expert have a bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """Rules for reading the experts from an architecture's config.json."""

    num_experts_key: str = "num_experts"
    """Key for their number; `counts` reads other names, too."""
    size_key: str = "moe_intermediate_size"
    chosen_key: str = "num_experts_per_tok"
    switch_key: str | None = None
    """Key of a switch without which no layer has experts; None: no such switch."""
    has_mlp_beside_experts: bool = False
    """Whether layers with experts also have an MLP."""
    scores: RouterScores = "softmax"
    reads_renormalization: bool = True
    """Whether `norm_topk_prob` decides about renormalization; otherwise weights are renormalized."""
    has_correction_bias: bool = False
    reads_groups: bool = False
    """Whether `n_group`, `topk_group` and `routed_scaling_factor` are read."""
    dense_layers: Literal["none", "steps", "first", "outside"] = "none"
    """Layers with an MLP instead of experts:

    - none: no layer;
    - steps: the layers that `decoder_sparse_step` and `mlp_only_layers` exclude;
    - first: the first `first_k_dense_replace`;
    - outside: those outside `moe_layer_start_index` to `moe_layer_end_index`, and between every `moe_layer_interval`.
    """
    shared: Literal["none", "size", "number"] = "none"
    """Size of the shared expert: none; `shared_expert_intermediate_size` rows; `shared_key` times an expert's rows."""
    shared_key: str = "n_shared_experts"
    has_shared_gate: bool = False
    norms_router_input: bool = False
    has_expert_scales: bool = False
    has_biases: bool = False

    def counts(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return `expert_counts` under this architecture's keys."""
        return expert_counts(config, self.num_experts_key, self.chosen_key)

    def read(self, given: Mapping[str, Any]) -> ExpertsSpec:
        """Return the experts that a config describes.

        Raises:
            CorruptCheckpoint: a number is absent, or contradicts another.
        """
        key, chosen_key = (
            _written(given, self.num_experts_key, _NUM_EXPERTS),
            _written(given, self.chosen_key, _NUM_CHOSEN),
        )
        num_experts = read_count(given, key, most=MAX_EXPERTS)  # checked before lists of this length are made
        size = read_count(given, self.size_key)
        num_groups = read_count(given, "n_group", 1) if self.reads_groups else 1
        spec = ExpertsSpec(
            num_experts=num_experts,
            num_chosen=read_count(given, chosen_key),
            intermediate_size=size,
            scores=self.scores,
            is_renormalized=read_bool(given, "norm_topk_prob") if self.reads_renormalization else True,
            scale=_scale(given) if self.reads_groups else 1.0,
            has_correction_bias=self.has_correction_bias,
            num_groups=num_groups,
            num_chosen_groups=read_count(given, "topk_group", 1) if self.reads_groups else 1,
            shared_size=self._shared_size(given, size),
            has_shared_gate=self.has_shared_gate,
            norms_router_input=self.norms_router_input,
            has_expert_scales=self.has_expert_scales,
            has_biases=self.has_biases,
        )
        _check(spec, key, chosen_key)
        return spec

    def sparse_layers(self, given: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
        """Return for each layer whether it has experts."""
        if self.switch_key is not None and not read_bool(given, self.switch_key):
            return (False,) * num_layers
        if self.dense_layers == "first":
            num_dense = read_count_or_0(given, "first_k_dense_replace", num_layers)
            return tuple(layer_id >= num_dense for layer_id in range(num_layers))
        if self.dense_layers == "none":
            return (True,) * num_layers
        if self.dense_layers == "outside":
            return _between(given, num_layers)
        step, dense = read_count(given, "decoder_sparse_step", 1), read_list(given, "mlp_only_layers")
        if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one < num_layers for one in dense):
            raise CorruptCheckpoint(
                f"config.json: mlp_only_layers must be numbers of layers, 0 to {num_layers - 1}, found {shown(dense)}."
            )
        return tuple(layer_id not in dense and (layer_id + 1) % step == 0 for layer_id in range(num_layers))

    def _shared_size(self, given: Mapping[str, Any], size: int) -> int:
        if self.shared == "none":
            return 0
        if self.shared == "size":
            return read_count(given, "shared_expert_intermediate_size")
        return size * read_count_or_0(given, self.shared_key)


def expert_counts(config: Mapping[str, Any], num_experts_key: str, chosen_key: str) -> dict[str, Any]:
    """Return the numbers of experts and of chosen experts that a config has, whatever names it uses.

    Args:
        config: the config as written, without defaults.
        num_experts_key: key to return the number of experts under.
        chosen_key: key to return the number of chosen experts under.

    Raises:
        CorruptCheckpoint: the config has two names of a number, with different values.
    """
    found = {
        num_experts_key: one_value(config, num_experts_key, _NUM_EXPERTS),
        chosen_key: one_value(config, chosen_key, _NUM_CHOSEN),
    }
    return {key: value for key, value in found.items() if value is not None}


def _written(given: Mapping[str, Any], own: str, names: Collection[str]) -> str:
    """Return the name under which a config has a number; `own` if it has no other name, which no default sets."""
    return next((name for name in names if name != own and given.get(name) is not None), own)


def _between(given: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it has experts, from the first and last index and the interval; -1: the last
    layer."""
    step = read_count(given, "moe_layer_interval", 1)
    first, last = read_count_or_0(given, "moe_layer_start_index"), given.get("moe_layer_end_index", -1)
    last = num_layers - 1 if last in (None, -1) else read_count_or_0(given, "moe_layer_end_index")
    return tuple(first <= layer_id <= last and (layer_id + 1) % step == 0 for layer_id in range(num_layers))


def _check(spec: ExpertsSpec, num_experts_key: str, chosen_key: str) -> None:
    if spec.num_chosen > spec.num_experts:
        raise CorruptCheckpoint(
            f"config.json: {chosen_key} {spec.num_chosen} is more than {num_experts_key} {spec.num_experts}."
        )
    if spec.num_experts % spec.num_groups:
        raise CorruptCheckpoint(
            f"config.json: {num_experts_key} {spec.num_experts} is no multiple of n_group {spec.num_groups}."
        )
    if spec.num_chosen_groups > spec.num_groups:
        raise CorruptCheckpoint(
            f"config.json: topk_group {spec.num_chosen_groups} is more than n_group {spec.num_groups}."
        )
    of_group = spec.num_experts // spec.num_groups
    if spec.num_groups > 1 and of_group < 2:
        raise CorruptCheckpoint(
            f"config.json: n_group {spec.num_groups} leaves one of {spec.num_experts} experts in a group; groups are "
            "chosen by the two largest scores in them."
        )
    if spec.num_chosen > of_group * spec.num_chosen_groups:
        raise CorruptCheckpoint(
            f"config.json: {chosen_key} {spec.num_chosen} is more than the {of_group * spec.num_chosen_groups} "
            f"experts of topk_group {spec.num_chosen_groups} groups."
        )


def _scale(given: Mapping[str, Any]) -> float:
    value = given.get("routed_scaling_factor", 1.0)
    if not is_number(value) or not 0 < value < 1e6:
        raise CorruptCheckpoint(
            f"config.json: routed_scaling_factor must be a number above 0 and below 1e6, found {shown(value)}."
        )
    return float(value)
