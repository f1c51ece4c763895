"""The forms of a weight in the Triton kernels: only reading and multiplying a tile depends on the form (`FORM`).

"floats": bfloat16 or float16 numbers. "int8": codes [O, I], a scale for each output; x is rounded to codes, scaled by
the token's largest magnitude. "int4": 4-bit codes (`Int4Product`), a scale and a zero for each group of 32 inputs; x is
rounded to codes, scaled by the largest magnitude of a token's group. The rounding (`round_x`) is that of the CPU
library (codes.c, blocks.c), sums of codes are exact integers, and packed codes are unpacked in registers.

x is rounded in a separate launch: rounding inside the product would stall it at each tile.

M tokens and N outputs of a tile, K inputs read at a time.
"""

import os

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# ruff: noqa: RUF005 - Triton adds tuples, and does not unpack them
# fmt: off
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")  # inline assembly does not work there
SHIFT = tl.constexpr(12582912.0)  # 1.5 · 2²³: adding it rounds a number to an integer, ties to even
INFINITE = tl.constexpr(0x7F800000)  # as bits; greater ones are NaN


@triton.jit
def prefetch(pointers):
    """Prefetch lines of 128 bytes."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _pitch(inputs, FORM: tl.constexpr):
    """Stride between outputs of a weight, in elements."""
    return (inputs + 63) // 64 * 32 if FORM == "int4" else inputs


@triton.jit
def output_of(w_ptr, scales_ptr, first, inputs, FORM: tl.constexpr):
    """Pointers to the weights and the scales of an output."""
    first = first.to(tl.int64)
    return w_ptr + first * _pitch(inputs, FORM), scales_ptr + first * (inputs // 32 if FORM == "int4" else 1)


@triton.jit
def ask_ahead(w_ptr, n, inputs, begin, end, AHEAD: tl.constexpr, FORM: tl.constexpr):
    """Prefetch the first AHEAD bytes of each output's weights; they do not depend on earlier kernels."""
    if AHEAD > 0:
        size: tl.constexpr = w_ptr.dtype.element_ty.primitive_bitwidth // 8
        packed: tl.constexpr = 2 if FORM == "int4" else 1
        at = begin // packed + tl.arange(0, AHEAD // 128) * (128 // size)
        prefetch(w_ptr + n[:, None] * _pitch(inputs, FORM) + tl.minimum(at, end // packed - 1)[None, :])


@triton.jit
def bits_of(x):
    """The bits of |x| as integers, which sort like |x|; NaN is the greatest."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _number(top):
    """The number with these bits; NaN if it is not finite, so the scaled result is NaN, too."""
    return tl.where(top >= INFINITE, float("nan"), top.to(tl.float32, bitcast=True))


@triton.jit
def _codes(x, top):
    """x f32 as 8-bit codes from -127 to 127; `top` holds the bits of the largest magnitude."""
    largest = tl.where(top == 0, 1.0, top.to(tl.float32, bitcast=True))
    inverse = tl.div_rn(tl.full(top.shape, 127.0, tl.float32), largest)
    inverse = tl.where(inverse > 3e38, 0.0, inverse)  # too small to be scaled up
    x, inverse = tl.broadcast(x, inverse)
    scaled = tl.math.fma(x, inverse, tl.zeros(x.shape, tl.float32))  # a separate rounding before SHIFT is added
    return (scaled + SHIFT - SHIFT).to(tl.int8)


@triton.jit(do_not_specialize=["tokens"])
def round_x(
    x_ptr, codes_ptr, scales_ptr, tokens, inputs,
    GROUP: tl.constexpr, W: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr, PDL: tl.constexpr,
):
    """x [T, I] as codes int8 [T, I]; a program rounds B groups of a token. GROUP inputs (padded: W) share a scale.

    scales f32: for int8 the largest magnitude of a token [T], for int4 the scale of each group [T, I / 32] and, after
    all scales, the sum of its codes times the scale.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token, groups = tl.program_id(0), (inputs + GROUP - 1) // GROUP
    group, w = tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, W)
    at = group[:, None] * GROUP + w[None, :]
    inside = (w < GROUP)[None, :] & (at < inputs)
    place = token.to(tl.int64) * inputs + at
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(bits_of(x), 1)
    codes, scale = _codes(x, top[:, None]), _number(top)
    tl.store(codes_ptr + place, codes, mask=inside)
    if FORM == "int4":
        scale = tl.div_rn(scale, tl.full(top.shape, 127.0, tl.float32))
        total = tl.sum(codes.to(tl.int32), 1).to(tl.float32) * scale
        tl.store(scales_ptr + (tokens + token) * groups + group, total, mask=group < groups)
    tl.store(scales_ptr + token * groups + group, scale, mask=group < groups)


@triton.jit
def _x_of_group(x_ptr, scales_ptr, m, start, tokens, inputs, end, EVEN: tl.constexpr):
    """A group of inputs: codes [32, M], their scale [M], and the sum of codes · scale [M]."""
    at, there = start + tl.arange(0, 32), m < tokens
    if not EVEN:
        there = there & (m * 0 + start < end)
    codes = tl.load(x_ptr + m[None, :] * inputs + at[:, None], mask=there[None, :], other=0)
    groups = inputs // 32
    place = scales_ptr + m * groups + start // 32
    return codes, tl.load(place, mask=there, other=0.0), tl.load(place + tokens * groups, mask=there, other=0.0)


@triton.jit
def read_x(
    x_ptr, x_scales_ptr, m, start, tokens, inputs, end, K: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr,
):
    """x, or its codes, for `add_tile`."""
    if FORM == "int4":
        x = ()
        for i in tl.static_range(K // 32):
            x = x + (_x_of_group(x_ptr, x_scales_ptr, m, start + 32 * i, tokens, inputs, end, EVEN),)
    else:
        at = start + tl.arange(0, K)
        here = (m < tokens)[None, :]
        if not EVEN:
            here = here & (at < end)[:, None]
        x = tl.load(x_ptr + m[None, :] * inputs + at[:, None], mask=here, other=0)  # [K, M]
    return x


@triton.jit
def no_sums(N: tl.constexpr, M: tl.constexpr, FORM: tl.constexpr):
    """A zero accumulator, [N, M]."""
    return tl.zeros((N, M), tl.int32 if FORM == "int8" else tl.float32)


@triton.jit
def _halves(both):
    """The low and high halves of bytes uint8, minus 8: int8. Four bytes at a time."""
    if INTERPRETED:
        low, high = (both & 15).to(tl.int8) - 8, (both >> 4).to(tl.int8) - 8
    else:  # no byte carries: b + 0x78 is at most 0x87
        asm: tl.constexpr = """
            and.b32 $0, $2, 0x0f0f0f0f; add.u32 $0, $0, 0x78787878; xor.b32 $0, $0, 0x80808080;
            shr.u32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f; add.u32 $1, $1, 0x78787878; xor.b32 $1, $1, 0x80808080;
        """
        low, high = tl.inline_asm_elementwise(asm, "=&r,=&r,r", [both], dtype=(tl.int8, tl.int8), is_pure=True, pack=4)
    return low, high


@triton.jit
def _scale_of(scales_ptr, n, start, inputs, EVEN: tl.constexpr):
    """Scale and zero of a group of each output, f32 [N]."""
    at = scales_ptr + n * (inputs // 32) + start // 32
    words = tl.load(at) if EVEN else tl.load(at, mask=n * 0 + start < inputs, other=0)
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)  # both bfloat16


@triton.jit
def read_w(w_ptr, scales_ptr, n, start, inputs, end, K: tl.constexpr, EVEN: tl.constexpr, FORM: tl.constexpr):
    """A tile of a weight for `add_tile`: K inputs from `start` on."""
    if FORM == "int4":
        w = ()
        for i in tl.static_range(K // 64):
            first = start + 64 * i
            at = tl.multiple_of(first // 2, 32) + tl.arange(0, 32)
            place = w_ptr + n[:, None] * _pitch(inputs, FORM) + at[None, :]
            both = tl.load(place) if EVEN else tl.load(place, mask=(at < (end + 63) // 64 * 32)[None, :], other=0)
            low, high = _halves(both)
            even = low, _scale_of(scales_ptr, n, first, inputs, EVEN)
            w = w + (even, (high, _scale_of(scales_ptr, n, first + 32, inputs, EVEN)))
    else:
        at = start + tl.arange(0, K)
        place = w_ptr + n[:, None] * inputs + at[None, :]
        w = tl.load(place) if EVEN else tl.load(place, mask=(at < end)[None, :], other=0)
    return w


@triton.jit
def _add_group(acc, x, w):
    """acc [N, M] + (scale · codes + zero) · x of one group."""
    x_codes, x_scale, x_sum = x
    codes, scales = w
    scale, zero = scales
    sums = tl.dot(codes, x_codes, out_dtype=tl.int32).to(tl.float32)
    acc = tl.math.fma(sums, scale[:, None] * x_scale[None, :], acc)
    zero, x_sum = tl.broadcast(zero[:, None], x_sum[None, :])
    return tl.math.fma(zero, x_sum, acc)


@triton.jit
def add_tile(acc, x, w, K: tl.constexpr, FORM: tl.constexpr):
    """acc [N, M] + w x; for int4 group by group."""
    if FORM == "int4":
        for i in tl.static_range(K // 32):
            acc = _add_group(acc, x[i], w[i])
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def read_fresh(pointers, mask, other):
    """Load data that another multiprocessor may just have written: past the L1 cache."""
    return tl.load(pointers, mask=mask, other=other, cache_modifier=".cg")


@triton.jit
def write_piece(part_ptr, sums, mask, FORM: tl.constexpr):
    """Store a piece of the sums as f32; integers are stored bit for bit."""
    tl.store(part_ptr, sums.to(tl.float32, bitcast=True) if FORM == "int8" else sums, mask=mask)


@triton.jit
def all_pieces(part_ptr, step, inside, S: tl.constexpr, FORM: tl.constexpr):
    """The sum of S pieces, from the first to the last."""
    acc = read_fresh(part_ptr, inside, 0.0)
    if FORM == "int8":
        acc = acc.to(tl.int32, bitcast=True)
    for split in tl.static_range(1, S):
        piece = read_fresh(part_ptr + split * step, inside, 0.0)
        acc += piece.to(tl.int32, bitcast=True) if FORM == "int8" else piece
    return acc


@triton.jit
def numbers_of(sums, scales_ptr, x_scales_ptr, n, m, tokens, FORM: tl.constexpr):
    """w x in f32 [N, M], from its sums."""
    if FORM == "int8":
        largest = tl.load(x_scales_ptr + m, mask=m < tokens, other=0.0)
        scaled, largest = tl.broadcast(sums.to(tl.float32) * tl.load(scales_ptr + n)[:, None], largest[None, :])
        sums = tl.math.fma(scaled, largest, tl.zeros(scaled.shape, tl.float32))  # rounded before a bias is added
    return sums
