"""The kernels of a pass, in Triton: five for each layer, with those of `cuda_attention`.

A row's result has the same bits in any batch. Tokens are multiplied in whole tiles of M, and a product's sum is split
into pieces whose size depends on the weight alone. The last program to finish adds the pieces, always from the first to
the last. With many tokens, a program multiplies a tile of a weight by TIMES tiles of tokens. Tensor cores of the
supported GPUs sum a tile of any width in the same order; everything after that is done tile by tile.

T tokens (row by row, F tokens each), I features in, O features out, E features of the residual stream, H heads of
queries, K heads of keys and values, D features of a head, C columns of a cache. FORM is the weight's (see `forms`).

For weights in 8 or 4 bits, x has been rounded to codes with scales `x_scales` (see `forms.round_x`).
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from genctl.kernels.forms import (
    add_tile,
    all_pieces,
    ask_ahead,
    no_sums,
    numbers_of,
    output_of,
    read_w,
    read_x,
    write_piece,
)

# types that kernels write; float32 for tests in the interpreter
KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}

# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them
# fmt: off


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next kernel start, and wait for the previous one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _dots(
    x_ptr, w_ptr, scales_ptr, x_scales_ptr, first, n, tokens, inputs, begin, end,
    N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
):
    """The sums of w x over the inputs from `begin` to `end`, for TIMES tiles of tokens: [N, M] each."""
    m = first + tl.arange(0, M * TIMES)
    acc = no_sums(N, M * TIMES, FORM)
    for start in range(begin, end, K):
        w = read_w(w_ptr, scales_ptr, n, start, inputs, end, K, EVEN, FORM)
        x = read_x(x_ptr, x_scales_ptr, m, start, tokens, inputs, end, K, EVEN, FORM)
        acc = add_tile(acc, x, w, K, FORM)
    return _tiles(acc, N, M, TIMES)


@triton.jit
def _tiles(sums, N: tl.constexpr, M: tl.constexpr, TIMES: tl.constexpr):
    """Split sums [N, M · TIMES] into TIMES (1, 2, 4 or 8) tiles [N, M], so later sums have the order of one tile."""
    tiles = (sums,)
    for level in tl.static_range(3):
        if 1 << level < TIMES:
            halves = ()
            for i in tl.static_range(1 << level):
                pairs = tl.reshape(tiles[i], (N, 2, M * TIMES >> level + 1))
                low, high = tl.split(tl.permute(pairs, (0, 2, 1)))
                halves = halves + (low, high)
            tiles = halves
    return tiles


@triton.jit
def comes_last(count_ptr, pieces):
    """Whether all other programs that share a counter have stored their pieces. The last one resets it to 0."""
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel") == pieces - 1
    if last:
        tl.store(count_ptr, 0)
    return last


@triton.jit
def _scale(sums_ptr, parts, tokens, inputs, eps, m, P: tl.constexpr):
    """1 / sqrt(mean(x²) + eps) of each token [M], from `parts` sums of squares."""
    p = tl.arange(0, P)
    inside = (p < parts)[:, None] & (m < tokens)[None, :]
    squares = tl.load(sums_ptr + p[:, None] * tokens + m[None, :], mask=inside, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / inputs + eps)


@triton.jit
def _activated(x, ACT: tl.constexpr):
    if ACT == "silu":
        x = x * tl.sigmoid(x)
    elif ACT == "relu":
        x = tl.maximum(x, 0.0)
    elif ACT == "gelu":
        x = 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))
    elif ACT == "gelu_tanh":  # 0.5 · (1 + tanh(z)) is the sigmoid of 2 z
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACT == "quick_gelu":
        x = x * tl.sigmoid(1.702 * x)
    return x


@triton.jit
def _places(m, n, tokens, outputs):
    """Offsets of a tile's outputs in [T, O], and a mask of those inside."""
    return m[None, :] * outputs + n[:, None], (m < tokens)[None, :] & (n < outputs)[:, None]


