"""Attention over the columns of a cache, in Triton: for the tokens of a step (`attend`), and for many (`attend_all`).
`move_rows` reorders rows between steps.

A row's result has the same bits in any batch: its columns are split into pieces counted from its first token, and these
are merged from the first to the last, by the last program to finish or by the one program that computed them all.

T tokens (row by row, F tokens each), H heads of queries, K heads of keys and values, D features of a head, C
columns of a cache.
"""

import triton
import triton.language as tl

from genctl.kernels.cuda import comes_last, wait
from genctl.kernels.forms import prefetch, read_fresh

# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them
# fmt: off
NEVER = tl.constexpr(-1e30)  # the score of a masked column


@triton.jit
def _base(row, row_stride, column, D: tl.constexpr):
    """The offset of a column, declared as aligned to D; else the compiler loads one number at a time."""
    aligned: tl.constexpr = D & -D
    return tl.multiple_of(row.to(tl.int64) * row_stride + column * D, aligned)


@triton.jit
def _look(
    qs, keys_ptr, values_ptr, begin, seen, owns, scaling, TILES: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, CAP: tl.constexpr, PIECE: tl.constexpr, C: tl.constexpr,
):
    """One piece of PIECE columns from `begin` on; a query sees columns before its `own` [G] and before `seen`.

    Returns for each of TILES tiles of queries the largest scores and the sums of the weights [G], and the weighted
    sums of the values [G, W].
    """
    d = tl.arange(0, W)
    mosts, masses, accs = (), (), ()
    for _ in tl.static_range(TILES):
        mosts, masses = mosts + (tl.full((G,), NEVER, tl.float32),), masses + (tl.zeros((G,), tl.float32),)
        accs = accs + (tl.zeros((G, W), tl.float32),)
    for part in tl.static_range(PIECE // C):
        c = begin + part * C + tl.arange(0, C)
        there = (c < seen)[:, None] & (d < D)[None, :]
        place = c[:, None] * D + d[None, :]
        keys = tl.load(keys_ptr + place, mask=there, other=0.0)
        values = tl.load(values_ptr + place, mask=there, other=0.0)
        new_mosts, new_masses, new_accs = (), (), ()
        for i in tl.static_range(TILES):
            scores = tl.dot(qs[i], tl.trans(keys), input_precision="ieee") * scaling
            if CAP > 0.0:  # tanh(z) is 2 · sigmoid(2 z) - 1
                scores = CAP * (2.0 * tl.sigmoid(2.0 / CAP * scores) - 1.0)
            inside = c[None, :] < owns[i][:, None]
            scores = tl.where(inside, scores, NEVER)
            new = tl.maximum(mosts[i], tl.max(scores, 1))
            weights = tl.where(inside, tl.exp(scores - new[:, None]), 0.0)
            shrink = tl.exp(mosts[i] - new)
            acc = accs[i] * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
            new_mosts, new_masses = new_mosts + (new,), new_masses + (masses[i] * shrink + tl.sum(weights, 1),)
            new_accs = new_accs + (acc,)
        mosts, masses, accs = new_mosts, new_masses, new_accs
    return mosts, masses, accs


@triton.jit
def _joined(most, mass, acc, top, added, part):
    """Merge two pieces (online softmax)."""
    new = tl.maximum(most, top)
    old, fresh = tl.exp(most - new), tl.exp(top - new)
    return new, mass * old + added * fresh, acc * old[:, None] + part * fresh[:, None]


@triton.jit(do_not_specialize=["fed", "row_stride", "columns", "pieces"])
def attend(
    q_ptr, keys_ptr, values_ptr, start_ptr, place_ptr, out_ptr, part_ptr, most_ptr, mass_ptr, count_ptr,
    fed, row_stride, columns, pieces, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr,
    PIECE: tl.constexpr, C: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):
    """One piece of PIECE columns of one token and key head, for the GROUP heads that share it (G and W: padded).

    A row's columns begin at `start` int32 [N]; a token sees those up to its own, at most WINDOW of them (0: all).
    Scores are CAP · tanh(score / CAP) (CAP 0: unchanged). Padding has an output of 0. out [T, H, D].
    """
    token, kv, number = tl.program_id(2), tl.program_id(1), tl.program_id(0)
    row = token // fed
    start = tl.load(start_ptr + row)
    end = (tl.load(place_ptr) + token % fed + 1).to(tl.int32)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    seen = end - start  # pieces start at the first column seen: sums do not depend on the buffer
    count = tl.maximum((seen - 1) // PIECE + 1, 1)
    base = _base(row, row_stride, kv * columns + start, D)
    if PDL and W >= 64:  # noqa: SIM102 - this is known when it is compiled
        if number < count:  # only the last columns come from the previous kernel
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
        mosts, masses, accs = _look(
            (q,), keys_ptr + base, values_ptr + base, number * PIECE, seen, (own,), scaling, 1, G, D, W, CAP, PIECE, C
        )
        most, mass, acc = mosts[0], masses[0], accs[0]
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
                    for i in tl.static_range(AT_ONCE):  # independent loads
                        piece = tl.full((G,), i, tl.int32) + chunk
                        there = (piece < count) & (g < GROUP)
                        each = ((token * KV + kv) * pieces + piece).to(tl.int64) * GROUP + g
                        part = read_fresh(part_ptr + each[:, None] * D + d[None, :], there[:, None] & wide, 0.0)
                        top, added = read_fresh(most_ptr + each, there, NEVER), read_fresh(mass_ptr + each, there, 0.0)
                        most, mass, acc = _joined(most, mass, acc, top, added, part)
            out = (acc / tl.where(mass > 0.0, mass, 1.0)[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + q_at, out, mask=grouped & wide)


@triton.jit(do_not_specialize=["fed", "row_stride", "columns"])
def attend_all(
    q_ptr, keys_ptr, values_ptr, start_ptr, place_ptr, out_ptr,
    fed, row_stride, columns, scaling,
    KV: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, B: tl.constexpr, TILES: tl.constexpr,
    PIECE: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):
    """Like `attend`, with all pieces in sequence, for TILES tiles of B tokens that read the same columns.

    B and TILES are 1 with a window: there, pieces begin at another column for each token.
    """
    block, kv, row = tl.program_id(0) * (B * TILES), tl.program_id(1), tl.program_id(2)
    wait(PDL)
    g, d = tl.arange(0, G), tl.arange(0, W)
    start = tl.load(start_ptr + row)
    place = tl.load(place_ptr).to(tl.int32)
    end = place + tl.minimum(block + B * TILES, fed)
    if WINDOW > 0:
        start = tl.maximum(start, end - WINDOW)
    seen = end - start
    base = _base(row, row_stride, kv * columns + start, D)
    qs, owns, mosts, masses, accs = (), (), (), (), ()
    for i in tl.static_range(TILES):
        token = block + i * B + g // GROUP
        there = (g < B * GROUP) & (token < fed)
        q_at = (((row * fed + token) * KV + kv) * GROUP + g % GROUP)[:, None] * D + d[None, :]
        qs = qs + (tl.load(q_ptr + q_at, mask=there[:, None] & (d < D)[None, :], other=0.0),)
        owns = owns + (tl.where(there, place + token + 1 - start, 0),)
        mosts, masses = mosts + (tl.full((G,), NEVER, tl.float32),), masses + (tl.zeros((G,), tl.float32),)
        accs = accs + (tl.zeros((G, W), tl.float32),)
    for begin in range(0, seen, PIECE):
        tops, added, parts = _look(
            qs, keys_ptr + base, values_ptr + base, begin, seen, owns, scaling, TILES, G, D, W, CAP, PIECE, C
        )
        new_mosts, new_masses, new_accs = (), (), ()
        for i in tl.static_range(TILES):
            most, mass, acc = _joined(mosts[i], masses[i], accs[i], tops[i], added[i], parts[i])
            new_mosts, new_masses, new_accs = new_mosts + (most,), new_masses + (mass,), new_accs + (acc,)
        mosts, masses, accs = new_mosts, new_masses, new_accs
    for i in tl.static_range(TILES):
        token = block + i * B + g // GROUP
        there = (g < B * GROUP) & (token < fed)
        q_at = (((row * fed + token) * KV + kv) * GROUP + g % GROUP)[:, None] * D + d[None, :]
        out = (accs[i] / tl.where(masses[i] > 0.0, masses[i], 1.0)[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + q_at, out, mask=there[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["count", "begin", "size", "columns"])
def move_rows(
    table_ptr, rows_ptr, like_ptr, count, begin, size, columns, D: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):
    """Row i of each buffer becomes row `rows[i]` int64 [count], in `size` columns from `begin` on; at most R rows.

    table int64 [buffers]: the address of each buffer [rows, K, C, D].
    """
    block, head, buffer = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    base = tl.load(table_ptr + buffer).to(tl.pointer_type(like_ptr.dtype.element_ty))
    base = tl.multiple_of(base, 16) + _base(head, columns * D, begin, D)
    row_stride = tl.num_programs(1) * columns * D
    r, at = tl.arange(0, R).to(tl.int64), block * N + tl.arange(0, N)
    inside = (r < count)[:, None] & (at < size * D)[None, :]
    source = tl.load(rows_ptr + r, mask=r < count, other=0)
    moved = tl.load(base + source[:, None] * row_stride + at[None, :], mask=inside, other=0.0)
    tl.debug_barrier()  # read all before writing any
    tl.store(base + r[:, None] * row_stride + at[None, :], moved, mask=inside)
