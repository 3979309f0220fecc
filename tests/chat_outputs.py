"""Outputs of models and their meaning: generations of each family, whole, unusual, malformed and truncated."""

from __future__ import annotations

from chat_output import NOW, PARIS, TOOLS, Output, same_output
from sparse_chat_outputs import GLM45, HARMONY
from twostroke.api.parsers.output import ToolCall

__all__ = ("NOW", "OUTPUTS", "PARIS", "TOOLS", "Output")


def _hermes(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


HERMES = (
    Output("one call", "hermes", _hermes('{"name": "get_weather", "arguments": {"city": "Paris"}}'), "", (PARIS,)),
    Output(
        "parallel, text around",
        "hermes",
        "Let me see.\n"
        + _hermes('{"name": "get_weather", "arguments": {"city": "Paris"}}')
        + "\n"
        + _hermes('{"name":"now","arguments":{}}')
        + "\nDone.",
        "Let me see.\n\n\nDone.",
        (PARIS, NOW),
    ),
    Output("no space", "hermes", '<tool_call>{"name":"now","arguments":{}}</tool_call>', "", (NOW,)),
    Output("two in one tag", "hermes", _hermes('{"name": "now"}\n{"name": "now"}'), "", (NOW, NOW)),
    Output("list in a tag", "hermes", _hermes('[{"name": "now"}, {"name": "now"}]'), "", (NOW, NOW)),
    Output(
        "nested braces and tags in strings",
        "hermes",
        _hermes(r'{"name": "f", "arguments": {"a": {"b": [{}, "}]\"</tool_call>"]}, "c": "\u00e9\\"}}') + " ok",
        "ok",
        (ToolCall("f", r'{"a": {"b": [{}, "}]\"</tool_call>"]}, "c": "\u00e9\\"}'),),
    ),
    Output(
        "arguments before the name",
        "hermes",
        _hermes('{"arguments": {"city": "Paris"}, "name": "get_weather"}'),
        "",
        (PARIS,),
    ),
    Output(
        "arguments as a string",
        "hermes",
        _hermes(r'{"name": "f", "arguments": "{\"a\": 1}"}'),
        "",
        (ToolCall("f", '{"a": 1}'),),
    ),
    Output(
        "arguments null", "hermes", _hermes('{"id": 12, "name": "now", "arguments": null, "type": "x"}'), "", (NOW,)
    ),
    Output("no arguments as a text", "hermes", _hermes('{"name": "now", "arguments": ""}'), "", (NOW,)),
    Output("null as a text", "hermes", _hermes('{"name": "now", "arguments": " null "}'), "", (NOW,)),
    Output(
        "any member behind the arguments",
        "hermes",
        _hermes('{"name": "now", "arguments": {}, "why": "a, \\"b\\"", "deep": {"x": [1, {}]}, "sure": -1.5e3}') + "so",
        "so",
        (NOW,),
    ),
    Output(
        "no JSON behind the arguments",
        "hermes",
        _hermes('{"name": "now", "arguments": {}, why: 1}'),
        ", why: 1}\n</tool_call>",
        (NOW,),
    ),
    same_output("an id without end", "hermes", _hermes('{"id": "' + "x" * 600 + '", "name": "now"}')),
    Output("a name as an escape", "hermes", _hermes(r'{"name": "n\u006fw", "arguments": {}}'), "", (NOW,)),
    Output(
        "raw newline in a string",
        "hermes",
        _hermes('{"name": "f", "arguments": {"code": "a\n\tb"}}'),
        "",
        (ToolCall("f", r'{"code": "a\n\tb"}'),),
    ),
    Output(
        "brace missing",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        "",
        (ToolCall("f", '{"a": 1}'),),
    ),
    Output(
        "braces too many", "hermes", _hermes('{"name": "f", "arguments": {"a": 1}}}'), "", (ToolCall("f", '{"a": 1}'),)
    ),
    Output(
        "inner brace missing",
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>!',
        "!",
        (ToolCall("f", '{"a": {"b": 1}'),),
    ),
    Output(
        "slips in the arguments",
        "hermes",
        _hermes('{"name": "f", "arguments": {"a": tru,}}'),
        "",
        (ToolCall("f", '{"a": tru,}'),),
    ),
    Output("call after a broken one", "hermes", "<tool_call>no " + _hermes('{"name": "now"}'), "<tool_call>no", (NOW,)),
    same_output("not JSON", "hermes", "<tool_call>\nget_weather(Paris)\n</tool_call>"),
    same_output("other keys", "hermes", _hermes('{"function": "now", "arguments": {}}')),
    same_output("Python's quotes", "hermes", _hermes("{'name': 'now', 'arguments': {}}")),
    same_output("arguments no object", "hermes", _hermes('{"name": "now", "arguments": [1]}')),
    same_output("name no name", "hermes", _hermes('{"name": "a b", "arguments": {}}')),
    same_output("lone surrogate", "hermes", _hermes(r'{"name": "\ud800", "arguments": {}}')),
    same_output("a name without end", "hermes", _hermes('{"name": "' + "x" * 600 + '", "arguments": {}}')),
    same_output("cut off in the head", "hermes", '<tool_call>\n{"name": "get_wea'),
    same_output("spaces are kept", "hermes", "  a < b <tool_cal \n"),
    Output(
        "cut off in the arguments",
        "hermes",
        '<tool_call>\n{"name": "f", "arguments": {"a": "x\\',
        "",
        (ToolCall("f", '{"a": "x\\'),),
    ),
    Output("cut off in the end", "hermes", '<tool_call>{"name": "now", "arguments": {}}\n</tool_', "", (NOW,)),
    Output("end missing", "hermes", '<tool_call>{"name": "now", "arguments": {}} and so on', "and so on", (NOW,)),
    Output(
        "in the reasoning",
        "hermes",
        "<think>\nI could " + _hermes('{"name": "now"}') + "\n</think>\n\n" + _hermes('{"name": "now"}'),
        "",
        (NOW,),
        "I could " + _hermes('{"name": "now"}'),
        "qwen3",
    ),
)

QWEN3_CODER = (
    Output(
        "types of the schema",
        "qwen3_coder",
        "I will.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=fresh>\nTrue\n</parameter>\n"
        "<parameter=options>\n{'a': None, \"b\": [1]}\n</parameter>\n"
        "<parameter=unit>\nnull\n</parameter>\n<parameter=anything>\n[1, 2]\n</parameter>\n</function>\n</tool_call>",
        "I will.",
        (
            ToolCall(
                "get_weather",
                '{"city": "Paris", "days": 3, "fresh": true, "options": {"a": null, "b": [1]}, '
                '"unit": null, "anything": [1, 2]}',
            ),
        ),
    ),
    Output("no line ends", "qwen3_xml", "<tool_call><function=now></function></tool_call>", "", (NOW,)),
    Output("no parameters", "qwen3_coder", "<tool_call>\n<function=now>\n</function>\n</tool_call>", "", (NOW,)),
    Output("no wrapper", "qwen3_coder", "<function=now>\n</function>\n</tool_call> x", "x", (NOW,)),
    Output(
        "a value of several lines with tags and quotes",
        "qwen3_coder",
        '<tool_call>\n<function=write>\n<parameter=text>\n\n<b>"x"</b> </tool_call>\n\n</parameter>\n'
        "</function>\n</tool_call>",
        "",
        (ToolCall("write", r'{"text": "\n<b>\"x\"</b> </tool_call>\n"}'),),
    ),
    Output(
        "unclosed parameters",
        "qwen3_coder",
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>",
        "",
        (ToolCall("get_weather", '{"city": "Paris", "days": 3}'),),
    ),
    Output(
        "values that are not of their type",
        "qwen3_coder",
        "<function=get_weather><parameter=days>a few</parameter><parameter=fresh>NaN</parameter></function>",
        "",
        (ToolCall("get_weather", '{"days": "a few", "fresh": "NaN"}'),),
    ),
    Output("text within", "qwen3_coder", "<function=now>\nhm</function>", "<function=now>\nhm</function>"),
    Output("an object within", "qwen3_coder", f"<function=get_weather>\n{PARIS.arguments}\n</function>", "", (PARIS,)),
    Output(
        "cut off in a string",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nPar",
        "",
        (ToolCall("get_weather", '{"city": "Par'),),
    ),
    Output(
        "cut off in a number",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=days>\n1",
        "",
        (ToolCall("get_weather", '{"days": 1'),),
    ),
    Output(
        "cut off in a tag",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<param",
        "",
        (ToolCall("get_weather", '{"city": "Paris"'),),
    ),
    Output(
        "a parameter's name without end",
        "qwen3_coder",
        "<function=now>\n<parameter=" + "x" * 600,
        "<parameter=" + "x" * 600,
        (NOW,),
    ),
    same_output("no function", "qwen3_coder", "<tool_call>\nnow()\n</tool_call> <function="),
)

LLAMA3_JSON = (
    Output("one call", "llama3_json", '{"name": "get_weather", "parameters": {"city": "Paris"}}', "", (PARIS,)),
    Output(
        "several",
        "llama3_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": "now", "parameters": {}}',
        "",
        (PARIS, NOW),
    ),
    Output("with a type", "llama3_json", '{"type": "function", "name": "now", "parameters": {}} ', "", (NOW,)),
    same_output("JSON that is no call", "llama3_json", '{"name": "Ann", "parameters": {"age": 3}}'),
    same_output("JSON later", "llama3_json", 'So: {"name": "now", "parameters": {}}'),
)

