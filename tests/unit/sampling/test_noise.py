"""The noise is a fixed function: its integers are written down here, for every machine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from oracle import naive_sampling as naive
from twostroke.sampling.noise import GumbelNoise, NoiseStream, splitmix64_
from twostroke.sampling.sampler import Sampler
from twostroke.sampling.state import SamplingRules, SamplingState
from twostroke.sampling_params import SamplingParams

GOLDEN = 0x9E3779B97F4A7C15


def signed(word: int) -> int:
    word %= 2**64
    return word - 2**64 if word >= 2**63 else word


def test_splitmix64_gives_the_published_sequence() -> None:
    """The first numbers of seed 1234567, as in the implementations people compare with."""
    state = torch.tensor([signed(1234567 + i * GOLDEN) for i in range(1, 6)])
    assert [word % 2**64 for word in splitmix64_(state).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_row_keys_do_not_change() -> None:
    assert NoiseStream(0).key(0) == 1330247942958781911
    assert NoiseStream(42, 3).key(1000) == -7480208837687796194
    assert NoiseStream(2**63 - 1, 127).key(2**31) == 736761292462923431


def test_tokens_of_given_seeds_do_not_change() -> None:
    """From flat logits, so nothing but the noise decides."""
    rules = SamplingRules.compile(SamplingParams(), 1000)
    states = [SamplingState(rules, NoiseStream(seed), range(seed + 1)) for seed in range(12)]
    drawn = Sampler(1000).sample(torch.zeros(12, 1000), states).token_ids.tolist()
    assert drawn == [329, 508, 170, 628, 210, 166, 871, 421, 851, 315, 552, 429]


def test_noise_equals_the_naive_one() -> None:
    vocab_size = 500
    noise = GumbelNoise(vocab_size)
    keys = noise.keys([NoiseStream(seed, seed % 3) for seed in range(5)], [3] * 5)
    expected = [
        [
            naive.gumbel(naive.NaiveRequest(SamplingParams(), prompt=(0, 0, 0), seed=s, sample_index=s % 3), token)
            for token in range(vocab_size)
        ]
        for s in range(5)
    ]
    np.testing.assert_allclose(noise.of_range(keys, 0, vocab_size).numpy(), expected, rtol=1e-14, atol=1e-14)


def test_any_slice_and_any_pair_has_the_bits_of_the_whole() -> None:
    vocab_size = 4099
    noise = GumbelNoise(vocab_size)
    keys = noise.keys([NoiseStream(seed) for seed in range(9)], range(9))
    whole = noise.of_range(keys, 0, vocab_size)
    for start, stop in ((0, 1), (1, 18), (5, 4099), (4098, 4099), (100, 1733)):
        assert torch.equal(noise.of_range(keys, start, stop), whole[:, start:stop])
        assert torch.equal(noise.of_range(keys[3:4], start, stop), whole[3:4, start:stop])
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 9, (3001,), generator=generator)
    token_ids = torch.randint(0, vocab_size, (3001,), generator=generator)
    assert torch.equal(noise.of_tokens(keys[rows], token_ids), whole[rows, token_ids])


def test_uniforms_are_uniform_and_neighbours_independent() -> None:
    noise = GumbelNoise(2000)
    gumbel = noise.of_range(noise.keys([NoiseStream(1)] * 100, range(100)), 0, 2000).numpy()
    assert stats.kstest(np.exp(-np.exp(-gumbel)).ravel(), "uniform").pvalue > 1e-4
    # neighbours in the vocabulary, and the same token at neighbouring positions
    uniform = np.exp(-np.exp(-gumbel))
    for first, second in ((uniform[:, :-1], uniform[:, 1:]), (uniform[:-1], uniform[1:])):
        joint = np.histogram2d(first.ravel(), second.ravel(), bins=16, range=((0, 1), (0, 1)))[0]
        assert stats.chi2_contingency(joint).pvalue > 1e-4


def test_the_word_zero_gives_finite_noise() -> None:
    """SplitMix64 is a bijection that maps 0 to 0, so some key would bring token 0 a uniform of 0."""
    noise = GumbelNoise(1)
    key = torch.tensor([signed(-GOLDEN)])
    assert noise.of_range(key, 0, 1).item() == pytest.approx(-np.log(53 * np.log(2)))
