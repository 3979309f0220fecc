"""Differences between layers in a config.json: windows, rotation, and keys that differ from layer to layer
(`per_layer_config`, which transformers 5.24 writes); no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from twostroke.config.architecture_traits import ArchitectureTraits, RopeRule
from twostroke.config.fields import read_bool, read_count, read_list, read_mapping
from twostroke.config.rope import DEFAULT_ROPE_THETA, RopeConfig
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, shorten, show_name, shown

_MAX_NAMED = 4
"""Most unknown names of a config that a message lists."""


def is_original_given(given: Mapping[str, Any], traits: ArchitectureTraits) -> bool:
    by_type = _full_layers_rope(given, traits)
    rope = by_type or read_mapping(given, "rope_scaling") or read_mapping(given, "rope_parameters")
    name = "original_max_position_embeddings"
    return bool(given.get(name) or rope.get(name))


def _full_layers_rope(given: Mapping[str, Any], traits: ArchitectureTraits) -> Mapping[str, Any] | None:
    """Return the rope parameters of full layers; None if the config has one set for all layers."""
    by_type = read_mapping(given, "rope_parameters")
    if not any(isinstance(value, Mapping) for value in by_type.values()):
        return None
    stretched = read_mapping(given, "rope_scaling") if traits.rope_rule in _STRETCHES_FULL else {}
    return {**read_mapping(by_type, "full_attention"), **stretched}


_STRETCHES_FULL: tuple[RopeRule, ...] = ("plain_windows", "local_windows")
"""Rules by which `rope_scaling` applies to full layers only."""


def ropes_of(given: Mapping[str, Any], traits: ArchitectureTraits, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of full layers and of layers with a window."""
    rule = traits.rope_rule
    read = partial(
        RopeConfig.from_hf,
        head_dim=head_dim if traits.has_partial_rotary else None,
        is_interleaved=traits.has_interleaved_rope,
        scales_queries=traits.scales_queries,
        longrope_names=traits.longrope_names,
    )
    of_windows: dict[str, Any] = {}
    if rule == "local_windows":
        of_windows["rope_theta"] = given.get("rope_local_base_freq", DEFAULT_ROPE_THETA)
    by_type, of_full = read_mapping(given, "rope_parameters"), _full_layers_rope(given, traits)
    if of_full is not None:
        unknown = shorten(sorted(by_type.keys() - {"full_attention", "sliding_attention"}), _MAX_NAMED)
        if unknown:
            raise UnsupportedModel(
                f"rope parameters of {unknown} are not implemented; known: full_attention, sliding_attention."
            )
        if given.get("rope_scaling") and rule not in _STRETCHES_FULL:
            raise UnsupportedModel(
                f"config.json: rope_scaling {shown(given['rope_scaling'])} is not implemented beside rope_parameters "
                "for each kind of layer; known: null. Write the scaling into rope_parameters."
            )
        rest = {name: value for name, value in given.items() if name != "rope_scaling"}
        full = read({**rest, "rope_parameters": of_full})
        window = read({**rest, **of_windows, "rope_parameters": read_mapping(by_type, "sliding_attention")})
        return full, window
    full = read(given)
    if rule not in _STRETCHES_FULL:
        return full, full
    plain = {"rope_scaling": None, "rope_parameters": {"rope_theta": of_windows.get("rope_theta", full.theta)}}
    return full, read({**given, **plain})


