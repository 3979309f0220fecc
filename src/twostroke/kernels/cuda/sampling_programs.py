"""Draws from large vocabularies: noise and scores of sampling/noise.py, in float64, without a tensor of either.

Logarithms of two libraries differ by some 1e-15, and so do sums in another order. Where a decision depends on less than
SLACK, the result is -1 and the caller decides, so no token depends on the backend.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit, jit_unspecialized

SLACK = tl.constexpr(1e-9)
"""Least difference of two scores for a decision."""
MASS_SLACK = tl.constexpr(1e-11)
"""Least difference of two sums of probabilities for a decision, as a part of the whole sum."""
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)
INFINITE = tl.constexpr(0x7F800000)
"""Bits of an infinite float32."""


@jit
def noise_of(key, token):
    """Return Gumbel noise of tokens, int64 of any shape, for a row's key. float64"""
    state = (token + 1).to(tl.uint64, bitcast=True) * GOLDEN + key.to(tl.uint64, bitcast=True)
    state = (state ^ (state >> 30)) * MIX_1
    state = (state ^ (state >> 27)) * MIX_2
    state = state ^ (state >> 31)
    uniform = ((state >> 11) | 1).to(tl.float64) * (2.0**-53)
    return -tl.log(-tl.log(uniform))


@jit
def scaled_logits(logits, token, vocab_size, peak, temperature):
    """Return (logits - peak) / temperature of tokens [n] of a row; -inf after the last one. float32, none above 0"""
    found = tl.load(logits + token, mask=token < vocab_size, other=float("-inf"))
    return tl.div_rn(found - peak, temperature)


@jit
def update_best_two(best, second, winner, scores, token):
    """Update the two best scores and the token of the best with more tokens [n]; of equal scores the first is best."""
    highest = tl.max(scores, axis=0)
    first = tl.min(tl.where(scores == highest, token, 0x7FFFFFFFFFFFFFFF), axis=0)
    next_best = tl.max(tl.where(token == first, float("-inf"), scores), axis=0)
    is_better = highest > best
    second = tl.maximum(tl.maximum(second, next_best), tl.where(is_better, best, highest))
    return tl.where(is_better, highest, best), second, tl.where(is_better, first, winner)


@jit_unspecialized("peaks", "temperatures", "keys")
def draw_in_slices(logits, peaks, temperatures, keys, bests, seconds, winners, stride, vocab_size, SLICE: tl.constexpr):
    """Store the two best scores of a slice of the vocabulary and the token of the best, in program (row, slice)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = (piece * SLICE + tl.arange(0, SLICE)).to(tl.int64)
    scaled = scaled_logits(logits + row * stride, token, vocab_size, tl.load(peaks + row), tl.load(temperatures + row))
    scores = scaled.to(tl.float64) + noise_of(tl.load(keys + row), token)
    highest = tl.max(scores, axis=0)
    first = tl.min(tl.where(scores == highest, token, 0x7FFFFFFFFFFFFFFF), axis=0)
    place = row * tl.num_programs(1) + piece
    tl.store(bests + place, highest)
    tl.store(seconds + place, tl.max(tl.where(token == first, float("-inf"), scores), axis=0))
    tl.store(winners + place, first)


@jit
def best_of_slices(bests, seconds, winners, out, num_slices, SLICES: tl.constexpr):
    """Store the winner of all slices, or -1 if it is too close, in program (row).

    SLICES is num_slices, rounded up to a power of two.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.arange(0, SLICES)
    inside, place = piece < num_slices, row * num_slices + piece
    best = tl.load(bests + place, mask=inside, other=float("-inf"))
    second = tl.load(seconds + place, mask=inside, other=float("-inf"))
    token = tl.load(winners + place, mask=inside, other=0x7FFFFFFFFFFFFFFF)
    highest = tl.max(best, axis=0)
    winner = tl.min(tl.where(best == highest, token, 0x7FFFFFFFFFFFFFFF), axis=0)
    others = tl.maximum(tl.where(token == winner, float("-inf"), best), second)
    is_clear = highest > tl.max(others, axis=0) + SLACK
    tl.store(out + row, tl.where(is_clear, winner, -1))


@jit
def distances(logits, token, vocab_size, peak, temperature):
    """Return the distance of tokens [n] below the peak, as bits of a float32 (int32), whose order is that of the
    numbers."""
    scaled = scaled_logits(logits, token, vocab_size, peak, temperature)
    return scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF, scaled


