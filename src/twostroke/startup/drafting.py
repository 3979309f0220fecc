"""Drafters: found and checked before any weight is read, and built when the target is in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from twostroke.config.kv_format import is_quantized
from twostroke.config.layer_spec import KVSpec
from twostroke.config.model import ModelConfig
from twostroke.config.speculation import AUTO, SpeculativeConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.kernels.interface import GroupShape
from twostroke.kv_cache.layout import KVGroup, KVLayout
from twostroke.layers.attention import AttentionLayout
from twostroke.layers.row_split import RowSplit
from twostroke.model.checkpoint import bundled_drafter, find_model_folder
from twostroke.model.decoder import Placement
from twostroke.model.draft_folder import DraftFolder
from twostroke.model.eagle import EagleHead, check_eagle, eagle_bytes, eagle_config, feature_layers
from twostroke.model.loader import check_weights, load_model
from twostroke.model.medusa import MedusaHeads, check_medusa, medusa_bytes, medusa_shape
from twostroke.model.model_files import ModelFiles, find_model
from twostroke.model.registry import num_parameters
from twostroke.model.weight_size import weight_bytes
from twostroke.model.weight_source import WeightSource
from twostroke.runner.branches import MAX_BRANCHES, blocks_of_branch
from twostroke.runner.key_means import center_keys, key_means_bytes
from twostroke.runner.kv_storage import JoinedStorages, KVStorage
from twostroke.speculation.chain import ChainProposer, ComputedByDraftModel, ComputedByTarget
from twostroke.speculation.draft_model_pass import DraftModelPass, TargetTable
from twostroke.speculation.eagle import EagleKV, EagleProposer
from twostroke.speculation.history import FeatureHistory
from twostroke.speculation.medusa import MedusaProposer
from twostroke.speculation.ngram import NgramProposer
from twostroke.speculation.proposer import Proposer
from twostroke.startup.prepared import Drafter, DrafterFacts, LoadedTarget, Prepared

_NO_NEEDS = DrafterFacts()


def find_drafter(config: SpeculativeConfig, prepared: Prepared) -> Drafter:
    """Return the drafter that the settings name, after all checks that need no weights.

    Raises:
        InvalidParameter: a setting that does not go with the target.
        SetupError: a draft model of another vocabulary, or one that cannot be loaded.
    """
    match config.method:
        case "ngram":
            return _Ngram(config)
        case "early_exit":
            return _EarlyExit.of(config, prepared)
        case "draft_model":
            return _DraftModel.of(config, prepared)
        case "medusa":
            return _Medusa.of(config, prepared)
        case "eagle":
            return _Eagle.of(config, prepared)


@dataclass(frozen=True, slots=True)
class _Ngram:
    config: SpeculativeConfig
    facts: DrafterFacts = _NO_NEEDS

    @property
    def words(self) -> str:
        fewest, most = self.config.lookup_lengths
        return f"prompt lookup, endings of {fewest} to {most} tokens"

    def build(self, target: LoadedTarget) -> Proposer:
        del target
        fewest, most = self.config.lookup_lengths
        return NgramProposer(max_ngram=most, min_ngram=fewest)


@dataclass(frozen=True, slots=True)
class _EarlyExit:
    num_layers: int
    prepared: Prepared
    facts: DrafterFacts = _NO_NEEDS

    @classmethod
    def of(cls, config: SpeculativeConfig, prepared: Prepared) -> _EarlyExit:
        """Return the drafter after checking the layer."""
        name, num_layers = "speculative_config.exit_layer", prepared.config.num_layers
        trained = prepared.config.early_exit_layers
        exit_layer = config.exit_layer or (trained[0] if trained else None)
        if exit_layer is None:
            remedy = f"Give one, 1 to {num_layers - 1}; `twostroke calibrate` finds the best."
            raise InvalidParameter(name, None, f"{prepared.path.name} was not trained to exit early", remedy)
        if exit_layer >= num_layers:
            limit = f"must be below the {num_layers} layers of {prepared.path.name}"
            raise InvalidParameter(name, exit_layer, limit)
        return cls(exit_layer, prepared)

    @property
    def words(self) -> str:
        return f"the first {self.num_layers} of {self.prepared.config.num_layers} layers, with weights and KV shared"

    def build(self, target: LoadedTarget) -> Proposer:
        layout = target.kv.attention_layout(target.model.num_heads)
        tables = [TargetTable(group_id) for group_id in range(len(layout.shapes))]
        reader = DraftModelPass(target.model, self.num_layers, target.kv, layout, tables, self.prepared.device)
        return ChainProposer(reader, ComputedByTarget(), target.sampler, max_tokens=target.max_tokens)


@dataclass(frozen=True, slots=True)
class _DraftModel:
    """A separate draft model. Its KV block i belongs to the target's block i, whatever the target stores there."""

    files: ModelFiles
    config: ModelConfig
    weights: WeightSource
    prepared: Prepared

    @classmethod
    def of(cls, config: SpeculativeConfig, prepared: Prepared) -> _DraftModel:
        """Find the model, and check that it has the target's vocabulary."""
        files = find_model(_model_of(config, prepared, "draft"))
        draft = files.config().fixed_for(prepared.longest_request)
        _check_vocabulary(files, draft, prepared, has_tokenizer=config.model is not None)
        weights = files.weights(draft, None)
        check_weights(weights, draft, None)
        return cls(files, draft, weights, prepared)

    @property
    def facts(self) -> DrafterFacts:
        prepared = self.prepared
        weights = weight_bytes(self.weights, self.config, prepared.dtype, prepared.operators)
        weights += key_means_bytes(self.config, prepared.kv_format, prepared.dtype.itemsize)
        return DrafterFacts(num_weight_bytes=weights, kv_bytes_per_block=self._kv.bytes_per_block)

    @property
    def words(self) -> str:
        parameters = num_parameters(self.config) / 1e6
        return (
            f"draft model {self.files.path.name}, {parameters:,.1f} M parameters, {self.facts.num_weight_bytes:,} "
            f"bytes of weights, {self._kv.words}"
        )

    @property
    def _kv(self) -> _DrafterKV:
        return _DrafterKV(self.config, self.prepared.layout)

    def build(self, target: LoadedTarget) -> Proposer:
        prepared = self.prepared
        model = load_model(self.weights, self.config, _placement(prepared, target))
        if is_quantized(prepared.kv_format):
            center_keys(model, prepared.tokenizer.encode, prepared.dtype, prepared.device, RowSplit())
        beside = self._kv
        kv, attention = beside.storage(target.kv.num_blocks, prepared.device)
        tables = [beside.table] * len(attention.shapes)
        reader = DraftModelPass(model, self.config.num_layers, kv, attention, tables, prepared.device)
        return ChainProposer(reader, ComputedByDraftModel(), target.sampler, max_tokens=target.max_tokens)