PYTHONIC = (
    Output("one call", "pythonic", '[get_weather(city="Paris")]', "", (PARIS,)),
    Output(
        "all literals",
        "pythonic",
        "[get_weather(city='Pa)\\'r\\n', days=-3, fresh=True, options={'a': [None, (1.5, \"x\")]},\n "
        "unit=null), now()]",
        "",
        (
            ToolCall(
                "get_weather",
                '{"city": "Pa)\'r\\n", "days": -3, "fresh": true, "options": {"a": [null, [1.5, "x"]]}, "unit": null}',
            ),
            NOW,
        ),
    ),
    Output(
        "triple quotes",
        "pythonic",
        '[get_weather(city="""a"b\n""")] ok',
        "ok",
        (ToolCall("get_weather", r'{"city": "a\"b\n"}'),),
    ),
    Output("cut off", "pythonic", '[now(), get_weather(city="Par', ', get_weather(city="Par', (NOW,)),
    Output("the second is none", "pythonic", "[now(), later()]", ", later()]", (NOW,)),
    same_output("a list", "pythonic", "[1, 2, (3)]"),
    same_output("no keyword", "pythonic", "[get_weather('Paris')]"),
    same_output("no literal", "pythonic", "[get_weather(city=now())]"),
    same_output("bytes", "pythonic", "[get_weather(city=b'Paris')]"),
    same_output("infinity", "pythonic", "[get_weather(city=1e999)]"),
    same_output("brackets crossed", "pythonic", "[get_weather(city=[1)])]"),
    Output(
        "with tags",
        "llama4_pythonic",
        'I call <|python_start|>[get_weather(city="Paris")]<|python_end|>',
        "I call",
        (PARIS,),
    ),
    Output("without tags", "llama4_pythonic", ' [get_weather(city="Paris"), now( )]', "", (PARIS, NOW)),
)

