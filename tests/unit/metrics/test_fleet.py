"""Requests that go from process to process are counted once."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pool_log import PROMPT, D, P, PoolLog, died_and_resumed
from twostroke.metrics.engine_metrics import FleetMetrics
from twostroke.metrics.exposition import EngineCollector, GatewayMetrics, exposition
from twostroke.request import FinishReason


class DispatchResult:
    num_resumed = 3
    num_late_updates = 4


class Counted:
    """Metrics that a scraper reads after a log."""

    def __init__(self, log: PoolLog) -> None:
        collector = EngineCollector()
        fleet = FleetMetrics("m", collector.add)
        for event in log.events:
            fleet.observe(event)
        text = exposition(collector).decode()
        families = list(text_string_to_metric_families(text))
        self._samples = [sample for family in families for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        """Return the sum over all samples with these labels."""
        wanted = labels.items()
        return sum(s.value for s in self._samples if s.name == f"twostroke:{name}" and wanted <= s.labels.items())

    def engines(self) -> set[str]:
        return {sample.labels["engine"] for sample in self._samples}


def check_that_nobody_is_left(counted: Counted) -> None:
    assert counted.of("num_requests_running") == counted.of("num_requests_waiting") == 0


def test_a_request_that_is_handed_over_is_one() -> None:
    log = PoolLog()
    log.handed_over("a#0.0", 0.0)
    counted = Counted(log)
    assert counted.engines() == {"prefill-0", "decode-0"}
    assert counted.of("request_success_total") == 1
    assert counted.of("request_success_total", engine="decode-0", finished_reason="length") == 1
    assert counted.of("prompt_tokens_total", engine="prefill-0") == counted.of("prompt_tokens_total") == PROMPT
    assert counted.of("prompt_tokens_cached_total") == 4
    assert counted.of("generation_tokens_total", engine="prefill-0") == 1
    assert counted.of("generation_tokens_total", engine="decode-0") == 2
    assert counted.of("time_to_first_token_seconds_count") == 1
    assert counted.of("time_to_first_token_seconds_sum", engine="prefill-0") == 1.0
    assert counted.of("e2e_request_latency_seconds_sum", engine="decode-0") == 3.0
    assert counted.of("e2e_request_latency_seconds_count") == 1
    assert counted.of("inter_token_latency_seconds_sum") == 2.0, "a reader waited while it was on its way, too"
    assert counted.of("prefix_cache_queries_total") == PROMPT
    assert counted.of("request_prompt_tokens_sum") == PROMPT
    assert counted.of("request_generation_tokens_sum") == 3
    assert counted.of("request_params_max_tokens_sum") == 3
    assert counted.of("request_params_n_count") == 1
    assert counted.of("kv_fetched_bytes_total", engine="decode-0") == 4_000_000
    assert counted.of("kv_handovers_total", outcome="complete") == 1
    assert counted.of("kv_fetch_seconds_sum") == 0.5
    check_that_nobody_is_left(counted)


def test_a_fetch_does_not_last_until_the_receivers_step_has_ended() -> None:
    log = PoolLog()
    log.fetch("a#0.0", 1, 0.25, 0.75, 3.0, last_s=1.0)
    assert Counted(log).of("kv_fetch_seconds_sum") == 0.25


def test_hand_overs_that_fail_have_a_reason() -> None:
    log = PoolLog()
    log.handed_over("a#0.0", 0.0, problem="there is no room for it beside what the pool must keep")
    log.handed_over("b#1.0", 10.0, problem="/x: the other side has closed the connection.")
    counted = Counted(log)
    assert counted.of("kv_handovers_total", outcome="complete") == 0
    assert counted.of("kv_handovers_total", outcome="failed", reason="no room") == 1
    assert counted.of("kv_handovers_total", outcome="failed", reason="broken") == 1
    assert counted.of("request_success_total") == 2
    assert counted.of("prompt_tokens_total") == 2 * PROMPT


def test_a_request_whose_process_died_is_one_and_no_error() -> None:
    log = PoolLog()
    died_and_resumed(log, "a#0.0")
    counted = Counted(log)
    assert counted.of("request_success_total") == counted.of("request_success_total", finished_reason="length") == 1
    assert counted.of("time_to_first_token_seconds_count") == 1
    assert counted.of("e2e_request_latency_seconds_sum") == 7.0
    assert counted.of("request_generation_tokens_sum") == 4
    assert counted.of("request_params_max_tokens_sum") == 4
    assert counted.of("prompt_tokens_total") == PROMPT
    assert counted.of("engine_starts_total", engine="decode-0") == 2
    check_that_nobody_is_left(counted)


def test_one_that_ends_on_its_way_is_counted_where_it_was_last() -> None:
    log = PoolLog()
    log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
    log.prefill(P, "a#0.0", 0.0, 1.0, reason=FinishReason.LENGTH)
    log.end_everywhere("a#0.0", 2.0, FinishReason.ABORT)
    log.arrive(D, "a#0.0", 2.5, arrival_s=0.0, num_tokens=PROMPT + 1, max_tokens=2, import_id=1)
    log.end(D, "a#0.0", 2.5, FinishReason.ABORT)
    counted = Counted(log)
    assert counted.of("request_success_total") == 1
    assert counted.of("request_success_total", engine="prefill-0", finished_reason="abort") == 1
    assert counted.of("e2e_request_latency_seconds_sum") == 2.0
    check_that_nobody_is_left(counted)


def test_one_that_is_given_up_is_an_error() -> None:
    log = PoolLog()
    log.arrive(P, "a#0.0", 0.0, arrival_s=0.0, lend_as=1)
    log.lose(P, 1.0)
    log.end_everywhere("a#0.0", 1.0, FinishReason.ERROR)
    counted = Counted(log)
    assert counted.of("request_success_total", finished_reason="error") == counted.of("request_success_total") == 1
    check_that_nobody_is_left(counted)


def test_the_gateway_counts_what_its_dispatcher_does() -> None:
    gateway = GatewayMetrics("m")
    assert exposition(gateway) == b""
    gateway.follow(DispatchResult())
    found = {
        sample.name: (sample.value, sample.labels["engine"])
        for family in text_string_to_metric_families(exposition(gateway).decode())
        for sample in family.samples
    }
    assert found == {
        "twostroke:sequences_resumed_total": (3, "gateway"),
        "twostroke:updates_fenced_total": (4, "gateway"),
    }
