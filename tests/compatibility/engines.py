"""Runs requests through an engine, or two pools, with the settings of one feature or of a pair of them."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compatibility.features import (
    BACKGROUND,
    EMBEDDING,
    FEATURES,
    POOLS,
    POOLS_OF_FORMATS,
    RESUMPTION,
    TIGHT_POOL,
    Feature,
    Pair,
)
from compatibility.models import Models
from two_pools import Answer, TwoPools
from twostroke.client.input_processor import InputProcessor
from twostroke.client.submission import Submission
from twostroke.client.text_frontend import TextFrontend
from twostroke.cluster.pooled_engine import PooledEngine
from twostroke.config.engine import EngineConfig
from twostroke.config.pools import PoolConfig
from twostroke.engine.clock import monotonic_clock
from twostroke.engine.generation import GenerationRequest
from twostroke.events import Event
from twostroke.kv_cache.sizing import blocks_of_request
from twostroke.request import FinishReason
from twostroke.sampling_params import SamplingParams
from twostroke.startup.assembly import BuiltEngine, build_engine
from twostroke.startup.preparation import prepare

MAX_MODEL_LEN, BLOCK_SIZE = 64, 4
USUAL: dict[str, Any] = {
    "model": "tiny-llama",
    "threads": 1,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 64,
    "block_size": BLOCK_SIZE,
    "num_kv_blocks": 400,
}
SINGLE_RANK: dict[str, Any] = {"max_num_seqs": 1, "enable_prefix_caching": False, "batching": "continuous"}
"""How the engine runs that answers are compared with: a request after the other, each computed from its beginning."""
BREAK_AFTER = 3
"""Tokens that a stream has when its engine is gone."""
FIRST, STEPS_BETWEEN = 2, 3
"""So many requests, and so many steps; then the others join them."""

BLOCKS_TO_IMPORT = 10
"""KV that is fetched leaves room for the longest request beside it."""

_COMMON = tuple(range(40, 74))
PROMPTS: tuple[tuple[int, ...], ...] = (
    (5,),
    (*_COMMON, 7),
    tuple(3 + (11 * i) % 90 for i in range(17)),
    (9, 10, 11, 12) * 5,
    (*_COMMON, 7, 8, 9),
    tuple(3 + (7 * i) % 90 for i in range(45)),
)
MAX_TOKENS = (16, 8, 14, 18, 6, 10)
_CHOICES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.0, "presence_penalty": 0.6, "frequency_penalty": 0.2},
    {"temperature": 0.8, "top_k": 20, "repetition_penalty": 1.2},
)


@dataclass
class Run:
    """Result of a run."""

    answers: dict[str, Answer] = field(default_factory=dict[str, Answer])
    events: list[Event] = field(default_factory=list[Event])
    num_resumed: int = 0

    @property
    def essence(self) -> dict[str, Any]:
        """Return everything that has to be equal, to the last bit."""
        return {
            name: (a.token_ids, a.logprobs, a.prompt_logprobs, a.hidden_state, a.finish_reason)
            for name, a in self.answers.items()
        }


class _Collector:
    """Stands where the engine would: requests as the front desk hands them on."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def add_request(self, request: GenerationRequest) -> None:
        self.requests.append(request)

    def finish(self, request_id: str, reason: FinishReason, num_output_tokens: int | None = None) -> None:
        pass