@dataclass(frozen=True, slots=True)
class _Medusa:
    """Medusa heads on the target's last hidden state; they keep no K and V."""

    folder: DraftFolder
    num_places: int
    """Positions for drafts, per request and step; more than there are heads allow branches."""
    prepared: Prepared

    @classmethod
    def of(cls, config: SpeculativeConfig, prepared: Prepared) -> _Medusa:
        """Find the heads, and check that they fit the target."""
        folder = DraftFolder(find_model_folder(_model_of(config, prepared, "medusa")))
        check_medusa(folder, prepared.config, prepared.path.name)
        num_places = config.num_speculative_tokens
        return cls(folder, 0 if num_places == AUTO else num_places, prepared)

    @property
    def facts(self) -> DrafterFacts:
        prepared, num_heads = self.prepared, medusa_shape(self.folder).num_heads
        num_branch_blocks = 0
        if self.num_places > num_heads + 1:  # one more does not make a branch
            num_branch_blocks = MAX_BRANCHES * blocks_of_branch(num_heads, prepared.layout)
        return DrafterFacts(
            max_drafts=num_heads,
            num_weight_bytes=medusa_bytes(self.folder, prepared.dtype, prepared.operators.packed_sizes),
            num_branch_blocks=num_branch_blocks,
            # states of two steps, because not every request is in the last one
            bytes_per_request=2 * prepared.config.hidden_size * prepared.dtype.itemsize,
        )

    @property
    def words(self) -> str:
        facts = self.facts
        branches = f", {facts.num_branch_blocks:,} KV blocks for branches" if facts.num_branch_blocks else ""
        weights = f"{facts.num_weight_bytes:,} bytes of weights"
        return f"{facts.max_drafts} Medusa heads of {self.folder.path.name}, {weights}{branches}"

    def build(self, target: LoadedTarget) -> Proposer:
        heads = MedusaHeads(self.folder, target.model, _placement(self.prepared, target))
        return MedusaProposer(heads, target.sampler)


