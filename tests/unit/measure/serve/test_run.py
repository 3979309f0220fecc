"""The whole command against a small real server; what is asserted are counts and contents, never times."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from openai_server import WordServer, scripted, serving
from twostroke.errors import InvalidParameter, SetupError, TwostrokeError
from twostroke.measure.serve.load import HttpClient, LoadRun, Origin, PlannedRequest, batch_priority, run_load, run_loop
from twostroke.measure.serve.options import ServeOptions
from twostroke.measure.serve.run import print_serve, run_serve
from twostroke.measure.serve.target import CANDIDATES, MIN_WORDS, candidate_texts, one_token_words

SMALL = ServeOptions(
    num_requests=12, prompt_lengths="uniform:3:9", output_lengths="uniform:1:6", plots=False, warmup=0, timeout=30.0
)


def bench(server: WordServer, folder: Path, **changes: Any) -> dict[str, Any]:
    """Run the benchmark against the server; return the saved JSON."""
    with serving(server) as url:
        run_serve(replace(SMALL, url=url, results=folder, **changes))
    return json.loads((folder / "serve.json").read_text())


def remarks_on_counts(results: dict[str, Any]) -> list[str]:
    """Return all remarks except the one on a busy load generator: the server is a thread of the same process."""
    return [remark for remark in results["remarks"] if not remark.startswith("the load generator was busy")]


def test_an_open_loop_sends_whatever_became_of_the_others(tmp_path: Path) -> None:
    server = WordServer(gather=12)  # no answer begins before the last request has arrived
    found = bench(server, tmp_path)["results"]
    assert found["num_completed"] == 12
    assert server.most_under_way == 12


def test_a_closed_loop_sends_no_more_than_it_should(tmp_path: Path) -> None:
    server = WordServer(gather=3)
    found = bench(server, tmp_path, max_concurrency=3)["results"]
    assert found["num_completed"] == 12
    assert server.most_under_way == 3


@pytest.mark.parametrize("token_counts", ["usage", "token-ids", "chunks"])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_what_is_sent_is_what_is_counted(tmp_path: Path, endpoint: Any, token_counts: Any) -> None:
    server = WordServer()
    saved = bench(server, tmp_path, endpoint=endpoint, token_counts=token_counts, temperature=0.5)
    found, workload = saved["results"], SMALL.workload(4096)
    assert found["num_completed"] == 12
    assert found["num_output_tokens"] == workload.num_output_tokens
    assert found["num_prompt_tokens"] == workload.num_prompt_tokens
    assert found["num_cached_tokens"] == 12 * 3
    assert remarks_on_counts(found) == []
    assert saved["config"]["model"] == "words"
    key = "max_tokens" if endpoint == "completions" else "max_completion_tokens"
    assert sorted(sent[key] for sent in server.bodies) == sorted(workload.output_lengths)
    assert {sent["seed"] for sent in server.bodies} == set(range(12))
    assert all(sent["ignore_eos"] and sent["model"] == "words" for sent in server.bodies)


def test_shared_prefixes_are_shared_as_text_too(tmp_path: Path) -> None:
    server = WordServer()
    bench(server, tmp_path, prompts="text", num_prefix_groups=2, prefix_length=20)
    prompts = [sent["prompt"].split() for sent in server.bodies]
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 12


def test_several_tokens_a_chunk_are_several_tokens(tmp_path: Path) -> None:
    sizes = {"output_lengths": "fixed:7", "num_requests": 3}
    found = bench(WordServer(tokens_a_chunk=4), tmp_path, **sizes)["results"]
    assert found["num_output_tokens"] == 21
    assert remarks_on_counts(found) == []
    found = bench(WordServer(tokens_a_chunk=4), tmp_path, token_counts="chunks", **sizes)["results"]
    assert found["num_output_tokens"] == 21
    assert remarks_on_counts(found)[0].startswith("3 answers had other numbers of tokens")


def test_refusals_are_counted_apart(tmp_path: Path) -> None:
    found = bench(WordServer(quota=5), tmp_path)["results"]
    assert found["num_completed"] == 5
    assert found["failures"]["by_kind"] == {"429": 7}
    assert found["failures"]["num_with_retry_after"] == 7
    assert found["failures"]["retry_after_s"]["mean"] == 2.0
    assert found["failures"]["refusal_latency_s"]["count"] == 7
    assert "full" in found["failures"]["messages"][0]


def test_a_frontier_has_a_point_for_each_load(tmp_path: Path) -> None:
    server = WordServer()
    found = bench(server, tmp_path, frontier="50,100", request_rate=1.0, goodput=("ttft:60000",), plots=True)["results"]
    assert [point["request_rate"] for point in found["points"]] == [50.0, 100.0]
    assert [point["goodput"]["share"] for point in found["points"]] == [1.0, 1.0]
    assert found["saturated"] is None
    assert (tmp_path / "serve.png").stat().st_size > 0
    assert found["points"][0]["cost"] is None
    found = bench(server, tmp_path, frontier="2", price_per_hour=2.5)["results"]
    assert found["points"][0]["request_rate"] == 2 * found["saturated"]["throughput"]["requests_per_s"]
    with (tmp_path / "shown").open("w") as file:
        print_serve(found, Console(file=file, width=120))
    shown = (tmp_path / "shown").read_text()
    assert "all at once" in shown
    assert "per M tokens out" in shown
    for point in (found["saturated"], *found["points"]):
        rate = point["throughput"]["output_tok_s"]
        assert point["cost"]["per_million_output_tokens"] == pytest.approx(2.5 / 3600 / rate * 1e6)


def test_the_servers_own_metrics_are_the_difference_over_the_run(tmp_path: Path) -> None:
    server = WordServer()
    found = bench(server, tmp_path, warmup=2, plots=True)["results"]
    assert len(server.bodies) == 2 * 4 + 12
    assert len({tuple(sent["prompt"]) for sent in server.bodies}) == len(server.bodies)  # nothing is warm that counts
    assert found["server_metrics"] == {"counted": {"words:requests_total": 12.0}, "means": {"words:ttft_seconds": 0.5}}
    with (tmp_path / "shown").open("w") as file:
        print_serve(found, Console(file=file, width=120))
    assert "12 of 12 requests" in (tmp_path / "shown").read_text()


def test_the_key_is_sent_and_kept_out_of_the_result(tmp_path: Path) -> None:
    found = bench(WordServer(api_key="sesame"), tmp_path, api_key="sesame", warmup=1)
    assert found["results"]["num_completed"] == 12
    assert "sesame" not in (tmp_path / "serve.json").read_text()
    assert "sesame" not in repr(ServeOptions(api_key="sesame"))


def test_a_wrong_key_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"401.*wrong key"):
        bench(WordServer(api_key="sesame"), tmp_path, model="words", warmup=1)
    with pytest.raises(SetupError, match="/v1/models returned status 401"):
        bench(WordServer(api_key="sesame"), tmp_path)


def test_no_server_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"127\.0\.0\.1:9/v1/models: no connection .* Is a server running"):
        run_serve(replace(SMALL, url="http://127.0.0.1:9", results=tmp_path))


def load(*connections: list[bytes | None], count: int = 1, timeout_s: float = 60.0) -> LoadRun:
    """Requests to a server that plays scripts."""

    async def run() -> LoadRun:
        async with scripted(*connections) as url:
            client = HttpClient(Origin.parse(url))
            try:
                wire = client.origin.request("POST", "/v1/completions", {}, b"{}")
                return await run_load(client, [PlannedRequest(0.0, wire)] * count, timeout_s=timeout_s)
            finally:
                await client.close()

    return run_loop(run())


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":" w"}]}\n\n'
END = b"0\r\n\r\n"


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def test_a_stream_that_breaks_off_is_truncated_and_the_others_are_not() -> None:
    begun = HEAD + framed(EVENT[:9], EVENT[9:])
    whole, without_done = begun + framed(b"data: [DONE]\n\n") + END, begun + END
    run = load([None, begun], [None, whole], [None, without_done], [], count=4)
    assert sorted(str(e.failure) for e in run.exchanges) == ["None", "connection", "truncated", "truncated"]
    assert sorted(sum(e.chunk_tokens) for e in run.exchanges) == [0, 1, 1, 1]


def test_a_server_that_says_nothing_is_given_up() -> None:
    (found,) = load([None, HEAD, None], timeout_s=0.05).exchanges
    assert found.failure == "timeout"
    assert found.status == 200


def test_words_that_are_several_tokens_are_left_out() -> None:
    counts = [len(text.split()) * (1 if "the" in text or len(text.split()[0]) < 4 else 2) for text in candidate_texts()]
    words = one_token_words(counts)
    assert len(set(CANDIDATES)) == len(CANDIDATES)
    assert "the" in words
    assert "return" not in words
    assert one_token_words([len(text.split()) + 1 for text in candidate_texts()]) == list(CANDIDATES)  # a begin token
    with pytest.raises(InvalidParameter, match=f"{MIN_WORDS} are needed"):
        one_token_words([2 * count for count in counts])


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "chat", "prompts": "token-ids"},
        {"tokenizer": "embedded"},
        {"prompts": "text", "vocab_size": 100},
        {"max_concurrency": 2, "request_rate": 1.0},
        {"max_concurrency": 2, "frontier": "1"},
        {"frontier": "1,x"},
        {"frontier": "0"},
        {"price_per_hour": 0.0},
        {"price_per_hour": float("nan")},
        {"burstiness": 0.5},
        {"burstiness": 0.0, "request_rate": 1.0},
        {"extra_body": "[]"},
        {"goodput": ("itl:3",)},
        {"timeout": 0.0},
        {"endpoint": "embeddings"},
        {"token_counts": "guess"},
        {"api_key": "a\nb"},
        {"url": "127.0.0.1:8000"},
        {"name": "../x"},
        {"trace": Path("t.jsonl"), "frontier": "1"},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TwostrokeError, match="="):
        ServeOptions(**changes)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such policy")
def test_giving_way_ends_with_what_it_is_for() -> None:
    before = os.sched_getscheduler(0)
    found: list[int] = []

    def fail() -> None:
        found.append(os.sched_getscheduler(0))
        raise SetupError("something else")

    with pytest.raises(SetupError), batch_priority():
        fail()
    assert found == [os.SCHED_BATCH]
    assert os.sched_getscheduler(0) == before
