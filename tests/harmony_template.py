"""A chat template of channels, for tests: what it writes and what it refuses is as gpt-oss's."""

from __future__ import annotations

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('thinking or content, not both') }}{% endif %}"
    "{% set turns = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') %}"
    "{% set later = turns | rejectattr('tool_calls') | list %}"
    "{% if (m.thinking or m.content) and not later %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking or m.content }}<|end|>{% endif %}"
    "{% set call = m.tool_calls[0].function %}"
    "<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>"
    "{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort or '' }}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
