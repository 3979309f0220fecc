"""`--preset`: gives every setting of the preset that has no flag of its own on the command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cyclopts import App, Token
from cyclopts.argument import ArgumentCollection

from twostroke.config.presets import PRESETS

_NAME = "preset"


def preset_help() -> str:
    """Return what `--help` says of the presets.

    >>> preset_help()[:100]
    'Settings that go together; flags beside it win. interactive: --itl-slo 100ms --ttft-slo 300ms. batch'
    """
    parts = (f"{preset}: {' '.join(_flags(settings))}." for preset, settings in PRESETS.items())
    return f"Settings that go together; flags beside it win. {' '.join(parts)}"


def give_preset(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Write the values of a preset where no flag is given; a preset that there is not stays for the parser to refuse.

    Args:
        app: as the parser hands it over.
        commands: likewise.
        arguments: with the words that were given for them.
    """
    del app, commands
    by_name = {argument.field_info.name: argument for argument in arguments}
    given = by_name[_NAME].tokens if _NAME in by_name else []
    settings = cast(Mapping[str, Mapping[str, Any]], PRESETS).get(given[-1].value, {}) if given else {}
    for name, value in settings.items():
        if not by_name[name].tokens:
            by_name[name].append(Token(keyword=f"--{_NAME}", value=str(value), source=_NAME))


def _flags(settings: Mapping[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')} {value}" for name, value in settings.items()]
