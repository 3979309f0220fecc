"""Finds out whether a chat template writes tools, tool calls and the text beside them: many models' templates do not.

What a template does not write the model never sees. To find out, the template renders the same conversation with two
different tools, calls or texts; where what it writes is equal, it writes none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from twostroke.errors import InvalidPrompt
from twostroke.tokenizer.messages import CallArguments
from twostroke.tokenizer.plain_json import JSON
from twostroke.tokenizer.template_process import TemplateStopped


class Unwritten:
    """What one template never writes, found out when it is first asked.

    Args:
        render: the template; it takes its variables, and raises InvalidPrompt where it refuses.
        named_tokens: variables that every rendering has.
        call_content: content of a turn that only calls tools.
    """

    def __init__(
        self, render: Callable[[JSON], str], named_tokens: Mapping[str, str], call_content: str | None = ""
    ) -> None:
        self._render = render
        self._named_tokens = named_tokens
        self._call_content = call_content

    @cached_property
    def tools(self) -> bool:
        """Whether tools are never written."""
        return self._never_differ(
            [[(chat, _tools(name)) for name in ("f", "g")] for chat in ([_ASKED], [_SYSTEM, _ASKED])]
        )

    @cached_property
    def calls(self) -> bool:
        """Whether the calls of earlier turns that have no text are never written."""
        return self._hides_calls(self._call_content)

    @cached_property
    def calls_beside_text(self) -> bool:
        """Whether the calls of earlier turns that have a text are never written."""
        return self._hides_calls("mark")

    @cached_property
    def text_beside_calls(self) -> bool:
        """Whether the text of earlier turns that call tools is never written."""
        return self._never_differ(
            [
                [([_ASKED, _called("f", text), next_turn], tools) for text in ("markone", "marktwo")]
                for next_turn in (_RESULT, _ASKED)
                for tools in (None, _tools("f"))
            ]
        )

    def _hides_calls(self, content: str | None) -> bool:
        return self._never_differ(
            [
                [([_ASKED, _called(name, content), next_turn], tools) for name in ("f", "g")]
                for next_turn in (_RESULT, _ASKED)
                for tools in (None, _tools("f"))
            ]
        )

    def _never_differ(self, pairs: Sequence[Sequence[_Chat]]) -> bool:
        """Whether the template writes the same for both of each pair, as far as it takes them."""
        found: list[bool] = []
        for pair in pairs:
            try:
                first, second = (self._text(messages, tools) for messages, tools in pair)
            except TemplateStopped:
                return False
            except InvalidPrompt:  # it refuses such conversations, and speaks for itself
                continue
            found.append(first == second)
        return bool(found) and all(found)

    def _text(self, messages: list[JSON], tools: list[JSON] | None) -> str:
        given: dict[str, Any] = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": True}
        return self._render({**self._named_tokens, **given})


_Chat = tuple[list[JSON], list[JSON] | None]
"""Messages and tools."""
_ASKED: JSON = {"role": "user", "content": "mark"}
_SYSTEM: JSON = {"role": "system", "content": "mark"}
_RESULT: JSON = {"role": "tool", "tool_call_id": "callmark0", "content": "mark"}


def _tools(name: str) -> list[JSON]:
    parameters: JSON = {"type": "object", "properties": {name: {"type": "string"}}}
    return [{"type": "function", "function": {"name": name, "description": name, "parameters": parameters}}]


def _called(name: str, content: str | None) -> JSON:
    arguments = CallArguments({name: name}, f'{{"{name}": "{name}"}}')
    call: JSON = {"id": "callmark0", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}