MISTRAL = (
    Output(
        "a list",
        "mistral",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "now", "arguments": {}}]',
        "",
        (PARIS, NOW),
    ),
    Output("a name", "mistral", '[TOOL_CALLS]get_weather{"city": "Paris"}[TOOL_CALLS]now{}', "", (PARIS, NOW)),
    Output("arguments marked", "mistral", 'Ok.[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}', "Ok.", (PARIS,)),
    Output("with an id", "mistral", '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}', "", (PARIS,)),
    Output("with thoughts", "mistral", "[THINK]Hm.[/THINK][TOOL_CALLS]now{}", "", (NOW,), "Hm.", "mistral"),
    same_output("an id without end", "mistral", "[TOOL_CALLS]now[CALL_ID]" + "x" * 600 + "[ARGS]{}"),
    same_output("no arguments", "mistral", "[TOOL_CALLS]now and then"),
    same_output("no name", "mistral", '[TOOL_CALLS] "now" {}'),
)

_V3_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'  # noqa: RUF001
DEEPSEEK = (
    Output(
        "the second has no end",
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"  # noqa: RUF001
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{} x",  # noqa: RUF001
        "x",
        (NOW, NOW),
    ),
    Output("one call", "deepseek_v3", f"Ok.<｜tool▁calls▁begin｜>{_V3_CALL}<｜tool▁calls▁end｜>", "Ok.", (PARIS,)),  # noqa: RUF001
    Output(
        "two", "deepseek_v3", f"<｜tool▁calls▁begin｜>{_V3_CALL}\n{_V3_CALL}<｜tool▁calls▁end｜>x", "x", (PARIS, PARIS)  # noqa: RUF001
    ),
    Output(
        "cut off", "deepseek_v3", f"<｜tool▁calls▁begin｜>{_V3_CALL[:-19]}", "", (PARIS,)  # noqa: RUF001
    ),
    same_output("empty", "deepseek_v3", "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜>"),  # noqa: RUF001
    Output(
        "one call",
        "deepseek_v31",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}<｜tool▁call▁end｜>'  # noqa: RUF001
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",  # noqa: RUF001
        "",
        (PARIS, NOW),
    ),
)  # fmt: skip

