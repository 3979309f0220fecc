"""`twostroke chat [MODEL]`: a conversation in the terminal; the prefix cache keeps each turn cheap.

A line is a message to the model, or a command that begins with a slash.
"""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import fields, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twostroke.cli.flags import (
    ChatSampling,
    ChatSamplingFlags,
    EngineFlagsWithoutModel,
    JsonFlag,
    ModelFlag,
    QuietFlag,
)
from twostroke.cli.generate import print_json, run_and_print, started_engine, summary
from twostroke.errors import ClientError, EngineError, InvalidParameter, TwostrokeError

if TYPE_CHECKING:
    from twostroke.client.text_engine import TextEngine
    from twostroke.outputs import RequestOutput

HELP = """\
/new                  forget the conversation (also /clear)
/set NAME VALUE       change a sampling setting: /set max_tokens 1000, /set temperature 0
/bye                  end the chat (also /exit, /quit, an empty line, Ctrl-D)
/help                 print this list (also /?)
All other lines are messages to the model. \"\"\" begins and ends a message of several lines. Put a space before a
message that begins with a slash. Ctrl-C stops an answer.
"""


class Command(StrEnum):
    """Command that a line gives to the chat itself."""

    NEW = "new"
    SET = "set"
    END = "end"
    HELP = "help"