@triton.jit(do_not_specialize=["tokens", "parts", "scale_by"])
def product(
    x_ptr, w_ptr, scales_ptr, bias_ptr, rest_ptr, gain_ptr, sums_ptr, x_scales_ptr, out_ptr, next_ptr, next_sums_ptr,
    part_ptr, count_ptr,
    tokens, outputs, inputs, piece, parts, eps, scale_by,
    NORM: tl.constexpr, BIAS: tl.constexpr, REST: tl.constexpr, NEXT: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, FORM: tl.constexpr, SHORT: tl.constexpr, PDL: tl.constexpr,
):
    """out [T, O] = w (x · scale of its norm) + bias, times `scale_by`, + rest, rounded to SHORT.

    NORM: x is already multiplied by the gain, and `sums` holds the sums of squares of the norm's input. NEXT: also
    write next = out · gain and the sums of squares of out, for the next norm.
    """
    tile = tl.program_id(1)
    first_m = tl.program_id(0) * (M * TIMES)
    m = first_m + tl.arange(0, M)
    begin = tl.program_id(2) * piece
    end = tl.minimum(begin + piece, inputs)
    first = tile * N
    rows = tl.minimum(tl.arange(0, N), outputs - 1 - first)
    w_ptr, scales_ptr = output_of(w_ptr, scales_ptr, first, inputs, FORM)
    ask_ahead(w_ptr, rows, inputs, begin, end, AHEAD, FORM)
    wait(PDL)
    all_sums = _dots(
        x_ptr, w_ptr, scales_ptr, x_scales_ptr, first_m, rows, tokens, inputs, begin, end, N, M, K, TIMES, EVEN, FORM
    )
    n = first + tl.arange(0, N)
    last = True
    if S > 1:
        for i in tl.static_range(TIMES):
            place, inside = _places(m + i * M, n, tokens, outputs)
            write_piece(part_ptr + tl.program_id(2) * tokens * outputs + place, all_sums[i], inside, FORM)
        last = comes_last(count_ptr + tile * tl.num_programs(0) + tl.program_id(0), S)
    if last:
        for i in tl.static_range(TIMES):
            t, sums = m + i * M, all_sums[i]
            place, inside = _places(t, n, tokens, outputs)
            if S > 1:
                sums = all_pieces(part_ptr + place, tokens * outputs, inside, S, FORM)
            acc = numbers_of(sums, scales_ptr, x_scales_ptr, rows, t, tokens, FORM)
            if NORM:
                acc *= _scale(sums_ptr, parts, tokens, inputs, eps, t, P)[None, :]
            if BIAS:
                acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0)[:, None]
            acc *= scale_by
            if REST:
                acc += tl.load(rest_ptr + place, mask=inside, other=0.0).to(tl.float32)
            short = acc.to(SHORT)
            tl.store(out_ptr + place, short.to(out_ptr.dtype.element_ty), mask=inside)
            if NEXT:
                wide = tl.where(inside, short.to(tl.float32), 0.0)
                gain = tl.load(gain_ptr + n, mask=n < outputs, other=0.0)[:, None]
                gained = (wide * gain).to(next_ptr.dtype.element_ty)
                tl.store(next_ptr + place, gained, mask=inside)
                if REST:  # its load determines the layout of the sum
                    squares = tl.sum(wide * wide, 0)
                else:
                    squares = _sum_in_halves(tl.math.fma(wide, wide, tl.zeros(wide.shape, tl.float32)), N, M)
                tl.store(next_sums_ptr + tile * tokens + t, squares, mask=t < tokens)


