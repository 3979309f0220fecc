"""One Jinja template as a program: compiled and rendered in a sandbox. It must run in a separate process.

The settings are those of transformers, so that a template renders to the same text. A template gets plain JSON
values only. Loop passes and written characters are counted here, which gives clear errors for honest mistakes. The
cost of a single operation cannot be counted from inside; the process that runs the template has limits
(template_worker.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, cast

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twostroke.errors import InvalidPrompt
from twostroke.plain_words import kind_of, reason_of
from twostroke.tokenizer.messages import template_json
from twostroke.tokenizer.template_wire import MAX_PROMPT_CHARS, TemplateFacts

JSON = dict[str, Any]

MAX_STEPS = 2_000_000
"""Maximum loop passes and macro calls of one rendering; a thousand messages need some ten thousand."""
MAX_REPEATED_CHARS = 1_000_000


class TemplateProgram:
    """One compiled template.

    Raises:
        InvalidPrompt: it is not a Jinja template.
        MemoryError: compiling needs more memory than there is.
    """

    def __init__(self, source: str) -> None:
        self._environment = _Environment()
        try:
            tree = self._environment.parse(source)
            self.facts = TemplateFacts(
                reads_content_parts=_reads_content_parts(tree),
                reads_argument_text=_tests(tree, "arguments", "string"),
                tests_missing_content=_tests(tree, "content", "none") or _is_compared_with_none(tree, "content"),
                knows_developer=any(const.value == "developer" for const in tree.find_all(nodes.Const)),
            )
            _count_steps(tree)
            self._template = self._environment.from_string(tree)
        except MemoryError:
            raise
        except Exception as error:  # jinja2 checks little itself: Python's compiler may refuse the generated code
            raise InvalidPrompt(f"the model's chat template cannot be compiled: {reason_of(error)}") from error

    def render(self, variables: JSON) -> str:
        """Return the rendered text.

        Raises:
            InvalidPrompt: the template refuses the conversation, fails, or takes too many steps.
            MemoryError: rendering needs more memory than there is.
        """
        self._environment.steps = _Steps()
        pieces: list[str] = []
        num_chars = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                num_chars += len(piece)
                if num_chars > MAX_PROMPT_CHARS:
                    raise jinja2.TemplateError(f"it writes more than {MAX_PROMPT_CHARS} characters")
            return "".join(pieces)
        except MemoryError:
            raise
        except RecursionError as error:
            raise InvalidPrompt("the chat template failed: it calls itself without end.") from error
        except OSError as error:  # its message would name paths of this machine
            raise InvalidPrompt("the chat template failed: it asks for a file and can read none.") from error
        except Exception as error:  # the template is untrusted code: any operation may raise any exception
            raise InvalidPrompt(f"the chat template refused the conversation: {reason_of(error)}") from error


class _Steps:
    """Counter of a template's steps, which raises if the template loops without end."""

    def __init__(self) -> None:
        self._num_left = MAX_STEPS

    def take(self) -> str:
        self._num_left -= 1
        if self._num_left < 0:
            raise jinja2.TemplateError(f"it needs more than {MAX_STEPS} steps")
        return ""


def _count_steps(tree: nodes.Template) -> None:
    """Insert a step counter into the body of every loop and macro; names in a template cannot reach it."""
    for body_owner in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock))):
        counter = nodes.Call(nodes.EnvironmentAttribute("steps.take"), [], [], None, None)
        step = nodes.ExprStmt(counter).set_lineno(body_owner.lineno)
        body_owner.body.insert(0, step.set_environment(cast(jinja2.Environment, tree.environment)))


def _reads_content_parts(tree: nodes.Template) -> bool:
    """Return whether the template iterates over a message's content as a list of parts; most read only a string."""
    names = _names_of(tree, "content")
    return any(_is_field(loop.iter, "content", names) for loop in tree.find_all(nodes.For))


def _tests(tree: nodes.Template, field: str, kind: str) -> bool:
    """Return whether the template tests the kind of a field (`field is string`) and so supports such values."""
    names = _names_of(tree, field)
    tests = (test for test in tree.find_all(nodes.Test) if test.name == kind)
    return any(_is_field(test.node, field, names) for test in tests)


def _is_compared_with_none(tree: nodes.Template, field: str) -> bool:
    """Return whether the template compares a field with none, by == or !=."""
    names = _names_of(tree, field)
    none = nodes.Const(None)
    compares = (one for one in tree.find_all(nodes.Compare) if any(operand.expr == none for operand in one.ops))
    return any(_is_field(compare.expr, field, names) for compare in compares)


def _names_of(tree: nodes.Template, field: str) -> set[str]:
    """Return the names under which a template reads a field: its own, and variables that it is assigned to."""
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
    """Code generator that evaluates constant expressions at rendering, not at compilation.

    A template is compiled when a model is loaded, even if no chat follows.
    """

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Undefined(jinja2.Undefined):
    """A variable or field that is read but not set; error messages use JSON's terms."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        if self._undefined_hint or self._undefined_obj is jinja2.utils.missing:
            return super()._undefined_message
        return f"{kind_of(self._undefined_obj)} has no field {self._undefined_name!r}"


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox of transformers' chat templates, with limits on multiplication, which could fill the memory."""

    intercepted_binops = frozenset({"*", "**"})
    code_generator_class = _CodeGenerator
    steps: _Steps
    """Counter of the current rendering; a template's code takes one step in each loop pass."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # see _CodeGenerator
            undefined=_Undefined,
        )
        self.filters["tojson"] = _to_json
        offered: dict[str, Any] = {"dict": _Dict(), "namespace": _Namespace}
        offered |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        cast(dict[str, Any], self.globals).update(offered)

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise jinja2.TemplateError("it raises a number to a power above 64 or below -64")
        for value, times in ((left, right), (right, left)):
            if operator == "*" and isinstance(value, (str, list, tuple)) and isinstance(times, int):
                size = len(cast(Sequence[object], value)) * times
                if size > MAX_REPEATED_CHARS:
                    raise jinja2.TemplateError(f"it repeats a value to a length of {size}")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks assistant text for training; in a prompt it is replaced by its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it as an attribute of the instance)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # a separate block, because a variable set inside must not be visible after it
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
    # jinja2's own filter escapes for HTML, which models were not trained on
    if ensure_ascii or indent is not None or separators is not None or sort_keys:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return template_json(value)


class _Dict:
    """`dict` without the class itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that refuses names with a leading underscore."""

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
