"""Settings given from Python: every wrong type and value is refused by name, before anything is built of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke import SamplingParams
from twostroke.cli.flags import ChatSampling, CompletionSampling
from twostroke.config.checks import parse_ints
from twostroke.config.engine import EngineConfig
from twostroke.config.load import LoadConfig
from twostroke.config.server import ServerConfig
from twostroke.errors import InvalidParameter

WRONG_SETTINGS: list[tuple[str, Any]] = [
    ("mixing", "x"),
    ("batching", "statik"),
    ("kv_reservation", "contig"),
    ("dtype", "int8"),
    ("load_format", "pt"),
    ("policy", "prio"),
    ("policy", ["fcfs"]),
    ("device", "tpu"),
    ("block_size", "16"),
    ("block_size", 16.0),
    ("block_size", True),
    ("block_size", 24),
    ("threads", "2"),
    ("threads", 10**30),
    ("threads", 0),
    ("max_num_seqs", True),
    ("max_num_batched_tokens", 1.5),
    ("max_num_batched_tokens", 10**30),
    ("max_model_len", "4096"),
    ("max_model_len", 1),
    ("max_logprobs", None),
    ("num_kv_blocks", "many"),
    ("kv_cache_memory", 1e9),
    ("enable_prefix_caching", "no"),
    ("enable_chunked_prefill", 0),
    ("ageing_s", float("inf")),
    ("ageing_s", float("nan")),
    ("ageing_s", 1e300),
    ("ageing_s", 0),
    ("ageing_s", "10"),
    ("event_log", 3),
    ("tokenizer", b"folder"),
    ("model", None),
    ("model", ""),
]


@pytest.mark.parametrize(("name", "value"), WRONG_SETTINGS, ids=str)
def test_wrong_settings(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as error:
        EngineConfig.from_keywords(**{name: value})
    assert error.value.name == name
    assert error.value.limit


def test_paths_may_be_texts_or_paths() -> None:
    load = EngineConfig.from_keywords(model=Path("some/folder"), event_log="log.jsonl", tokenizer=Path("other")).load
    assert (load.model, load.tokenizer, load.event_log) == (str(Path("some/folder")), "other", Path("log.jsonl"))


WRONG_PARAMS: list[tuple[str, Any]] = [
    ("logit_bias", [1]),
    ("logit_bias", {"x": 1.0}),
    ("logit_bias", {1: "2"}),
    ("logit_bias", {"²": 1.0}),
    ("repetition_penalty", 1e-300),
    ("repetition_penalty", 0.0099),
    ("repetition_penalty", 101),
    ("temperature", "1"),
    ("temperature", float("nan")),
    ("temperature", 10**400),
    ("temperature", None),
    ("top_p", 0),
    ("top_k", 1.0),
    ("stop", b"end"),
    ("stop", [b"end"]),
    ("stop", [""]),
    ("stop", 5),
    ("stop", "\ud800"),
    ("stop", ["end", "half \udfff"]),
    ("bad_words", ["\ud83d"]),
    ("bad_words", {"a": 1}),
    ("stop_token_ids", "12"),
    ("stop_token_ids", [1.0]),
    ("allowed_token_ids", 3),
    ("seed", "1"),
    ("seed", 2**63),
    ("n", True),
    ("n", 129),
    ("max_tokens", 1.5),
    ("min_tokens", None),
    ("logprobs", "3"),
    ("ignore_eos", "no"),
    ("skip_special_tokens", None),
    ("include_stop_str_in_output", 1),
]


@pytest.mark.parametrize(("name", "value"), WRONG_PARAMS, ids=lambda value: repr(value)[:30])
def test_wrong_sampling_params(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as error:
        SamplingParams(**{name: value})
    assert error.value.name == name


@pytest.mark.parametrize("kind", [SamplingParams, CompletionSampling, ChatSampling])
def test_sampling_parameters_are_keys(kind: type[SamplingParams]) -> None:
    same = [kind(logit_bias={1: 2.0}, stop=["a"]) for _ in range(2)]
    assert len({*same, kind(logit_bias={1: 3.0}, stop=["a"]), kind(stop=["a"])}) == 3


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"admin_api_key": ""}, "admin_api_key='': must be a string"),
        ({"api_key": ("",)}, "api_key"),
        ({"cors_origins": ("somewhere",)}, "cors_origins='somewhere': is no origin"),
        ({"cors_origins": ("http://a/b",)}, "cors_origins"),
        ({"otlp_traces_endpoint": "nonsense"}, "otlp_traces_endpoint='nonsense': must be like"),
        ({"answer_timeout_s": 0}, "answer_timeout_s=0"),
    ],
    ids=str,
)
def test_settings_of_a_server_that_cannot_work(given: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidParameter, match=told):
        ServerConfig(**given)


def test_settings_of_a_server_that_can() -> None:
    ServerConfig(cors_origins=("*", "http://localhost:3000", "https://a.example"), admin_api_key="x")
    ServerConfig(otlp_traces_endpoint="http://localhost:4318", answer_timeout_s=0.5)


def test_a_preset_sets_what_is_not_set() -> None:
    interactive = EngineConfig.from_keywords(preset="interactive").scheduler
    assert (interactive.itl_slo_s, interactive.ttft_slo_s) == (0.1, 0.3)
    assert EngineConfig.from_keywords(preset="interactive", ttft_slo="1s").scheduler.ttft_slo_s == 1.0
    given = EngineConfig.from_keywords(preset="batch", max_num_seqs=64).scheduler
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (64, 2048), "64 is the default, and was asked for"
    with pytest.raises(InvalidParameter, match="preset"):
        EngineConfig.from_keywords(preset="fast")


def test_batch_invariance_is_given_up_only_where_that_changes_something() -> None:
    for kernels in ("auto", "native", "avx2"):
        with pytest.raises(InvalidParameter, match=f"batch_invariant=false.*not to device=cpu with kernels={kernels}"):
            EngineConfig.from_keywords(batch_invariant=False, kernels=kernels)
    for settings in ({"kernels": "reference"}, {"kernels": "triton"}, {"device": "cuda"}):
        assert not EngineConfig.from_keywords(batch_invariant=False, **settings).load.batch_invariant
    with pytest.raises(InvalidParameter, match=r"kv_check_rate.*needs batch_invariant"):
        EngineConfig.from_keywords(batch_invariant=False, kernels="reference", kv_check_rate=0.5)


@pytest.mark.parametrize(
    "refused",
    [
        lambda: parse_ints("prompt_lengths", "1," + "9" * 5000, 1, 10**6),
        lambda: LoadConfig(tensor_parallel_size=2, tensor_parallel_address="host:" + "9" * 5000),
    ],
)
def test_thousands_of_digits_are_refused_like_any_other_number(refused: Callable[[], object]) -> None:
    with pytest.raises(InvalidParameter, match=r"from 1 to 1000000|must be host:port") as told:
        refused()
    assert len(str(told.value)) < 300
    assert parse_ints("sizes", "0" * 5000 + "7", 1, 8) == (7,), "zeros before a number say nothing"
