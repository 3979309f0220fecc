"""The count of `twostroke plan --prompt` equals the server's usage of the same request."""

from __future__ import annotations

import pytest

from server_process import ServerProcess
from twostroke.config.engine import EngineConfig
from twostroke.planner.options import PlanOptions
from twostroke.planner.plan import make_plan

TEXTS = ["def fibonacci(n):\n", "x", "Unbelievable: naïve café, 東京 and 🎉!\n\n", "class A:\n" * 40]


@pytest.mark.parametrize("text", TEXTS, ids=["code", "one", "unicode", "long"])
def test_the_count_is_that_of_usage(server: ServerProcess, text: str) -> None:
    config = EngineConfig.from_keywords(model="embedded", threads=1)
    for chat, path, body in (
        (False, "/v1/completions", {"prompt": text}),
        (True, "/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        plan = make_plan(config, PlanOptions(prompt=text, chat=chat, device_name="L4", compare="none"))
        answer = server.post(path, {"max_tokens": 1, **body}).json()
        assert plan.prompt is not None
        assert plan.prompt.num_prompt_tokens == answer["usage"]["prompt_tokens"], path
