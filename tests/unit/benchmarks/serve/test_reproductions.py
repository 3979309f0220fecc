"""The server's reproductions: their arithmetic, and one of them whole, against our own server."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.claim import ReproduceOptions
from benchmarks.reproduce import overload, server_throughput
from benchmarks.reproduce.run import reproduce
from benchmarks.serving.clients import Ending, OrderKind, Way
from benchmarks.serving.local_server import growth_mb_per_minute, local_server
from openai_server import WordServer, serving
from twostroke.errors import SetupError
from twostroke.measure.serve.figures import Slo
from twostroke.measure.serve.load import Origin
from twostroke.measure.serve.openai_wire import Exchange
from twostroke.measure.serve.target import ServerTarget, TargetLoad, run_loads

SMALL = ReproduceOptions(with_model=False, plots=False)


def ended(end_s: float, ttft_s: float = 0.1, failure: str | None = None) -> Exchange:
    return Exchange(0.0, chunk_times_s=[ttft_s], chunk_tokens=[1], end_s=end_s, failure=failure)


def test_good_requests_count_between_the_two_moments() -> None:
    exchanges = [ended(0.5), ended(2.0), ended(2.5), ended(3.0, ttft_s=0.9), ended(3.0, failure="429"), ended(9.0)]
    assert overload._good_per_second(exchanges, Slo({"ttft": 0.5}), 1.0, 5.0) == 2 / 4


def test_the_slo_is_a_generation_more_than_at_capacity() -> None:
    latency = {"ttft_s": {"p99": 0.2}, "e2e_s": {"mean": 1.5}, "tpot_s": {"p99": 0.02}}
    assert overload._slo(latency).limits_s == {"ttft": 1.7, "tpot": pytest.approx(0.03)}


def test_the_capacity_of_a_server_that_refuses_is_none() -> None:
    with serving(WordServer(quota=70)) as url, pytest.raises(SetupError, match="429"):
        overload.measure_capacity(ServerTarget(origin=Origin.parse(url), model="words"), SMALL)
    with serving(WordServer()) as url:
        found, capacity = overload.measure_capacity(ServerTarget(origin=Origin.parse(url), model="words"), SMALL)
    assert found["num_completed"] == 64
    assert capacity > 0


def test_loads_are_sent_together() -> None:
    server = WordServer(gather=2 * 3)  # neither is answered before the other has arrived
    with serving(server) as url:
        target = ServerTarget(origin=Origin.parse(url), model="words")
        first, second = run_loads([TargetLoad(target, overload.drawn(SMALL, 3, None, seed)) for seed in (0, 1)])
    assert [e.failure for e in (*first.exchanges, *second.exchanges)] == [None] * 6


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(SetupError, match="max_num_seqs=0"), local_server("embedded", {"max_num_seqs": 0}):
        pass


def test_memory_grows_by_the_samples_behind_the_warm_up() -> None:
    times_s = [float(second) for second in range(100)]
    filling = [min(second, 25) * 2**20 for second in range(100)]
    assert growth_mb_per_minute(times_s, filling, warm_up=0.3) == pytest.approx(0.0, abs=1e-3)
    assert growth_mb_per_minute(times_s, [second * 2**20 for second in range(100)], warm_up=0.5) == pytest.approx(60.0)
    assert growth_mb_per_minute(times_s[:1], [5], warm_up=0.0) == 0.0


def test_chaos_whole(tmp_path: Path) -> None:
    (found,) = reproduce(["chaos"], ReproduceOptions(results=tmp_path, threads=1), Console(quiet=True))
    assert [claim for claim in found.claims if claim.holds is False] == []
    assert found.details["endings"][Way.STAYS] == {Ending.WHOLE: pytest.approx(20, abs=19)}
    assert len(found.details["memory_mb"]["engine"]) > 1


def test_soak_whole(tmp_path: Path) -> None:
    (found,) = reproduce(["soak"], ReproduceOptions(results=tmp_path, threads=1), Console(quiet=True))
    assert [claim for claim in found.claims if claim.holds is False] == [], found.details["wrong"]
    assert found.details["requests"].keys() == set(OrderKind), "of every kind there was one"
    measured = {claim.what: claim.measured for claim in found.claims}
    assert measured["answers compared"] >= 10
    assert measured["memory, engine, MB at the end"] > 10
    assert measured["memory, http, MB at the end"] > 10


def test_server_throughput_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_throughput, "STREAMS", 3)
    monkeypatch.setattr(server_throughput, "_size", lambda _: (3, 5))
    options = ReproduceOptions(results=tmp_path, threads=1)
    (found,) = reproduce(["server-throughput"], options, Console(quiet=True))
    delays = found.details["delay_s"]
    assert all(of["count"] == 3 * 3 * 5 for of in delays.values()), "every token's event was found beside its sample"
    assert all(of["p50"] >= 0 for of in delays.values())
    segments = [delays[name]["mean"] for name in ("sampled_to_sent", "sent_to_received", "received_to_read")]
    assert sum(segments) == pytest.approx(delays["sampled_to_read"]["mean"])
    assert {place: of["count"] for place, of in found.details["delay_by_token_s"].items()} == {
        "first": 9,
        "between": 27,
        "last": 9,
    }
    (delay,) = [claim.measured for claim in found.claims if claim.what.startswith("event at the client")]
    assert delay == 1000 * sorted(found.details["delay_p99_s"]["sampled_to_read"])[1], "the middle one of three rounds"
    assert found.details["sides"].keys() == {"1"}
    assert (tmp_path / "server-throughput-small.png").is_file()