_KEPT_TOKENS = 32
"""Tokens whose features are kept for each request, two blocks of the usual size, in addition to the largest chunk of a
prompt."""


@dataclass(frozen=True, slots=True)
class _Eagle:
    """A separate layer over the target's features; its KV block i belongs to the target's block i."""

    folder: DraftFolder
    config: ModelConfig
    prepared: Prepared

    @classmethod
    def of(cls, config: SpeculativeConfig, prepared: Prepared) -> _Eagle:
        """Find the head, and check that it fits the target."""
        folder = DraftFolder(find_model_folder(_model_of(config, prepared, "eagle")))
        check_eagle(folder, prepared.config, prepared.path.name)
        layers = feature_layers(prepared.config.num_layers)
        if not 0 < layers[0] < layers[1] < layers[2]:
            num_layers = prepared.config.num_layers
            limit = f"reads a low, a middle and a high layer of 7 or more; {prepared.path.name} has {num_layers}"
            remedy = "Take another method, such as ngram."
            raise InvalidParameter("speculative_config.method", "eagle", limit, remedy)
        return cls(folder, eagle_config(folder), prepared)

    @property
    def facts(self) -> DrafterFacts:
        prepared = self.prepared
        size = len(self._feature_layers) * prepared.config.hidden_size * prepared.dtype.itemsize
        return DrafterFacts(
            num_weight_bytes=eagle_bytes(self.folder, prepared.dtype, prepared.operators.packed_sizes),
            kv_bytes_per_block=self._kv.bytes_per_block,
            bytes_per_token=2 * size,  # features of the step, and features that are kept
            bytes_per_request=_KEPT_TOKENS * size,
        )

    @property
    def words(self) -> str:
        return f"EAGLE head {self.folder.path.name}, {self.facts.num_weight_bytes:,} bytes of weights, {self._kv.words}"

    @property
    def _kv(self) -> _DrafterKV:
        return _DrafterKV(self.config, self.prepared.layout)

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return feature_layers(self.prepared.config.num_layers)

    def build(self, target: LoadedTarget) -> Proposer:
        prepared = self.prepared
        head = EagleHead(self.folder, target.model, _placement(prepared, target))
        beside = self._kv
        kv, attention = beside.storage(target.kv.num_blocks, prepared.device)
        history = FeatureHistory(self._feature_layers, target.max_tokens + _KEPT_TOKENS * target.max_num_seqs)
        memory = EagleKV(kv, beside.num_pages(target.kv.num_blocks), attention, beside.table)
        return EagleProposer(head, memory, history, target.sampler, prepared.device)


def _model_of(config: SpeculativeConfig, prepared: Prepared, kind: str) -> str:
    """Return the model that the settings name, or the one that comes with the target.

    Raises:
        InvalidParameter: there is neither.
    """
    path = config.model or bundled_drafter(prepared.path, kind)
    if path is None:
        limit = f"nothing of that method comes with {prepared.path.name}"
        raise InvalidParameter("speculative_config.model", None, limit, "Give a folder, or a hub id.")
    return str(path)


def _placement(prepared: Prepared, target: LoadedTarget) -> Placement:
    """Return the placement of a drafter: same operators, type and device as the target."""
    return Placement(prepared.operators, prepared.dtype, prepared.device, target.max_model_len)


