"""Rendering of messages to prompt text with the model's own Jinja template.

Templates come with downloaded models and messages come from any client. So a template gets plain JSON values only,
is rendered in a sandbox (template_program.py), and runs in a separate process with limited time and memory
(template_process.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twostroke.config.checks import check_bool
from twostroke.errors import InvalidParameter, InvalidPrompt, shorten
from twostroke.log import get_logger
from twostroke.tokenizer.messages import JSON, checked_messages, checked_tools, plain_json, with_joined_content
from twostroke.tokenizer.template_probes import ALWAYS_WRITTEN, ContentForms, DroppedRoles, UnwrittenParts
from twostroke.tokenizer.template_process import TemplateSource, TemplateStopped

log = get_logger(__name__)

MAX_TEMPLATE_CHARS = 512 * 1024
"""Characters of the longest template accepted; the longest published ones have some 30,000."""

_USED = frozenset({"default", "tool_use"})
"""Names of the templates that render conversations, among those that a model may have."""
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
TOOLS, CALLS, CALL_TEXTS = "tools", "tool calls", "text beside tool calls"
"""Names of conversation parts that a template may never write."""
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


def check_template(source: str) -> None:
    """Raise InvalidPrompt if a text is not a Jinja template."""
    _Template(source, {})


class ChatTemplate:
    """The chat template of one model.

    A template that does not compile causes a warning here and an InvalidPrompt for each chat; the model can still
    complete text.

    Args:
        templates: name to Jinja source; the template of a model with only one is named default.
        named_tokens: role to token text, visible to the template as bos_token, eos_token and so on.
    """

    def __init__(self, templates: Mapping[str, str], named_tokens: Mapping[str, str]) -> None:
        self._names = tuple(sorted(templates))
        self._named_tokens = dict(named_tokens)
        self._sources = tuple(templates.values())
        self._compiled: dict[str, _Template] = {}
        self._compile_errors: dict[str, str] = {}
        """Name of a template to the reason why it does not compile."""
        self._warned: set[str] = set()
        """Names of conversation parts that a warning was already logged for."""
        for name in _USED.intersection(templates):
            try:
                self._compiled[name] = _Template(templates[name], self._named_tokens)
            except InvalidPrompt as error:
                self._compile_errors[name] = str(error)
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
        """Return the prompt text of a conversation; encode it without special tokens, which the template has written.

        Args:
            messages: objects with a role and, usually, a content.
            tools: JSON schemas of functions the model may call.
            documents: for templates that support retrieval.
            add_generation_prompt: whether to open the assistant's turn.
            continue_final_message: whether to leave the last message open so that the model continues it.
            template_kwargs: further variables for the template, for example enable_thinking.

        Raises:
            InvalidPrompt: the model has no template, a message is malformed, or the template refuses or fails.
            InvalidParameter: switches that contradict each other, or a reserved name in template_kwargs.
        """
        check_bool("add_generation_prompt", add_generation_prompt)
        check_bool("continue_final_message", continue_final_message)
        variables = self._variables(template_kwargs) if template_kwargs else {}
        template = self._template(tools is not None)
        chat = checked_messages(
            messages,
            knows_developer=template.facts.knows_developer,
            reads_argument_text=template.facts.reads_argument_text,
            tests_missing_content=template.facts.tests_missing_content,
        )
        if template.facts.reads_content_parts or any(isinstance(message["content"], list) for message in chat):
            chat = [template.forms.fitted(message) for message in chat]
        if continue_final_message and add_generation_prompt:
            raise InvalidParameter(
                "continue_final_message", True, "cannot be combined with add_generation_prompt", "Switch one off."
            )
        if tools or any("tool_calls" in message for message in chat):
            self._warn_unwritten(chat, has_tools=bool(tools))
            chat = [_with_merged_text(message, template.unwritten) for message in chat]
        final_text = _mark_final_message(chat) if continue_final_message else None
        given = {
            **self._named_tokens,
            **variables,
            "tools": None if tools is None else checked_tools(tools),
            "documents": None if documents is None else plain_json(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        if any(message["role"] not in ALWAYS_WRITTEN for message in chat):
            template.dropped_roles.check(chat, given)
        rendered = template.render({**given, "messages": chat})
        return rendered if final_text is None else _cut_at_mark(rendered, final_text)

    def compile_now(self) -> None:
        """Run the probes of `unwritten` now, so that the first conversation with tools does not wait for them."""
        for template in self._compiled.values():
            unwritten = template.unwritten
            _ = unwritten.tools, unwritten.calls, unwritten.calls_beside_text, unwritten.text_beside_calls

    def unwritten(self, messages: Sequence[Mapping[str, Any]], *, has_tools: bool) -> list[str]:
        """Return what the template never writes of a conversation: TOOLS, CALLS of earlier turns, or CALL_TEXTS."""
        template = self._compiled.get(self._name(has_tools))
        if template is None:
            return []
        found: list[str] = []
        if has_tools and template.unwritten.tools:
            found.append(TOOLS)
        calling = [message for message in messages if message.get("tool_calls")]
        beside_text = any(_has_text(message.get("content")) for message in calling)
        if (calling and template.unwritten.calls) or (beside_text and template.unwritten.calls_beside_text):
            found.append(CALLS)
        if beside_text and template.unwritten.text_beside_calls:
            found.append(CALL_TEXTS)
        return found

    def mentions(self, name: str) -> bool:
        """Return whether any template contains `name`. If none does, none reads a field of this name."""
        return any(name in source for source in self._sources)

    def _warn_unwritten(self, messages: Sequence[JSON], *, has_tools: bool) -> None:
        """Log a warning, once each, for parts of this conversation that the model does not see."""
        for name in self.unwritten(messages, has_tools=has_tools):
            if name not in self._warned:
                self._warned.add(name)
                log.warning("this model's chat template does not write %s: the model does not see them", name)

    def _name(self, with_tools: bool) -> str:
        return "tool_use" if with_tools and "tool_use" in self._names else "default"

    def _template(self, with_tools: bool) -> _Template:
        name = self._name(with_tools)
        if name in self._compile_errors:
            raise InvalidPrompt(self._compile_errors[name])
        if name not in self._compiled:
            known = f" (its templates: {shorten(self._names)})" if self._names else ""
            raise InvalidPrompt(
                f"this model has no default chat template{known}. Send a completion prompt instead of messages, or "
                "give a template: `twostroke serve --chat-template FILE`, or chat_template.jinja in a model's folder."
            )
        return self._compiled[name]

    @staticmethod
    def _variables(template_kwargs: Mapping[str, Any]) -> JSON:
        if taken := sorted(RESERVED & set(template_kwargs)):
            raise InvalidParameter("chat_template_kwargs", taken[0], "is set by the conversation and cannot be given")
        return plain_json(template_kwargs, "chat_template_kwargs")


class _Template:
    """One template, rendered in a separate process."""

    def __init__(self, source: str, named_tokens: Mapping[str, str]) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidPrompt(
                f"the model's chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS} are run."
            )
        self._source = TemplateSource(source)
        self.facts = self._source.facts
        self.forms = ContentForms(self._probe, named_tokens, reads_parts=self.facts.reads_content_parts)
        self.dropped_roles = DroppedRoles(self._probe, self.forms.fitted)
        call_content = None if self.facts.tests_missing_content else ""
        self.unwritten = UnwrittenParts(self._probe, named_tokens, call_content)
        self._stopped: TemplateStopped | None = None
        """Error of the first probe that was stopped; later probes fail with it at once."""

    def render(self, variables: JSON) -> str:
        return self._source.render(variables)

    def _probe(self, variables: JSON) -> str:
        if self._stopped is not None:
            raise self._stopped
        try:
            return self._source.render(variables, probes=True)
        except TemplateStopped as error:
            self._stopped = error
            raise


def _with_merged_text(message: JSON, probes: UnwrittenParts) -> JSON:
    """Move the text of a turn with tool calls behind its reasoning, if the template accepts only one of them."""
    if "tool_calls" not in message or "thinking" not in message or not _has_text(message["content"]):
        return message
    if not probes.takes_reasoning_or_text:
        return message
    text = f"{message['thinking']}\n{with_joined_content(message)['content']}"
    return {**message, "content": "", "thinking": text, "reasoning_content": text}


def _has_text(content: Any) -> bool:
    """Return whether the content of a message, checked or as received, contains text."""
    if not isinstance(content, list):
        return bool(content)
    parts = cast(list[Any], content)
    return any(cast(JSON, part).get("text") if isinstance(part, dict) else part for part in parts)


def _mark_final_message(chat: list[JSON]) -> str:
    """Append a mark to the last text of the last message; return that text."""
    if "tool_calls" in chat[-1]:  # calls are written behind the text, and would be cut off with the mark
        raise InvalidPrompt(
            "the last message cannot be continued: it ends with tool calls. Send their results, or leave "
            "continue_final_message out."
        )
    content = chat[-1].get("content")
    if isinstance(content, str):
        chat[-1]["content"] = content + _CONTINUE_MARK
        return content
    for part in reversed(cast(list[Any], content) if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            text = part["text"]
            part["text"] = text + _CONTINUE_MARK
            return text
    raise InvalidPrompt("the last message cannot be continued: it has no text.")


def _cut_at_mark(rendered: str, final_text: str) -> str:
    """Return the prompt up to the mark; the space behind the mark shows whether the template trimmed the message."""
    position = rendered.rfind(_CONTINUE_MARK.strip())
    if position < 0 or final_text.strip() not in rendered:
        raise InvalidPrompt(
            "the last message cannot be continued: this model's chat template does not write the last message "
            "unchanged. Send it as a completion prompt, or let the conversation end with a message of the user."
        )
    cut = rendered[:position]
    return cut if rendered[position:].startswith(_CONTINUE_MARK) else cut.rstrip()
