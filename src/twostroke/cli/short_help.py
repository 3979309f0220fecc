"""Short `--help` of two screens: a cyclopts formatter that shows some flags of a command, then examples."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from twostroke.cli.help_pages import LINES, PAGES

if TYPE_CHECKING:
    from cyclopts.help import HelpEntry, HelpPanel
    from rich.console import Console, ConsoleOptions

HELP_ALL = "--help-all"
_SHOWS_EVERY_FLAG = ContextVar("_SHOWS_EVERY_FLAG", default=False)


class ShortHelp:
    """Formatter of help panels that omits most flags."""

    def __init__(self, flags: Iterable[str], lines: Mapping[str, str]) -> None:
        """Set the flags to show.

        Args:
            flags: flags to show in addition to required ones and positional arguments.
            lines: descriptions by flag or command, in place of the long ones.
        """
        self._flags = frozenset(flags)
        self._lines = lines

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print the selected entries of a panel; omit a panel without any."""
        from cyclopts.help import DefaultFormatter

        if not _SHOWS_EVERY_FLAG.get() or panel.format == "command":
            entries = [self._shortened(entry) for entry in panel.entries if self._is_shown(panel, entry)]
            panel = panel.copy(entries=entries)
        if panel.entries:
            DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the usage line, as in the long help."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def _is_shown(self, panel: HelpPanel, entry: HelpEntry) -> bool:
        is_flag = panel.format == "parameter" and not entry.positional_label
        return not is_flag or entry.required or not self._flags.isdisjoint(entry.positive_names)

    def _shortened(self, entry: HelpEntry) -> HelpEntry:
        line = next((self._lines[name] for name in entry.positive_names if name in self._lines), None)
        if line is None or entry.positional_label:
            return entry
        default = None if entry.default in ("()", "False") else entry.default
        return entry.copy(description=line, choices=None, default=default, negative_names=())


def short_help(command: str) -> dict[str, Any]:
    """Return the keyword arguments that give a cyclopts command its short help.

    Args:
        command: its words, such as "bench offline".
    """
    page = PAGES[command]
    every_flag = (f"twostroke {command} {HELP_ALL}", "every flag, with its choices and defaults")
    return {
        "help_formatter": ShortHelp(page.flags.split(), {**LINES, **(page.lines or {})}),
        "help_epilogue": _lines((every_flag, *page.examples)),
    }


def command_list(program: str, commands: Mapping[str, str]) -> dict[str, Any]:
    """Return the keyword arguments that give a program its list of commands.

    Args:
        program: name as it is called, such as "twostroke bench".
        commands: descriptions of commands that replace their own.
    """
    told = (
        (f"{program} COMMAND --help", "the flags that people use first, and examples"),
        (f"{program} COMMAND {HELP_ALL}", "every flag of a command"),
    )
    return {"help_formatter": ShortHelp((), commands), "help_epilogue": _lines(told)}


def _lines(commands: Iterable[tuple[str, str]]) -> str:
    """Return commands and their descriptions as Markdown, one line each."""
    return "  \n".join(f"`{command}`  # {what}" for command, what in commands)


@contextmanager
def help_of(words: Sequence[str]) -> Generator[list[str]]:
    """Yield the words of a command with --help-all replaced by --help; meanwhile show every flag if it was there."""
    num_flags = words.index("--") if "--" in words else len(words)
    before = _SHOWS_EVERY_FLAG.set(HELP_ALL in words[:num_flags])
    try:
        yield ["--help" if word == HELP_ALL else word for word in words[:num_flags]] + list(words[num_flags:])
    finally:
        _SHOWS_EVERY_FLAG.reset(before)
