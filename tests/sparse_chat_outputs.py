"""Outputs of models with experts and their meaning: GLM-4.5's calls, and the channels of gpt-oss."""

from __future__ import annotations

from typing import Any

from chat_output import NOW, PARIS, Output, same_output
from twostroke.api.parsers.output import ToolCall

GLM45 = (
    Output(
        "types of the schema",
        "glm45",
        "I will.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>fresh</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>options</arg_key>\n<arg_value>{"a": null, "b": [1]}</arg_value>\n'
        "<arg_key>unit</arg_key>\n<arg_value>null</arg_value>\n"
        "<arg_key>anything</arg_key>\n<arg_value>[1, 2]</arg_value>\n"
        "<arg_key>unknown</arg_key>\n<arg_value>1.5</arg_value>\n</tool_call>",
        "I will.",
        (
            ToolCall(
                "get_weather",
                '{"city": "Paris", "days": 3, "fresh": true, "options": {"a": null, "b": [1]}, '
                '"unit": null, "anything": [1, 2], "unknown": 1.5}',
            ),
        ),
    ),
    Output("no arguments", "glm45", "<tool_call>now\n</tool_call>", "", (NOW,)),
    Output(
        "two without line ends",
        "glm47",
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value></tool_call>"
        "<tool_call>now</tool_call> x",
        "x",
        (PARIS, NOW),
    ),
    Output(
        "a value of several lines with tags and quotes",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n"
        '<arg_value>\n<b>"x"</b> </tool_call>\n</arg_value>\n</tool_call>',
        "",
        (ToolCall("get_weather", r'{"city": "\n<b>\"x\"</b> </tool_call>\n"}'),),
    ),
    Output(
        "unclosed values",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris\n<arg_key>days</arg_key>\n<arg_value>3\n"
        "</tool_call>",
        "",
        (ToolCall("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    Output(
        "values that are not of their type",
        "glm45",
        "<tool_call>get_weather<arg_key>days</arg_key><arg_value>a few</arg_value><arg_key>fresh</arg_key>"
        "<arg_value>NaN</arg_value></tool_call>",
        "",
        (ToolCall("get_weather", '{"days": "a few", "fresh": "NaN"}'),),
    ),
    Output(
        "cut off in a string",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
        "",
        (ToolCall("get_weather", '{"city": "Par'),),
    ),
    Output(
        "cut off in a tag",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_",
        "",
        (ToolCall("get_weather", '{"city": "Paris"'),),
    ),
    Output(
        "a key without a value",
        "glm45",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\nParis\n</tool_call>",
        "<arg_key>city</arg_key>\nParis\n</tool_call>",
        (ToolCall("get_weather", "{}"),),
    ),
    Output(
        "a key without end",
        "glm45",
        "<tool_call>now\n<arg_key>" + "x" * 600,
        "<arg_key>" + "x" * 600,
        (NOW,),
    ),
    Output(
        "with thoughts",
        "glm45",
        "\n<think>I could <tool_call>now</tool_call></think>\n<tool_call>now\n</tool_call>",
        "",
        (NOW,),
        "I could <tool_call>now</tool_call>",
        "glm45",
    ),
    same_output("JSON", "glm45", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'),
    same_output("a name without end", "glm45", "<tool_call>" + "x" * 600 + "</tool_call>"),
    same_output("a name and no more", "glm45", "<tool_call>now"),
)


def _harmony(*messages: str) -> str:
    """Return the model's output after `<|start|>assistant`."""
    return "<|start|>assistant".join(messages)


_ANALYSIS = "<|channel|>analysis<|message|>They ask.\nHm.<|end|>"
_CALL_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>"
_FINAL = "<|channel|>final<|message|>It is noon.\n<|return|>"
_CHANNELS: dict[str, Any] = {"reasoning_parser": "openai_gptoss"}
HARMONY = (
    Output("an answer", "openai", _FINAL, "It is noon.\n", **_CHANNELS),
    Output(
        "thought and answer",
        "openai",
        _harmony(_ANALYSIS, _FINAL[:-10]),
        "It is noon.\n",
        (),
        "They ask.\nHm.",
        **_CHANNELS,
    ),
    Output("thought and call", "openai", _harmony(_ANALYSIS, _CALL_NOW), "", (NOW,), "They ask.\nHm.", **_CHANNELS),
    Output(
        "a preamble, two thoughts and two calls",
        "openai",
        _harmony(
            _ANALYSIS,
            "<|channel|>commentary<|message|>Let me look. <|end|>",
            "<|channel|>analysis<|message|>\nSo.\n<|end|>",
            _CALL_NOW,
            '<|channel|>commentary to=functions.get_weather<|message|>{"city": "Paris"}<|call|>',
            " <|channel|>final<|message|> Sunny.<|return|>",
        ),
        "Let me look.\nSunny.",
        (NOW, PARIS),
        "They ask.\nHm.\nSo.",
        **_CHANNELS,
    ),
    Output(
        "the recipient first",
        "openai",
        ' to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        "",
        (PARIS,),
        **_CHANNELS,
    ),
    Output(
        "the recipient in a further header",
        "openai",
        _harmony(_ANALYSIS, " to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}"),
        "",
        (NOW,),
        "They ask.\nHm.",
        **_CHANNELS,
    ),
    Output(
        "a call in the analysis",
        "openai",
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
        "",
        (NOW,),
        **_CHANNELS,
    ),
    Output(
        "the namespace forgotten",
        "openai",
        "<|channel|>commentary to=now json<|message|>{}<|call|>",
        "",
        (NOW,),
        **_CHANNELS,
    ),
    Output(
        "no arguments", "openai", "<|channel|>commentary to=functions.now<|message|> <|call|>", "", (NOW,), **_CHANNELS
    ),
    Output(
        "no arguments, and the end",
        "openai",
        "<|channel|>commentary to=functions.now<|message|>",
        "",
        (NOW,),
        **_CHANNELS,
    ),
    Output(
        "markup in strings",
        "openai",
        r'<|channel|>commentary to=functions.f<|message|>{"a": "<|call|>\"}<|end|>", "b": [{}]}<|call|>',
        "",
        (ToolCall("f", r'{"a": "<|call|>\"}<|end|>", "b": [{}]}'),),
        **_CHANNELS,
    ),
    Output(
        "text behind the arguments",
        "openai",
        "<|channel|>commentary to=functions.now<|message|>{} so<|call|>",
        "so",
        (NOW,),
        **_CHANNELS,
    ),
    Output(
        "cut off in the arguments",
        "openai",
        '<|channel|>commentary to=functions.f<|message|>{"a": "x\\',
        "",
        (ToolCall("f", '{"a": "x\\'),),
        **_CHANNELS,
    ),
    Output("cut off in a thought", "openai", "<|channel|>analysis<|message|>Hm.\n", "", (), "Hm.\n", **_CHANNELS),
    Output(
        "another tool's thought",
        "openai",
        _harmony("<|channel|>analysis to=python code<|message|>1+1<|call|>", _FINAL),
        "It is noon.\n",
        (),
        "1+1",
        **_CHANNELS,
    ),
    Output(
        "words too many",
        "openai",
        _harmony("<|channel|>analysis?? a to=assistant<|channel|>??analysis 2<|message|>Hm.<|end|>", _FINAL),
        "It is noon.\n",
        (),
        "Hm.",
        **_CHANNELS,
    ),
    Output(
        "an end missing",
        "openai",
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Yes.<|start|>assistant<|channel|>analysis<|message|>b",
        "Yes.",
        (),
        "Hm.\nb",
        **_CHANNELS,
    ),
    Output(
        "an end and no header", "openai", "<|channel|>analysis<|message|>Hm.<|end|>Yes.", "Yes.", (), "Hm.", **_CHANNELS
    ),
    Output(
        "marks in a thought",
        "openai",
        "<|channel|>analysis<|message|>a <|channel|> b <|start|>user<|message|>c<|end|>Yes.",
        "Yes.",
        (),
        "a <|channel|> b <|start|>user<|message|>c",
        **_CHANNELS,
    ),
    Output(
        "opened by the prompt",
        "openai",
        "Hm.<|end|><|start|>assistant" + _FINAL,
        "It is noon.\n",
        (),
        "Hm.",
        prompt="<|start|>assistant<|channel|>analysis<|message|>",
        **_CHANNELS,
    ),
    Output(
        "a channel that there is not",
        "openai",
        "<|channel|>thoughts<|message|>a<|end|>",
        "<|channel|>thoughts<|message|>a",
        **_CHANNELS,
    ),
    same_output("no channel", "openai", "Yes. <|start|>assistant<|message|>No.", **_CHANNELS),
    same_output("somebody else's turn", "openai", "<|start|>user<|channel|>x<|message|>No.", **_CHANNELS),
    same_output("a header without end", "openai", "<|channel|>final" + "x" * 600 + "<|message|>No.", **_CHANNELS),
    same_output("a header over two lines", "openai", "<|channel|>final\n<|message|>No.", **_CHANNELS),
    same_output("arguments no object", "openai", "<|channel|>commentary to=functions.now<|message|>[1]", **_CHANNELS),
    same_output("no channel at all", "openai", ' {"a": "to=functions."} ', **_CHANNELS),
    Output(
        "channels and no tools",
        None,
        _harmony(_ANALYSIS, _CALL_NOW, _FINAL),
        "{}\nIt is noon.\n",
        (),
        "They ask.\nHm.",
        **_CHANNELS,
    ),
)
