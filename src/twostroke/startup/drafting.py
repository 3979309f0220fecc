"""Puts together what drafts: found and checked before a weight is read, built when the target is in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch

from twostroke.config.kv_format import KVFormat, is_quantized
from twostroke.config.layer_spec import KVSpec
from twostroke.config.model import ModelConfig
from twostroke.config.speculation import AUTO, SpeculativeConfig
from twostroke.errors import InvalidParameter, SetupError
from twostroke.kernels.dispatch import GroupShape, Operators
from twostroke.kv_cache.layout import KVGroup, KVLayout
from twostroke.layers.attention import AttentionLayout
from twostroke.layers.row_split import RowSplit
from twostroke.model.checkpoint import companion, find_model_folder
from twostroke.model.decoder import DecoderModel, Placement
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
from twostroke.sampling.sampler import Sampler
from twostroke.speculation.chain import ChainProposer, ReadByDraftModel, ReadByTarget
from twostroke.speculation.eagle import EagleProposer, HeadMemory
from twostroke.speculation.history import FeatureHistory
from twostroke.speculation.medusa import MedusaProposer
from twostroke.speculation.ngram import NgramProposer
from twostroke.speculation.proposer import Proposer
from twostroke.speculation.reader import Reader, TargetTable
from twostroke.tokenizer.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the target is loaded with, and its drafter too."""

    path: Path
    config: ModelConfig
    tokenizer: Tokenizer
    dtype: torch.dtype
    device: torch.device
    operators: Operators
    kv_format: KVFormat
    layout: KVLayout
    longest_request: int
    """Tokens of the target's, as asked for: what its dynamic rope scaling is fixed for."""

    def placement(self, target: Target) -> Placement:
        """Of what drafts: beside the target."""
        return Placement(self.operators, self.dtype, self.device, target.max_model_len)


@dataclass(frozen=True, slots=True)
class Target:
    """The target in memory."""

    model: DecoderModel
    kv: KVStorage
    sampler: Sampler
    max_model_len: int
    max_tokens: int
    """Of a step, known tokens that drafting layers may read at once."""
    max_num_seqs: int
    """Of a step."""


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """What the engine has to know of who drafts; as it stands here, of somebody who takes nothing, or of nobody."""

    max_drafts: int | None = None
    """Most tokens in a row that it can guess; None: any number."""
    num_weight_bytes: int = 0
    """Of its own."""
    kv_bytes_per_block: int = 0
    """What it keeps beside each KV block of the target."""
    num_branch_blocks: int = 0
    """KV blocks of the target's that its branches are verified in."""
    bytes_per_token: int = 0
    """What it remembers at most of each token of the largest step."""
    bytes_per_request: int = 0
    """And of each request of it."""


class Drafter(Protocol):
    """Something that will draft, with what it takes."""

    @property
    def facts(self) -> DrafterFacts:
        """What it takes, and can do."""
        ...

    @property
    def words(self) -> str:
        """What it is, for the lines at the start."""
        ...

    def build(self, target: Target) -> Proposer:
        """Reads its weights and makes it work."""
        ...


@dataclass(frozen=True, slots=True)
class GivenDrafter:
    """A proposer that is there already: a benchmark's, or a test's."""

    proposer: Proposer
    words: str
    facts: DrafterFacts = DrafterFacts()

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        del target
        return self.proposer


def find_drafter(config: SpeculativeConfig, surroundings: Surroundings) -> Drafter:
    """What the settings ask for, with everything checked that can be before a weight is read.

    Raises:
        InvalidParameter: a setting that does not go with the target.
        SetupError: a draft model of another vocabulary, or one that cannot be loaded.
    """
    match config.method:
        case "ngram":
            return _Ngram(config)
        case "early_exit":
            return _EarlyExit.of(config, surroundings)
        case "draft_model":
            return _DraftModel.of(config, surroundings)
        case "medusa":
            return _Medusa.of(config, surroundings)
        case "eagle":
            return _Eagle.of(config, surroundings)


