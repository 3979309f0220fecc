"""What works a row at a time: norm, rotation, and choosing tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from twostroke.config.model import ModelConfig
from twostroke.kernels import reference
from twostroke.kernels.dispatch import Operators
from twostroke.layers.rotary import Rotary
from twostroke.measure.operators.subject import Point, Subject, against_reference
from twostroke.sampling.noise import NoiseStream
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingState
from twostroke.sampling_params import SamplingParams

_TOLERANCE = 0.01
_ROWS, _QUICK_ROWS = (1, 32, 512), (32,)
_TOP_K = 50


def norm_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Over the model's hidden states."""
    rows, n = _QUICK_ROWS if quick else _ROWS, config.hidden_size
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, n, generator=generator).to(_DTYPE) for m in rows]
    weight = torch.randn(n, generator=generator).to(_DTYPE)

    def build(operators: Operators) -> Callable[[int], Tensor]:
        return lambda point: operators.rms_norm(inputs[point], weight, config.norm_eps)

    points = tuple(Point(f"{m} rows of {n}", 2 * m * n * _DTYPE.itemsize, 4.0 * m * n) for m in rows)
    yield _of_rows("rms_norm", points, build)


def rotate_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """The q and k heads of each token, in place."""
    layer = config.fixed_for(None).layers[0]
    rows, heads, dim = _QUICK_ROWS if quick else _ROWS, layer.num_heads + layer.kv.num_kv_heads, layer.kv.head_dim
    rotary = Rotary(config.ropes[0][0], dim, max_model_len=max(rows), dtype=_DTYPE, device=CPU)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, heads, dim, generator=generator).to(_DTYPE) for m in rows]
    tables = [rotary(torch.arange(m)) for m in rows]

    def build(operators: Operators) -> Callable[[int], Tensor]:
        # a rotation of a rotation is one too: the values stay what they were in size, and the first is checked
        copies = [x.clone() for x in inputs]

        def rotate(point: int) -> Tensor:
            operators.rotate_heads_(copies[point], *tables[point])
            return copies[point]

        return rotate

    size = heads * dim
    points = tuple(Point(f"{m} tokens, {heads} heads", 2 * m * size * _DTYPE.itemsize, 3.0 * m * size) for m in rows)
    yield _of_rows("rotate", points, build)


def _of_rows(
    operator: str, points: tuple[Point, ...], build: Callable[[Operators], Callable[[int], Tensor]]
) -> Subject:
    return Subject(
        operator=operator,
        kind="bf16",
        points=points,
        constant_bytes=0,
        product="float32",
        build=build,
        error=against_reference(build, reference.operators()),
        tolerance=_TOLERANCE,
    )


def sampling_subjects(config: ModelConfig, *, quick: bool) -> Iterator[Subject]:
    """Greedy, at a temperature, and with filters, by the engine's sampler with the backend's own draw where it has one.

    Tokens are a function of the seed, so every backend has to draw the reference's.
    """
    rows = _QUICK_ROWS if quick else (1, 32)
    reference_sampler = Sampler(config.vocab_size)
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randn(m, config.vocab_size, generator=generator) * 3 for m in rows]
    kinds = {
        "greedy": (SamplingParams(temperature=0.0), 1),
        "temperature": (SamplingParams(temperature=0.8), config.vocab_size),
        "top-k, top-p": (SamplingParams(temperature=0.8, top_k=_TOP_K, top_p=0.95), _TOP_K),
    }
    for kind, (params, most) in kinds.items():
        rules = reference_sampler.rules(params)
        states = [SamplingState(rules, NoiseStream(row, 0), ()) for row in range(max(rows))]

        def build(operators: Operators, states: list[SamplingState] = states) -> Callable[[int], Tensor]:
            sampler = Sampler(
                config.vocab_size,
                gumbel_argmax=operators.gumbel_argmax,
                filtered_argmax=operators.filtered_argmax,
                argmax=operators.argmax,
            )
            copies = [some.clone() for some in logits]
            return lambda point: sampler.sample(copies[point], states[: rows[point]]).token_ids

        def error(point: int, found: Tensor, most: int = most, states: list[SamplingState] = states) -> float:
            """Share of rows whose token is not the reference's, or not among the `most` largest."""
            expected = reference_sampler.sample(logits[point], states[: rows[point]]).token_ids
            ranks = (logits[point] > logits[point].gather(-1, found[:, None])).sum(-1)
            return float(((found != expected) | (ranks >= most)).double().mean())

        points = tuple(Point(f"{m} rows of {config.vocab_size}", 4.0 * m * config.vocab_size, 0.0) for m in rows)
        yield Subject(
            operator="sampling",
            kind=kind,
            points=points,
            constant_bytes=int(points[-1].num_bytes),
            product="float32",
            build=build,
            error=error,
            tolerance=0.0,
        )
