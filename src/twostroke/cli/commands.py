"""All commands in one cyclopts app. Modules that are slow to import are loaded when a command runs."""

from __future__ import annotations

from cyclopts import App

from twostroke.cli.help_pages import COMMANDS
from twostroke.cli.numbers import apply_preset, convert_numbers
from twostroke.cli.short_help import command_list, short_help
from twostroke.version import __version__

app = App(
    name="twostroke",
    help="An LLM inference engine and server. Start with: twostroke serve",
    version=__version__,
    config=(apply_preset, convert_numbers),
    **command_list("twostroke", COMMANDS),
)
for _place, _name in enumerate(COMMANDS):
    _module = _name.replace("-", "_")
    if _name == "bench":
        app.command("twostroke.cli.bench:app", name=_name, sort_key=_place)
    else:
        app.command(f"twostroke.cli.{_module}:{_module}", name=_name, sort_key=_place, **short_help(_name))
