"""Processors that reshape the distribution: guidance, temperature (also dynamic), quadratic sampling, XTC.

All are stateless and ignore removed tokens: a score of -inf (or the lowest float, which `remove_invalid_values` writes
instead) does not contribute to an entropy or a count.
"""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from genctl.decode.processors import Processor
from genctl.decode.processors.build import ProcessorContext, own
from genctl.decode.processors.filters import there
from genctl.decode.processors.rows import RowCandidates
from genctl.errors import UsageError
from genctl.kernels.ops import entropy, log_softmax


def dynatemp(m: ProcessorContext, spread: float) -> Processor:
    """Dynamic temperature, between low = `temperature - spread` (at least 0) and high = `temperature + spread`.

    low + (high - low) * (entropy / log(count)) ** exponent, as in llama.cpp's `temp_ext`: low-entropy rows are
    sharpened, high-entropy ones flattened. A temperature of 0 keeps only the best token; a single token is unchanged.
    """
    temperature, exponent = m.generation.temperature, m.generation.dynatemp_exponent
    low, high = max(0.0, temperature - spread), temperature + spread

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        count = there(scores).sum(-1, keepdim=True)
        share = entropy(log_softmax(scores))[..., None] / count.clamp(min=2).log()
        at = (low + (high - low) * share.pow(exponent)).masked_fill(count < 2, 1.0)
        best = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.argmax(-1, keepdim=True), True)
        frozen = scores.masked_fill(~best, -torch.inf)
        return torch.where(at > 0.0, scores / at.clamp(min=torch.finfo(scores.dtype).tiny), frozen)

    return processor


def quadratic(m: ProcessorContext, factor: float) -> Processor:
    """Quadratic sampling: a score d below the best becomes best - factor * (k * d ** 2 + s * d ** 3).

    github.com/oobabooga/text-generation-webui/pull/5403, and with `smoothing_curve` c pull/5551: k = (3 - c) / 2,
    s = (c - 1) / 2. Scores with a small d move closer to the best, others further away. With c above 3, the nearest
    overtake it, as in those pull requests.
    """
    curve = m.generation.smoothing_curve

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        best = scores.amax(-1, keepdim=True)
        below = best - scores
        smoothed = best - factor * below.square() * ((3.0 - curve) + (curve - 1.0) * below) / 2.0
        return torch.where(there(scores), smoothed, scores)

    return processor


def xtc(m: ProcessorContext, probability: float) -> Processor:
    """XTC: with `probability`, remove all tokens of at least probability `threshold` except the least probable of them.

    github.com/oobabooga/text-generation-webui/pull/6335. As in llama.cpp, no token is exempt, and a row that would keep
    fewer than `min_tokens_to_keep` is unchanged. Each row draws one number per step (see `draws`).
    """
    threshold = m.generation.xtc_threshold

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        act = [drawn < probability for drawn in draws(history, m.seed)]
        if not any(act):
            return scores
        output = scores.clone()
        for number, row in enumerate(scores.detach().float().cpu().numpy()):
            there = RowCandidates.of(row) if act[number] else None
            if there is None:
                continue
            top = np.flatnonzero(there.weights >= threshold * there.total)
            left = np.count_nonzero(there.values > np.finfo(np.float32).min) - (len(top) - 1)
            if len(top) > 1 and left >= m.min_tokens_to_keep:
                removed = np.delete(top, there.weights[top].argmin())
                ids = removed if there.ids is None else there.ids[removed]
                output[number, torch.from_numpy(ids).to(output.device)] = -torch.inf
        return output

    return processor


def draws(history: Tensor, seed: int) -> list[float]:
    """One number in [0, 1) for each row of history int64 [R, T], uniform over seeds and over histories.

    A number depends on the seed, on the row's tokens, and on how many rows before it have the same tokens. So a row
    that is moved or rolled back draws the same number again, whatever the other rows are, and rows with equal tokens
    draw different numbers.
    """
    key = (seed % 2**64).to_bytes(8, "little")
    seen: Counter[bytes] = Counter()
    drawn = []
    for row in history.cpu().numpy():
        written = row.tobytes()
        digest = hashlib.blake2b(written, digest_size=8, key=key, salt=seen[written].to_bytes(16, "little")).digest()
        seen[written] += 1
        drawn.append((int.from_bytes(digest, "little") >> 11) * 2.0**-53)
    return drawn


def guidance_scale(m: ProcessorContext, scale: float) -> Processor:
    if m.unconditional is None:
        raise UsageError("guidance_scale: this strategy cannot read a second prompt, so it cannot be guided")
    unconditional = m.unconditional

    def processor(history: Tensor, scores: Tensor) -> Tensor:
        # UnbatchedClassifierFreeGuidanceLogitsProcessor (arXiv:2306.17806), with a separate cache for the second pass
        without = unconditional(history).to(scores).log_softmax(-1)
        return scale * (scores.log_softmax(-1) - without) + without

    return processor


def temperature(m: ProcessorContext, value: float) -> Processor | None:
    """Divide by the temperature; None for 0, which means greedy, and with dynamic temperature, which replaces it."""
    if value == 0.0 or m.generation.dynatemp_range > 0.0:
        return None
    return lambda history, scores: scores / float(value)


def remove_invalid_values(m: ProcessorContext, on: bool) -> Processor:
    return own("InfNanRemoveLogitsProcessor")


def renormalize_logits(m: ProcessorContext, on: bool) -> Processor:
    return own("LogitNormalization")