@triton.jit(do_not_specialize=["tokens", "parts"])
def gated(
    x_ptr, w_ptr, scales_ptr, bias_ptr, sums_ptr, x_scales_ptr, out_ptr, part_ptr, count_ptr,
    tokens, outputs, inputs, piece, parts, eps,
    ACT: tl.constexpr, BIAS: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):
    """out [T, O] = act(gate) · up of a normed x; w [2 O, I] has the gates first."""
    tile = tl.program_id(1)
    first_m = tl.program_id(0) * (M * TIMES)
    m = first_m + tl.arange(0, M)
    begin = tl.program_id(2) * piece
    end = tl.minimum(begin + piece, inputs)
    first = tile * N
    rows = tl.minimum(tl.arange(0, N), outputs - 1 - first)
    up_ptr, up_scales_ptr = output_of(w_ptr, scales_ptr, outputs + first, inputs, FORM)
    w_ptr, scales_ptr = output_of(w_ptr, scales_ptr, first, inputs, FORM)
    ask_ahead(w_ptr, rows, inputs, begin, end, AHEAD, FORM)
    ask_ahead(up_ptr, rows, inputs, begin, end, AHEAD, FORM)
    wait(PDL)
    wide = first_m + tl.arange(0, M * TIMES)
    gates, ups = no_sums(N, M * TIMES, FORM), no_sums(N, M * TIMES, FORM)
    for start in range(begin, end, K):
        w = read_w(w_ptr, scales_ptr, rows, start, inputs, end, K, EVEN, FORM)
        up_w = read_w(up_ptr, up_scales_ptr, rows, start, inputs, end, K, EVEN, FORM)
        x = read_x(x_ptr, x_scales_ptr, wide, start, tokens, inputs, end, K, EVEN, FORM)
        gates, ups = add_tile(gates, x, w, K, FORM), add_tile(ups, x, up_w, K, FORM)
    gate_sums, up_sums = _tiles(gates, N, M, TIMES), _tiles(ups, N, M, TIMES)
    n = first + tl.arange(0, N)
    last = True
    if S > 1:
        for i in tl.static_range(TIMES):
            place, inside = _places(m + i * M, n, tokens, outputs)
            part = part_ptr + tl.program_id(2) * 2 * tokens * outputs + place
            write_piece(part, gate_sums[i], inside, FORM)
            write_piece(part + tokens * outputs, up_sums[i], inside, FORM)
        last = comes_last(count_ptr + tile * tl.num_programs(0) + tl.program_id(0), S)
    if last:
        for i in tl.static_range(TIMES):
            t, gate_sum, up_sum = m + i * M, gate_sums[i], up_sums[i]
            place, inside = _places(t, n, tokens, outputs)
            if S > 1:
                gate_sum = all_pieces(part_ptr + place, 2 * tokens * outputs, inside, S, FORM)
                up_sum = all_pieces(part_ptr + place + tokens * outputs, 2 * tokens * outputs, inside, S, FORM)
            gate = numbers_of(gate_sum, scales_ptr, x_scales_ptr, rows, t, tokens, FORM)
            up = numbers_of(up_sum, up_scales_ptr, x_scales_ptr, rows, t, tokens, FORM)
            scale = _scale(sums_ptr, parts, tokens, inputs, eps, t, P)[None, :]
            gate, up = gate * scale, up * scale
            if BIAS:
                gate += tl.load(bias_ptr + n, mask=n < outputs, other=0.0)[:, None]
                up += tl.load(bias_ptr + outputs + n, mask=n < outputs, other=0.0)[:, None]
            out = (_activated(gate, ACT) * up).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + place, out, mask=inside)