class Engines:
    """Engines of all pairs. A reference that several pairs need is run once."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._references: dict[frozenset[str], Run] = {}

    def reference(self, features: Iterable[Feature]) -> Run:
        """Return the run of the engine with only those features that change answers."""
        chosen = [feature for feature in features if feature.changes_answers]
        key = frozenset(feature.name for feature in chosen)
        if key not in self._references:
            settings = {name: value for feature in chosen for name, value in feature.settings.items()}
            self._references[key] = self._run_one({**settings, **SINGLE_RANK}, chosen)
        return self._references[key]

    def run(self, pair: Pair) -> Run:
        """Run the engine with both features.

        Raises:
            TwostrokeError: they are refused.
        """
        has_pools = POOLS in pair or POOLS_OF_FORMATS in pair
        return (self._run_pools if has_pools else self._run_one)(pair.settings, pair)

    def words(self, error: Exception) -> str:
        """Return the words of a refusal, without the folder of this run."""
        return str(error).replace(f"{self._models.folder}/", "")

    def _run_one(self, settings: dict[str, Any], features: Sequence[Feature]) -> Run:
        run = Run()
        built = build_engine(self._config(settings), listeners=(run.events,))  # pyright: ignore
        try:
            self._answer(run, _requests(built, features), features, lambda some: _through(built, some))
        finally:
            built.engine.close()
        return run

    def _run_pools(self, settings: dict[str, Any], features: Sequence[Feature]) -> Run:
        drifts = POOLS_OF_FORMATS in features
        prefill = {"kv_cache_dtype": "int8"} if drifts else {}
        asked = PoolConfig(prefill=1, decode=1, prefill_config=prefill, allow_numeric_drift=drifts)
        PooledEngine(self._config(settings), asked)  # raises what a server would refuse
        run = Run()
        with tempfile.TemporaryDirectory() as folder:
            given = self._resolved(settings, spare=BLOCKS_TO_IMPORT)
            decode = {name: given.get(name, "auto") for name in prefill}
            pools = TwoPools(Path(folder), decode=decode, allows_drift=drifts, **{**given, **prefill})
            try:
                self._answer(
                    run,
                    _requests(pools.prefill.built, features),
                    features,
                    lambda some: pools.run(some[:FIRST]) | pools.run(some[FIRST:]),
                )
            finally:
                pools.close()
            run.events = [*pools.prefill.events, *pools.decode.events]
        return run

    @staticmethod
    def _answer(run: Run, requests: list[GenerationRequest], features: Sequence[Feature], through: Any) -> None:
        if RESUMPTION not in features:
            run.answers = through(requests)
            return
        begun: dict[str, Answer] = through([replace(r, max_tokens=min(BREAK_AFTER, r.max_tokens)) for r in requests])
        rest = [_resumed(r, begun[r.request_id]) for r in requests if _is_broken_off(r, begun[r.request_id])]
        run.num_resumed = len(rest)
        for name, answer in through(rest).items():
            answer.logprobs[:0] = begun[name].logprobs
            answer.prompt_logprobs = begun[name].prompt_logprobs
            answer.num_draft_tokens += begun[name].num_draft_tokens
            begun[name] = answer
        run.answers = begun

    def _config(self, settings: dict[str, Any]) -> EngineConfig:
        return EngineConfig.from_keywords(**self._resolved(settings))

    def _resolved(self, settings: dict[str, Any], spare: int = 0) -> dict[str, Any]:
        """Return the settings with the paths of models, and the fewest blocks for this one."""
        given = {**USUAL, **settings}
        model = given["model"]
        given["model"] = self._models.path(model)
        drafts = given.get("speculative_config")
        if drafts is not None and "model" in drafts:
            given["speculative_config"] = {**drafts, "model": self._models.drafter(drafts["model"], model)}
        if given["num_kv_blocks"] == TIGHT_POOL:
            given["num_kv_blocks"] = _fewest_blocks({**given, "num_kv_blocks": USUAL["num_kv_blocks"]}) + spare
        return given


def _fewest_blocks(settings: dict[str, Any]) -> int:
    """Return the fewest blocks with which the engine starts."""
    config = EngineConfig.from_keywords(**settings)
    prepared = prepare(config)
    layout, most = prepared.layout, prepared.max_tokens_per_step
    num_blocks = blocks_of_request(layout, config.cache, config.load.max_model_len or 0, most)
    return num_blocks + (len(layout.groups) if config.cache.kv_check_rate else 0)


def _requests(built: BuiltEngine, features: Sequence[Feature]) -> list[GenerationRequest]:
    """Return requests as a server submits them: greedy and seeded, with three priorities and two tenants."""
    inputs = InputProcessor.of_engine(built.facts, built.tokenizer, built.grammars)
    collector = _Collector()
    desk = TextFrontend(collector, built.tokenizer, replace(built.facts, uses_priority=True))
    asks = {name: value for feature in features for name, value in feature.asks.items()}
    for i, prompt in enumerate(PROMPTS):
        own = {"max_tokens": MAX_TOKENS[i], "ignore_eos": True, "logprobs": 2, "seed": i, **_CHOICES[i % 4]}
        given = {"prompt_token_ids": list(prompt)}
        if EMBEDDING in features and i % 2 == 0:
            prepared = inputs.process_embedding(given)
        else:
            prepared = inputs.process(given, SamplingParams(**own, **(asks if i % 2 else {})))
        desk.enqueue(
            Submission(
                prompt=prepared,
                arrival_time_s=monotonic_clock(),
                request_id=f"r{i}",
                priority=-i % 3,
                tenant="ab"[i > 3],
                background=BACKGROUND in features and i % 2 == 1,
            )
        )
    return collector.requests


def _through(built: BuiltEngine, requests: Sequence[GenerationRequest]) -> dict[str, Answer]:
    engine, waiting = built.engine, iter(requests)
    answers = {request.request_id: Answer(list(request.new_request.output_token_ids)) for request in requests}

    def join(several: Iterable[GenerationRequest]) -> None:
        for request in several:
            engine.add_request(request)

    join(itertools.islice(waiting, FIRST))
    for step in itertools.count(1):
        if not engine.has_work or step == STEPS_BETWEEN:
            join(waiting)
        if not engine.has_work:
            return answers
        for update in engine.step():
            answers[update.request_id].take(update)
    raise AssertionError("steps are counted without an end")


def _is_broken_off(request: GenerationRequest, answer: Answer) -> bool:
    return answer.finish_reason is FinishReason.LENGTH and len(answer.token_ids) < request.max_tokens


def _resumed(request: GenerationRequest, answer: Answer) -> GenerationRequest:
    """Return the request as the dispatcher resumes it in another engine."""
    new = request.new_request
    params = replace(new.params, prompt_logprobs=None)
    return replace(request, new_request=replace(new, params=params, output_token_ids=tuple(answer.token_ids)))


assert len({feature.name for feature in FEATURES}) == len(FEATURES), "names are the keys of what is compared with"
