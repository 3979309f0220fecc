"""Attention over paged KV, in one order of summation for every batch.

    keys       |0 ........... 255|256 .......... 511|512 ... 600|      segments, at absolute positions
                64  64  64  64     64  64  64  64     64 64            chunks: one product each

A segment is a separate online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022,
arXiv:2205.14135) over its chunks. Segments are folded into an empty state in their order. A work item is a tile of
queries with all of its segments, which one program folds, or with one of them, whose state is stored and folded by
another program. Both use the same function, so it changes no bit of a row where its segments are computed. A segment or
a chunk in which a row sees nothing leaves it unchanged, so the other rows of its tile do not matter.
"""

# pyright: reportMissingImports=false, reportMissingParameterType=false, reportUnknownParameterType=false

from __future__ import annotations

import triton.language as tl

from twostroke.kernels.cuda.jit import jit, jit_unspecialized, product, rounded, wait_for_inputs
from twostroke.kernels.cuda.kv_programs import hadamard_back, read_slots

LOWEST = tl.constexpr(-1e30)
"""Maximum of an empty set; finite, so that differences of two of them are 0 and not NaN."""
LOG2_E = tl.constexpr(1.4426950408889634)


@jit
def fold_states(m, total, acc, m_next, total_next, acc_next):
    """Fold the next segment's state into the state of a row.

    Multiply-adds are fused where `fma` says so and nowhere else, so that the compiler cannot decide differently here
    and elsewhere.
    """
    highest = tl.maximum(m, m_next)
    keep, add = tl.exp2(m - highest), tl.exp2(m_next - highest)
    total = tl.fma(total, keep, total_next * add)
    acc = tl.fma(acc, tl.broadcast_to(keep[:, None], acc.shape), acc_next * add[:, None])
    return highest, total, acc


@jit
def fold_sinks(m, total, acc, sinks):
    """Fold each head's sink into the states, like a last segment of one key without a value."""
    return fold_states(m, total, acc, sinks * LOG2_E, tl.full(total.shape, 1.0, tl.float32), tl.zeros_like(acc))


