"""A row of `bench quality` given as text, NAME=VALUE,NAME=VALUE, parsed into keywords of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, get_args, get_type_hints

from twostroke.config.cache import CacheConfig
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.errors import InvalidParameter, UnknownParameter

RESERVED: Mapping[str, str] = {
    "model": "is the same in every row (--model)",
    "load_format": "is fixed: the quality of random weights is meaningless",
    "tokenizer": "is fixed: rows with different tokens cannot be compared",
    "max_model_len": "is the window in which every row is scored (--context)",
    "max_logprobs": "changes nothing that is measured",
    "event_log": "would be overwritten by every row",
}
"""Engine settings that a row cannot change, with the reasons."""


def _settable() -> dict[str, tuple[Any, ...]]:
    """Return every setting that a row may change, with the allowed types of its value."""
    hints = {f.name: get_type_hints(c)[f.name] for c in (LoadConfig, CacheConfig, SchedulerConfig) for f in fields(c)}
    return {name: get_args(hint) or (hint,) for name, hint in hints.items() if name not in RESERVED}


def keywords_of(configuration: str) -> dict[str, Any]:
    """Return the engine's keywords, each value with the type that its config declares.

    >>> keywords_of("quantization=int4,group_size=64,enable-chunked-prefill=false,ageing_s=0.5")
    {'quantization': 'int4', 'group_size': 64, 'enable_chunked_prefill': False, 'ageing_s': 0.5}

    Raises:
        InvalidParameter: the text is not NAME=VALUE pairs, a name is reserved or given twice, or a value has another
        type or is out of range.
        UnknownParameter: the engine has no such setting.
    """
    settable, found = _settable(), dict[str, Any]()
    for pair in configuration.split(","):
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not (name and equals and value):
            raise InvalidParameter("configuration", configuration, "must be NAME=VALUE pairs separated by commas")
        name = name.replace("-", "_")
        if name in RESERVED:
            raise InvalidParameter(f"configuration {name}", value, RESERVED[name], f"Settable: {', '.join(settable)}.")
        if name not in settable:
            raise UnknownParameter(name, settable, "a configuration")
        if name in found:
            raise InvalidParameter("configuration", configuration, f"gives {name} twice")
        found[name] = _parsed(name, value, settable[name])
    EngineConfig.from_keywords(**found)  # for the ranges
    return found


def _parsed(name: str, text: str, kinds: tuple[Any, ...]) -> Any:
    if bool in kinds:
        if text.lower() not in ("true", "false"):
            raise InvalidParameter(name, text, "must be true or false")
        return text.lower() == "true"
    for kind, words in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(text)
            except ValueError:
                raise InvalidParameter(name, text, f"must be {words}") from None
    return text
