"""Attention over the columns of a cache, in Triton: of the tokens of a step (`attend`), and of many (`attend_all`).
Between two steps rows move (`move_rows`).

A row's bits are its own: its columns are cut into pieces that are counted from its first token, and these are joined
from the first to the last, whether the program that comes last does so or one program has computed them all.

T tokens (rows in turn, F tokens of each), H heads of queries, K heads of keys and values, D features of a head, C
columns of a cache.
"""

import triton
import triton.language as tl

from genctl.kernels.cuda import comes_last, wait
from genctl.kernels.forms import bits_of, prefetch, read_fresh

# fmt: off
NEVER = tl.constexpr(-1e30)  # the score of a column that is not seen


@triton.jit
def _look(
    q, keys_ptr, values_ptr, begin, seen, own, scaling,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):
    """One piece of PIECE columns from `begin` on, of which a query sees those before `own` [G], `seen` at most.

    Returns the largest scores and the masses of the weights [G], and the weighted sums of the values [G, W].
    """
    d = tl.arange(0, W)
    most, mass, acc = tl.full((G,), NEVER, tl.float32), tl.zeros((G,), tl.float32), tl.zeros((G, W), tl.float32)
    for at in range(begin, begin + PIECE, C):
        c = at + tl.arange(0, C)
        there = (c < seen)[:, None] & (d < D)[None, :]
        place = c[:, None] * D + d[None, :]
        keys = tl.load(keys_ptr + place, mask=there, other=0.0)
        values = tl.load(values_ptr + place, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scaling
        if CAP > 0.0:  # tanh(z) is 2 · sigmoid(2 z) - 1
            scores = CAP * (2.0 * tl.sigmoid(2.0 / CAP * scores) - 1.0)
        inside = c[None, :] < own[:, None]
        scores = tl.where(inside, scores, NEVER)
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.where(inside, tl.exp(scores - new[:, None]), 0.0)
        shrink = tl.exp(most - new)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        mass, most = mass * shrink + tl.sum(weights, 1), new
    return most, mass, acc


@triton.jit
def _joined(most, mass, acc, top, added, part):
    """Two pieces together."""
    new = tl.maximum(most, top)
    old, fresh = tl.exp(most - new), tl.exp(top - new)
    return new, mass * old + added * fresh, acc * old[:, None] + part * fresh[:, None]


@triton.jit(do_not_specialize=["fed", "row_stride", "columns", "pieces"])
def attend(
    q_ptr, keys_ptr, values_ptr, start_ptr, place_ptr, out_ptr, tops_ptr, part_ptr, most_ptr, mass_ptr, count_ptr,
    fed, row_stride, columns, pieces, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
    PIECE: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr, TOPS: tl.constexpr, PDL: tl.constexpr,
):
    """One piece of PIECE columns of one token and key head, for the GROUP heads that share it (G and W: padded).

    A row's columns begin with `start` int32 [N]; a token sees those up to its own, WINDOW of them at most (0: all).
    Scores are CAP · tanh(score / CAP) (0: the scores themselves). Padding has an output of 0. out [T, H, D].
    """
    token, kv, number = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    row = token // fed
    start = tl.load(start_ptr + row)
    end = (tl.load(place_ptr) + token % fed + 1).to(tl.int32)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    seen = end - start  # columns, cut into pieces from the first one on: a row's sums do not depend on its buffer
    count = tl.maximum((seen - 1) // PIECE + 1, 1)
    base = row.to(tl.int64) * row_stride + (kv * columns + start) * D
    if PDL and W >= 64:  # noqa: SIM102 - this is known when it is compiled
        if number < count:  # earlier steps wrote all but a few columns
            ahead = tl.maximum(tl.minimum(number * PIECE + tl.arange(0, C), seen - 1), 0)[:, None] * D
            lines = base + ahead + tl.minimum(tl.arange(0, W // 64) * 64, D - 1)[None, :]
            prefetch(keys_ptr + lines)
            prefetch(values_ptr + lines)
    wait(PDL)
    if number < count:
        g, d = tl.arange(0, G), tl.arange(0, W)
        grouped, wide = (g < GROUP)[:, None], (d < D)[None, :]
        q_at = ((token * KV + kv) * GROUP + g)[:, None] * D + d[None, :]
        q = tl.load(q_ptr + q_at, mask=grouped & wide, other=0.0)
        own = tl.full((G,), 0, tl.int32) + seen
        most, mass, acc = _look(
            q, keys_ptr + base, values_ptr + base, number * PIECE, seen, own, scaling, G, D, W, CAP, PIECE, C
        )
        last = True
        if count > 1:
            at = ((token * KV + kv) * pieces + number).to(tl.int64) * GROUP + g
            tl.store(part_ptr + at[:, None] * D + d[None, :], acc, mask=grouped & wide)
            tl.store(most_ptr + at, most, mask=g < GROUP)
            tl.store(mass_ptr + at, mass, mask=g < GROUP)
            last = comes_last(count_ptr + token * KV + kv, count)
        if last:
            if count > 1:
                most, mass = tl.full((G,), NEVER, tl.float32), tl.zeros((G,), tl.float32)
                acc = tl.zeros((G, W), tl.float32)
                for chunk in range(0, count, AT_ONCE):
                    for i in tl.static_range(AT_ONCE):  # loads that do not wait for each other
                        piece = tl.full((G,), i, tl.int32) + chunk
                        there = (piece < count) & (g < GROUP)
                        each = ((token * KV + kv) * pieces + piece).to(tl.int64) * GROUP + g
                        part = read_fresh(part_ptr + each[:, None] * D + d[None, :], there[:, None] & wide, 0.0)
                        top, added = read_fresh(most_ptr + each, there, NEVER), read_fresh(mass_ptr + each, there, 0.0)
                        most, mass, acc = _joined(most, mass, acc, top, added, part)
            out = (acc / tl.where(mass > 0.0, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_at, out, mask=grouped & wide)
            if TOPS:
                top = tl.max(tl.max(tl.where(grouped & wide, bits_of(out), 0), 1), 0)
                tl.store(tops_ptr + kv * tl.num_programs(2) + token, top)


@triton.jit(do_not_specialize=["fed", "row_stride", "columns"])
def attend_all(
    q_ptr, keys_ptr, values_ptr, start_ptr, place_ptr, out_ptr, tops_ptr,
    fed, row_stride, columns, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, B: tl.constexpr,
    PIECE: tl.constexpr, C: tl.constexpr, TOPS: tl.constexpr, PDL: tl.constexpr,
):
    """What `attend` computes, all pieces one after another, of B tokens of a row that read the same columns.

    B is 1 with a window, whose pieces begin at another column for each token, and with TOPS.
    """
    block, kv, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    g, d = tl.arange(0, G), tl.arange(0, W)
    token = block * B + g // GROUP
    there = (g < B * GROUP) & (token < fed)
    start = tl.load(start_ptr + row)
    place = tl.load(place_ptr).to(tl.int32)
    end = place + tl.minimum(block * B + B, fed)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    seen, own = end - start, tl.where(there, place + token + 1 - start, 0)
    base = row.to(tl.int64) * row_stride + (kv * columns + start) * D
    q_at = (((row * fed + token) * KV + kv) * GROUP + g % GROUP)[:, None] * D + d[None, :]
    here = there[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_at, mask=here, other=0.0)
    most, mass, acc = tl.full((G,), NEVER, tl.float32), tl.zeros((G,), tl.float32), tl.zeros((G, W), tl.float32)
    for begin in range(0, seen, PIECE):
        top, added, part = _look(
            q, keys_ptr + base, values_ptr + base, begin, seen, own, scaling, G, D, W, CAP, PIECE, C
        )
        most, mass, acc = _joined(most, mass, acc, top, added, part)
    out = (acc / tl.where(mass > 0.0, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + q_at, out, mask=here)
    if TOPS:
        top = tl.max(tl.max(tl.where(here, bits_of(out), 0), 1), 0)
        tl.store(tops_ptr + (kv * tl.num_programs(2) + row) * fed + block, top)


@triton.jit(do_not_specialize=["count", "begin", "size", "row_stride", "columns"])
def move_rows(
    table_ptr, rows_ptr, like_ptr, count, begin, size, row_stride, columns,
    D: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):
    """Row i of each buffer becomes row `rows[i]` int64 [count], in `size` columns from `begin` on, R rows at most.

    table int64 [buffers]: where each begins; [rows, K, C, D], rows `row_stride` apart.
    """
    block, head, buffer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(table_ptr + buffer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    base += (head.to(tl.int64) * columns + begin) * D
    r, at = tl.arange(0, R), block * N + tl.arange(0, N)
    inside = (r < count)[:, None] & (at < size * D)[None, :]
    source = tl.load(rows_ptr + r, mask=r < count, other=0)
    moved = tl.load(base + source[:, None] * row_stride + at[None, :], mask=inside, other=0.0)
    tl.debug_barrier()  # all are read before one is written
    tl.store(base + r.to(tl.int64)[:, None] * row_stride + at[None, :], moved, mask=inside)