@dataclass(frozen=True, slots=True)
class _Ngram:
    config: SpeculativeConfig
    facts: DrafterFacts = DrafterFacts()

    @property
    def words(self) -> str:
        """See Drafter."""
        fewest, most = self.config.lookup_lengths
        return f"prompt lookup, endings of {fewest} to {most} tokens"

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        del target
        fewest, most = self.config.lookup_lengths
        return NgramProposer(most=most, fewest=fewest)


@dataclass(frozen=True, slots=True)
class _EarlyExit:
    num_layers: int
    surroundings: Surroundings
    facts: DrafterFacts = DrafterFacts()

    @classmethod
    def of(cls, config: SpeculativeConfig, surroundings: Surroundings) -> _EarlyExit:
        """Checks the layer."""
        name, num_layers = "speculative_config.exit_layer", surroundings.config.num_layers
        trained = surroundings.config.early_exit_layers
        exit_layer = config.exit_layer or (trained[0] if trained else None)
        if exit_layer is None:
            remedy = f"Give one, 1 to {num_layers - 1}; `twostroke calibrate` finds the best."
            raise InvalidParameter(name, None, f"{surroundings.path.name} was not trained to exit early", remedy)
        if exit_layer >= num_layers:
            limit = f"must be below the {num_layers} layers of {surroundings.path.name}"
            raise InvalidParameter(name, exit_layer, limit)
        return cls(exit_layer, surroundings)

    @property
    def words(self) -> str:
        """See Drafter."""
        return (
            f"the first {self.num_layers} of {self.surroundings.config.num_layers} layers, with weights and KV shared"
        )

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        layout = target.kv.attention_layout(target.model.num_heads)
        tables = [TargetTable(group_id) for group_id in range(len(layout.shapes))]
        reader = Reader(target.model, self.num_layers, target.kv, layout, tables, self.surroundings.device)
        return ChainProposer(reader, ReadByTarget(), target.sampler, max_tokens=target.max_tokens)


@dataclass(frozen=True, slots=True)
class _DraftModel:
    """A model of its own. Its KV block i goes with the target's block i, whatever the target keeps there."""

    files: ModelFiles
    config: ModelConfig
    weights: WeightSource
    surroundings: Surroundings

    @classmethod
    def of(cls, config: SpeculativeConfig, surroundings: Surroundings) -> _DraftModel:
        """Finds it, and checks that it speaks the target's tokens."""
        files = find_model(_model_of(config, surroundings, "draft"))
        draft = files.config().fixed_for(surroundings.longest_request)
        _check_vocabulary(files, draft, surroundings, has_tokenizer=config.model is not None)
        weights = files.weights(draft, None)
        check_weights(weights, draft, None)
        return cls(files, draft, weights, surroundings)

    @property
    def facts(self) -> DrafterFacts:
        """See Drafter."""
        around = self.surroundings
        weights = weight_bytes(self.weights, self.config, around.dtype, around.operators)
        weights += key_means_bytes(self.config, around.kv_format, around.dtype.itemsize)
        return DrafterFacts(num_weight_bytes=weights, kv_bytes_per_block=_bytes_beside(self._layouts))

    @property
    def words(self) -> str:
        """See Drafter."""
        parameters = num_parameters(self.config) / 1e6
        per_token = sum(layout.bytes_per_token for layout in self._layouts)
        return (
            f"draft model {self.files.path.name}, {parameters:,.1f} M parameters, {self.facts.num_weight_bytes:,} "
            f"bytes of weights, {per_token:,} bytes of KV per token"
        )

    @property
    def _layouts(self) -> tuple[KVLayout, ...]:
        return _kv_beside(self.config, self.surroundings)

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        around = self.surroundings
        model = load_model(
            self.weights,
            self.config,
            dtype=around.dtype,
            device=around.device,
            max_model_len=target.max_model_len,
            operators=around.operators,
        )
        if is_quantized(around.kv_format):
            center_keys(model, around.tokenizer.encode, around.dtype, around.device, RowSplit())
        kv, attention = _storage_beside(self.config, self._layouts, around, target.kv.num_blocks)
        tables = [_table_beside(around.layout)] * len(attention.shapes)
        reader = Reader(model, self.config.num_layers, kv, attention, tables, around.device)
        return ChainProposer(reader, ReadByDraftModel(), target.sampler, max_tokens=target.max_tokens)