@jit
def visible_keys(keys, position, oldest, tree_row, own_first, trees, HAS_TREES: tl.constexpr):
    """Return which keys [n] each row sees. [rows, n]

    position, oldest: the last and the first key of each row. tree_row: where its bits over the step's own tokens, which
    start at own_first, lie in `trees`; with -1 it sees all of them.
    """
    visible = (keys[None, :] <= position[:, None]) & (keys[None, :] >= oldest[:, None])
    if HAS_TREES:
        own = keys[None, :] - own_first[:, None]
        is_own = (own >= 0) & (tree_row[:, None] >= 0) & visible
        words = tl.load(trees + tree_row[:, None] + own // 32, mask=is_own, other=0)
        visible = visible & ((is_own == 0) | (((words >> (own & 31)) & 1) == 1))
    return visible


@jit
def scored(
    products,
    keys,
    position,
    slopes,
    scale,
    cap,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
):
    """Return scores of a chunk to base 2, from products q . k. slopes: addresses of the rows' slopes."""
    if HAS_CAP:  # tanh(y) = 1 - 2 / (1 + exp(2 y))
        bent = tl.div_rn(tl.zeros_like(products) + 2.0 * cap, 1.0 + tl.exp(products * (scale * (2.0 / cap))))
        scores = (cap - bent) * LOG2_E
    else:
        scores = products * (scale * LOG2_E)
    if HAS_SLOPES:
        slope = tl.load(slopes) * LOG2_E
        behind = (keys[None, :] - position[:, None]).to(tl.float32)
        scores = tl.fma(behind, tl.broadcast_to(slope[:, None], (ROWS, CHUNK)), scores)
    return scores


@jit_unspecialized("items", "tokens", "table", "trees", "num_tokens", "max_blocks")
def attend(
    items,
    tokens,
    table,
    trees,
    q,
    values,
    halves,
    out,
    part_m,
    part_total,
    part_acc,
    sinks,
    slopes,
    num_tokens,
    max_blocks,
    q_stride,
    block_stride,
    layer_offset,
    head_stride,
    num_heads,
    scale,
    cap,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    SEGMENT: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_TREES: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    FLAT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Attend with a tile of queries and one KV head over some segments, in program (item, KV head).

    items: int32 [num_items, 8]: sequence, first token, number of queries (0: nothing is written), first segment, number
    of segments, and the row of partial states for the first query (-1: the result is final).
    tokens: int32 [5, num_tokens]: position, oldest key, tree_row, own_first (see `visible_keys`); the fifth is not read
        here.
    FLAT: one loop goes over the chunks of all segments, so that loads continue where a segment ends. No bit depends on
    it; it is slower for items of one segment.
    """
    wait_for_inputs(OVERLAPS)
    item, head = items + tl.program_id(0) * 8, tl.program_id(1)
    seq, first_token, num_queries = tl.load(item).to(tl.int64), tl.load(item + 1), tl.load(item + 2)
    first_segment, num_segments, part = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    row = tl.arange(0, ROWS)
    query, member = row // GROUP, row % GROUP
    is_real = query < num_queries
    token = (first_token + tl.minimum(query, num_queries - 1)).to(tl.int64)
    position, oldest = tl.load(tokens + token), tl.load(tokens + num_tokens + token)
    tree_row, own_first = tl.load(tokens + 2 * num_tokens + token), tl.load(tokens + 3 * num_tokens + token)
    column = tl.arange(0, WIDTH)
    is_number = is_real[:, None] & (column < HEAD_DIM)[None, :]
    of_head = (head * GROUP + member)[:, None] * HEAD_DIM + column[None, :]
    queries = tl.load(q + token[:, None] * q_stride + of_head, mask=is_number, other=0.0)
    if LEVELS == 15:
        wide = hadamard_back(queries.to(tl.float32), ROWS, WIDTH, STAGES)
        queries = rounded(wide, q.dtype.element_ty)
    first_key, last_key = tl.min(oldest, axis=0), tl.max(position, axis=0)
    common_first, common_end = tl.max(oldest, axis=0), tl.min(position, axis=0) + 1  # range of keys that every row sees

    m = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    at_once = tl.maximum(num_segments, 1) if FLAT else 1
    for segment in range(first_segment, first_segment + num_segments, at_once):
        begin = tl.maximum(segment * SEGMENT, first_key // CHUNK * CHUNK)
        end = tl.minimum((segment + at_once) * SEGMENT, last_key + 1)
        m_seg = tl.full((ROWS,), LOWEST, tl.float32)
        total_seg = tl.zeros((ROWS,), tl.float32)
        acc_seg = tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(begin, end, CHUNK):
            keys = start + tl.arange(0, CHUNK)
            inside = (keys >= first_key) & (keys <= last_key)
            block = tl.load(table + seq * max_blocks + keys // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
            begins = block * block_stride + layer_offset + head * head_stride
            slots = keys % BLOCK_SIZE
            k = read_slots(
                values, halves, begins, slots, inside, HEAD_DIM, WIDTH, BLOCK_SIZE, LEVELS, q.dtype.element_ty
            )
            scores = product(queries, tl.trans(k), tl.zeros((ROWS, CHUNK), tl.float32))
            scores = scored(
                scores, keys, position, slopes + head * GROUP + member, scale, cap, ROWS, CHUNK, HAS_CAP, HAS_SLOPES
            )
            # chunks that every row sees need no mask, and most chunks of a long context are such
            if HAS_TREES or (start < common_first) or (start + CHUNK > common_end):
                visible = visible_keys(keys, position, oldest, tree_row, own_first, trees, HAS_TREES)
                scores = tl.where(visible, scores, float("-inf"))
            highest = tl.maximum(m_seg, tl.max(scores, axis=1))
            keep = tl.exp2(m_seg - highest)
            weights = tl.exp2(scores - highest[:, None])
            total_seg = tl.fma(total_seg, keep, tl.sum(weights, axis=1))
            values_begin = begins + tl.num_programs(1) * head_stride
            v = read_slots(
                values, halves, values_begin, slots, inside, HEAD_DIM, WIDTH, BLOCK_SIZE, LEVELS, q.dtype.element_ty
            )
            acc_seg = product(rounded(weights, v.dtype), v, acc_seg * keep[:, None])
            m_seg = highest
            if FLAT:  # noqa: SIM102  # known to the compiler, unlike what follows
                if (start + CHUNK) % SEGMENT == 0:
                    m, total, acc = fold_states(m, total, acc, m_seg, total_seg, acc_seg)
                    m_seg = tl.full((ROWS,), LOWEST, tl.float32)
                    total_seg = tl.zeros((ROWS,), tl.float32)
                    acc_seg = tl.zeros((ROWS, WIDTH), tl.float32)
        m, total, acc = fold_states(m, total, acc, m_seg, total_seg, acc_seg)

    if part < 0:
        if HAS_SINKS:
            m, total, acc = fold_sinks(m, total, acc, tl.load(sinks + head * GROUP + member))
        result = tl.div_rn(acc, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], (ROWS, WIDTH)))
        if LEVELS == 15:
            result = hadamard_back(result, ROWS, WIDTH, STAGES)
        place = token[:, None] * num_heads * HEAD_DIM + of_head
        tl.store(out + place, rounded(result, out.dtype.element_ty), mask=is_number)
    else:
        state = (part + query).to(tl.int64) * num_heads + head * GROUP + member
        tl.store(part_m + state, m, mask=is_real)
        tl.store(part_total + state, total, mask=is_real)
        tl.store(part_acc + state[:, None] * HEAD_DIM + column[None, :], acc, mask=is_number)


@jit_unspecialized("splits")
def fold_parts(
    splits,
    part_m,
    part_total,
    part_acc,
    sinks,
    out,
    num_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    LEVELS: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Fold the states of a split token's segments in their order, in program (split token, HEADS heads).

    splits: int32 [n, 4]: token, row of its first segment's state, rows from one segment to the next, segments (0: none,
    and nothing is written).
    """
    wait_for_inputs(OVERLAPS)
    split = splits + tl.program_id(0) * 4
    token, first = tl.load(split).to(tl.int64), tl.load(split + 1).to(tl.int64)
    step, count = tl.load(split + 2), tl.load(split + 3)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)[None, :]
    is_real = head < tl.where(count > 0, num_heads, 0)
    is_number = is_real[:, None] & (column < HEAD_DIM)
    m = tl.full((HEADS,), LOWEST, tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    acc = tl.zeros((HEADS, WIDTH), tl.float32)
    for segment in range(0, count):
        state = (first + segment * step) * num_heads + head
        m_next = tl.load(part_m + state, mask=is_real, other=LOWEST)
        total_next = tl.load(part_total + state, mask=is_real, other=0.0)
        acc_next = tl.load(part_acc + state[:, None] * HEAD_DIM + column, mask=is_number, other=0.0)
        m, total, acc = fold_states(m, total, acc, m_next, total_next, acc_next)
    if HAS_SINKS:
        m, total, acc = fold_sinks(m, total, acc, tl.load(sinks + head, mask=is_real, other=0.0))
    result = tl.div_rn(acc, tl.broadcast_to(tl.where(total == 0.0, 1.0, total)[:, None], (HEADS, WIDTH)))
    if LEVELS == 15:
        result = hadamard_back(result, HEADS, WIDTH, STAGES)
    place = (token * num_heads + head)[:, None] * HEAD_DIM + column
    tl.store(out + place, rounded(result, out.dtype.element_ty), mask=is_number)
