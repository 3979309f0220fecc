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
from twostroke.tokenizer.content_parts import joined_content, refuse_media

log = get_logger(__name__)

MAX_TEMPLATE_CHARS = 512 * 1024
"""The longest published templates have some 30,000."""
MAX_PROMPT_CHARS = 64 * 2**20
MAX_STEPS = 2_000_000
"""Passes through loops and calls of macros in one rendering; a thousand messages need some ten thousand."""
MAX_REPEATED_CHARS = 1_000_000
MAX_DEPTH = 64
"""Of lists and objects within messages and tools."""

_USED = frozenset({"default", "tool_use"})
"""Of the templates that a model may bring, those that a conversation is rendered with."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some older ones the second."""

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "

JSON = dict[str, Any]


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
        chat = _checked_messages(messages)
        if not template.reads_content_parts:
            chat = [joined_content(message) for message in chat]
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", True, "cannot be combined with add_generation_prompt", "Switch one off."
            )
        final_text = _mark_final_message(chat) if continue_final_message else None
        rendered = template.render(
            {
                **self._named_tokens,
                **variables,
                "messages": [_with_reasoning(message) for message in chat],
                "tools": None if tools is None else _plain(list(tools), "tools"),
                "documents": None if documents is None else _plain(list(documents), "documents"),
                "add_generation_prompt": add_generation_prompt,
            }
        )
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
        return _plain(template_kwargs, "chat_template_kwargs")


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
            _count_steps(tree)
            self._template = environment.from_string(tree)
        except Exception as error:  # jinja2 checks little itself: Python's own compiler may refuse what it makes of it
            raise InvalidPrompt(f"the model's chat template cannot be compiled: {_reason(error)}") from error

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
            raise InvalidPrompt(f"the chat template refused the conversation: {_reason(error)}") from error
        return "".join(pieces)


def _reason(error: Exception) -> str:
    """What it says, or what it is when it says nothing, as a MemoryError does."""
    return str(error) or type(error).__name__


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
    aliases = {"content"}
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, aliases):
            aliases.add(assign.target.name)
    return any(_is_content(loop.iter, aliases) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name(name=name):
            return name in aliases
        case nodes.Filter(node=nodes.Node() as inner):
            return _is_content(inner, aliases)
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
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy out of plain JSON types; objects with methods could do things the sandbox does not know of."""
    if depth > MAX_DEPTH:
        raise InvalidPrompt(f"{where} is nested more than {MAX_DEPTH} levels deep.")
    if value is None or isinstance(value, bool):
        return value
    for kind, copy in ((str, str.__str__), (int, int.__int__), (float, float.__float__)):
        if isinstance(value, kind):
            return cast(Any, copy)(value)
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return {_key(key, where): _plain(item, f"{where}.{key}", depth + 1) for key, item in items}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(cast(Sequence[Any], value))]
    raise InvalidPrompt(f"{where} is of type {type(value).__name__}; only JSON values can be put into a prompt.")


def _key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidPrompt(f"{where} has the key {key!r}; keys must be texts.")
    return str.__str__(key)


def _checked_messages(messages: Any) -> list[JSON]:
    if not isinstance(messages, (list, tuple)):
        raise InvalidPrompt(f"messages must be a list of objects, not {type(messages).__name__}.")
    if not messages:
        raise InvalidPrompt("messages is empty; give at least one message, like {'role': 'user', 'content': '...'}.")
    chat: list[JSON] = []
    for index, message in enumerate(cast(Sequence[Any], messages)):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidPrompt(f"{where} must be an object with role and content, not {type(message).__name__}.")
        plain = _plain(message, where)
        if not isinstance(plain.get("role"), str) or not plain["role"]:
            raise InvalidPrompt(f"{where} has no role; use for example 'system', 'user' or 'assistant'.")
        refuse_media(plain, where)
        # OpenAI clients send content and tool_calls as null; templates know them as missing.
        chat.append({key: value for key, value in plain.items() if value is not None})
    return chat


def _with_reasoning(message: JSON) -> JSON:
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


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
    raise InvalidPrompt("continue_final_message is set, but the last message has no text to continue.")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    """Everything up to the mark; whether the template trimmed the message shows in the space behind the mark."""
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in rendered:
        raise InvalidPrompt(
            "continue_final_message is set, but this model's chat template does not write the last message as it is. "
            "Send it as a completion prompt, or leave continue_final_message out."
        )
    cut = rendered[:position]
    return cut if rendered[position:].startswith(_CONTINUE_MARK) else cut.rstrip()