@dataclass(frozen=True, slots=True)
class _Medusa:
    """Heads on the target's last hidden state; they keep no K and V."""

    folder: DraftFolder
    num_places: int
    """For drafts, of each request and step; more than there are heads make branches."""
    surroundings: Surroundings

    @classmethod
    def of(cls, config: SpeculativeConfig, surroundings: Surroundings) -> _Medusa:
        """Finds them, and checks that they go with the target."""
        folder = DraftFolder(find_model_folder(_model_of(config, surroundings, "medusa")))
        check_medusa(folder, surroundings.config, surroundings.path.name)
        num_places = config.num_speculative_tokens
        return cls(folder, 0 if num_places == AUTO else num_places, surroundings)

    @property
    def facts(self) -> DrafterFacts:
        """See Drafter."""
        around, num_heads = self.surroundings, medusa_shape(self.folder).num_heads
        num_branch_blocks = 0
        if self.num_places > num_heads + 1:  # one more is no place for a branch
            num_branch_blocks = MAX_BRANCHES * blocks_of_branch(num_heads, around.layout)
        return DrafterFacts(
            max_drafts=num_heads,
            num_weight_bytes=medusa_bytes(self.folder, around.dtype, around.operators.packed_sizes),
            num_branch_blocks=num_branch_blocks,
            # states of two steps: not every request is in the last one
            bytes_per_request=2 * around.config.hidden_size * around.dtype.itemsize,
        )

    @property
    def words(self) -> str:
        """See Drafter."""
        facts = self.facts
        branches = f", {facts.num_branch_blocks:,} KV blocks for branches" if facts.num_branch_blocks else ""
        weights = f"{facts.num_weight_bytes:,} bytes of weights"
        return f"{facts.max_drafts} Medusa heads of {self.folder.path.name}, {weights}{branches}"

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        heads = MedusaHeads(self.folder, target.model, self.surroundings.placement(target))
        return MedusaProposer(heads, target.sampler)


_KEPT_TOKENS = 32
"""Of each request, two blocks of the usual size; beside them the largest chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class _Eagle:
    """A layer of its own over the target's features; its KV block i goes with the target's block i."""

    folder: DraftFolder
    config: ModelConfig
    surroundings: Surroundings

    @classmethod
    def of(cls, config: SpeculativeConfig, surroundings: Surroundings) -> _Eagle:
        """Finds it, and checks that it goes with the target."""
        folder = DraftFolder(find_model_folder(_model_of(config, surroundings, "eagle")))
        check_eagle(folder, surroundings.config, surroundings.path.name)
        layers = feature_layers(surroundings.config.num_layers)
        if not 0 < layers[0] < layers[1] < layers[2]:
            num_layers = surroundings.config.num_layers
            limit = f"reads a low, a middle and a high layer of 7 or more; {surroundings.path.name} has {num_layers}"
            remedy = "Take another method, such as ngram."
            raise InvalidParameter("speculative_config.method", "eagle", limit, remedy)
        return cls(folder, eagle_config(folder), surroundings)

    @property
    def facts(self) -> DrafterFacts:
        """See Drafter."""
        around = self.surroundings
        size = len(self._feature_layers) * around.config.hidden_size * around.dtype.itemsize
        return DrafterFacts(
            num_weight_bytes=eagle_bytes(self.folder, around.dtype, around.operators.packed_sizes),
            kv_bytes_per_block=_bytes_beside(self._layouts),
            bytes_per_token=2 * size,  # of a step's features, and of those that are kept
            bytes_per_request=_KEPT_TOKENS * size,
        )

    @property
    def words(self) -> str:
        """See Drafter."""
        return (
            f"EAGLE head {self.folder.path.name}, {self.facts.num_weight_bytes:,} bytes of weights, "
            f"{sum(layout.bytes_per_token for layout in self._layouts):,} bytes of KV per token"
        )

    @property
    def _layouts(self) -> tuple[KVLayout, ...]:
        return _kv_beside(self.config, self.surroundings)

    @property
    def _feature_layers(self) -> tuple[int, ...]:
        return feature_layers(self.surroundings.config.num_layers)

    def build(self, target: Target) -> Proposer:
        """See Drafter."""
        around = self.surroundings
        head = EagleHead(self.folder, target.model, around.placement(target))
        kv, attention = _storage_beside(self.config, self._layouts, around, target.kv.num_blocks)
        num_pages = target.kv.num_blocks * self._layouts[0].groups[0].pages_per_block
        history = FeatureHistory(self._feature_layers, target.max_tokens + _KEPT_TOKENS * target.max_num_seqs)
        memory = HeadMemory(kv, num_pages, attention, _table_beside(around.layout))
        return EagleProposer(head, memory, history, target.sampler, around.device)


def _model_of(config: SpeculativeConfig, surroundings: Surroundings, kind: str) -> str:
    """The model that the settings name, or what comes with the target.

    Raises:
        InvalidParameter: there is neither.
    """
    path = config.model or companion(surroundings.path, kind)
    if path is None:
        limit = f"nothing of that method comes with {surroundings.path.name}"
        raise InvalidParameter("speculative_config.model", None, limit, "Give a folder, or a hub id.")
    return str(path)


def _group_beside(target: KVLayout) -> int:
    """Return the group of the target by whose block table a drafter goes: that which reaches back most."""
    windows = [group.window for group in target.groups]
    return min(range(len(windows)), key=lambda group: (windows[group] is not None, -(windows[group] or 0)))


def _table_beside(target: KVLayout) -> TargetTable:
    group_id = _group_beside(target)
    return TargetTable(group_id, target.page_ids(target.groups[group_id]))


def _kv_beside(drafter: ModelConfig, target: Surroundings) -> tuple[KVLayout, ...]:
    """For each shape of K and V of what drafts, one group that holds all layers of it; what each of them sees is the
    attention layout's business."""
    num_pages = target.layout.groups[_group_beside(target.layout)].pages_per_block
    layers: dict[KVSpec, list[int]] = {}
    for layer_id, spec in enumerate(drafter.kv_specs):
        layers.setdefault(replace(spec, window=None), []).append(layer_id)
    groups = (KVGroup(tuple(layer_ids), spec, num_pages) for spec, layer_ids in layers.items())
    return tuple(KVLayout((group,), target.layout.block_size, target.kv_format) for group in groups)


