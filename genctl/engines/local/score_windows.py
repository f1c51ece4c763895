"""Overlapping windows over a text longer than the model's context, in which each token is scored once."""

from __future__ import annotations

from collections.abc import Iterator


def windows(total: int, window: int, stride: int, first: int = 1) -> Iterator[tuple[int, int, int]]:
    """(begin, end, scored) of each window: it reads tokens begin..end-1 and scores those from `scored` on.

    Windows begin `stride` tokens apart, so that all but the first `window` tokens are scored with at least window -
    stride tokens before them (https://huggingface.co/docs/transformers/perplexity). Tokens before `first` (at least 1)
    are not scored, and windows that would score nothing are left out. `stride` is in 1..window-1.
    """
    done = first
    for begin in range(0, total, stride):
        end = min(begin + window, total)
        if end > done:
            yield begin, end, done
            done = end
        if end == total:
            return
