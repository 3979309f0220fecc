"""`per_layer_config` of a config.json: keys whose values differ from layer to layer. transformers 5.24 writes it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from twostroke.config.fields import list_of, mapping
from twostroke.errors import CorruptCheckpoint, UnsupportedModel, name_shown, shown

_MOST_DIGITS = 100
"""Most digits of a layer's number. Python refuses to make a number of thousands of digits."""
_NAME = "per_layer_config"


def layer_overrides(
    given: Mapping[str, Any], num_layers: int, known: Collection[str]
) -> Mapping[int, Mapping[str, Any]]:
    """Return, by layer, the keys whose values differ from those of all layers.

    Args:
        given: the config of all layers. A layer's number may begin with zeros.
        num_layers: of the model.
        known: keys that a layer of this architecture may have for itself.

    >>> own = {"07": {"head_dim": 128}, "3": {"head_dim": 64}}
    >>> layer_overrides({"head_dim": 64, "per_layer_config": own}, 8, ["head_dim"])
    {7: {'head_dim': 128}}

    Raises:
        CorruptCheckpoint: a layer that there is not, or one whose keys are no object.
        UnsupportedModel: a key that is not known.
    """
    by_layer = mapping(given, _NAME)
    found: dict[int, Mapping[str, Any]] = {}
    for number in by_layer:
        is_layer = number.isdecimal() and len(number) <= _MOST_DIGITS and int(number) < num_layers
        if not is_layer:
            last = num_layers - 1
            raise CorruptCheckpoint(
                f"config.json: {_NAME} has {shown(number)}, which is no layer's number; they go from 0 to {last}."
            )
        own = {**mapping(by_layer, number)}
        if not list_of(own, "skip"):
            own.pop("skip", None)
        own = {key: value for key, value in own.items() if key not in given or given[key] != value}
        unknown = sorted(own.keys() - set(known))
        if unknown:
            raise UnsupportedModel(
                f"config.json: {_NAME} gives layer {int(number)} its own {name_shown(unknown[0])} "
                f"({shown(own[unknown[0]])}), which is not implemented; known: {', '.join(known) or 'nothing'}."
            )
        found[int(number)] = own
    return {layer_id: own for layer_id, own in found.items() if own}