def _bytes_beside(layouts: Sequence[KVLayout]) -> int:
    """Return the bytes of KV that a drafter keeps for each KV block of the target."""
    return sum(layout.bytes_per_block for layout in layouts)


def _storage_beside(
    drafter: ModelConfig, layouts: Sequence[KVLayout], target: Surroundings, num_blocks: int
) -> tuple[JoinedStorages, AttentionLayout]:
    """Make the storage of what drafts, and say where its layers find their K and V there.

    Layers of the same shape and window are a group; all go by one block table of the target.
    """
    held = target.layout.groups[_group_beside(target.layout)].window  # what it has given back, nobody sees any more
    places = {
        layer_id: (which, index)
        for which, layout in enumerate(layouts)
        for index, layer_id in enumerate(layout.groups[0].layer_ids)
    }
    seen = [min((w for w in (spec.window, held) if w is not None), default=None) for spec in drafter.kv_specs]
    kinds = list(dict.fromkeys((places[layer_id][0], window) for layer_id, window in enumerate(seen)))
    shapes: list[GroupShape] = []
    for which, window in kinds:
        layout, (group,) = layouts[which], layouts[which].groups
        spec, page_bytes = replace(group.spec, window=window), layout.bytes_per_page(group)
        shapes.append(GroupShape(drafter.layers[0].num_heads, spec, layout.block_size, page_bytes, layout.kv_format))
    slots = ((kinds.index((places[layer_id][0], window)), places[layer_id][1]) for layer_id, window in enumerate(seen))
    storages = [KVStorage(layout, num_blocks, target.device) for layout in layouts]
    kv = JoinedStorages(storages, [which for which, _ in kinds])
    return kv, AttentionLayout(tuple(slots), tuple(shapes))


def _check_vocabulary(files: ModelFiles, draft: ModelConfig, target: Surroundings, *, has_tokenizer: bool) -> None:
    """A draft is a token id: both models must mean the same by it.

    Raises:
        SetupError: they do not, with the first difference.
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