_NAMES = {
    "/new": Command.NEW,
    "/clear": Command.NEW,
    "/reset": Command.NEW,
    "/set": Command.SET,
    "/bye": Command.END,
    "/exit": Command.END,
    "/quit": Command.END,
    "/q": Command.END,
    "/help": Command.HELP,
    "/?": Command.HELP,
    "/h": Command.HELP,
}
_COMMAND_FORM = re.compile(r"/[A-Za-z?][\w?-]*")
_ALIASES = {"num_predict": "max_tokens", "n_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
"""Names of sampling settings in Ollama and llama.cpp, with the name here."""
_NOT_SET = frozenset(
    {"structured_outputs", "logit_bias", "stop", "n", "allowed_token_ids", "bad_words", "stop_token_ids"}
)
"""Sampling settings that /set cannot change, because their values take more than one word."""


def command_of(line: str) -> tuple[Command, list[str]] | None:
    """Return the command that a line gives, and the words after it; return None for a message.

    >>> command_of("/set max_tokens 9"), command_of("/etc/hosts is what?"), command_of(" /bye")
    ((<Command.SET: 'set'>, ['max_tokens', '9']), None, None)

    Raises:
        ClientError: the line has the form of a command, but no command has this name.
    """
    first, *rest = line.split() or [""]
    if not line.startswith("/") or not _COMMAND_FORM.fullmatch(first):
        return None
    if first not in _NAMES:
        raise ClientError(
            f"there is no command {first}; /help lists all commands. Put a space before a message that begins with a "
            "slash."
        )
    return _NAMES[first], rest


def with_setting(sampling: ChatSampling, words: list[str]) -> ChatSampling:
    """Return the sampling settings after a /set command; Ollama's word `parameter` may precede the name.

    Raises:
        ClientError: the words are not a name and a value, or no setting has this name.
        InvalidParameter: the setting does not accept the value.
    """
    match words:
        case ["parameter", name, value] | [name, value]:
            pass
        case _:
            raise ClientError("/set takes a name and a value, such as /set max_tokens 1000.")
    name = name.lstrip("-").replace("-", "_")
    name = _ALIASES.get(name, name)
    known = sorted({field.name for field in fields(ChatSampling)} - _NOT_SET)
    if name not in known:
        raise ClientError(f"/set cannot change {name!r}; it can change {', '.join(known)}.")
    return replace(sampling, **{name: _value(name, value)})


def _value(name: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidParameter(name, text, "must be a number, true, false or null") from None


def chat(
    model: str | None = None,
    /,
    *,
    system: str | None = None,
    model_flag: ModelFlag = None,
    engine_flags: Annotated[EngineFlagsWithoutModel, Parameter(name="*")] = EngineFlagsWithoutModel(),
    sampling: ChatSamplingFlags = ChatSampling(),
    json_output: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Talk to a model; /help lists the commands, and an empty line, /bye or end of input ends the chat.

    An answer has at most 256 tokens unless --max-tokens or /set max_tokens changes this. A message that is refused or
    fails is left out of the conversation, and the chat continues. The exit code is then 1, unless the messages come
    from a terminal.

    Parameters
    ----------
    model
        Model folder or hub id; without it the embedded code model answers (a demonstration, not an assistant).
    model_flag
        The same as MODEL.
    system
        A system message to begin with.
    json_output
        Print only one JSON object per message: the output of `generate --json`, or {"error": ...} for a refused one.
    quiet
        Print no start-up lines and no figures.
    """
    engine = started_engine(engine_flags, model, model_flag, quiet=quiet)
    if not quiet:
        sys.stderr.write(f"answers  {_limit_text(sampling)}; /help lists the commands\n")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # input that is not UTF-8 is then refused as a message
    talk = _Conversation(engine, system, sampling, json_output=json_output, quiet=quiet)
    while (line := _read_line()).strip() and talk.handle_line(line):
        pass
    engine.close()
    if talk.num_failed and not sys.stdin.isatty():
        sys.exit(1)  # a pipe learns of the failure only from the exit code


class _Conversation:
    """Conversation with its engine and settings."""

    def __init__(
        self, engine: TextEngine, system: str | None, sampling: ChatSampling, *, json_output: bool, quiet: bool
    ) -> None:
        self._engine = engine
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._sampling = sampling
        self._json_output = json_output
        self._quiet = quiet
        self.num_failed = 0

    def handle_line(self, line: str) -> bool:
        """Answer a message or execute a command; return whether to read another line."""
        try:
            command = command_of(line)
            if command is None:
                self._answer(line.strip())
                return True
        except TwostrokeError as error:
            self._refuse(error)
            return True
        kind, words = command
        match kind:
            case Command.END:
                return False
            case Command.NEW:
                self._messages = list(self._opening)
            case Command.HELP:
                sys.stderr.write(HELP)
            case Command.SET:
                self._set(words)
        return True

    def _set(self, words: list[str]) -> None:
        try:
            self._sampling = with_setting(self._sampling, words)
        except TwostrokeError as error:
            self._refuse(error)
        else:
            if not self._quiet:
                sys.stderr.write(f"answers  {_limit_text(self._sampling)}\n")

    def _refuse(self, error: TwostrokeError) -> None:
        if self._json_output and isinstance(error, ClientError):  # the sender waits for one line per message
            print(json.dumps({"error": str(error)}), flush=True)
        sys.stderr.write(f"{error}\n")
        self.num_failed += 1

    def _answer(self, content: str) -> None:
        """Answer a message and print the text as it is generated; add both to the conversation on success."""
        from twostroke.client.chat_inputs import ChatInputs  # the engine has already loaded it
        from twostroke.client.output_processor import OutputKind

        question = {"role": "user", "content": content}
        chat = ChatInputs([*self._messages, question])
        request_id = self._engine.submit(chat, self._sampling, kind=OutputKind.DELTA)
        output = self._run(request_id)
        if output is None:
            return
        if self._json_output:
            print_json(output)
        elif not self._quiet and output.metrics is not None:
            sys.stderr.write(summary(output, output.metrics) + "\n")
            if output.outputs[0].finish_reason == "length":
                sys.stderr.write(f"cut off: {_limit_text(self._sampling)}; /set max_tokens 1000 allows more\n")
        if output.error is not None:
            raise EngineError(output.error)
        self._messages += [question, {"role": "assistant", "content": output.outputs[0].text}]

    def _run(self, request_id: str) -> RequestOutput | None:
        """Run the request to its end; abort it and return None after a Ctrl-C at a terminal."""
        from twostroke.client.text_engine import hold_interrupts

        try:
            with hold_interrupts() as let_interrupts_through:
                return run_and_print(self._engine, silent=self._json_output, between_steps=let_interrupts_through)
        except KeyboardInterrupt:
            if not sys.stdin.isatty() or not self._engine.is_consistent:
                raise
            self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()
            sys.stderr.write("\nstopped; the question is not part of the conversation\n")
            return None


def _limit_text(sampling: ChatSampling) -> str:
    most = (
        "as many tokens as the context has room for"
        if sampling.max_tokens is None
        else f"at most {sampling.max_tokens:,} tokens"
    )
    return f"{most} each (--max-tokens)"


def _read_line() -> str:
    """Return the next line, or the text between two marks, as typed; return "" at the end of input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        sys.stderr.write("> ")
        sys.stderr.flush()
    line = sys.stdin.readline()
    if not is_terminal or not line.startswith(_MULTILINE_MARK):
        return line
    parts = [line.removeprefix(_MULTILINE_MARK)]
    while not parts[-1].rstrip().endswith(_MULTILINE_MARK) and (more := sys.stdin.readline()):
        parts.append(more)
    return " " + "".join(parts).rstrip().removesuffix(_MULTILINE_MARK)  # a leading space: never a command


_MULTILINE_MARK = '"""'
"""Mark before and after a message of several lines, as in Ollama."""
