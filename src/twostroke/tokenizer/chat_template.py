"""Messages to prompt text: the model's own Jinja template, in a sandbox.

The settings are those of transformers, so that a template renders to the same text. A template comes with a model
from somewhere, and messages come from anyone: the template sees plain JSON values only, and how long it may loop and
how much it may write is bounded. (Not what a filter may do in one call: a folder of a model is trusted that far.)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.config.checks import switch
from twostroke.errors import InvalidParameter, InvalidPrompt
from twostroke.log import get_logger
from twostroke.plain_words import reason_of
from twostroke.tokenizer.dropped_roles import DroppedRoles
from twostroke.tokenizer.messages import checked_messages, with_joined_content, written_json
from twostroke.tokenizer.plain_json import JSON, plain_json

log = get_logger(__name__)

MAX_TEMPLATE_CHARS = 512 * 1024
"""The longest published templates have some 30,000."""
MAX_PROMPT_CHARS = 64 * 2**20
MAX_STEPS = 2_000_000
"""Passes through loops and calls of macros in one rendering; a thousand messages need some ten thousand."""
MAX_REPEATED_CHARS = 1_000_000

_USED = frozenset({"default", "tool_use"})
"""Of the templates that a model may bring, those that a conversation is rendered with."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def check_template(source: str) -> None:
    """Raises InvalidPrompt for a text that is no Jinja template."""
    _Template(source)