def layer_windows(given: Mapping[str, Any], traits: ArchitectureTraits, num_layers: int) -> tuple[int | None, ...]:
    rule = traits.windows
    kinds = None if given.get("layer_types") is None else [str(kind) for kind in read_list(given, "layer_types")]
    if kinds is not None and len(kinds) != num_layers:
        raise CorruptCheckpoint(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers.")
    if rule == "none":
        _check_kinds(kinds or (), "full_attention")
        return (None,) * num_layers
    window = given.get("sliding_window", 4096)
    if rule in ("by_layer", "unrotated") and not read_bool(given, "use_sliding_window"):
        window = None
    if window is not None:
        window = read_count({"sliding_window": window}, "sliding_window")
    if rule == "all_layers":
        return (window,) * num_layers
    if kinds is None:
        return _default_windows(given, traits, num_layers, window)
    _check_kinds(kinds, "full_attention", "sliding_attention")
    if window is None and "sliding_attention" in kinds:
        raise CorruptCheckpoint("config.json: layer_types has sliding_attention, but no sliding_window is in use.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _check_kinds(kinds: Collection[str], *known: str) -> None:
    unknown = sorted(set(kinds) - set(known))
    if unknown:
        raise UnsupportedModel(
            f"config.json: layer_types {shown(unknown)} are not implemented for this architecture; known: "
            f"{', '.join(known)}."
        )


def _default_windows(
    given: Mapping[str, Any], traits: ArchitectureTraits, num_layers: int, window: int | None
) -> tuple[int | None, ...]:
    """Return the window of each layer for a config without `layer_types`."""
    if traits.windows == "by_type":
        # EXAONE 4 without a window has only full layers; transformers cannot run such configs of other architectures
        if window is None and traits.window_every is not None and traits.rope_rule != "only_windows":
            raise CorruptCheckpoint(
                "config.json: sliding_window is null, and layers of this architecture have one. Give the window, or "
                "layer_types that are all full_attention."
            )
        every = (traits.reads_window_pattern and given.get("sliding_window_pattern")) or traits.window_every
        if isinstance(every, str):  # "LLLG": as many layers as it has letters
            every = len(every)
        every = read_count({"sliding_window_pattern": every}, "sliding_window_pattern", num_layers + 1)
        return tuple(window if (layer_id + 1) % every else None for layer_id in range(num_layers))
    if traits.windows == "unrotated":
        return tuple(None if is_rotated else window for is_rotated in _rotated_layers(given, num_layers))
    first_windowed = given.get("max_window_layers", 28)
    if isinstance(first_windowed, bool) or not isinstance(first_windowed, int) or first_windowed < 0:
        raise CorruptCheckpoint(
            f"config.json: max_window_layers must be an integer of at least 0, found {shown(first_windowed)}."
        )
    return tuple(window if layer_id >= first_windowed else None for layer_id in range(num_layers))


def layers_with_rope(
    given: Mapping[str, Any], traits: ArchitectureTraits, windows: Sequence[int | None]
) -> tuple[bool, ...]:
    num_layers = len(windows)
    if traits.has_alibi or traits.position_offset is not None:
        return (False,) * num_layers
    if traits.rope_rule == "windows_alone":
        return tuple(window is not None for window in windows)
    if traits.rope_rule == "only_windows" and given.get("sliding_window", 4096) is not None:
        return tuple(window is not None for window in windows)
    return _rotated_layers(given, num_layers) if traits.reads_no_rope_layers else (True,) * num_layers


def _rotated_layers(given: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether `no_rope_layers` has it rotated."""
    if given.get("no_rope_layers") is None:
        interval = read_count(given, "no_rope_layer_interval", 4)
        return tuple((layer_id + 1) % interval != 0 for layer_id in range(num_layers))
    flags = read_list(given, "no_rope_layers")
    if len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise CorruptCheckpoint(
            f"config.json: no_rope_layers must have a 0 or a 1 for each of {num_layers} layers, found {shown(flags)}."
        )
    return tuple(bool(flag) for flag in flags[:num_layers])


_MAX_DIGITS = 100
"""Most digits of a layer's number. Python refuses to parse integers of thousands of digits."""
_NAME = "per_layer_config"


def layer_overrides(
    given: Mapping[str, Any], num_layers: int, known: Collection[str]
) -> Mapping[int, Mapping[str, Any]]:
    """Return, by layer, the keys whose values differ from those of all layers.

    Args:
        given: the config of all layers. A layer's number may begin with zeros.
        num_layers: of the model.
        known: keys that this architecture may set per layer.

    >>> own = {"07": {"head_dim": 128}, "3": {"head_dim": 64}}
    >>> layer_overrides({"head_dim": 64, "per_layer_config": own}, 8, ["head_dim"])
    {7: {'head_dim': 128}}

    Raises:
        CorruptCheckpoint: a layer does not exist, or its keys are no object.
        UnsupportedModel: a key is not known.
    """
    by_layer = read_mapping(given, _NAME)
    found: dict[int, Mapping[str, Any]] = {}
    for number in by_layer:
        is_layer = number.isdecimal() and len(number) <= _MAX_DIGITS and int(number) < num_layers
        if not is_layer:
            last = num_layers - 1
            raise CorruptCheckpoint(
                f"config.json: {_NAME} has {shown(number)}, which is no layer's number; they go from 0 to {last}."
            )
        own = {**read_mapping(by_layer, number)}
        if not read_list(own, "skip"):
            own.pop("skip", None)
        own = {key: value for key, value in own.items() if key not in given or given[key] != value}
        unknown = sorted(own.keys() - set(known))
        if unknown:
            raise UnsupportedModel(
                f"config.json: {_NAME} gives layer {int(number)} its own {show_name(unknown[0])} "
                f"({shown(own[unknown[0]])}), which is not implemented; known: {', '.join(known) or 'nothing'}."
            )
        found[int(number)] = own
    return {layer_id: own for layer_id, own in found.items() if own}