OTHERS = (
    Output(
        "one call", "granite", '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]', "", (PARIS,)
    ),
    Output(
        "two",
        "granite",
        '<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]',
        "",
        (NOW, NOW),
    ),
    Output(
        "one call",
        "internlm",
        'Ok.<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}<|action_end|>',
        "Ok.",
        (NOW,),
    ),
    Output("one call", "jamba", '<tool_calls>[\n  {"name": "now", "arguments": {}}\n]</tool_calls>', "", (NOW,)),
    Output("one call", "phi4_mini_json", 'functools[{"name": "now", "arguments": {}}]', "", (NOW,)),
    same_output("the word", "phi4_mini_json", "Use functools[0]."),
    Output(
        "two",
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        '{"city": "Paris"}<|tool_call_end|><|tool_call_begin|>functions.now:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        (PARIS, NOW),
    ),
)

REASONING = (
    Output("both tags", None, "<think>\nHm.\n\nSo.\n</think>\n\nYes.", "Yes.", (), "Hm.\n\nSo.", "qwen3"),
    Output("no tags", None, "Yes. <think>", "Yes. <think>", (), "", "qwen3"),
    Output("nothing thought", None, "<think>\n\n</think>\n\nYes.", "Yes.", (), "", "qwen3"),
    Output("opened by the prompt", None, "Hm.\n</think>\n\nYes.\n", "Yes.\n", (), "Hm.", "qwen3", "user\n<think>\n"),
    Output("closed by the prompt", None, "\nYes.", "\nYes.", (), "", "deepseek_r1", "<think>\n\n</think>\n\n"),
    Output("a second thought", None, "a</think>b</think><think>c", "b</think><think>c", (), "a", "deepseek_r1"),
    Output("cut off", None, "<think>\nHm.\n", "", (), "Hm.\n", "deepseek_r1"),
    Output("cut off in the tag", None, "Hm.\n</thi", "", (), "Hm.\n</thi", "deepseek_r1"),
    Output(
        "in words", None, "Here's my thought process:\nHm. Here is my response: Yes.", " Yes.", (), "Hm. ", "granite"
    ),
    Output("tokens", None, "[THINK]Hm.[/THINK]Yes.", "Yes.", (), "Hm.", "mistral"),
)  # fmt: skip

OUTPUTS = (*HERMES, *QWEN3_CODER, *LLAMA3_JSON, *PYTHONIC, *MISTRAL, *DEEPSEEK, *OTHERS, *GLM45, *HARMONY, *REASONING)