class ChatTemplate:
    """The chat template of one model.

    One that cannot be compiled is a warning here and an InvalidPrompt for each chat: the model completes texts as well.

    Args:
        templates: name to Jinja source; a model with one template calls it default.
        named_tokens: role to token text, visible to the template as bos_token, eos_token and so on.
    """

    def __init__(self, templates: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._names = tuple(sorted(templates))
        self._named_tokens = dict(named_tokens)
        self._sources = tuple(templates.values())
        self._compiled: dict[str, _Template] = {}
        self._broken: dict[str, str] = {}
        """Why a template cannot be compiled."""
        for name in _USED.intersection(templates):
            try:
                self._compiled[name] = _Template(templates[name])
            except InvalidPrompt as error:
                self._broken[name] = str(error)
                log.warning("chats will be refused: %s", error)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it without adding special tokens, the template wrote them.

        Args:
            messages: objects with a role and, as a rule, a content.
            tools: JSON schemas of functions the model may call.
            documents: for templates that know retrieval.
            add_generation_prompt: whether to open the assistant's turn.
            continue_final_message: whether to leave the last message open, for the model to go on within it.
            template_kwargs: further variables for the template, for example enable_thinking.

        Raises:
            InvalidPrompt: the model has no template, a message is malformed, or the template refuses or fails.
            InvalidParameter: switches that contradict each other, or a reserved name in template_kwargs.
        """
        switch("add_generation_prompt", add_generation_prompt)
        switch("continue_final_message", continue_final_message)
        variables = self._variables(template_kwargs or {})
        template = self._template(tools is not None)
        chat = checked_messages(
            messages, knows_developer=template.knows_developer, reads_argument_text=template.reads_argument_text
        )
        if not template.reads_content_parts:
            chat = [with_joined_content(message) for message in chat]
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", True, "cannot be combined with add_generation_prompt", "Switch one off."
            )
        final_text = _mark_final_message(chat) if continue_final_message else None
        given = {
            **self._named_tokens,
            **variables,
            "tools": None if tools is None else plain_json(list(tools), "tools"),
            "documents": None if documents is None else plain_json(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        template.dropped_roles.check(chat, given)
        rendered = template.render({**given, "messages": chat})
        return rendered if final_text is None else _cut_at_mark(rendered, final_text)

    def mentions(self, name: str) -> bool:
        """Whether a template may read a field of this name; one that does not contain the name does not."""
        return any(name in source for source in self._sources)

    def _template(self, with_tools: bool) -> _Template:
        name = "tool_use" if with_tools and "tool_use" in self._names else "default"
        if name in self._broken:
            raise InvalidPrompt(self._broken[name])
        if name not in self._compiled:
            known = f" (its templates: {', '.join(self._names)})" if self._names else ""
            raise InvalidPrompt(
                f"this model has no default chat template{known}. Send a completion prompt instead of messages, or add "
                "a chat_template.jinja to the model's folder."
            )
        return self._compiled[name]

    @staticmethod
    def _variables(template_kwargs: Mapping[str, Any]) -> JSON:
        if taken := sorted(RESERVED & set(template_kwargs)):
            raise InvalidParameter("chat_template_kwargs", taken[0], "is set by the conversation itself")
        return plain_json(template_kwargs, "chat_template_kwargs")


class _Template:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidPrompt(
                f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are run."
            )
        environment = _Environment()
        try:
            tree = environment.parse(source)
            self.reads_content_parts = _reads_content_parts(tree)
            self.reads_argument_text = _reads_argument_text(tree)
            self.knows_developer = any(const.value == "developer" for const in tree.find_all(nodes.Const))
            _count_steps(tree)
            self._template = environment.from_string(tree)
        except Exception as error:  # jinja2 checks little itself: Python's own compiler may refuse what it makes of it
            raise InvalidPrompt(f"the model's chat template cannot be compiled: {reason_of(error)}") from error
        self.dropped_roles = DroppedRoles(self.render)

    def render(self, variables: JSON) -> str:
        steps = _Steps()
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate({**variables, _STEP: steps.take}):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise jinja2.TemplateError(f"it writes more than {MAX_PROMPT_CHARS} characters")
        except RecursionError as error:
            raise InvalidPrompt("the chat template failed: it calls itself without end.") from error
        except Exception as error:  # the template is a foreign program: any operation in it may fail in any way
            raise InvalidPrompt(f"the chat template refused the conversation: {reason_of(error)}") from error
        return "".join(pieces)


_STEP = "__twostroke_step__"


class _Steps:
    """Counts what a template does, because a thread that renders one cannot be stopped from outside."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def take(self) -> str:
        self._num_left -= 1
        if self._num_left < 0:
            raise jinja2.TemplateError(f"it needs more than {MAX_STEPS} steps")
        return ""


def _count_steps(tree: nodes.Template) -> None:
    """Puts a counter into the body of every loop and macro."""
    for body_owner in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        counter = nodes.Call(nodes.Name(_STEP, "load"), [], [], None, None)
        step = nodes.ExprStmt(counter).set_lineno(body_owner.lineno)
        body_owner.body.insert(0, step.set_environment(cast(jinja2.Environment, tree.environment)))


def _reads_content_parts(tree: nodes.Template) -> bool:
    """Whether the template walks through a message's content as a list of parts; most only know a text."""
    names = _names_of(tree, "content")
    return any(_is_field(loop.iter, "content", names) for loop in tree.find_all(nodes.For))


def _reads_argument_text(tree: nodes.Template) -> bool:
    """Whether the template tests for a call's arguments being a text, and so writes a text as it is."""
    names = _names_of(tree, "arguments")
    tests = (test for test in tree.find_all(nodes.Test) if test.name == "string")
    return any(_is_field(test.node, "arguments", names) for test in tests)


def _names_of(tree: nodes.Template, field: str) -> set[str]:
    """Names under which a template knows a field: its own, and variables that it is assigned to."""
    names = {field}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_field(assign.node, field, names):
            names.add(assign.target.name)
    return names


def _is_field(node: nodes.Node, field: str, names: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr=name) | nodes.Getitem(arg=nodes.Const(value=name)):
            return name == field
        case nodes.Name(name=name):
            return name in names
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_field(inner, field, names)
        case _:
            return False


class _CodeGenerator(CodeGenerator):
    """Leaves constant expressions to the rendering: a template is compiled when a model is loaded, chat or not."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates; multiplying may not be used to fill the memory."""

    intercepted_binops = frozenset({"*", "**"})
    code_generator_class = _CodeGenerator

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # see _CodeGenerator
        )
        self.filters["tojson"] = _to_json
        offered: dict[str, Any] = {"dict": _Dict(), "namespace": _Namespace}
        offered |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        cast(dict[str, Any], self.globals).update(offered)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise jinja2.TemplateError("it raises a number to a power above 64")
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(times, int):
                size = len(cast(Sequence[object], value)) * times
                if size > MAX_REPEATED_CHARS:
                    raise jinja2.TemplateError(f"it repeats a value to a length of {size}")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant wrote, for training; in a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an attribute of the instance)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A block of its own, because a variable that is set inside must not be seen behind it.
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(lineno)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes for HTML, which models have never seen.
    if ensure_ascii or indent is not None or separators is not None or sort_keys:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return written_json(value)


class _Dict:
    """`dict` without the class behind it, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that takes no underscored names."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # pyright: ignore[reportSelfClsParameterName]
        # No name for self: `namespace(self=...)` is allowed in templates.
        self: _Namespace = args[0]
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not hold the underscored name {name!r}")


def _mark_final_message(chat: list[JSON]) -> str:
    """Appends a mark to the last text of the last message; returns the text."""
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(cast(list[Any], content) if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise InvalidPrompt("the last message is to be continued, but it has no text to continue.")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    """Everything up to the mark; whether the template trimmed the message shows in the space behind the mark."""
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in rendered:
        raise InvalidPrompt(
            "the last message cannot be continued: this model's chat template does not write the last message as it "
            "is. "
            "Send it as a completion prompt, or let the conversation end with a message of the user."
        )
    cut = rendered[:position]
    return cut if rendered[position:].startswith(_CONTINUE_MARK) else cut.rstrip()