class _DrafterKV:
    """KV of a drafter, whose block i belongs to the target's block i: it follows one block table of the target."""

    def __init__(self, drafter: ModelConfig, target: KVLayout) -> None:
        self._drafter = drafter
        windows = [group.window for group in target.groups]
        # the block table of the group with the longest window
        group_id = min(range(len(windows)), key=lambda group: (windows[group] is not None, -(windows[group] or 0)))
        group = target.groups[group_id]
        self.table = TargetTable(group_id, target.page_ids(group))
        self._held = group.window  # positions before the window have no blocks any more
        layers: dict[KVSpec, list[int]] = {}
        for layer_id, spec in enumerate(drafter.kv_specs):
            layers.setdefault(replace(spec, window=None), []).append(layer_id)
        # one group for all layers with the same shape of K and V; the attention layout has their windows
        groups = (KVGroup(tuple(layer_ids), spec, group.pages_per_block) for spec, layer_ids in layers.items())
        self._layouts = [KVLayout((group,), target.block_size, target.kv_format) for group in groups]

    @property
    def bytes_per_block(self) -> int:
        """Bytes that the drafter keeps for each KV block of the target."""
        return sum(layout.bytes_per_block for layout in self._layouts)

    @property
    def words(self) -> str:
        """KV bytes of a token, for the lines at the start."""
        return f"{sum(layout.bytes_per_token for layout in self._layouts):,} bytes of KV per token"

    def num_pages(self, num_blocks: int) -> int:
        """Return the number of pages of each of its storages."""
        return num_blocks * self._layouts[0].groups[0].pages_per_block

    def storage(self, num_blocks: int, device: torch.device) -> tuple[JoinedStorages, AttentionLayout]:
        """Create the storage, and return it with the places of the drafter's layers in it.

        Layers of the same shape and window form a group.
        """
        places = {
            layer_id: (which, index)
            for which, layout in enumerate(self._layouts)
            for index, layer_id in enumerate(layout.groups[0].layer_ids)
        }
        specs = self._drafter.kv_specs
        seen = [min((w for w in (spec.window, self._held) if w is not None), default=None) for spec in specs]
        kinds = list(dict.fromkeys((places[layer_id][0], window) for layer_id, window in enumerate(seen)))
        shapes: list[GroupShape] = []
        for which, window in kinds:
            layout, (group,) = self._layouts[which], self._layouts[which].groups
            spec, page_bytes = replace(group.spec, window=window), layout.bytes_per_page(group)
            num_heads = self._drafter.layers[0].num_heads
            shapes.append(GroupShape(num_heads, spec, layout.block_size, page_bytes, layout.kv_format))
        slots = (
            (kinds.index((places[layer_id][0], window)), places[layer_id][1]) for layer_id, window in enumerate(seen)
        )
        storages = [KVStorage(layout, num_blocks, device) for layout in self._layouts]
        kv = JoinedStorages(storages, [which for which, _ in kinds])
        return kv, AttentionLayout(tuple(slots), tuple(shapes))


def _check_vocabulary(files: ModelFiles, draft: ModelConfig, target: Prepared, *, has_tokenizer: bool) -> None:
    """Check that both models have the same vocabulary, because a draft is a token id.

    Raises:
        SetupError: they differ; the message has the first difference.
    """
    names = f"{files.path.name}, the draft model, and {target.path.name}"
    if draft.vocab_size != target.config.vocab_size:
        raise SetupError(
            f"{names} have vocabularies of {draft.vocab_size} and {target.config.vocab_size} entries. A draft model "
            "needs the target's tokenizer."
        )
    if not has_tokenizer:
        return
    tokenizer = files.tokenizer()
    for token_id in range(max(tokenizer.max_token_id, target.tokenizer.max_token_id) + 1):
        ours, theirs = target.tokenizer.token(token_id), tokenizer.token(token_id)
        if ours != theirs:
            raise SetupError(
                f"{names} differ in their tokens: id {token_id} is {theirs!r} and {ours!r}. A draft model needs the "
                "target's tokenizer."
            )