@triton.jit(do_not_specialize=["tokens", "fed", "parts", "row_stride", "columns", "turns", "turn_scale"])
def heads(
    x_ptr, w_ptr, scales_ptr, bias_ptr, sums_ptr, x_scales_ptr, q_ptr, keys_ptr, values_ptr, gain_ptr, rope_ptr,
    position_ptr, place_ptr, part_ptr, count_ptr,
    tokens, fed, inputs, piece, parts, eps, row_stride, columns, turns, turn_scale,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, R: tl.constexpr, PAIRS: tl.constexpr, TILES: tl.constexpr,
    BIAS: tl.constexpr, QK_NORM: tl.constexpr, S: tl.constexpr,
    P: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TIMES: tl.constexpr, EVEN: tl.constexpr,
    AHEAD: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):
    """Queries, keys and values of normed tokens, rotated; keys and values are written to their columns of the cache.

    w [(H + 2 K) D, I], TILES tiles of N / 2 rotated pairs of features for each head; rope f32 [R / 2], radians
    per position; q [T, H, D]; keys and values [N, K, C, D], rows `row_stride` apart; `place` is the column of each
    row's first token.
    """
    head, tile = tl.program_id(1) // TILES, tl.program_id(1) % TILES
    first_m = tl.program_id(0) * (M * TIMES)
    m = first_m + tl.arange(0, M)
    begin = tl.program_id(2) * piece
    end = tl.minimum(begin + piece, inputs)
    H: tl.constexpr = N // 2
    r = tl.arange(0, N)
    rows = tl.minimum(_feature(tile * H + r % H, r // H, R, PAIRS), D - 1)
    w_ptr, scales_ptr = output_of(w_ptr, scales_ptr, head * D, inputs, FORM)
    ask_ahead(w_ptr, rows, inputs, begin, end, AHEAD, FORM)
    wait(PDL)
    all_sums = _dots(
        x_ptr, w_ptr, scales_ptr, x_scales_ptr, first_m, rows, tokens, inputs, begin, end, N, M, K, TIMES, EVEN, FORM
    )
    outputs = (HEADS + 2 * KV) * D
    paired = (tile * H + r % H < D // 2)[:, None]
    last = True
    if S > 1:
        for i in tl.static_range(TIMES):
            t = m + i * M
            own = t[None, :] * outputs + head * D + rows[:, None]
            mine = (t < tokens)[None, :] & paired  # a new name: Triton allows no change of type inside an `if`
            write_piece(part_ptr + tl.program_id(2) * tokens * outputs + own, all_sums[i], mine, FORM)
        last = comes_last(count_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), S)
    if last:
        pair = tile * H + tl.arange(0, H)
        first, second = _feature(pair, 0, R, PAIRS), _feature(pair, 1, R, PAIRS)
        for i in tl.static_range(TIMES):
            t, sums = m + i * M, all_sums[i]
            if S > 1:
                own = t[None, :] * outputs + head * D + rows[:, None]
                sums = all_pieces(part_ptr + own, tokens * outputs, (t < tokens)[None, :] & paired, S, FORM)
            acc = numbers_of(sums, scales_ptr, x_scales_ptr, rows, t, tokens, FORM)
            acc *= _scale(sums_ptr, parts, tokens, inputs, eps, t, P)[None, :]
            if BIAS:
                acc += tl.load(bias_ptr + head * D + rows)[:, None]
            low, high = tl.split(tl.permute(tl.reshape(acc, (2, H, M)), (1, 2, 0)))
            there = (pair < D // 2)[:, None]
            if head < HEADS + KV:
                if QK_NORM:
                    squares = _sum_in_halves(tl.where(there, low * low + high * high, 0.0), H, M)
                    scale = tl.rsqrt(squares / D + eps)[None, :]
                    gains_ptr = gain_ptr + tl.where(head < HEADS, 0, D)
                    low *= scale * tl.load(gains_ptr + first, mask=pair < D // 2, other=0.0)[:, None]
                    high *= scale * tl.load(gains_ptr + second, mask=pair < D // 2, other=0.0)[:, None]
                if turns != 0:
                    kind = q_ptr.dtype.element_ty  # angles are rounded to it
                    turning = pair < R // 2
                    position = tl.load(position_ptr + t, mask=t < tokens, other=0).to(tl.float32)
                    angle = tl.load(rope_ptr + pair, mask=turning, other=0.0)[:, None] * position[None, :]
                    cos = tl.where(turning[:, None], (tl.cos(angle) * turn_scale).to(kind).to(tl.float32), 1.0)
                    sin = tl.where(turning[:, None], (tl.sin(angle) * turn_scale).to(kind).to(tl.float32), 0.0)
                    low, high = low * cos - high * sin, high * cos + low * sin
            inside = (t < tokens)[None, :] & there
            if head < HEADS:
                target = q_ptr + (t[None, :] * HEADS + head) * D
                tl.store(target + first[:, None], low.to(q_ptr.dtype.element_ty), mask=inside)
                tl.store(target + second[:, None], high.to(q_ptr.dtype.element_ty), mask=inside)
            else:
                column = tl.load(place_ptr) + t % fed
                at = ((t // fed).to(tl.int64) * row_stride + (((head - HEADS) % KV) * columns + column) * D)[None, :]
                if head < HEADS + KV:
                    tl.store(keys_ptr + at + first[:, None], low.to(q_ptr.dtype.element_ty), mask=inside)
                    tl.store(keys_ptr + at + second[:, None], high.to(q_ptr.dtype.element_ty), mask=inside)
                else:
                    tl.store(values_ptr + at + first[:, None], low.to(q_ptr.dtype.element_ty), mask=inside)
                    tl.store(values_ptr + at + second[:, None], high.to(q_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _sum_in_halves(x, H: tl.constexpr, M: tl.constexpr):
    """x [H, M] -> [M], in an order that does not depend on how a compiler lays x out; H is at most 128."""
    for level in tl.static_range(7):
        if H >> level > 1:
            low, high = tl.split(tl.permute(tl.reshape(x, (2, H >> level + 1, M)), (1, 2, 0)))
            x = low + high
    return tl.reshape(x, (M,))


@triton.jit
def _feature(pair, second, R: tl.constexpr, PAIRS: tl.constexpr):
    """The first or second feature of a pair. The first R features are rotated, paired by halves or as neighbours."""
    return 2 * pair + second if PAIRS else tl.where(pair < R // 2, pair + second * (R // 2), 2 * pair + second)


@triton.jit
def enter(
    x_ptr, added_ptr, added_sums_ptr, added_gain_ptr, gain_ptr, next_ptr, sums_ptr,
    size, parts, eps, scale_by,
    ADD: tl.constexpr, P: tl.constexpr, E: tl.constexpr, PDL: tl.constexpr,
):
    """next [T, E] = x · gain and the squares of x [T], which a norm needs. ADD: first x += norm(added) · scale_by."""
    token, tokens = tl.program_id(0), tl.num_programs(0)
    e = tl.arange(0, E)
    inside, place = e < size, token * size + e
    wait(PDL)
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        p = tl.arange(0, P)
        squares = tl.load(added_sums_ptr + p * tokens + token, mask=p < parts, other=0.0)
        scale = tl.rsqrt(tl.sum(squares, 0) / size + eps) * scale_by
        added = tl.load(added_ptr + place, mask=inside, other=0.0).to(tl.float32)
        x += added * scale * tl.load(added_gain_ptr + e, mask=inside, other=0.0)
        short = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, short, mask=inside)
        x = short.to(tl.float32)
    gained = (x * tl.load(gain_ptr + e, mask=inside, other=0.0)).to(next_ptr.dtype.element_ty)
    tl.store(next_ptr + place, gained, mask=inside)
    tl.store(sums_ptr + token, tl.sum(x * x, 0))


# -- counter-based draws (`strategies.counter`) in one pass over the scores --------------------------------------------


# fmt: off


@triton.jit
def draw(scores_ptr, places_ptr, best_ptr, tokens_ptr, size, N: tl.constexpr):
    """The token, among N of a row, with the largest score plus Gumbel noise: f64 and int64 [R, parts].

    scores f32 [R, V]; places int64 [R, 3]: the seed, the sequence, the position.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * N + tl.arange(0, N)
    place = places_ptr + row * 3
    a, b, c, d = tl.philox(
        tl.load(place), (token >> 2).to(tl.uint32), tl.load(place + 1).to(tl.uint32), tl.load(place + 2).to(tl.uint32),
        tl.zeros((N,), tl.uint32),
    )
    which = token & 3  # a block of random words serves four tokens
    word = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    score = tl.load(scores_ptr + row.to(tl.int64) * size + token, mask=token < size, other=float("-inf"))
    best, at = tl.max(score.to(tl.float64) - tl.log(-tl.log(uniform)), 0, return_indices=True)
    out = row * tl.num_programs(1) + part
    tl.store(best_ptr + out, best)
    tl.store(tokens_ptr + out, tl.minimum(part * N + at, size - 1).to(tl.int64))
