"""Noise from a counter-based generator, so that a seed samples the same text on every device.

The noise of a token is a function of the seed, the sequence, the position and the token's id. It does not depend on the
batch, on the device, or on how often a position is computed. The random bits are those of Philox4x32-10 (Salmon et al.
2011, "Parallel random numbers: as easy as 1, 2, 3"), in integers; only the logarithm is rounded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from genctl.decode import transfer
from genctl.decode.types import RowsOfLane

if TYPE_CHECKING:
    from genctl.decode.processors.rows import RowCandidates

Words: TypeAlias = Any  # 32-bit numbers in int64: numpy arrays, tensors or ints alike

_MASK = (1 << 32) - 1
_FACTORS = 0xD2511F53, 0xCD9E8D57
_STEPS = 0x9E3779B9, 0xBB67AE85
_AT_ONCE = 1 << 24  # words that are computed at once on a device
_IN_CACHE = 1 << 11  # blocks that are computed at once on the host
_OF_PROGRAM = 1024  # tokens per program of the kernel


def counter(logits: Tensor, lanes: Sequence[RowsOfLane], left: Sequence[RowCandidates] | None = None) -> Tensor:
    """logits f32 [R, V] -> int64 [R]: the token with the largest score plus Gumbel noise, in float64.

    The rows of `logits` are those of `lanes`, one after another. `left` are the same rows without their -inf entries,
    if known.
    """
    places = [(lane.seed, index, lane.position) for lane in lanes for index in lane.indices]
    if not transfer.on_host(logits):
        return _on_device(logits, places)
    drawn = []
    for number, (row, place) in enumerate(zip(logits.detach().numpy(), places, strict=True)):
        ids = None if left is None else left[number].ids
        tokens = np.flatnonzero(row > -np.inf) if ids is None else ids
        if not len(tokens):  # nothing can be drawn: the loop refuses such a row
            drawn.append(0)
            continue
        gumbel = -np.log(-np.log(uniform(_words_of(np.asarray(tokens, np.int64), len(row), *place))))
        drawn.append(int(tokens[(row[tokens] + gumbel).argmax()]))
    return torch.tensor(drawn, dtype=torch.long)


def _on_device(logits: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
    if logits.device.type == "cuda" and _has_kernel():
        return _by_kernel(logits, places)
    size, device = logits.shape[1], logits.device
    blocks = torch.arange(-(-size // 4), device=device)[None]
    numbers = [word for seed, *place in places for word in (seed & _MASK, seed >> 32, *place)]
    of_rows = transfer.to_device(numbers, device).view(-1, 4)
    step = max(1, _AT_ONCE // size)
    parts = []
    for first in range(0, len(logits), step):
        some, own = logits[first : first + step], of_rows[first : first + step]
        low, high, index, position = own[:, :, None].unbind(1)
        words = torch.stack(philox((blocks, index, position, 0), (low, high)), -1).flatten(1)[:, :size]
        parts.append((some - (-uniform(words).log()).log()).argmax(-1))
    return torch.cat(parts)


def _by_kernel(logits: Tensor, places: Sequence[tuple[int, int, int]]) -> Tensor:
    from genctl.kernels.cuda import draw

    (rows, size), device = logits.shape, logits.device
    numbers = [word for seed, *place in places for word in (seed - (seed >> 63 << 64), *place)]  # as signed words
    parts = -(-size // _OF_PROGRAM)
    best = torch.empty(rows, parts, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, parts, dtype=torch.long, device=device)
    draw[rows, parts](
        logits.float().contiguous(), transfer.to_device(numbers, device), best, tokens, size, N=_OF_PROGRAM
    )
    return tokens.gather(1, best.argmax(-1, keepdim=True))[:, 0]


@lru_cache(maxsize=1)
def _has_kernel() -> bool:
    """Whether Triton is installed and its kernel runs; otherwise torch's operations draw the same tokens."""
    if importlib.util.find_spec("triton") is None:
        return False
    try:
        _by_kernel(torch.zeros(1, 8, device="cuda"), [(0, 0, 0)])
    except Exception:  # whatever a compiler, a driver or the file system raises
        return False
    return True


def _words_of(tokens: Words, size: int, seed: int, index: int, position: int) -> Words:
    """The random words of `tokens` of a vocabulary of `size`, for one place. A block has the words of four tokens."""
    key = seed & _MASK, seed >> 32
    if 4 * len(tokens) < size:
        return np.choose(tokens & 3, philox((tokens >> 2, index, position, 0), key))
    words = np.empty((-(-size // 4), 4), np.int64)
    for first in range(0, len(words), _IN_CACHE):
        part = words[first : first + _IN_CACHE]
        blocks = np.arange(first, first + len(part))
        part.T[:] = philox((blocks, index, position, 0), key)
    return words.reshape(-1)[tokens]


def philox(block: tuple[Words, Words, Words, Words], key: tuple[Words, Words]) -> tuple[Words, Words, Words, Words]:
    """The four words of a block: Philox4x32-10. A product of two words wraps around in int64, which keeps its bits."""
    a, b, c, d = block
    first, second = key
    for _ in range(10):
        one, two = a * _FACTORS[0], c * _FACTORS[1]
        a, b, c, d = two >> 32 & _MASK ^ b ^ first, two & _MASK, one >> 32 & _MASK ^ d ^ second, one & _MASK
        first, second = first + _STEPS[0] & _MASK, second + _STEPS[1] & _MASK
    return a, b, c, d


def uniform(words: Words) -> Words:
    """Numbers strictly between 0 and 1, f64, from random words."""
    return (words + 0.5) * 2.0**-32