@jit
def count_and_mass(logits, vocab_size, peak, temperature, limit, SLICE: tl.constexpr, WANTS_MASS: tl.constexpr):
    """Return the number of tokens no farther than `limit`, or the sum of e^scaled over them. float64"""
    found = tl.zeros((SLICE,), tl.float64)
    for start in range(0, vocab_size, SLICE):
        token = start + tl.arange(0, SLICE)
        distance, scaled = distances(logits, token, vocab_size, peak, temperature)
        one = tl.exp(scaled.to(tl.float64)) if WANTS_MASS else tl.full((SLICE,), 1.0, tl.float64)
        found += tl.where(distance <= limit, one, 0.0)
    return tl.sum(found, axis=0)


@jit
def nearest_reaching(
    logits, vocab_size, peak, temperature, limit, target, SLICE: tl.constexpr, WANTS_MASS: tl.constexpr
):
    """Return the least distance up to `limit` within which tokens reach a count or a mass; `limit` if none does."""
    low, high = limit * 0, limit
    while low < high:
        middle = low + (high - low) // 2
        found = count_and_mass(logits, vocab_size, peak, temperature, middle, SLICE, WANTS_MASS)
        is_enough = found >= target
        high = tl.where(is_enough, middle, high)
        low = tl.where(is_enough, low, middle + 1)
    return high


@jit_unspecialized("peaks", "temperatures", "keys", "floors", "top_ks", "top_ps")
def draw_filtered(
    logits,
    peaks,
    temperatures,
    keys,
    floors,
    top_ks,
    top_ps,
    out,
    stride,
    vocab_size,
    SLICE: tl.constexpr,
):
    """Draw from the tokens that pass min_p, top_k and top_p (sampling/filters.py), or store -1, in program (row).

    Nothing is sorted. The filters keep all tokens down to some value, and of the tokens at that value the first ones.
    So the value is found by bisection over the float32 numbers (31 steps at most, each a pass over the row).
    """
    row = tl.program_id(0).to(tl.int64)
    of_row, key = logits + row * stride, tl.load(keys + row)
    peak, temperature = tl.load(peaks + row), tl.load(temperatures + row)
    limit = tl.load(floors + row).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    limit = tl.minimum(limit, INFINITE - 1)  # tokens at -inf were excluded before
    top_k, top_p = tl.load(top_ks + row), tl.load(top_ps + row)
    if top_k < vocab_size:
        limit = nearest_reaching(of_row, vocab_size, peak, temperature, limit, top_k.to(tl.float64), SLICE, False)
    num_at_limit = vocab_size.to(tl.int64)
    is_clear = row >= 0
    if top_p < 1.0:
        mass = count_and_mass(of_row, vocab_size, peak, temperature, limit, SLICE, True)
        limit = nearest_reaching(of_row, vocab_size, peak, temperature, limit, mass * top_p, SLICE, True)
        before = count_and_mass(of_row, vocab_size, peak, temperature, limit - 1, SLICE, True)
        each = tl.exp(-(limit.to(tl.float32, bitcast=True).to(tl.float64)))
        # take tokens at the limit until the mass before the next one reaches the target
        missing = (mass * top_p - before) / each
        nearest = tl.floor(missing + 0.5)
        is_clear = tl.abs(missing - nearest) * each > MASS_SLACK * mass
        num_at_limit = tl.maximum(tl.ceil(missing), 1.0).to(tl.int64)
    best = tl.full((), float("-inf"), tl.float64)
    second = tl.full((), float("-inf"), tl.float64)
    winner = row * 0
    num_before = row * 0
    for start in range(0, vocab_size, SLICE):
        token = (start + tl.arange(0, SLICE)).to(tl.int64)
        distance, scaled = distances(of_row, token, vocab_size, peak, temperature)
        is_at_limit = distance == limit
        rank = num_before + tl.cumsum(is_at_limit.to(tl.int64), axis=0)  # from 1
        is_kept = (distance < limit) | (is_at_limit & (rank <= num_at_limit))
        scores = tl.where(is_kept, scaled.to(tl.float64) + noise_of(key, token), float("-inf"))
        best, second, winner = update_best_two(best, second, winner, scores, token)
        num_before += tl.sum(is_at_limit.to(tl.int64), axis=0)
    tl.store(out + row, tl.where(is_clear & (best > second + SLACK), winner, -1))
