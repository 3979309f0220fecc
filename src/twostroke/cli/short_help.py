"""`--help` in two screens: a cyclopts formatter that shows some flags of a command, and examples behind them."""

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
    """Formatter of help panels that leaves out most flags."""

    def __init__(self, flags: Iterable[str], lines: Mapping[str, str]) -> None:
        """Set what is shown.

        Args:
            flags: the flags that stay, beside those that are required and the words of the command.
            lines: descriptions by flag or command, in place of the long ones.
        """
        self._flags = frozenset(flags)
        self._lines = lines

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print the entries of a panel that stay; a panel without any is left out."""
        from cyclopts.help import DefaultFormatter

        if not _SHOWS_EVERY_FLAG.get() or panel.format == "command":
            entries = [self._shortened(entry) for entry in panel.entries if self._is_shown(panel, entry)]
            panel = panel.copy(entries=entries)
        if panel.entries:
            DefaultFormatter()(console, options, panel)

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the line of the usage, as the long help does."""
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
    """Return the keywords that give a command of cyclopts its short help.

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
    """Return the keywords that give a program its list of commands.

    Args:
        program: as it is called, such as "twostroke bench".
        commands: what each of them does, where their own descriptions do not say it.
    """
    told = (
        (f"{program} COMMAND --help", "the flags that people use first, and examples"),
        (f"{program} COMMAND {HELP_ALL}", "every flag of a command"),
    )
    return {"help_formatter": ShortHelp((), commands), "help_epilogue": _lines(told)}


def _lines(commands: Iterable[tuple[str, str]]) -> str:
    """Return commands and what they do as Markdown, a line each."""
    return "  \n".join(f"`{command}`  # {what}" for command, what in commands)


@contextmanager
def help_of(words: Sequence[str]) -> Generator[list[str]]:
    """Give the words of a command as the parser knows them; meanwhile help is as long as they ask for."""
    num_flags = words.index("--") if "--" in words else len(words)
    before = _SHOWS_EVERY_FLAG.set(HELP_ALL in words[:num_flags])
    try:
        yield ["--help" if word == HELP_ALL else word for word in words[:num_flags]] + list(words[num_flags:])
    finally:
        _SHOWS_EVERY_FLAG.reset(before)
