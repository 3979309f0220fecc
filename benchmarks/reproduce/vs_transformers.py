"""Ours compared with `transformers.generate`: one request at a time, and exponential lengths in static batches of 16.

Both get the same folder, prompts, element type and threads. Runs alternate, and the ratio is the median over pairs of
neighbouring runs. The faster of transformers' attention implementations is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.alternating import alternate, close_together, ratio
from benchmarks.claim import Claim, ReproduceOptions, Reproduction
from benchmarks.transformers_peer import TransformersPeer, fastest_peer
from twostroke.config.cache import CacheConfig
from twostroke.config.scheduler import SchedulerConfig
from twostroke.measure.figure import bar_chart
from twostroke.measure.model_engine import ModelEngine, model_engine
from twostroke.measure.report import median
from twostroke.measure.workload import Lengths, Workload
from twostroke.model.checkpoint import read_model_config
from twostroke.model.model_files import find_folder_only

BATCH = 16
PROMPTS = Lengths.uniform(16, 96)
GOALS = {"batch 1": 1.0, "exponential": 3.0}
"""Least ratio of throughputs, on the embedded model."""


def reproduce(options: ReproduceOptions) -> Reproduction:
    """Alternate ours and theirs."""
    folder = find_folder_only(options.model, "transformers is to read the same folder")
    config = read_model_config(folder)
    # a model of production size takes minutes where the embedded one takes seconds
    is_embedded = options.model == "embedded"
    rounds, groups, mean = (5, 4, 64) if options.full and is_embedded else (3, 2, 32) if options.full else (2, 1, 16)
    one = options.drawn(1, PROMPTS, Lengths.fixed(128 if options.full else 32))
    many = options.drawn(groups * BATCH, PROMPTS, Lengths.exponential(mean))
    longest = max(one.max_request_tokens, many.max_request_tokens)
    threads = options.threads or torch.get_num_threads()
    with close_together(
        {num_seqs: _engine(options, num_seqs, longest) for num_seqs in (1, BATCH, 4 * BATCH)}
    ) as engines:
        torch.set_num_threads(threads)  # native kernels leave torch one thread, and the peer has to get as many as ours
        peer, tried = fastest_peer(folder, config.dtype, _prompts(many.first(BATCH)), [16] * BATCH, BATCH)
        batched = {f"exponential, ours with {BATCH} slots": engines[BATCH], "exponential": engines[4 * BATCH]}
        rates = {
            **_side_by_side({"batch 1": engines[1]}, peer, one, 1, rounds),
            **_side_by_side(batched, peer, many, BATCH, rounds),
        }
    claims: list[Claim] = []
    for name, of in rates.items():
        claim = Claim.at_least(f"throughput, {name}: ours / theirs", GOALS.get(name, 0.0), of["ratio"])
        claims.append(claim.judged(options.full and is_embedded and name in GOALS))
    return Reproduction(
        claims=tuple(claims),
        config={
            "model": options.model_name,
            "dtype": config.dtype,
            "threads": threads,
            "static_batch": BATCH,
            "attention": peer.attention,
        },
        workload={"one": one.description, "many": many.description},
        details={**rates, "attention_tried_s": tried},
        draw=bar_chart(
            [name.replace(", ", ",\n") for name in rates],
            {
                "transformers": [of["theirs_median"] for of in rates.values()],
                "ours": [of["ours_median"] for of in rates.values()],
            },
            "output tokens per second",
        ),
        warmup=1,
        repeats=rounds,
    )


def _engine(options: ReproduceOptions, num_seqs: int, longest: int) -> ModelEngine:
    # without a prefix cache: the second round would find the prompts of the first, and transformers keeps nothing
    cache = CacheConfig(enable_prefix_caching=False)
    return model_engine(options.load(longest), SchedulerConfig(max_num_seqs=num_seqs), cache)


def _side_by_side(
    engines: Mapping[str, ModelEngine], peer: TransformersPeer, workload: Workload, batch_size: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """Run rounds of every engine of ours and then the peer; the peer's rates are compared with each of ours.

    Returns:
        Output tokens per second, their medians and ratio.
    """
    prompts, tokens = _prompts(workload), workload.num_output_tokens
    warm_up = workload.first(batch_size).cut_outputs(4)
    for engine in engines.values():
        engine.run(warm_up)
    peer.run_static(_prompts(warm_up), warm_up.output_lengths, batch_size)

    def rate(name: str, _: int) -> float:
        if name in engines:
            return tokens / engines[name].run(workload, progress=f"ours, {name}").duration_s
        return tokens / peer.run_static(prompts, workload.output_lengths, batch_size)

    found = alternate(rounds, (*engines, "transformers"), rate)
    theirs = found.pop("transformers")
    return {
        name: {
            "ours_tok_s": ours,
            "theirs_tok_s": theirs,
            "ours_median": median(ours),
            "theirs_median": median(theirs),
            "ratio": ratio(ours, theirs),
        }
        for name, ours in found.items()
    }


def _prompts(workload: Workload) -> list[tuple[int, ...]]:
    return [request.prompt_token_ids for request in workload.requests]
