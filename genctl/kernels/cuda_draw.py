"""Draws by their place (`strategies.counter`) in one pass over the scores, in Triton."""

import triton
import triton.language as tl

# fmt: off


@triton.jit
def draw(scores_ptr, places_ptr, best_ptr, tokens_ptr, size, N: tl.constexpr):
    """Of N tokens of a row the one with the largest score plus Gumbel noise, f64 and int64 [R, parts].

    scores f32 [R, V]; places int64 [R, 3]: the seed, the sequence, the position.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * N + tl.arange(0, N)
    place = places_ptr + row * 3
    a, b, c, d = tl.philox(
        tl.load(place), (token >> 2).to(tl.uint32), tl.load(place + 1).to(tl.uint32), tl.load(place + 2).to(tl.uint32),
        tl.zeros((N,), tl.uint32),
    )
    which = token & 3  # a block has the words of four tokens
    word = tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))
    uniform = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    score = tl.load(scores_ptr + row.to(tl.int64) * size + token, mask=token < size, other=float("-inf"))
    best, at = tl.max(score.to(tl.float64) - tl.log(-tl.log(uniform)), 0, return_indices=True)
    out = row * tl.num_programs(1) + part
    tl.store(best_ptr + out, best)
    tl.store(tokens_ptr + out, tl.minimum(part * N + at, size - 1).to(tl.int64))
